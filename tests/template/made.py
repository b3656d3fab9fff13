"""Making projects in tests, as a user does, and what they are made of."""

import os
import subprocess
import sys
from pathlib import Path

from conftest import environment

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from hooks import generate  # noqa: E402

PARTS = [part for part in generate.parts(ROOT) if part != "template" and " or " not in part]
NO_PARTS = dict.fromkeys(PARTS, "no")
LONG = "a_very_long_name_that_has_forty_letters1"
ANSWERS: dict[str, dict[str, str]] = {
    "all parts": {},
    "no parts": {"project_name": "Bare Bones", "license": "Proprietary", "data": "own images", **NO_PARTS},
    "one letter": {"project_name": "Q", "license": "BSD-3-Clause", "python_version": "3.14", "email": "q@example.org"},
    "forty letters": {"project_name": LONG, "license": "Apache-2.0", "python_version": "3.12"},
    "unicode": {
        "project_name": "Été à l'Øresund",
        "author": 'Ada "Countess" \\Lovelace\\1',
        "description": 'It\'s a {net}: 100 % "quoted" \\d, # not a comment.',
        **dict.fromkeys(PARTS[::2], "no"),
    },
    "the template's name": {
        "project_name": "My-Cool lit_project.2",
        "data": "own images",
        **dict.fromkeys(PARTS[1::2], "no"),
    },
}
Completed = subprocess.CompletedProcess[str]


def run(cwd: Path, *command: object, check: bool = True, **env: str) -> Completed:
    """Run a command as a newcomer to this machine: an empty home, and no name that git would know."""
    home = cwd.parent / "home" if (cwd / ".git").exists() else cwd / "home"
    alone = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=environment(home, **{**alone, **env}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 or not check, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done


def cookiecutter(folder: Path, template: object, *options: str, check: bool = True, **answers: str) -> Completed:
    """Make a project in ``folder``."""
    given = [f"{key}={value}" for key, value in answers.items()]
    command = [sys.executable, "-m", "cookiecutter", "--no-input", *options, str(template), *given]
    return run(folder, *command, check=check)


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.org")
    return run(folder, "git", *who, *arguments).stdout


def repository(folder: Path) -> Path:
    """A git repository that has this tree as its only commit, for tests that go on from there."""
    generate.write(folder, {path: (ROOT / path).read_bytes() for path in generate.tracked_files(ROOT)})
    git(folder, "init", "--quiet", "--initial-branch=main")
    commit(folder, "The template")
    return folder


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", message)


def files_in(folder: Path) -> dict[str, tuple[bytes, bool]]:
    """What is in a project: content and executable bit of each file, without git's own."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), os.access(path, os.X_OK))
        for path in folder.rglob("*")
        if path.is_file() and not {".git", ".cruft.json", "__pycache__"} & {*path.relative_to(folder).parts}
    }
