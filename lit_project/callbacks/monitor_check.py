"""Finds a mistyped or missing monitored metric before the first epoch is spent."""

import inspect
import re
import sys
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from lit_project.errors import InputError
from lit_project.metrics import EpochMetrics

_PROJECT = __name__.partition(".")[0]
_SCHEDULER = "The scheduler"
#: Names that Lightning itself gives a checkpoint to go by.
_PROGRESS = {"epoch", "step"}


class MonitorCheck(Callback):
    """Compares what checkpoints, early stopping and schedulers monitor with what the model logs.

    A name must be one of the model's metrics, or be written in the code of the project. Where other code takes part, it
    must be known after the sanity check before training: unless that is left out, or it is one of training.

    Without validation there is nothing to monitor: early stopping on a validation metric is then switched off with a
    notice, and ``last.ckpt`` is the checkpoint to use.
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for callback in _monitoring(trainer):
            wrong = {"loss": "max", "acc": "min", "f1": "min", "auroc": "min"}.get(
                str(callback.monitor).rsplit("/", 1)[-1]
            )
            if callback.mode == wrong:
                rank_zero_warn(f"{type(callback).__name__} takes the {wrong}imum of {callback.monitor} for the best.")
        names = _metric_names(pl_module)
        source = _source([pl_module, *trainer.callbacks]) if names else None  # type: ignore[attr-defined]
        for user, monitor in _monitors(trainer):
            if source is not None and not re.search(f"[\"']{re.escape(monitor)}[\"']", source):
                _refuse_unknown(user, monitor, names)
        if trainer.fast_dev_run or self._validates(trainer):  # type: ignore[attr-defined]
            return
        for user, monitor in _monitors(trainer):
            if user == _SCHEDULER and not monitor.startswith("train/"):
                raise InputError(
                    f"{user} monitors {monitor!r}, but this run has no validation. Have it validate "
                    "(trainer.limit_val_batches, trainer.check_val_every_n_epoch), monitor a training metric "
                    "(--model.scheduler.monitor=train/loss), or choose another scheduler."
                )
        stopped = [callback for callback in _monitoring(trainer) if isinstance(callback, EarlyStopping)]
        # a new list, because Lightning is going through the present one
        trainer.callbacks = [c for c in trainer.callbacks if c not in stopped]  # type: ignore[attr-defined]
        rank_zero_warn(
            "This run has no validation, so there is no best checkpoint"
            + (" and no early stopping" if stopped else "")
            + ": use last.ckpt."
        )

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        logged = set(trainer.callback_metrics)
        for user, monitor in _monitors(trainer):
            # training metrics are first logged in training; validation metrics must be there by now
            if not monitor.startswith("train/"):
                _refuse_unknown(user, monitor, logged)

    @staticmethod
    def _validates(trainer: L.Trainer) -> bool:
        interval = trainer.check_val_every_n_epoch
        too_rare = (
            interval is not None and trainer.max_epochs not in (None, -1) and interval > (trainer.max_epochs or 0)
        )
        return trainer.enable_validation and not too_rare


def _monitoring(trainer: L.Trainer) -> list[EarlyStopping | ModelCheckpoint]:
    return [
        callback
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, EarlyStopping | ModelCheckpoint) and callback.monitor
    ]


def _monitors(trainer: L.Trainer) -> list[tuple[str, str]]:
    """Who monitors what."""
    pairs: list[tuple[str, Any]] = [(type(callback).__name__, callback.monitor) for callback in _monitoring(trainer)]
    pairs += [(_SCHEDULER, config.monitor) for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    return pairs


def _refuse_unknown(user: str, monitor: str, names: set[str]) -> None:
    if monitor not in names | _PROGRESS:
        known = ", ".join(sorted(names)) or "none"
        raise InputError(f"{user} monitors {monitor!r}, which the model does not log. Known names: {known}.")


def _metric_names(pl_module: L.LightningModule) -> set[str]:
    """The names of the model's metrics in training and validation; none of a model that logs in ways of its own."""
    stages = [getattr(pl_module, f"{stage}_metrics", None) for stage in ("train", "val")]
    metrics = [part for part in stages if isinstance(part, EpochMetrics)]
    return {name for part in metrics for name in (f"{part.stage}/loss", *part.scores)} if len(metrics) == 2 else set()


def _source(parts: list[Any]) -> str | None:
    """All files in which classes of the project may log something; None if others may, too."""
    classes = [cls for part in parts for cls in type(part).__mro__ if cls.__module__.partition(".")[0] == _PROJECT]
    if any(type(part).__module__.partition(".")[0] not in (_PROJECT, "lightning") for part in parts):
        return None
    return "".join(inspect.getsource(sys.modules[name]) for name in {cls.__module__ for cls in classes})
