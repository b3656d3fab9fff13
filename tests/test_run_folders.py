"""Reading run folders."""

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from conftest import logged
from made_runs import CONFIG, made_run, made_test

from lit_project.errors import InputError
from lit_project.run_folders import (
    best_epoch,
    flat,
    monitored,
    read_metrics,
    read_record,
    read_repeat,
    test_of,
    tests_in,
)

test_of.__test__ = tests_in.__test__ = False  # type: ignore[attr-defined]  # their names would have pytest collect them

EPOCHS = [
    {"train/loss": 3, "val/loss": 2.0, "val/acc": 0.5, "val/f1": 0.1},
    {"train/loss": 2, "val/loss": 1.0, "val/acc": 0.75, "val/f1": 0.2},
    {"train/loss": 1, "val/loss": 0.5, "val/acc": 0.75, "val/f1": 0.3},
]


def changed(**best: Any) -> dict[str, Any]:
    return CONFIG | {"callbacks": {"best": {"class_path": "x.ModelCheckpoint", "init_args": best}}}


@pytest.mark.parametrize(
    ("config", "epoch", "f1"),
    [
        (CONFIG, 1, 0.2),
        (changed(monitor="val/loss", mode="min"), 2, 0.3),
        (changed(monitor="val/acc", mode="min"), 0, 0.1),
        (changed(), 2, 0.3),
        (changed(monitor="val/other", mode="max"), 2, 0.3),
    ],
    ids=["the first of equals", "min", "worst on purpose", "nothing monitored", "never logged"],
)
def test_the_best_epoch_of_a_killed_run_is_where_the_monitored_metric_was_best(
    tmp_path: Path, config: dict[str, Any], epoch: int, f1: float
) -> None:
    run = made_run(tmp_path / "fit-1", *EPOCHS, config=config, best=None)
    found, scores = best_epoch(read_record(run), read_metrics(run))
    assert (found, scores) == (epoch, {name: EPOCHS[epoch][name] for name in ("val/loss", "val/acc", "val/f1")})
    assert scores["val/f1"] == f1


@pytest.mark.parametrize(
    ("score", "epoch", "scores"),
    [
        (0.75, 1, {"val/loss": 1.0, "val/acc": 0.75, "val/f1": 0.2}),
        # 0.5 as float32 arithmetic may give it; a better one could not be written
        (0.5 + 1e-8, 0, {"val/loss": 2.0, "val/acc": 0.5, "val/f1": 0.1}),
        # of the run that this one went on from
        (0.9, None, {"val/acc": 0.9}),
    ],
    ids=["the first of equals", "a save was taken back", "brought from another folder"],
)
def test_the_best_epoch_is_that_of_the_kept_checkpoint(
    tmp_path: Path, score: float, epoch: int | None, scores: dict[str, float]
) -> None:
    best = {"path": "checkpoints/best.ckpt", "monitor": "val/acc", "score": score}
    run = made_run(tmp_path / "fit-1", *EPOCHS, best=best)
    assert best_epoch(read_record(run), read_metrics(run)) == (epoch, scores)
    own = made_run(tmp_path / "fit-2", *EPOCHS, best=best, config=changed(monitor="val/loss", mode="min"))
    assert best_epoch(read_record(own), read_metrics(own))[0] == 2, "the score is not of what is monitored"


def test_the_best_epoch_of_a_real_run_is_the_recorded_one(tiny_run: Path) -> None:
    record = read_record(tiny_run)
    epoch, scores = best_epoch(record, read_metrics(tiny_run))
    assert scores["val/acc"] == pytest.approx(record["best"]["score"], rel=1e-6)
    assert scores.keys() == {"val/acc", "val/auroc", "val/f1", "val/loss"}
    assert {name: logged(tiny_run, name)[epoch or 0] for name in scores} == scores


def test_a_run_of_the_users_own_checkpoint_callback(tmp_path: Path) -> None:
    own = [{"class_path": "x.Other"}, {"class_path": "x.ModelCheckpoint", "init_args": {"monitor": "val/f1"}}]
    config = {"callbacks": {"best": None}, "trainer": {"callbacks": own}}
    assert monitored(config) == ("val/f1", "min"), "Lightning's default"


def test_rows_that_are_no_numbers_are_passed_over(tmp_path: Path) -> None:
    run = made_run(tmp_path / "fit-1", {"val/acc": "nan"}, {"val/acc": 0.25, "val/f1": "nan"}, {"val/acc": ""})
    with (run / "csv" / "metrics.csv").open("a") as file:
        file.write("3,30,0.9e")  # the disk was full
    epoch, scores = best_epoch(read_record(run), read_metrics(run))
    assert (epoch, scores["val/acc"], str(scores["val/f1"])) == (1, 0.25, "nan")


def test_without_metrics_the_best_score_is_known(tmp_path: Path) -> None:
    run = made_run(tmp_path / "fit-1")
    assert best_epoch(read_record(run), read_metrics(run)) == (None, {"val/acc": 0.5})
    crashed = made_run(tmp_path / "fit-2", best=None, exit_reason="failed: ValueError: x")
    assert best_epoch(read_record(crashed), read_metrics(crashed)) == (None, {})


def test_the_newest_finished_test_of_the_best_checkpoint_is_found(tmp_path: Path) -> None:
    run = made_run(tmp_path / "fit-1", *EPOCHS)
    other = made_run(tmp_path / "fit-2", *EPOCHS, best={"path": "checkpoints/epoch=3.ckpt"})
    made_test(run, "test-1", start="2026-11-30T11:00:00+00:00", metrics={"test/acc": 0.1})
    made_test(run, "test-2", start="2026-11-30T12:30:00+02:00", metrics={"test/acc": 0.2})
    made_test(run, "test-3", start="2026-11-30T12:00:00+00:00", exit_reason="failed: x")
    made_test(run, "test-4", "last.ckpt", start="2026-11-30T13:00:00+00:00")
    made_test(other, "test-5", "best.ckpt")
    (tmp_path / "test-6").mkdir()
    tests = tests_in(tmp_path)
    found = test_of(run, read_record(run), tests)
    assert found is not None
    assert found["metrics"] == {"test/acc": 0.1}
    assert test_of(other, read_record(other), tests) is None


@pytest.mark.parametrize(
    ("score", "start", "counts"),
    [
        (0.5, "2026-11-30T10:59:00+00:00", True),
        (0.4, "2026-11-30T10:59:00+00:00", False),
        (0.4, "2026-11-30T12:01:00+00:00", True),
        (0.5, "2026-11-30T09:59:00+00:00", False),
    ],
    ids=["none better since", "replaced since", "of what replaced it", "while it trained"],
)
def test_a_test_of_a_checkpoint_that_was_replaced_does_not_count(
    tmp_path: Path, score: float, start: str, counts: bool
) -> None:
    best = {"path": "checkpoints/best.ckpt", "monitor": "val/acc", "score": score}
    first = {"start": "2026-11-30T09:00:00+00:00", "end": "2026-11-30T10:00:00+00:00", "best": best}
    again = {"start": "2026-11-30T11:00:00+00:00", "end": "2026-11-30T12:00:00+00:00"}
    run = made_run(tmp_path / "fit-1", earlier=[first], **again)  # now its best score is 0.5
    made_test(run, start=start)
    assert (test_of(run, read_record(run), tests_in(tmp_path)) is not None) == counts


def test_a_test_of_a_killed_run_counts_if_the_file_is_older(tmp_path: Path) -> None:
    run = made_run(tmp_path / "fit-1", best=None, end=None, exit_reason="running")
    made_test(run)
    record, tests = read_record(run), tests_in(tmp_path)
    assert test_of(run, record, tests) is None, "no file"
    file = run / "checkpoints" / "best.ckpt"
    file.parent.mkdir()
    file.touch()
    tested = datetime.fromisoformat(tests["fit-1", "best.ckpt"]["start"]).timestamp()
    for seconds, counts in ((-60, True), (0.5, True), (60, False)):  # run.json has whole seconds
        os.utime(file, (tested + seconds, tested + seconds))
        assert (test_of(run, record, tests) is not None) == counts


def test_keys_are_those_of_the_command_line() -> None:
    assert dict(flat(CONFIG))["model"] == "Net"
    assert dict(flat(CONFIG))["model.optimizer.lr"] == 0.1
    assert dict(flat(CONFIG))["callbacks.best.monitor"] == "val/acc"


@pytest.mark.parametrize("text", [None, "{", "[]", json.dumps({"pid": 1})])
def test_what_is_no_run_folder_is_said(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(InputError, match=r"is not the folder of a run: its run\.json cannot be read"):
        read_record(tmp_path)


@pytest.mark.parametrize("text", [None, "{", "[]", json.dumps({"results": []})])
def test_what_is_no_repeat_is_said(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "repeat.json").write_text(text)
    with pytest.raises(InputError, match=r"repeat\.json cannot be read as what a repeat wrote"):
        read_repeat(tmp_path)
