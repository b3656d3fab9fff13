"""Runs in the new project's folder and fills it. cookiecutter fills in the braces below before."""

import json
import sys
from pathlib import Path

TEMPLATE = Path(json.loads(r""" {{ template_folder() | tojson }} """))
ANSWERS = json.loads(r""" {{ cookiecutter | tojson }} """)

sys.dont_write_bytecode = True
sys.path.insert(0, str(TEMPLATE))
from hooks.generate import generate  # noqa: E402

generate(TEMPLATE, Path.cwd(), ANSWERS)
