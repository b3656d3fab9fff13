"""``run.json`` says what a run was made of and how it ended."""

import errno
import fcntl
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
from helpers import QUIET, in_process
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from lit_project.callbacks import RunRecord
from lit_project.callbacks.run_record import best_checkpoint, hold
from lit_project.checkpoints import read_checkpoint
from lit_project.data import Shapes10
from lit_project.errors import InputError
from lit_project.module import ImageClassifier


def record(run: Path) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((run / "run.json").read_text(), parse_constant=refuse)


def fit(folder: Path, *callbacks: Callback, **options: Any) -> L.Trainer:
    settings = {"max_epochs": 1, **QUIET, "default_root_dir": folder} | options
    trainer = L.Trainer(**settings, callbacks=[RunRecord({"seed_everything": 3}), *callbacks])
    network = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 10))
    trainer.fit(ImageClassifier(network), datamodule=Shapes10(num_train=16, num_val=16, batch_size=16))
    return trainer


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


def test_a_run_keeps_others_out_of_its_folder_until_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its worker outlives it for some seconds, and must not keep the folder."""
    program = ("-m", "lit_project.cli", "fit")
    process = start(tmp_path, *program, *TINY, "--data.num_workers=1", "--trainer.max_epochs=1000")
    try:
        while not (found := list(tmp_path.glob("runs/*/checkpoints/last.ckpt"))):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        monkeypatch.chdir(tmp_path)
        (run,) = runs(tmp_path)
        before = record(run)
        status, _, errors = in_process(monkeypatch, capfd, "fit", "--ckpt_path=last")
        assert process.poll() is None
        assert runs(tmp_path) == [run]
        assert record(run) == before
        assert status == 1
        assert f"error: runs/{run.name} is in use by process {process.pid} on " in errors
    finally:
        process.kill()
        process.communicate()
    assert found[0].is_relative_to(run)
    assert (before["exit_reason"], before["end"], before["pid"]) == ("running", None, process.pid)
    with pytest.warns(UserWarning, match="The train and val images are not those that this run was started with"):
        fit(run)  # going on in the same folder
    after = record(run)
    assert after["exit_reason"] == "finished"
    assert after["seed"] == 3
    assert [(earlier["exit_reason"], earlier["seed"]) for earlier in after["earlier"]] == [("killed", 0)]
    with pytest.warns(UserWarning, match="not those that this run was started with"):  # which is so for good
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


def test_where_there_are_no_locks_a_run_goes_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, command: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    fit(tmp_path)
    assert record(tmp_path)["exit_reason"] == "finished"
    hold(Path("/proc/nowhere"))  # nor where nothing can be written: that is said of run.json


def test_every_rank_profiles_into_the_folder_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, own = str(tmp_path / "first"), str(tmp_path / "second")
    sent = {own: first}  # as the first rank would answer the second
    monkeypatch.setattr(SingleDeviceStrategy, "broadcast", lambda _, value, src=0: sent.get(value, value))
    fit(tmp_path, profiler=SimpleProfiler(dirpath=own, filename="profile"))
    assert len(list(Path(first).iterdir())) == 1
    assert not Path(own).exists()


class Worse(Callback):
    """A metric that is best in the sanity check, and then falls."""

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log("val/made", 9.0 if trainer.sanity_checking else 2.0 - trainer.current_epoch)


def test_the_best_is_that_of_the_monitored_metric_without_the_sanity_check(tmp_path: Path) -> None:
    plain = ModelCheckpoint(dirpath=tmp_path / "all", save_top_k=-1)
    best = ModelCheckpoint(dirpath=tmp_path / "best", monitor="val/made", mode="max")
    options: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": True, "num_sanity_val_steps": 1}
    trainer = fit(tmp_path, Worse(), plain, best, **options)
    assert trainer.checkpoint_callbacks[0] is plain, "which Lightning takes for the best"
    assert best_checkpoint(trainer) is best
    path = f"best/{Path(best.best_model_path).name}"
    assert "epoch=0" in path
    assert record(tmp_path)["best"] == {"path": path, "monitor": "val/made", "score": 2.0}
