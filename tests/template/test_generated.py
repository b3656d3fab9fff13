"""What is made with six sets of answers: complete, under its own name, and in order before it is touched."""

import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from conftest import runs
from made import ANSWERS, LONG, PARTS, ROOT, Completed, cookiecutter, files_in, git, run

from hooks import generate

MACHINERY = r"lit[-_. ]?project|\blit_|cookie|cruft|rename_project|(#|<!--) (part: \w+|/part)( -->)?$|\{% ?(end)?raw"


@pytest.mark.parametrize("name", ANSWERS)
def test_a_project_is_complete_and_in_order(tmp_path: Path, name: str) -> None:
    done = cookiecutter(tmp_path, ROOT, **ANSWERS[name])
    assert done.stderr == ""
    (project,) = (path for path in tmp_path.iterdir() if path.name != "home")
    has_nothing_of_the_template(project, name)
    is_a_clean_repository_with_one_commit(project, name)
    is_the_tracked_tree_but_for_names_and_parts(project, name)
    satisfies_ruff(project)
    says_what_was_answered(project, name)
    begins_with_the_chosen_data(project, name)
    has_fitting_lock_files(project)
    for path in project.rglob("*.py"):
        compile(path.read_bytes(), path, "exec")


def package_of(project: Path) -> Path:
    return next(path.parent for path in project.glob("*/__init__.py"))


def inside(project: Path, *arguments: object, check: bool = True) -> Completed:
    """Run Python in the project, which is not installed: its own folder comes first."""
    return run(project, sys.executable, "-B", *arguments, check=check, PYTHONPATH=str(project))


def has_nothing_of_the_template(project: Path, name: str) -> None:
    package = package_of(project).name
    own = [ANSWERS[name].get("project_name", "-"), package, project.name, package.upper()] if len(package) > 1 else []
    found = [
        f"{path}: {line}"
        for path, (content, _) in files_in(project).items()
        for line in [path, *content.decode("utf-8", "replace").splitlines()]
        if re.search(MACHINERY, re.sub("|".join(map(re.escape, own)) or "-", "", line), re.IGNORECASE)
    ]
    assert found == []


def is_a_clean_repository_with_one_commit(project: Path, name: str) -> None:
    assert git(project, "status", "--porcelain", "--ignored") == ""
    assert git(project, "log", "--format=%s", "--all") == "First commit\n"
    assert git(project, "branch", "--show-current") == "main\n"
    author = ANSWERS[name].get("author", f"The {ANSWERS[name].get('project_name', 'My Project')} authors")
    assert git(project, "log", "--format=%an") == f"{author}\n", "no name is configured here"


def is_the_tracked_tree_but_for_names_and_parts(project: Path, name: str) -> None:
    manifest = generate.parts(ROOT)
    kept = {part for part in PARTS if ANSWERS[name].get(part) != "no"}
    patterns = [pattern for part, found in manifest.items() if not {*part.split(" or ")} & kept for pattern in found]
    package = package_of(project).name
    expected = {
        re.sub(r"\blit_project\b", package, path)
        for path in generate.tracked_files(ROOT)
        if not generate.belongs(path, patterns)
    }
    assert files_in(project).keys() == expected
    for path in expected:
        source = ROOT / re.sub(rf"\b{package}\b", "lit_project", path)
        if path.endswith((".py", ".sh", ".yaml", ".yml")):  # no template engine has been at them
            assert (project / path).read_text().count("{{") == source.read_text().count("{{"), path
            assert (project / path).read_text().count("}") == source.read_text().count("}"), path
    modes = git(project, "ls-files", "--stage").splitlines()
    executable = {line.split("\t")[1] for line in modes if line.startswith("100755")}
    assert {".ci/run", "scripts/lock.sh"} <= executable
    assert executable == {path for path, (content, bit) in files_in(project).items() if bit}
    assert executable == {path for path, (content, bit) in files_in(project).items() if content.startswith(b"#!")}


def satisfies_ruff(project: Path) -> None:
    assert inside(project, "-m", "ruff", "check", "--no-cache", ".", check=False).stdout == "All checks passed!\n"
    done = inside(project, "-m", "ruff", "format", "--no-cache", "--diff", ".", check=False)
    assert done.stdout == "", "a name changes the layout: python tests/template/layout.py (a notebook: by hand)"


def says_what_was_answered(project: Path, name: str) -> None:
    answers = ANSWERS[name]
    title = answers.get("project_name", "My Project")
    author, email = answers.get("author", f"The {title} authors"), answers.get("email")
    kind, python = answers.get("license", "MIT"), answers.get("python_version", "3.11")
    readme = (project / "README.md").read_text()
    described = answers.get("description", "Image classification with PyTorch Lightning.")
    assert readme.startswith(f"# {title}\n\n{described}\n\n## Start\n")
    assert f"Python {python.replace('3.11', '3.11.4')} or newer" in readme

    config = tomllib.loads((project / "pyproject.toml").read_text())
    metadata = config["project"]
    assert metadata["name"] == project.name
    assert metadata["description"] == described
    assert metadata["authors"] == [{"name": author, **({"email": email} if email else {})}]
    assert metadata["license"] == {"Proprietary": "LicenseRef-Proprietary"}.get(kind, kind)
    assert metadata["requires-python"] == f">={python.replace('3.11', '3.11.4')}"
    assert config["tool"]["mypy"]["python_version"] == python

    cited = yaml.safe_load((project / "CITATION.cff").read_text())
    assert (cited["title"], cited["abstract"], cited.get("license")) == (
        title,
        described,
        None if kind == "Proprietary" else kind,
    )
    assert cited["authors"] == metadata["authors"]

    text = (project / "LICENSE").read_text()
    first = {"MIT": "MIT License", "BSD-3-Clause": "BSD 3-Clause License", "Proprietary": f"Copyright (c) {author}"}
    assert text.split("\n")[0] == first[kind] if kind in first else "Apache License" in text.splitlines()[0:5][1]
    assert (f"Copyright (c) {author}" in text) == (kind != "Apache-2.0")
    assert f"{kind if kind != 'Proprietary' else 'All rights reserved'}, see [LICENSE](LICENSE)." in readme
    assert (project / "CHANGELOG.md").read_text().endswith("## Unreleased\n")

    workflow = (project / ".github/workflows/ci.yml").read_text()
    assert "${{ github.workflow }}-${{ github.ref }}" in workflow
    job = yaml.safe_load(workflow)["jobs"]["check"]
    assert [step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", "")] == [
        python
    ]
    assert job["steps"][-1] == {"run": "bash .ci/run"}
    assert yaml.safe_load((project / ".pre-commit-config.yaml").read_text())["repos"]
    assert f"--python-version {python} " in (project / "scripts/lock.sh").read_text()


def begins_with_the_chosen_data(project: Path, name: str) -> None:
    expected = ["cifar10", "image_folder"]
    if ANSWERS[name].get("data") == "own images":
        expected.reverse()
    cli = (package_of(project) / "cli.py").read_text()
    assert re.findall(r"fit --config configs/(cifar10|image_folder)\.yaml", cli) == expected
    readme = (project / "README.md").read_text()
    assert re.findall(r"\.cli fit --config configs/(cifar10|image_folder)\.yaml", readme)[:4] == expected * 2


def has_fitting_lock_files(project: Path) -> None:
    config = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    for lock in ("requirements.lock", "requirements-dev.lock"):
        entries = re.split(r"^(?=[a-z0-9])", (project / lock).read_text(), flags=re.MULTILINE)[1:]
        vias = {
            entry.split("==")[0]: re.findall(r"^    #(?: via|  ) (\S.*)$", entry, re.MULTILINE) for entry in entries
        }
        root = f"{project.name} (pyproject.toml)"
        assert all(names and {*names} <= vias.keys() | {root} for names in vias.values())
        asked = [
            *config["dependencies"],
            *(line for extra in config["optional-dependencies"].values() for line in extra),
        ]
        wanted = {re.sub("[-_.]+", "-", re.match(r"[\w.-]+", line)[0]).lower() for line in asked}  # type: ignore[index]
        assert {package for package, names in vias.items() if root in names} <= wanted
        assert not {"cookiecutter", "cruft", "binaryornot"} & vias.keys()


def test_a_dropped_requirement_takes_along_what_only_it_needed() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    entries = set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE))
    shorter = generate.without_packages(lock, {"torchvision", "pillow"})
    left = set(re.findall(r"^([a-z0-9-]+)==", shorter, re.MULTILINE))
    assert entries - left == {"torchvision"}, "TensorBoard needs pillow too"
    assert generate.without_packages(lock, set()) == lock
    lock = (
        "# header\na==1\n    # via lit-project (pyproject.toml)\nb==1 ; sys_platform == 'win32'\n    # via a\n"
        "b==2\n    # via\n    #   a\n    #   c\n    #   lit-project (pyproject.toml)\n"
        "c==1 \\\n    --hash=sha256:0\n    # via\n    #   d\n    #   lit-project (pyproject.toml)\nd==1\n    # via c\n"
    )
    assert generate.without_packages(lock, {"c", "b"}) == (
        "# header\na==1\n    # via lit-project (pyproject.toml)\nb==1 ; sys_platform == 'win32'\n    # via a\n"
        "b==2\n    # via a\n"
    ), "c and d need only each other"
    assert "c==1" not in generate.without_packages(lock, {"a", "c"})


def test_requirements_are_read_however_they_are_written() -> None:
    text = (
        '[project]\nname = "x"\ndependencies = [\n    "A_b[c,d] >= 1",\n]\n[project.optional-dependencies]\n'
        'e = ["f==1", "g.h; python_version<\'4\'"]\n\n[tool.ruff]\nselect = ["tool"]\n'
    )
    assert generate._requirements(text) == {"x", "a-b", "f", "g-h"}


@pytest.mark.slow
def test_its_tests_can_be_collected_and_it_trains(tmp_path: Path) -> None:
    cookiecutter(tmp_path, ROOT, **ANSWERS["no parts"])
    project = tmp_path / "bare-bones"
    collect = ("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "", "--collect-only")
    done = inside(project, *collect, check=False)
    assert re.search(r"\d{3,} tests collected in", done.stdout.splitlines()[-1]), done.stdout

    small = ("--data.num_train=256", "--data.num_val=100", "--data.num_test=100", "--trainer.max_epochs=1")
    done = inside(project, "-m", "bare_bones.cli", "fit", *small)
    assert [line.split(":")[0].strip() for line in done.stdout.splitlines()[-3:]] == [
        "test it",
        "train on your images",
        "train on CIFAR-10",
    ]
    (finished,) = runs(project)
    assert "lit_project" not in (finished / "config.yaml").read_text()


# ---- in fresh environments, with the commands of the generated README


def readme_commands(project: Path) -> list[str]:
    lines = (project / "README.md").read_text().splitlines()
    return [line for line in lines if line.startswith("python3 -m venv")]


def shell(project: Path, command: str) -> Completed:
    """Run a README's command with the Python that this environment was made with."""
    path = f"{Path(sys._base_executable).parent}{os.pathsep}{os.environ['PATH']}"  # type: ignore[attr-defined]
    return run(project, "bash", "-c", command, PATH=path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_both_commands_of_the_readme_in_a_project_without_parts(tmp_path: Path) -> None:
    """All of its own tests: about as long as those of this project."""
    cookiecutter(tmp_path, ROOT, **ANSWERS["no parts"])
    project = tmp_path / "bare-bones"
    setup, test = readme_commands(project)
    assert "Best checkpoint: " in shell(project, setup).stdout
    assert re.search(r"\d{3,} passed", shell(project, test).stdout)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_both_commands_of_the_readme_in_a_project_with_all_parts(tmp_path: Path) -> None:
    """Of its tests a quick few, as the other project runs all; then types, the import contract and the dependencies."""
    cookiecutter(tmp_path, ROOT, project_name=LONG)
    project = tmp_path / LONG.replace("_", "-")
    setup, test = readme_commands(project)
    assert "Best checkpoint: " in shell(project, setup).stdout
    quick = "tests/test_locks.py tests/test_configs.py tests/test_readme.py tests/test_schedulers.py tests/networks"
    assert re.search(r"\d{2,} passed", shell(project, f"{test} {quick}").stdout)
    for command in ("ruff check .", "ruff format --check .", "mypy", "lint-imports", "deptry ."):
        shell(project, f".venv/bin/{command}")
    assert git(project, "status", "--porcelain") == ""
