import pytest

from lit_project.tables import duration, print_table


def test_names_are_no_markup_and_lines_are_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("[red]T", ["name", "[b]n"], [["[bold]x" + "y" * 200, 0.5], ["z", None]], [["mean", 0.25]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "[red]T"
    assert [line.split("│")[1:3] for line in lines if "│" in line] == [
        [f" [bold]x{'y' * 200} ", " 0.5000 "],
        [f" {'z':207} ", "        "],
        [f" {'mean':207} ", " 0.2500 "],
    ]


def test_durations_are_read_at_a_glance() -> None:
    assert [duration(s) for s in (0.4, 59, 61, 3600, 90061)] == [
        "0 s",
        "59 s",
        "1 min 01 s",
        "1 h 00 min",
        "25 h 01 min",
    ]
