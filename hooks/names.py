"""What a project, its package and its folder may be called. Standard library only: also used without cookiecutter."""

import keyword
import re
import sys
import unicodedata
from pathlib import Path

PACKAGE, SLUG, VARIABLES = "lit_project", "lit-project", "LIT_"  # what the template itself is called
LONGEST = 40

#: What Unicode does not decompose into a Latin letter and an accent.
_LATIN = str.maketrans({"ß": "ss", "æ": "ae", "œ": "oe", "ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th"})
#: Modules that are installed under another name than their distribution has in the lock file, and tools.
_MODULES = """
    absl attr caffe2 conda coreweave_evaluations cuda cv2 dateutil functorch git google grpc importlinter
    ipykernel_launcher isympy
    jupyter lightning_fabric markdown_it mpl_toolkits mypyc nvidia opentelemetry pil pip pkg_resources py pylab
    requirements rpds setuptools sklearn slugify torchgen uv wheel xdist yaml zmq
"""
#: Folders that the project has, may come to have, or that a tool takes for its own.
_FOLDERS = "bin build conf config data dist docs env examples hooks lib logs notebooks runs src venv"
_WINDOWS = {"aux", "con", "nul", "prn"} | {f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10)}


class RefusedNameError(Exception):
    """A name that cannot be used; the message says why and what to do."""


def package_name(text: str) -> str:
    """Turn a project name into a package name: Latin letters without accents, digits, single underscores."""
    text = unicodedata.normalize("NFKD", text.casefold().translate(_LATIN)).encode("ascii", "ignore").decode()
    return "_".join(re.findall("[a-z0-9]+", text))


def check(project_name: str, package: str, slug: str, root: Path) -> None:
    """Refuse names that cannot work.

    Args:
        project_name: what people call the project.
        package: name of the Python package.
        slug: name of the folder and of the distribution.
        root: the template, whose lock file and folders say which names are taken.

    Raises:
        RefusedNameError: with the reason.
    """
    if not project_name.strip() or not project_name.isprintable():
        raise RefusedNameError('The project name is empty, or cannot be printed: give another, project_name="My Net".')
    if not package:
        raise RefusedNameError(f"No package name can be made of {project_name!r}: give one, package_name=my_net.")
    for question, name in (("package_name", package), ("project_slug", slug)):
        if reason := _reason(question, name, root):
            raise RefusedNameError(f"{question} {name!r} cannot be used: {reason} Give another: {question}=...")


def _reason(question: str, name: str, root: Path) -> str:
    between, module = ("-", name.replace("-", "_")) if question == "project_slug" else ("_", name)
    if len(name) > LONGEST:
        return f"it has {len(name)} characters, at most {LONGEST} are possible."
    if name[:1].isdigit():
        return "it starts with a digit."
    if not re.fullmatch(rf"[a-z][a-z0-9]*({between}[a-z0-9]+)*", name):
        fitting = (package_name(name) or "my_net").replace("_", between)
        return f"it needs lower-case letters, digits and single {between} between them, as in {fitting}."
    if keyword.iskeyword(module):
        return "it is a keyword of Python."
    if module in {*sys.stdlib_module_names, "test"}:
        return "it is a module of Python's standard library, which it would hide."
    if module in {*_MODULES.split()} | _locked(root):
        return "it is a package that the project depends on, which it would hide."
    if module in {*_FOLDERS.split()} | _WINDOWS | {path.stem for path in [*root.iterdir(), *root.glob("tests/*.py")]}:
        return "it is taken by a folder or file of the project, or by a tool."
    return ""


def _locked(root: Path) -> set[str]:
    text = (root / "requirements-dev.lock").read_text(encoding="utf-8")
    return {name.replace("-", "_") for name in re.findall(r"^([a-z0-9-]+)==", text, re.MULTILINE)}
