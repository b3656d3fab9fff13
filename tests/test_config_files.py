"""What a config's classes say about their arguments."""

import sys
from pathlib import Path

import pytest

from lit_project.config_files import is_sequence


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_an_argument_for_several_numbers_is_known_by_its_annotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, future: str
) -> None:
    name = "sized_later" if future else "sized"
    (tmp_path / f"{name}.py").write_text(
        f"{future}from collections.abc import Sequence\n\n\nclass Net:\n"
        "    def __init__(self, one: int, two: Sequence[int], three: tuple[int, int] | None = None, four=(1, 2),\n"
        "                 five: int | None = None, six: list[int] = None) -> None: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = [word for word in ("one", "two", "three", "four", "five", "six") if is_sequence(f"{name}.Net", word)]
    assert found == ["two", "three", "four", "six"]
    del sys.modules[name]
