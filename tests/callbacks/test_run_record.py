"""``run.json`` says what a run was made of and how it ended."""

import errno
import json
import os
import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from conftest import TINY, runs, start
from helpers import QUIET
from lightning.pytorch.callbacks import Callback
from torch import nn

from lit_project.callbacks import RunRecord
from lit_project.checkpoints import read_checkpoint
from lit_project.data import Shapes10
from lit_project.errors import InputError
from lit_project.module import ImageClassifier


def record(run: Path) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((run / "run.json").read_text(), parse_constant=refuse)


def fit(folder: Path, *callbacks: Callback) -> None:
    trainer = L.Trainer(
        max_epochs=1,
        **QUIET,
        default_root_dir=folder,
        callbacks=[RunRecord({"seed_everything": 3}), *callbacks],
    )
    network = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 10))
    trainer.fit(ImageClassifier(network), datamodule=Shapes10(num_train=16, num_val=16, batch_size=16))


def test_a_finished_run_is_told_in_full(tiny_run: Path) -> None:
    found = record(tiny_run)
    assert found["exit_reason"] == "finished"
    assert found["command"][-2:] == [TINY[-1], "--trainer.max_epochs=2"]
    assert found["config"] == yaml.safe_load((tiny_run / "config.yaml").read_text())
    assert found["seed"] == 0
    assert datetime.fromisoformat(found["start"]) <= datetime.fromisoformat(found["end"])
    assert {name: split["images"] for name, split in found["data"].items()} == {"train": 256, "val": 129}
    assert found["versions"]["torch"] == torch.__version__.split("+")[0]
    assert found["machine"]["threads"] == 1
    best = read_checkpoint(tiny_run / found["best"]["path"])
    (scores,) = (
        state for key, state in best["callbacks"].items() if "monitor': 'val/acc'" in key and "dirpath" in state
    )
    assert (found["best"]["monitor"], found["best"]["score"]) == ("val/acc", scores["best_model_score"].item())
    assert found["metrics"]["val/acc"] <= found["best"]["score"]
    commit = found["git"] and found["git"]["commit"] + "-dirty" * found["git"]["changed"]
    assert best["git_commit"] == commit
    assert best["versions"].items() <= found["versions"].items()
    assert {"python", "torch", "lightning"} <= best["versions"].keys()
    assert (tiny_run / "diff.patch").exists() == bool(found["git"] and found["git"]["changed"])


class Raise(Callback):
    def __init__(self, exception: BaseException) -> None:
        self.exception = exception

    def on_train_batch_start(self, *_: Any) -> None:
        raise self.exception


@pytest.mark.parametrize(
    ("exception", "raised", "reason"),
    [
        (InputError("first line\nsecond"), InputError, "failed: InputError: first line"),
        (RuntimeError(), RuntimeError, "failed: RuntimeError: no message"),
        (KeyboardInterrupt(), SystemExit, "interrupted by SIGINT"),
    ],
)
def test_how_it_failed(tmp_path: Path, exception: BaseException, raised: type[BaseException], reason: str) -> None:
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(raised):
            fit(tmp_path, Raise(exception))
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it from then on
    found = record(tmp_path)
    assert found["exit_reason"] == reason
    assert found["end"]


def test_a_killed_run_is_seen_as_such(tmp_path: Path) -> None:
    program = ("-m", "lit_project.cli", "fit")
    process = start(tmp_path, *program, *TINY, "--trainer.max_epochs=1000")
    try:
        while not (found := list(tmp_path.glob("runs/*/checkpoints/last.ckpt"))):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
    finally:
        process.kill()
        process.communicate()
    (run,) = runs(tmp_path)
    assert found[0].is_relative_to(run)
    before = record(run)
    assert (before["exit_reason"], before["end"], before["pid"]) == ("running", None, process.pid)
    fit(run)  # going on in the same folder
    after = record(run)
    assert after["exit_reason"] == "finished"
    assert after["seed"] == 3
    assert [(earlier["exit_reason"], earlier["seed"]) for earlier in after["earlier"]] == [("killed", 0)]
    fit(run)
    assert [earlier["exit_reason"] for earlier in record(run)["earlier"]] == ["killed", "finished"]


class NotANumber(Callback):
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log("nan", float("nan"))


def test_what_is_not_finite_is_valid_json(tmp_path: Path) -> None:
    fit(tmp_path, NotANumber())
    assert record(tmp_path)["metrics"]["nan"] == "nan"


def test_a_full_disk_costs_the_record_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Callback):
        def on_train_end(self, *_: Any) -> None:
            def full(descriptor: int) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            monkeypatch.setattr(os, "fsync", full)

    with pytest.warns(UserWarning, match=r"run\.json cannot be written: No space left"):
        fit(tmp_path, Full())
    assert record(tmp_path)["exit_reason"] == "running", "the old record is whole"
