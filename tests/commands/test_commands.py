"""A file in ``commands/`` is a subcommand."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import environment
from helpers import in_process

from lit_project import commands


@pytest.fixture
def greet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of the user's own, and a file that is none."""
    (tmp_path / "greet.py").write_text(
        '"""Say hello.\n\nMore."""\nfrom lit_project.errors import InputError\n\n\ndef main(argv):\n'
        "    if not argv:\n        raise InputError('Whom?')\n"
        "    if argv == ['stop']:\n        raise KeyboardInterrupt\n    print('hello', *argv)\n    return len(argv)\n"
    )
    (tmp_path / "_shared.py").write_text("raise RuntimeError\n")
    monkeypatch.setattr(commands, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(commands, "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "lit_project.commands.greet", raising=False)


@pytest.mark.usefixtures("greet")
def test_a_new_file_is_listed_and_run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    _, printed, _ = in_process(monkeypatch, capfd, "--help")
    assert "  greet                 Say hello.\n" in printed
    # it may need what is not installed
    assert "lit_project.commands.greet" not in sys.modules
    assert "_shared" not in printed
    assert in_process(monkeypatch, capfd, "greet", "a", "--b")[:2] == (2, "hello a --b\n")
    assert "Did you mean 'greet'?" in in_process(monkeypatch, capfd, "gret")[2]


@pytest.mark.usefixtures("greet")
def test_a_mistake_is_one_message() -> None:
    with pytest.raises(SystemExit) as end:
        commands.dispatch(["cli", "greet"])
    assert end.value.code == "error: Whom?", "which Python prints to stderr, with exit status 1"


@pytest.mark.usefixtures("greet")
def test_ctrl_c_ends_it_without_a_traceback() -> None:
    with pytest.raises(SystemExit) as end:
        commands.dispatch(["cli", "greet", "stop"])
    assert end.value.code == 130


@pytest.mark.parametrize("name", commands.names())
def test_help_is_quick_since_it_imports_nothing_big(tmp_path: Path, name: str) -> None:
    script = (
        f"import runpy, sys\nsys.argv = ['cli', {name!r}, '--help']\n"
        "try:\n    runpy.run_module('lit_project.cli', run_name='__main__')\nexcept SystemExit as end:\n"
        "    assert not end.code\n"
        "print([name for name in ('torch', 'lightning', 'numpy', 'yaml') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment(tmp_path / "home"), capture_output=True, text=True
    )
    assert done.stdout.startswith(f"usage: python -m lit_project.cli {name} ")
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
