#!/usr/bin/env python3
"""Makes a project of your own out of a clone of the template, as cookiecutter does, in place and without cookiecutter.

    python scripts/rename_project.py my_project [QUESTION=ANSWER ...] [--dry-run]

The questions are those of cookiecutter.json, such as author="Ada Lovelace" license=Apache-2.0 benchmarks=no. Everything
that serves only the template goes, this script too. Nothing is committed: `git reset --hard` undoes it all.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT))
from hooks.generate import Answers, git, project, tracked_files, write  # noqa: E402
from hooks.names import PACKAGE, RefusedNameError, check  # noqa: E402


def answers(package: str, given: list[str]) -> Answers:
    """What was given, and what cookiecutter would suggest for the rest."""
    questions = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))
    found: Answers = {key: value[0] if isinstance(value, list) else value for key, value in questions.items()}
    values: Answers = dict(pair.partition("=")[::2] for pair in given)
    if unknown := [key for key in values if key not in questions or key.startswith("_")]:
        known = ", ".join(key for key in questions if not key.startswith("_"))
        sys.exit(f"error: there is no question {', '.join(unknown)}. There are: {known}.")
    for key, value in values.items():
        if isinstance(questions[key], bool):
            values[key] = value.lower() in ("yes", "y", "true", "t", "on", "1")
        elif isinstance(questions[key], list) and value not in questions[key]:
            sys.exit(f"error: {key} is one of {', '.join(questions[key])}, not {value!r}.")
    name = values.get("project_name") or package.replace("_", " ").title()
    suggested = {"project_name": name, "project_slug": package.replace("_", "-"), "author": f"The {name} authors"}
    return found | suggested | values | {"package_name": package}


def main() -> None:
    """Check, say what will be done, do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", help="name of the package, as in `import my_project`")
    parser.add_argument("answers", nargs="*", metavar="QUESTION=ANSWER", help="for other answers than the suggested")
    parser.add_argument("--dry-run", action="store_true", help="only say which files would change")
    given = parser.parse_args()

    if not (ROOT / PACKAGE / "__init__.py").is_file():
        sys.exit(f"error: there is no {PACKAGE}/ in {ROOT}: the project has its own name already.")
    if not (ROOT / ".git").exists():
        sys.exit(f"error: {ROOT} is no git repository, which could undo this: git init, git add and git commit first.")
    if git(ROOT, "status", "--porcelain", "--untracked-files=no"):
        sys.exit("error: there are uncommitted changes; commit or stash them first, for git to undo this alone.")
    new = answers(given.package, given.answers)
    try:
        check(new["project_name"], new["package_name"], new["project_slug"], ROOT)
    except RefusedNameError as refused:
        sys.exit(f"error: {refused}")

    files = project(ROOT, new)
    old = tracked_files(ROOT)
    if taken := [path for path in files.keys() - set(old) if (ROOT / path).exists()]:
        sys.exit(f"error: {taken[0]} is in the way, and git does not track it. Move it elsewhere.")
    changed = {path: content for path, content in files.items() if path not in old or _differs(path, content)}
    removed = [path for path in old if path not in files]
    if given.dry_run:
        for path in sorted(changed.keys() | removed):
            print("remove" if path in removed else "change" if path in old else "add   ", path)
        print(f"{len(changed)} files would be written and {len(removed)} removed. Nothing was done.")
        return

    write(ROOT, changed)
    git(ROOT, "add", "--force", "--", *changed)
    git(ROOT, "rm", "--quiet", "--force", "--", *removed)
    for cache in ROOT.glob(f"{PACKAGE}/**/__pycache__/*.pyc"):  # git leaves it, and Python would find a package in it
        cache.unlink()
    for folder in [*sorted((ROOT / PACKAGE).rglob("*/"), reverse=True), ROOT / PACKAGE]:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    print(f"This is {new['project_slug']} now. See it with `git status`, keep it with `git commit -m Rename`, or undo")
    print("it with `git reset --hard`. An environment needs `pip install --no-deps -e .` again.")


def _differs(path: str, content: bytes) -> bool:
    return (ROOT / path).read_bytes().replace(b"\r\n", b"\n") != content


if __name__ == "__main__":
    main()
