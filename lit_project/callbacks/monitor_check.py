"""Finds a mistyped or missing monitored metric before the first epoch is spent."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from lit_project.errors import InputError
from lit_project.metrics import EpochMetrics

_SCHEDULER = "The scheduler"
#: Names that Lightning itself gives a checkpoint to go by.
_PROGRESS = {"epoch", "step"}


class MonitorCheck(Callback):
    """Compares what checkpoints, early stopping and schedulers monitor with what the model logs.

    The names of validation come from the sanity check before training. Those of training, and all of them where that
    check is left out, are compared with the model's metrics: a name that is none of them gets a warning, as other code
    may log it.

    Without validation there is nothing to monitor: early stopping on a validation metric is then switched off with a
    notice, and ``last.ckpt`` is the checkpoint to use.
    """

    def __init__(self) -> None:
        #: The keys of the callbacks' states in a checkpoint, which name what they monitor.
        self._before = ""

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._before = " ".join(checkpoint.get("callbacks", {}))

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for callback in _monitoring(trainer):
            wrong = {"loss": "max", "acc": "min", "f1": "min", "auroc": "min"}.get(
                str(callback.monitor).rsplit("/", 1)[-1]
            )
            if callback.mode == wrong:
                rank_zero_warn(f"{type(callback).__name__} takes the {wrong}imum of {callback.monitor} for the best.")
        names = _metric_names(pl_module)
        checked = trainer.num_sanity_val_steps and trainer.ckpt_path is None
        for user, monitor in _monitors(trainer):
            known = not names or monitor in names | _PROGRESS or f"'{monitor}'" in self._before
            if not known and (not checked or monitor.startswith("train/")):
                rank_zero_warn(
                    f"{user} monitors {monitor!r}, which is none of the model's metrics ({', '.join(sorted(names))}). "
                    "If nothing else logs it, the run fails at the end of its first epoch."
                )
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
            if not monitor.startswith("train/") and monitor not in logged | _PROGRESS:
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


def _metric_names(pl_module: L.LightningModule) -> set[str]:
    """The names of the model's metrics; none of a model that has them in ways of its own."""
    stages = [getattr(pl_module, f"{stage}_metrics", None) for stage in ("train", "val")]
    metrics = [part for part in stages if isinstance(part, EpochMetrics)]
    return {name for part in metrics for name in (f"{part.stage}/loss", *part.scores)} | (
        {"train/loss_step", "train/grad_norm"} if metrics else set()
    )
