"""A monitored name that nothing logs is told before an epoch is spent, also where there is no sanity check."""

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from helpers import QUIET, Linear
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

from lit_project.callbacks import MonitorCheck
from lit_project.data import Shapes10
from lit_project.module import ImageClassifier


def fit(tmp_path: Path, *callbacks: Callback, checkpoint: Path | None = None, **options: Any) -> L.Trainer:
    """Train for an epoch of two batches, or for a second one."""
    options = {
        **QUIET,
        "enable_checkpointing": True,
        "max_epochs": 2 if checkpoint else 1,
        "log_every_n_steps": 1,
    } | options
    trainer = L.Trainer(default_root_dir=tmp_path, callbacks=[*callbacks, MonitorCheck()], **options)
    data = Shapes10(num_train=32, num_val=10, batch_size=16)
    trainer.fit(ImageClassifier(Linear()), datamodule=data, ckpt_path=checkpoint)
    return trainer


@pytest.mark.parametrize("monitor", ["val/accc", "train/accc", "valacc"])
def test_without_a_sanity_check_a_typo_is_told_before_training(tmp_path: Path, monitor: str) -> None:
    with (
        pytest.warns(UserWarning, match=f"monitors '{monitor}', which is none of the model's metrics .*train/acc, "),
        pytest.raises(MisconfigurationException, match="could not find the monitored key"),
    ):
        fit(tmp_path, ModelCheckpoint(tmp_path, monitor=monitor), num_sanity_val_steps=0)


def test_a_typo_of_training_is_told_in_a_resumed_run(tmp_path: Path) -> None:
    fit(tmp_path).save_checkpoint(tmp_path / "first.ckpt")
    with (
        pytest.warns(UserWarning, match="EarlyStopping monitors 'train/accc'"),
        pytest.raises(RuntimeError, match="train/accc"),
    ):
        fit(tmp_path, EarlyStopping("train/accc"), checkpoint=tmp_path / "first.ckpt")


class Logs(Callback):
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log("train/own", 1.0)


def test_what_the_run_monitored_before_is_not_told_again(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="'train/own', which is none"):
        fit(tmp_path, Logs(), EarlyStopping("train/own")).save_checkpoint(tmp_path / "first.ckpt")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*which is none")
        fit(tmp_path, Logs(), EarlyStopping("train/own"), checkpoint=tmp_path / "first.ckpt")


def test_all_that_is_logged_can_be_monitored(tmp_path: Path) -> None:
    own = ("train/acc", "val/auroc", "train/loss_step", "train/grad_norm", "step")
    for names, callbacks in ((own, []), ((*own, "train/own"), [Logs()])):
        for name in names:
            callbacks.append(ModelCheckpoint(tmp_path / f"{len(names)} {name}", monitor=name))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fit(tmp_path, *callbacks)
        warned = {name for name in names for warning in told if f"monitors '{name}'" in str(warning.message)}
        assert warned == set(names) - {*own}, "what is logged by other code is told, and works"
        assert all(list((tmp_path / f"{len(names)} {name}").glob("*.ckpt")) for name in names)
