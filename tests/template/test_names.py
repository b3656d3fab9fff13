"""Which names a project can have."""

import importlib.metadata
import re
from pathlib import Path

import pytest
from made import ROOT, cookiecutter

from hooks import names

TAKEN = {
    "standard library": ["test", "email", "random", "types"],
    "keyword": ["class", "import", "lambda"],
    "depends on": ["torch", "lightning", "numpy", "yaml", "PIL", "pytest"],
    "folder or file": ["src", "tests", "configs", "data", "hooks", "conftest", "con", "lit-project"],
    "digit": ["3d-net", "1"],
}


@pytest.mark.parametrize(
    ("text", "package"),
    [
        ("My-Cool Net", "my_cool_net"),
        ("a.ai", "a_ai"),
        ("Été", "ete"),
        ("Straße & Øresund", "strasse_oresund"),
        ("  __x__  ", "x"),
        ("ResNet50v2", "resnet50v2"),
        ("项目", ""),
    ],
)
def test_a_package_name_is_derived(text: str, package: str) -> None:
    assert names.package_name(text) == package
    if package:
        names.check(text, package, package.replace("_", "-"), ROOT)


@pytest.mark.parametrize(("reason", "name"), [(reason, name) for reason, all_ in TAKEN.items() for name in all_])
def test_a_name_that_is_taken_is_refused(reason: str, name: str) -> None:
    package = names.package_name(name)
    slug = package.replace("_", "-")
    with pytest.raises(names.RefusedNameError, match=f"package_name '{package}' cannot be used: .*{reason}"):
        names.check(name, package, slug, ROOT)
    with pytest.raises(names.RefusedNameError, match=f"project_slug '{slug}' cannot be used: .*{reason}"):
        names.check("My Net", "my_net", slug, ROOT)


@pytest.mark.parametrize("name", ["My_Net", "my-net", "my net", "été", "_net", "net_", "a__b", "a/b", "..", "net.py"])
def test_a_package_name_that_is_not_one_is_refused_with_one_that_is(name: str) -> None:
    with pytest.raises(names.RefusedNameError, match=r"as in (\w+)\.") as caught:
        names.check("My Net", name, "my-net", ROOT)
    fitting = re.findall(r"as in (\w+)\.", str(caught.value))[0]
    names.check("My Net", fitting, "my-net", ROOT)


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "a_b", "A", "a b", ""])
def test_a_folder_name_that_is_not_one_is_refused(name: str) -> None:
    with pytest.raises(names.RefusedNameError, match=r"project_slug .* cannot be used"):
        names.check("My Net", "my_net", name, ROOT)


def test_a_project_name_that_gives_no_other_is_refused() -> None:
    with pytest.raises(names.RefusedNameError, match="No package name can be made of '项目'"):
        names.check("项目", names.package_name("项目"), "", ROOT)


def test_forty_letters_are_possible_and_no_more() -> None:
    names.check("x", "x" * 40, "x", ROOT)
    with pytest.raises(names.RefusedNameError, match="41 characters, at most 40"):
        names.check("x", "x" * 41, "x", ROOT)


def test_no_module_that_the_project_can_import_is_a_name() -> None:
    locked = {name.replace("_", "-") for name in names._locked(ROOT)}
    modules = {
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if module.islower() and module.isidentifier() and not module.startswith("_") and "__" not in module
        if {re.sub("[-_.]+", "-", name).lower() for name in distributions} & locked
    }
    assert len(modules) > 80
    assert {module for module in modules if not names._reason("package_name", module, ROOT)} == set()


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"project_name": "torch"}, "package_name 'torch' cannot be used"),
        ({"project_slug": "../class"}, "project_slug '../class' cannot be used"),
        ({"project_name": ""}, "The project name is empty"),
    ],
)
def test_cookiecutter_says_so_in_one_line_and_writes_nothing(
    tmp_path: Path, answers: dict[str, str], said: str
) -> None:
    done = cookiecutter(tmp_path, ROOT, check=False, **answers)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert {path.name for path in tmp_path.iterdir()} == {"home"}


def test_a_folder_that_exists_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "my-project").mkdir()
    (tmp_path / "my-project" / "README.md").write_text("mine")
    done = cookiecutter(tmp_path, ROOT, check=False)
    assert done.returncode == 1
    assert done.stdout == 'Error: "my-project" directory already exists\n'
    done = cookiecutter(tmp_path, ROOT, "--overwrite-if-exists", check=False)
    assert done.returncode == 1
    assert "my-project is not empty, and nothing in it is overwritten" in done.stderr
    assert [path.name for path in (tmp_path / "my-project").iterdir()] == ["README.md"]
    assert (tmp_path / "my-project" / "README.md").read_text() == "mine"
