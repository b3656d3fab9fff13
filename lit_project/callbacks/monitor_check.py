"""Finds a mistyped or missing monitored metric before the first epoch is spent."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from lit_project.errors import InputError


class MonitorCheck(Callback):
    """Compares what checkpoints, early stopping and schedulers monitor with what the model logs.

    The names come from the sanity check before training. Without validation there is nothing to monitor: early stopping
    on a validation metric is then switched off with a notice, and ``last.ckpt`` is the checkpoint to use.
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for callback in _monitoring(trainer):
            wrong = {"loss": "max", "acc": "min", "f1": "min", "auroc": "min"}.get(
                str(callback.monitor).rsplit("/", 1)[-1]
            )
            if callback.mode == wrong:
                rank_zero_warn(f"{type(callback).__name__} takes the {wrong}imum of {callback.monitor} for the best.")
        if trainer.fast_dev_run or self._validates(trainer):  # type: ignore[attr-defined]
            return
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
            if monitor not in logged and not monitor.startswith("train/"):
                known = ", ".join(sorted(logged)) or "none"
                raise InputError(
                    f"{user} monitors {monitor!r}, which the model does not log. Logged in validation: {known}."
                )

    @staticmethod
    def _validates(trainer: L.Trainer) -> bool:
        interval = trainer.check_val_every_n_epoch
        too_rare = (
            interval is not None and trainer.max_epochs not in (None, -1) and interval > (trainer.max_epochs or 0)
        )
        return bool(trainer.limit_val_batches) and not too_rare


def _monitoring(trainer: L.Trainer) -> list[EarlyStopping | ModelCheckpoint]:
    return [
        callback
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, EarlyStopping | ModelCheckpoint) and callback.monitor
    ]


def _monitors(trainer: L.Trainer) -> list[tuple[str, str]]:
    """Who monitors what."""
    pairs: list[tuple[str, Any]] = [(type(callback).__name__, callback.monitor) for callback in _monitoring(trainer)]
    pairs += [("The scheduler", config.monitor) for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    return pairs
