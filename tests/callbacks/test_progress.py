"""What a run shows of its progress, through the real command line."""

import re
from pathlib import Path

import pytest
from conftest import TINY, cli

ARGUMENTS = [*TINY, "--trainer.max_epochs=2"]


def test_without_a_terminal_there_is_one_line_an_epoch(tmp_path: Path) -> None:
    shown = cli(tmp_path, "fit", *ARGUMENTS).stderr
    lines = [line for line in shown.splitlines() if line.startswith("Epoch ")]
    assert [line.split(":")[0] for line in lines] == ["Epoch 1/2", "Epoch 2/2"]
    for line in lines:
        # the training metrics of this very epoch, which are computed after the validation metrics, are there too
        assert re.search(r"images/s, \d+% waiting for data, .* left, .*val/acc 0\.\d+, train/acc 0\.\d+", line), line
    assert "\x1b" not in shown
    waiting = [int(re.search(r"(\d+)% waiting", line).group(1)) for line in lines]  # type: ignore[union-attr]
    assert all(0 <= share <= 100 for share in waiting)


def test_lines_between_epochs_come_by_the_clock(tmp_path: Path) -> None:
    shown = cli(tmp_path, "fit", *ARGUMENTS, "--callbacks.progress_bar.line_seconds=0").stderr
    assert len(re.findall(r"^Epoch [12]/2, step [1-4]/4: ", shown, re.MULTILINE)) == 8


def test_on_a_terminal_there_is_a_bar(tmp_path: Path) -> None:
    shown = cli(tmp_path, "fit", *ARGUMENTS, TTY_COMPATIBLE="1").stderr
    assert "Epoch 2/2" in shown
    assert "━" in shown
    assert "4/4" in shown


@pytest.mark.slow
def test_a_bar_for_the_test_and_none_when_switched_off(tmp_path: Path) -> None:
    cli(tmp_path, "fit", *ARGUMENTS, "--trainer.enable_progress_bar=false")
    shown = cli(tmp_path, "test", "--ckpt_path=best", TTY_COMPATIBLE="1").stderr
    assert "Test" in shown
    assert "3/3" in shown
