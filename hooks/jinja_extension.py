"""What cookiecutter.json and the hooks can call while cookiecutter fills them in, in its own process."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from jinja2 import Environment
from jinja2.ext import Extension

from hooks.names import RefusedNameError, check, package_name


class ProjectExtension(Extension):
    """Derives the package name, and stops before anything is written where a name cannot be used."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        environment.filters["package_name"] = package_name
        # a hook runs in the new project and is not told where the template is; while it is filled in, that is here
        environment.globals.update(check_answers=check_answers, template_folder=os.getcwd)


def check_answers(answers: dict[str, Any]) -> str:
    """End cookiecutter with one message if no project can be made; a failing hook would add a traceback to it."""
    if not shutil.which("git"):
        sys.exit("error: git is needed: it says which files are the template's, and keeps the new project.")
    try:
        root = Path(__file__).resolve().parents[1]
        check(answers["project_name"], answers["package_name"], answers["project_slug"], root)
    except RefusedNameError as refused:
        sys.exit(f"error: {refused}")
    return ""
