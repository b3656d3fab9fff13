"""Keeps the checkpoint that a run goes on from, and ends a run that is told to stop with one."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import get_worker_info

from lit_project.callbacks.full_disk import last_good, refuse_lost_end, save_or_warn
from lit_project.errors import InputError

#: What tells a run to stop.
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(SystemExit):
    """Ends the process once its checkpoint is written.

    Args:
        code: the exit status: 143 for SIGTERM, 130 for SIGINT, 0 when the time was up.
        reason: the same in words.
        together: whether all ranks stop at this step.
    """

    def __init__(self, code: int, reason: str, together: bool = False) -> None:
        super().__init__(code)
        self.reason = reason
        self.together = together


def stop_at_once(number: int, frame: FrameType | None) -> None:
    """Handle a signal while there is nothing to save: before training, in a test, or in a run without ``last.ckpt``.

    Raises:
        Stopped: in the process itself; its workers, which have inherited this, leave the signal to it.
    """
    if get_worker_info():
        return
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # a second one is not to cut off the ending of the first
    name = signal.Signals(number).name
    rank_zero_info(f"Stopped by {name}.")
    raise Stopped(128 + number, f"by {name}")


class LastCheckpoint(Callback):
    """Writes ``last.ckpt`` between two steps, so that a resumed run ends with the very weights of one that ran on.

    Lightning's ``ModelCheckpoint`` saves within an epoch's end: before the scheduler's step, before the epoch's metrics
    are logged. Here an epoch is over when the next one starts. The file is also written every ``every_n_steps``, and
    when the process gets SIGTERM or SIGINT or its time is up; it then ends at once, with status 143, 130 or 0.

    A step is an optimiser step, so no accumulated gradient is lost. A stop that comes in a validation, or when one is
    due, waits until the step after it. A second signal ends the process without a checkpoint.

    Args:
        path: the file.
        every_n_steps: how often it is written within an epoch; ``null``: only at its end.
    """

    def __init__(self, path: str, every_n_steps: int | None = None) -> None:
        self.path = Path(path)
        self.every_n_steps = every_n_steps
        #: How long this process may train: ``trainer.max_time``, put here by the command line.
        self.max_seconds = float("inf")
        #: What failed in the last save, and why; empty when nothing did.
        self.failure = ""
        self._signal: int | None = None
        self._handlers: dict[int, Any] = {}
        self._saving_in: str | None = None
        self._validation_was_due = False

    # ---- when

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.path = trainer.strategy.broadcast(self.path)  # the run folder is the first rank's
        self._started = time.monotonic()
        self._first_epoch = trainer.current_epoch
        self._saved_step = trainer.global_step
        loop = trainer.fit_loop
        if loop.restarting and loop.epoch_loop.batch_progress.current.ready == 0:
            # between two epochs there is nothing to finish, and so nothing that is to be restarted; the loop's own
            # setter would have none of it in a run with max_steps
            _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]
            loop.epoch_loop.reset_restart_stage()
        # before training and after it, a signal ends the process at once: see stop_at_once
        self._signal = None
        for number in SIGNALS:
            self._handlers[number] = signal.signal(number, self._receive)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch > self._first_epoch:
            self._save(trainer, "epoch start")
            self._stop_if_told(trainer)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0 or batch_idx % trainer.accumulate_grad_batches or self._validation_was_due:
            return
        due = self.every_n_steps is not None and trainer.global_step - self._saved_step >= self.every_n_steps
        told = self._status(trainer) is not None
        if due or told:
            self._save(trainer, "batch start")
            self._stop_if_told(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # a step later, nothing is restarted any more: else a ReduceLROnPlateau would miss the end of this epoch
        trainer.fit_loop._restarting = False
        fetcher = trainer.fit_loop._data_fetcher
        assert fetcher is not None
        # after it, Lightning cannot resume in mid-epoch without miscounting a step
        self._validation_was_due = trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)
        if trainer.fit_loop.epoch_loop._is_training_done and not trainer.is_last_batch:
            # max_steps ends the run within an epoch, which can go on when there are to be more of them
            self._save(trainer, "batch end")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step > self._saved_step:
            self._save(trainer, "end")
        self._give_signals_back()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        refuse_lost_end(self.failure, trainer, self._earlier())

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._give_signals_back()

    # ---- what

    def _save(self, trainer: L.Trainer, where: str) -> None:
        for logger in trainer.loggers:
            logger.save()  # what was logged before the checkpoint is not logged again after it
        self._saving_in = where
        try:
            save = partial(trainer.save_checkpoint, self.path, weights_only=False)
            self.failure = save_or_warn(save, trainer, self.path, self._earlier())
        finally:
            self._saving_in = None
        if not self.failure:
            self._saved_step = trainer.global_step

    def _earlier(self) -> Iterator[Path]:
        yield self.path
        yield from sorted(self.path.parent.glob("*.ckpt"))

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write the progress down as it was between the two steps or epochs."""
        if self._saving_in is None:
            return
        loop = checkpoint["loops"]["fit_loop"]
        epochs, batches = loop["epoch_progress"], loop["epoch_loop.batch_progress"]
        if self._saving_in == "batch start":
            _decrease_ready(batches)
            return
        if self._saving_in == "batch end":
            for part in ("total", "current"):
                batches[part] = batches[part] | {"completed": batches[part]["ready"]}
            loop["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
            return
        if self._saving_in == "epoch start":
            _decrease_ready(epochs)
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the best score so far, although the run's folder may have another path now, or be another's."""
        for callback in trainer.checkpoint_callbacks:
            state = checkpoint.get("callbacks", {}).get(callback.state_key)
            if not isinstance(callback, ModelCheckpoint) or not state or state["dirpath"] == str(callback.dirpath):
                continue
            old, new = Path(state["dirpath"]), Path(str(callback.dirpath))
            _bring(old, new, state)
            checkpoint["callbacks"][callback.state_key] = _moved(state, str(old), str(new))

    # ---- stopping

    def _stop_if_told(self, trainer: L.Trainer) -> None:
        status = self._status(trainer)
        if status is None:
            return
        reason = {0: "as its time is up", 130: "by SIGINT", 143: "by SIGTERM"}[status]
        command = f"python -m {__name__.partition('.')[0]}.cli fit --ckpt_path {self.path}"
        rank_zero_info(f"Stopped {reason}, after {trainer.global_step} steps. To go on: {command}")
        if self.failure:
            raise InputError(f"Stopped {reason}, but {self.failure}. {last_good(self._earlier())}")
        raise Stopped(status, reason, together=True)

    def _status(self, trainer: L.Trainer) -> int | None:
        """The status to exit with, the same on all ranks; None to go on."""
        status = -1
        if self._signal is not None:
            status = 128 + self._signal
        elif time.monotonic() - self._started >= self.max_seconds:
            status = 0
        if trainer.world_size > 1:
            # a signal reaches the ranks at different times, and it is enough for one to be told
            highest = torch.tensor(status, device=trainer.strategy.root_device)
            torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX)
            status = int(highest)
        return None if status < 0 else status

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if get_worker_info():  # a worker that has inherited this
            return
        if self._signal is not None:
            os.write(2, b"Stopped at once, without a checkpoint.\n")
            os._exit(128 + number)
        self._signal = number
        rank_zero_info("Stopping after this step, with a checkpoint. A second signal stops at once, without one.")

    def _give_signals_back(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()


def _decrease_ready(progress: dict[str, Any]) -> None:
    for part in ("total", "current"):
        progress[part] = progress[part] | {"ready": progress[part]["ready"] - 1}


def _bring(old: Path, new: Path, state: dict[str, Any]) -> None:
    """Copy the best checkpoints of another run into this one's folder."""
    for path in map(Path, {state["best_model_path"], *state["best_k_models"]} - {""}):
        if path.is_relative_to(old) and path.is_file() and not (copy := new / path.relative_to(old)).exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)


def _moved(value: Any, old: str, new: str) -> Any:
    """A copy of a callback's state with one folder in place of another."""
    if isinstance(value, dict):
        return {_moved(key, old, new): _moved(part, old, new) for key, part in value.items()}
    return new + value.removeprefix(old) if isinstance(value, str) and value.startswith(old) else value
