"""The two lock files: exact, free of addresses, and in agreement with each other and with pyproject.toml."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = ["requirements.lock", "requirements-dev.lock"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

each_lock = pytest.mark.parametrize("lock", LOCKS)


def lines_of(lock: str) -> list[str]:
    """The lock's requirements, each as one line with its hashes, without comments."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / lock).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return text.replace("\\\n", "").splitlines()


def requirements_of(lock: str) -> list[Requirement]:
    return [Requirement(line.split(" --hash=")[0]) for line in lines_of(lock)]


def version_of(requirement: Requirement) -> str:
    return str(requirement.specifier).removeprefix("==")


@each_lock
def test_every_line_is_one_exact_version_with_hashes(lock: str) -> None:
    lines = lines_of(lock)
    assert len(lines) > 50
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+==[^\s;,*]+( ; [^#]+?)?(\s+--hash=sha256:[0-9a-f]{64})+\s*", line), line


@each_lock
def test_no_index_address_and_no_path(lock: str) -> None:
    text = (ROOT / lock).read_text(encoding="utf-8")
    # the one slash that may be there is the header's: which command made the file
    header, body = text.split("scripts/lock.sh\n", maxsplit=1)
    assert len(header.splitlines()) == 2
    for forbidden in ("http:", "https:", "file:", "index-url", "find-links", "/", " @ ", "git+"):
        assert forbidden not in body


@each_lock
def test_the_project_itself_is_not_in_it(lock: str) -> None:
    assert PROJECT["name"] not in {requirement.name for requirement in requirements_of(lock)}


def test_dev_has_all_of_the_other_in_the_same_versions() -> None:
    # names and versions only: a package that a tool needs too can have a wider marker in the dev lock
    runtime, dev = ({line.split()[0] for line in lines_of(lock)} for lock in LOCKS)
    assert runtime < dev


def extra(name: str) -> list[Requirement]:
    """What an extra asks for, and the extras that it names."""
    asked = [Requirement(line) for line in PROJECT["optional-dependencies"][name]]
    own = [requirement for requirement in asked if requirement.name == PROJECT["name"]]
    more = [part for requirement in own for other in requirement.extras for part in extra(other)]
    return [requirement for requirement in asked if requirement not in own] + more


@each_lock
def test_pyproject_is_satisfied(lock: str) -> None:
    locked = requirements_of(lock)
    for dependency in [*map(Requirement, PROJECT["dependencies"]), *(extra("dev") if "dev" in lock else [])]:
        found = [pin for pin in locked if pin.name == canonicalize_name(dependency.name)]
        assert found, f"{dependency.name} is not in {lock}: run scripts/lock.sh"
        for pin in found:
            assert dependency.specifier.contains(version_of(pin)), f"{pin} in {lock}, {dependency} in pyproject.toml"


@each_lock
def test_every_platform_is_covered(lock: str) -> None:
    for requirement in requirements_of(lock):
        if requirement.name.startswith("nvidia-"):
            assert requirement.marker is not None, requirement
            for system in ("darwin", "win32"):
                assert not requirement.marker.evaluate({"sys_platform": system}), requirement
    # colorama is what click, tqdm and pytest need on Windows alone
    windows = {"sys_platform": "win32", "platform_system": "Windows"}
    needed = {
        requirement.name
        for requirement in requirements_of(lock)
        if requirement.marker is None or requirement.marker.evaluate(windows)
    }
    assert {"colorama", "torch", "torchvision"} <= needed


@each_lock
def test_no_malicious_release_of_lightning(lock: str) -> None:
    pins = [pin for pin in requirements_of(lock) if pin.name in {"lightning", "pytorch-lightning"}]
    assert pins
    assert not {version_of(pin) for pin in pins} & {"2.6.2", "2.6.3"}
    (allowed,) = (Requirement(line).specifier for line in PROJECT["dependencies"] if line.startswith("lightning"))
    assert not list(allowed.filter(["2.6.2", "2.6.3"]))
