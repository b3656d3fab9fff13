"""A checkpoint or a metric that cannot be written costs no training."""

import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import pytest
from conftest import TINY, cli, runs
from helpers import QUIET, TESTS, FullDisk
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lit_project.callbacks.full_disk import tolerate_full_disk
from lit_project.checkpoints import AtomicCheckpointIO, read_checkpoint
from lit_project.data import Shapes10
from lit_project.errors import InputError
from lit_project.module import ImageClassifier

SMALL = [*TINY, "--model.network=helpers.Linear"]
FULL_DISK = ["--trainer.callbacks+=helpers.FullDisk"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of two MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    mounted = mount and subprocess.run([mount, "-t", "tmpfs", "-o", "size=2m", "small", folder], capture_output=True)
    if not mounted or mounted.returncode:
        pytest.skip("mounting a small disk takes root, and a kernel that lets it")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def epochs_saved(run: Path) -> dict[str, int]:
    return {path.stem: read_checkpoint(path)["epoch"] for path in (run / "checkpoints").iterdir()}


def test_a_run_outlives_a_full_disk_and_says_what_is_lost(small_disk: Path) -> None:
    """Everything lies on it: checkpoints, metrics and the run folder itself."""
    options = ["--data.batch_size=4", "--trainer.log_every_n_steps=1", "--trainer.max_epochs=3"]
    full = ["--trainer.callbacks.first=1", "--trainer.callbacks.ballast=ballast"]
    done = cli(small_disk, "fit", *SMALL, *options, *FULL_DISK, *full, check=False, PYTHONPATH=TESTS)
    (run,) = runs(small_disk)
    assert done.returncode == 1, done.stderr
    assert "max_epochs=3" in done.stderr, "trained to the end"
    assert "CSVLogger cannot write, so metrics are lost: No space left on device" in done.stderr
    assert done.stderr.count("last.ckpt could not be written: No space left on device") == 2 + 1
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "its last checkpoint" in error
    assert error.count(f"{run}/checkpoints/") == 2, "the one that failed and the last good one"
    assert epochs_saved(run) == {"best": 0, "last": 1}


def fit(callback: ModelCheckpoint, disk: FullDisk) -> None:
    """Train for three epochs in this process; a file size limit fails as a quota does, on any machine."""
    trainer = L.Trainer(
        max_epochs=3,
        **QUIET | {"enable_checkpointing": True},
        callbacks=[callback, disk],
        plugins=[AtomicCheckpointIO()],
    )
    tolerate_full_disk(trainer)
    network = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 10))
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        trainer.fit(ImageClassifier(network), datamodule=Shapes10(num_train=64, num_val=16, batch_size=16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def test_a_disk_that_is_full_for_a_while_does_no_harm(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, "last", enable_version_counter=False)
    with pytest.warns(UserWarning, match="could not be written") as warned:
        fit(callback, FullDisk(1, end=2, limit=1000))
    failed = [str(warning.message) for warning in warned if "could not be written" in str(warning.message)]
    path = f"{tmp_path}/last.ckpt"
    assert failed == [
        f"Checkpoint {path} could not be written: File too large (step 8). The last good checkpoint is {path}."
    ]
    assert read_checkpoint(path)["epoch"] == 2


@pytest.mark.parametrize("monitor", [None, "train/loss"])
def test_nothing_is_deleted_for_a_checkpoint_that_was_not_written(tmp_path: Path, monitor: str | None) -> None:
    """Names differ from epoch to epoch, so Lightning deletes the old file itself."""
    callback = ModelCheckpoint(tmp_path, "{epoch}", monitor=monitor, save_last=True, save_on_train_epoch_end=True)
    if monitor:  # any value is better than the one before, so that every epoch saves
        callback.check_monitor_top_k = lambda trainer, current=None: True  # type: ignore[method-assign]
    with (
        pytest.warns(UserWarning, match=r"epoch=1\.ckpt could not be written: File too large"),
        pytest.raises(InputError, match=r"last checkpoint .* could not be written.* last good .*\.ckpt"),
    ):
        fit(callback, FullDisk(1, limit=1000))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0.ckpt", "last.ckpt"]
    assert callback.best_model_path == str(tmp_path / "epoch=0.ckpt")
    assert callback.last_model_path == str(tmp_path / "last.ckpt")
    if monitor:
        assert list(callback.best_k_models) == [callback.best_model_path]
        saved = read_checkpoint(tmp_path / "epoch=0.ckpt")["callbacks"][callback.state_key]
        assert callback.best_model_score == saved["best_model_score"]
