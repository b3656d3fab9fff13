"""A disk that is full, or fails, costs what would have been written to it, not the training."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn

from lit_project.checkpoints import SaveError, os_error_behind
from lit_project.errors import InputError


def tolerate_full_disk(trainer: L.Trainer) -> None:
    """Let the runs of ``trainer`` go on when a checkpoint or a metric cannot be written.

    Each failed checkpoint is a warning with the reason and the last good file, which stays. What a ``ModelCheckpoint``
    says of itself (``best_model_path``, ``best_model_score``, …) stays true. If its last save of a run has failed,
    ``fit`` ends with an ``InputError`` when the training is over. A logger that fails is a warning, once.

    Not covered: sharded checkpoints, which the strategies write by themselves.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            _SaveGuard(callback)
    for logger in trainer.loggers:
        _LoggerGuard(logger)


class _SaveGuard:
    """Goes around the saves of one ``ModelCheckpoint``.

    Lightning notes a checkpoint as saved, saves it, then deletes the one it replaces. When the save fails, the note is
    taken back and nothing is deleted.
    """

    def __init__(self, callback: ModelCheckpoint) -> None:
        self.callback = callback
        self.failure = ""
        guarded: dict[str, Callable[..., None]] = {
            "_save_checkpoint": self._save,
            "_save_topk_checkpoint": self._or_take_back,
            "_save_last_checkpoint": self._or_take_back,
            "on_exception": self._or_take_back,
            "on_fit_end": self._report,
        }
        for name, guard in guarded.items():
            setattr(callback, name, partial(guard, getattr(callback, name)))

    def _save(self, save: Callable[..., None], trainer: L.Trainer, filepath: str) -> None:
        failure = ""
        try:
            save(trainer, filepath)
        except SaveError as error:  # only the rank that writes gets here
            failure = f"{filepath} could not be written: {error.strerror}"
            trainer.strategy.barrier("Trainer.save_checkpoint")  # where the others wait for it
        self.failure = trainer.strategy.broadcast(failure)
        if self.failure:
            rank_zero_warn(f"Checkpoint {self.failure} (step {trainer.global_step}). {self._good(filepath)}")
            raise SaveError(self.failure)

    def _or_take_back(self, save: Callable[..., None], *args: Any) -> None:
        before = {**vars(self.callback), "best_k_models": dict(self.callback.best_k_models)}
        try:
            save(*args)
        except SaveError:
            vars(self.callback).update(before)

    def _report(self, on_fit_end: Callable[..., None], trainer: L.Trainer, *args: Any) -> None:
        on_fit_end(trainer, *args)
        if self.failure and trainer.is_global_zero:
            raise InputError(
                f"The training is over, but its last checkpoint {self.failure}. {self._good()} Make room, then go on "
                "from there with fit --ckpt_path."
            )

    def _good(self, filepath: str = "") -> str:
        """Which file still holds an earlier state of the run."""
        callback = self.callback
        paths = (filepath, callback._last_checkpoint_saved, callback.best_model_path, callback.last_model_path)
        good = next((path for path in paths if path and Path(path).exists()), None)
        return f"The last good checkpoint is {good}." if good else "There is no earlier checkpoint."


class _LoggerGuard:
    """Loses metrics rather than the run."""

    def __init__(self, logger: Logger) -> None:
        self.name = type(logger).__name__
        self.failed = False
        for name in ("log_metrics", "save", "finalize"):
            setattr(logger, name, partial(self._attempt, getattr(logger, name)))

    def _attempt(self, write: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        try:
            write(*args, **kwargs)
        except Exception as error:
            reason = os_error_behind(error)  # TensorBoardLogger makes a ValueError of it
            if reason is None:
                raise
            if not self.failed:
                rank_zero_warn(f"{self.name} cannot write, so metrics are lost: {reason.strerror or reason}.")
            self.failed = True
