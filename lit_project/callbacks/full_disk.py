"""A disk that is full, or fails, costs what would have been written to it, not the training."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn

from lit_project.checkpoints import SaveError
from lit_project.errors import InputError
from lit_project.files import os_error_behind


def save_or_warn(save: Callable[[], None], trainer: L.Trainer, path: str | Path, earlier: Iterable[str | Path]) -> str:
    """Have all ranks save a checkpoint; a failure is a warning, which names the first of ``earlier`` that is there.

    Returns:
        What failed and why, the same on all ranks; empty if nothing did.
    """
    failure = ""
    try:
        save()
    except SaveError as error:  # only the rank that writes gets here
        failure = f"{path} could not be written: {error.strerror}"
        trainer.strategy.barrier("Trainer.save_checkpoint")  # where the others wait for it
    failure = trainer.strategy.broadcast(failure)
    if failure:
        rank_zero_warn(f"Checkpoint {failure} (step {trainer.global_step}). {last_good(earlier)}")
    return failure


def last_good(paths: Iterable[str | Path]) -> str:
    """Which file still holds an earlier state of the run: the first of ``paths`` that is there."""
    good = next((path for path in paths if path and Path(path).exists()), None)
    return f"The last good checkpoint is {good}." if good else "There is no earlier checkpoint."


def refuse_lost_end(failure: str, trainer: L.Trainer, earlier: Iterable[str | Path]) -> None:
    """End a run, whose last save failed, with an ``InputError``; do nothing if it did not."""
    if failure and trainer.is_global_zero:
        raise InputError(
            f"The training is over, but its last checkpoint {failure}. {last_good(earlier)} Make room, then go on from "
            "there with fit --ckpt_path."
        )


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
        earlier = [filepath, *self._earlier()]
        self.failure = save_or_warn(partial(save, trainer, filepath), trainer, filepath, earlier)
        if self.failure:
            raise SaveError(self.failure)

    def _or_take_back(self, save: Callable[..., None], *args: Any) -> None:
        before = {**vars(self.callback), "best_k_models": dict(self.callback.best_k_models)}
        try:
            save(*args)
        except SaveError:
            vars(self.callback).update(before)

    def _report(self, on_fit_end: Callable[..., None], trainer: L.Trainer, *args: Any) -> None:
        on_fit_end(trainer, *args)
        refuse_lost_end(self.failure, trainer, self._earlier())

    def _earlier(self) -> list[str]:
        callback = self.callback
        return [callback._last_checkpoint_saved, callback.best_model_path, callback.last_model_path]


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
