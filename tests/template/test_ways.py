"""The ways to a project: from a folder, a zip or a tag, with cruft, and in place."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from made import ROOT, commit, cookiecutter, files_in, git, repository, run


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of the template with the tag v1, and a file that came later."""
    folder = repository(tmp_path_factory.mktemp("template") / "template")
    git(folder, "tag", "v1")
    (folder / "configs" / "later.yaml").write_text("trainer: {max_epochs: 7}\n")
    commit(folder, "Later")
    return folder


@pytest.fixture(scope="module")
def first(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project of tag v1 (read only)."""
    folder = tmp_path_factory.mktemp("first")
    cookiecutter(folder, f"git+file://{template}", "--checkout", "v1", benchmarks="no")
    return folder / "my-project"


def test_a_tag_gives_the_files_of_that_time(first: Path) -> None:
    assert not (first / "configs" / "later.yaml").exists()
    assert (first / ".ci" / "run").stat().st_mode & 0o111
    assert git(first, "status", "--porcelain") == ""


def test_a_zip_gives_the_same_project_although_it_forgets_modes_and_has_more_files(
    template: Path, first: Path, tmp_path: Path
) -> None:
    unpacked = tmp_path / "lit-project-main"
    git(template, "worktree", "add", str(unpacked), "v1")
    (unpacked / ".git").unlink()
    (unpacked / ".venv").mkdir()
    (unpacked / ".venv" / "big").write_text("lit_project")
    (unpacked / "best.ckpt").write_bytes(b"lit_project")
    with zipfile.ZipFile(tmp_path / "template.zip", "w") as archive:
        archive.writestr("lit-project-main/", "")
        for path in unpacked.rglob("*"):
            if path.is_file():
                archive.writestr(path.relative_to(tmp_path).as_posix(), path.read_bytes())
    cookiecutter(tmp_path, tmp_path / "template.zip", benchmarks="no")
    assert files_in(tmp_path / "my-project") == files_in(first)


def test_a_hostile_git_configuration_a_read_only_template_and_no_network_are_fine(
    template: Path, first: Path, tmp_path: Path
) -> None:
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for hook in ("pre-commit", "commit-msg", "post-commit", "prepare-commit-msg"):
        (hooks / hook).write_text("#!/bin/sh\ntouch ran\nexit 1\n")
        (hooks / hook).chmod(0o755)
    config = tmp_path / "gitconfig"
    config.write_text(
        f"[core]\nhooksPath = {hooks}\nautocrlf = true\n[commit]\ngpgSign = true\n[init]\ndefaultBranch = trunk\n"
        "[user]\nuseConfigOnly = true\n"
    )
    git(template, "checkout", "--quiet", "v1")
    (template / "configs" / "untracked.yaml").write_text("")
    isolated = ["unshare", "--map-root-user", "--net"]  # where that is allowed
    if not shutil.which("unshare") or subprocess.run([*isolated, "true"], capture_output=True).returncode:
        isolated = []
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")
    # as within a git hook: these would point all git commands at another repository
    astray = {"GIT_DIR": str(template / ".git"), "GIT_WORK_TREE": str(template), "GIT_CONFIG_GLOBAL": str(config)}
    command = [*isolated, sys.executable, "-m", "cookiecutter", "--no-input", os.path.relpath(template, tmp_path)]
    done = run(tmp_path, *command, "benchmarks=no", **nowhere, **astray)
    git(template, "checkout", "--quiet", "main")
    (template / "configs" / "untracked.yaml").unlink()
    project = tmp_path / "my-project"
    assert files_in(project) == files_in(first)
    assert git(project, "log", "--format=%s %an") == "First commit The My Project authors\n"
    assert git(project, "branch", "--show-current") == "main\n"
    assert done.stderr == ""
    assert git(template, "status", "--porcelain") == ""


def cruft(folder: Path, *arguments: object, check: bool = True) -> str:
    done = run(folder, sys.executable, "-m", "cruft", *arguments, check=check)
    return done.stdout + done.stderr


@pytest.mark.slow
def test_cruft_brings_a_fix_of_the_template_to_a_project_with_changes_of_its_own(
    template: Path, first: Path, tmp_path: Path
) -> None:
    answers = '{"benchmarks": "no"}'
    cruft(tmp_path, "create", template, "--no-input", "--checkout", "v1", "--extra-context", answers)
    project = tmp_path / "my-project"
    assert files_in(project) == files_in(first)
    commit(project, "Keep what cruft noted")
    assert git(project, "status", "--porcelain") == ""
    assert cruft(project, "diff") == ""
    assert "up to date" in cruft(project, "check", "--checkout", "v1")

    module = project / "my_project" / "errors.py"
    module.write_text(module.read_text() + "\n\nclass OwnError(InputError):\n    pass\n")
    (project / "configs" / "cifar10_fast.yaml").unlink()
    commit(project, "Work")
    shown = cruft(project, "diff")
    assert "class OwnError" in shown
    assert shown.count("diff --git ") == 1

    fixed = template / "lit_project" / "errors.py"
    fixed.write_text(fixed.read_text().replace("class InputError", "FIXED = 'lit_project'\n\n\nclass InputError", 1))
    script = template / "scripts" / "new.sh"
    script.write_text("#!/bin/sh\npython -m lit_project.cli fit\n")
    script.chmod(0o755)
    commit(template, "A fix")
    assert "out of date" in cruft(project, "check", check=False)
    assert "updated" in cruft(project, "update", "--skip-apply-ask")
    assert "FIXED = 'my_project'" in module.read_text()
    assert "class OwnError" in module.read_text()
    assert (project / "scripts" / "new.sh").read_text() == "#!/bin/sh\npython -m my_project.cli fit\n"
    assert os.access(project / "scripts" / "new.sh", os.X_OK)
    assert (project / "configs" / "later.yaml").exists()
    assert not (project / "configs" / "cifar10_fast.yaml").exists()
    assert not [*project.rglob("*.rej")], "merged cleanly"
    changed = {line[3:] for line in git(project, "status", "--porcelain").splitlines()}
    assert changed == {".cruft.json", "my_project/errors.py", "scripts/new.sh", "configs/later.yaml"}
    commit(project, "Take the fix")
    assert "up to date" in cruft(project, "check")


# ---- scripts/rename_project.py


@pytest.fixture
def clone(template: Path, tmp_path: Path) -> Path:
    git(tmp_path, "clone", "--quiet", "--branch", "v1", str(template), "clone")
    return tmp_path / "clone"


def rename(clone: Path, *arguments: str, check: bool = True) -> str:
    done = run(clone, sys.executable, "scripts/rename_project.py", *arguments, check=check)
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def test_a_clone_is_renamed_in_place_into_what_cookiecutter_makes(clone: Path, first: Path) -> None:
    (clone / "notes.txt").write_text("mine, about lit_project")
    (clone / "lit_project" / "__pycache__").mkdir()
    (clone / "lit_project" / "__pycache__" / "cli.cpython-311.pyc").write_bytes(b"")
    before = files_in(clone)
    listed = rename(clone, "my_project", "benchmarks=no", "--dry-run")
    assert files_in(clone) == before
    assert re.search(r"^add    my_project/cli\.py$", listed, re.MULTILINE)
    assert re.search(r"^remove lit_project/cli\.py$", listed, re.MULTILINE)
    assert re.search(r"^change README\.md$", listed, re.MULTILINE)

    assert "This is my-project now" in rename(clone, "my_project", "benchmarks=no")
    after = files_in(clone)
    assert after.pop("notes.txt")[0] == b"mine, about lit_project"
    assert after == files_in(first)
    assert not (clone / "lit_project").exists()
    assert git(clone, "diff", "--name-only") == "", "all is staged: git can undo it"
    assert "?? notes.txt" in git(clone, "status", "--porcelain").splitlines()

    git(clone, "reset", "--quiet", "--hard")
    assert files_in(clone) == before

    # once is enough
    rename(clone, "my_project")
    commit(clone, "Renamed")
    git(clone, "checkout", "HEAD~", "--", "scripts/rename_project.py", "hooks", "cookiecutter.json")
    assert "the project has its own name already" in rename(clone, "other", check=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["torch"], "package_name 'torch' cannot be used: it is a package that the project depends on"),
        (["My-Net"], "as in my_net"),
        (["lit_project"], "package_name 'lit_project' cannot be used"),
        (["my_net", "colour=red"], "there is no question colour. There are: project_name, package_name,"),
        (["my_net", "license=GPL"], "license is one of MIT, BSD-3-Clause, Apache-2.0, Proprietary, not 'GPL'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(clone: Path, arguments: list[str], said: str) -> None:
    assert said in rename(clone, *arguments, check=False)
    assert git(clone, "status", "--porcelain") == ""


def test_changes_that_git_does_not_have_are_refused(clone: Path) -> None:
    (clone / "README.md").write_text("mine")
    assert "there are uncommitted changes" in rename(clone, "my_net", check=False)
    git(clone, "checkout", "README.md")
    (clone / "my_net").mkdir()
    (clone / "my_net" / "cli.py").write_text("mine")
    assert "it is taken by a folder" in rename(clone, "my_net", check=False)
    assert (clone / "my_net" / "cli.py").read_text() == "mine"
    shutil.rmtree(clone / ".git")
    assert "is no git repository" in rename(clone, "other", check=False)
    assert (clone / "lit_project" / "cli.py").exists()


def test_the_commands_of_the_readme(template: Path, clone: Path, tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    block = re.findall(r"## Start a project from this\n\n```bash\n(.*?)```", text, re.DOTALL)[0]
    commands = [line.split("#")[0].split() for line in block.splitlines()]
    assert [command[0] for command in commands] == ["cookiecutter", "cruft", "python"]
    for number, command in enumerate(commands):
        folder = clone if command[0] == "python" else tmp_path / str(number)
        folder.mkdir(exist_ok=True)
        program = [sys.executable] if command[0] == "python" else [sys.executable, "-m", command[0]]
        given = [str(template) if word == "TEMPLATE" else word for word in command[1:]]
        run(folder, *program, *given, *([] if command[0] == "python" else ["--no-input"]))
        made = folder if command[0] == "python" else folder / "my-project"
        assert (made / "my_project" / "cli.py").is_file()
        assert not (made / "lit_project").exists()
