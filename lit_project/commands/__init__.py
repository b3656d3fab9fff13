"""Extra subcommands, one a file: ``commands/NAME.py`` is what ``python -m lit_project.cli NAME`` runs.

Such a file has a docstring, whose first line is shown by ``--help``, and ``main(argv: list[str]) -> int``, which gets
what follows the name and returns the exit status. Nothing has to be registered. A file is imported only when it is
called, and what takes long to import (torch, lightning) belongs into its functions, so that its ``--help`` is quick.
A file whose name begins with ``_`` is none: ``_fit.py`` is what several of them share.
"""

import argparse
import ast
import importlib
import os
import signal
import sys
from pathlib import Path

from lit_project.errors import InputError


def names() -> list[str]:
    """The names of all commands."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))


def overview() -> str:
    """A line of help for each command, read from its file without importing it."""
    lines = []
    for name in names():
        source = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
        summary = (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]
        lines.append(f"  {name:<21} {summary}")
    return "\n".join(lines)


def parser(name: str, doc: str | None, usage: str | None = None) -> argparse.ArgumentParser:
    """The parser of a command's options: ``doc``, the docstring of its file, is its help."""
    return argparse.ArgumentParser(
        prog=f"python -m lit_project.cli {name}",
        usage=usage,
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def dispatch(argv: list[str]) -> None:
    """Run the command that ``argv[1]`` names and exit with its status; return if it names none."""
    if len(argv) < 2 or argv[1] not in names():
        return
    try:
        status = importlib.import_module(f"{__name__}.{argv[1]}").main(argv[2:])
    except InputError as error:
        if os.environ.get("LIT_DEBUG") == "1":
            raise
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    sys.exit(status)
