import pytest

from lit_project.tables import print_table


def test_names_are_no_markup_and_lines_are_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("[red]T", ["name", "[b]n"], [["[bold]x" + "y" * 200, 0.5], ["z", None]], [["mean", 0.25]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "[red]T"
    assert [line.split("│")[1:3] for line in lines if "│" in line] == [
        [f" [bold]x{'y' * 200} ", " 0.5000 "],
        [f" {'z':207} ", "        "],
        [f" {'mean':207} ", " 0.2500 "],
    ]
