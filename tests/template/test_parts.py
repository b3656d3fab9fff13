"""The manifest of the optional parts, the marks around their blocks, and the lines that answers change."""

import json
import re

import pytest
from made import PARTS, ROOT

from hooks import generate

MANIFEST = generate.parts(ROOT)
FILES = generate.tracked_files(ROOT)
QUESTIONS = json.loads((ROOT / "cookiecutter.json").read_text())
ANSWERS = {
    "package_name": "my_net",
    "project_slug": "my-net",
    "project_name": "My Net",
    "author": "A",
    "email": "",
    "description": "D",
    "license": "MIT",
    "python_version": "3.11",
    "data": "CIFAR-10",
}


@pytest.mark.parametrize(("part", "pattern"), [(part, p) for part, patterns in MANIFEST.items() for p in patterns])
def test_each_entry_of_the_manifest_names_files(part: str, pattern: str) -> None:
    assert [path for path in FILES if generate.belongs(path, [pattern])], f"{part} names {pattern}, which is not there"


def test_no_file_belongs_to_two_parts() -> None:
    for path in FILES:
        assert len([part for part, patterns in MANIFEST.items() if generate.belongs(path, patterns)]) < 2, path


def test_each_part_is_a_question() -> None:
    assert {part for names in MANIFEST for part in names.split(" or ")} == {"template", *PARTS}
    assert [key for key, default in QUESTIONS.items() if isinstance(default, bool)] == PARTS
    assert all(QUESTIONS[part] is True for part in PARTS)
    asked = {key for key in QUESTIONS if not key.startswith("_")}
    assert QUESTIONS["__prompts__"].keys() == asked


@pytest.mark.parametrize("path", [path for path in FILES if not generate.belongs(path, MANIFEST["template"])])
def test_marks_are_whole_and_name_a_part(path: str) -> None:
    try:
        text = (ROOT / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    marks = re.findall(r"(?:#|<!--) (?:part: ([\w ]+?)|(/part))(?: -->)?[ \t]*$", text, re.MULTILINE)
    assert {part for names, _ in marks if names for part in names.split(" or ")} <= {"template", *PARTS}
    if path.endswith(".py"):
        assert marks == [], "Python files belong to a part as a whole"
    else:
        generate.without_parts(text, {*PARTS})


def test_a_part_not_kept_goes_and_the_marks_of_all() -> None:
    text = (
        "a\n\n# part: wandb\nb\n  # part: sweeps\nc\n  # /part\n# /part\n\n\td\n"
        "<!-- part: sweeps -->\ne\n<!-- /part -->\n"
        "| f | g | <!-- part: wandb -->\n- h  # part: sweeps\n# about a part: fine\n\n\ni\n"
    )
    assert generate.without_parts(text, {"wandb", "sweeps"}) == (
        "a\n\nb\nc\n\n\td\ne\n| f | g |\n- h\n# about a part: fine\n\n\ni\n"
    )
    assert generate.without_parts(text, {"wandb"}) == "a\n\nb\n\n\td\n| f | g |\n# about a part: fine\n\n\ni\n"
    assert generate.without_parts(text, {"sweeps"}) == "a\n\n\td\ne\n- h\n# about a part: fine\n\n\ni\n"


def test_what_two_parts_share_stays_with_either() -> None:
    text = "a\n# part: sweeps or wandb\nb\n# /part\n- c <!-- part: reports or sweeps -->\n"
    assert generate.without_parts(text, {"wandb"}) == "a\nb\n"
    assert generate.without_parts(text, {"sweeps"}) == "a\nb\n- c\n"
    assert generate.without_parts(text, {"notebooks"}) == "a\n"


@pytest.mark.parametrize("text", ["# part: wandb\na\n", "a\n# /part\n"])
def test_half_a_block_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="a block of a part"):
        generate.without_parts(text, {"wandb"})


@pytest.mark.parametrize(
    "answers",
    [{}, {"license": "Proprietary"}, {"license": "BSD-3-Clause", "python_version": "3.13"}, {"data": "own images"}],
)
def test_each_line_that_an_answer_changes_is_there(answers: dict[str, str]) -> None:
    given = ANSWERS | answers
    for path, pattern, _ in generate.facts(ROOT, given):
        text = generate.renamed((ROOT / path.replace("my_net", "lit_project")).read_text(), given)
        assert re.search(pattern, text, re.MULTILINE), f"{path} has no line {pattern}"


def test_names_are_replaced_in_one_pass() -> None:
    given = {"package_name": "my_lit_project", "project_slug": "a-lit-project"}
    before = "lit_project.data lit-project $LIT_DATA_DIR {'LIT_': 1} SPLIT_A ${{ x }} {epoch}"
    after = "my_lit_project.data a-lit-project $MY_LIT_PROJECT_DATA_DIR {'MY_LIT_PROJECT_': 1}"
    assert generate.renamed(before, given) == after + " SPLIT_A ${{ x }} {epoch}"


def test_imports_are_broken_as_ruff_does() -> None:
    long = "a" * 100
    assert generate.wrap_imports(f"    from {long} import b, c as d\n") == (
        f"    from {long} import (\n        b,\n        c as d,\n    )\n"
    )
    short = f"from {long} import b\n"
    assert generate.wrap_imports(short) == short
