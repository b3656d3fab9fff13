import os
import subprocess
from pathlib import Path

import pytest
import torch

from lit_project.provenance import machine, repository_state, versions


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    git(tmp_path, "init")
    return tmp_path


def test_the_patch_turns_the_commit_into_what_was_there(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Changed, staged, deleted and new source files, but neither data nor keys that nobody has ignored yet."""
    package = repository / "package"
    package.mkdir()
    for name in ("changed", "staged", "deleted", "same"):
        (package / f"{name}.py").write_text(f"{name} = 1\n")
    git(repository, "add", ".")
    git(repository, "commit", "-m", "first")
    state = repository_state(package)
    assert state == (git(repository, "rev-parse", "HEAD"), "")
    (package / "changed.py").write_text("changed = 2\n")
    (package / "staged.py").write_text("staged = 2\n")
    git(repository, "add", ".")
    (package / "deleted.py").unlink()
    (repository / "new network.py").write_text("new = 'é'\n")
    (repository / ".env").write_text("API_KEY=secret\n")
    (repository / "big.yaml").write_text("0\n" * 100_000)
    (repository / "broken.py").symlink_to("nowhere")
    state = repository_state(package)
    assert state is not None
    assert "secret" not in state.patch
    clone = tmp_path_factory.mktemp("clone")
    git(clone, "clone", str(repository), ".")
    git(clone, "checkout", state.commit)
    (clone.parent / "diff.patch").write_text(state.patch)
    git(clone, "apply", str(clone.parent / "diff.patch"))
    sources = {path.relative_to(clone).as_posix(): path.read_text() for path in clone.rglob("*.py")}
    assert sources == {
        "package/changed.py": "changed = 2\n",
        "package/staged.py": "staged = 2\n",
        "package/same.py": "same = 1\n",
        "new network.py": "new = 'é'\n",
    }


def test_neither_git_nor_a_repository_nor_a_commit_is_needed(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert repository_state(repository) is None, "no commit"
    (repository / ".git").rename(repository / "moved")
    assert repository_state(repository) is None, "no repository"
    monkeypatch.setenv("PATH", os.devnull)
    assert repository_state(Path(__file__).parent) is None, "no git"


def test_versions_and_machine() -> None:
    assert versions()["torch"] == torch.__version__.split("+")[0]
    facts = machine()
    assert facts["threads"] == torch.get_num_threads()
    assert facts["cpu"]
    assert facts["memory_gib"] > 0
