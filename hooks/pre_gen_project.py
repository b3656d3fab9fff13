"""Runs in the new project's folder before anything is written there."""

import sys
from pathlib import Path

if any(Path.cwd().iterdir()):
    sys.exit(f"error: {Path.cwd()} is not empty, and nothing in it is overwritten. Choose another project_slug.")
