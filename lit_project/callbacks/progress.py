"""Progress on the terminal, and in plain lines where there is none."""

import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from lit_project.tables import duration

# throughput is measured over at least this long, so that it can be read
_WINDOW_SECONDS = 5.0


class ThroughputBar(ProgressBar):
    """Shows images a second, the share of time spent waiting for data, the time left, and the metrics.

    On a terminal this is a bar; in a log file or a pipe one line appears after each epoch, and between times every
    ``line_seconds``. Both are drawn by the clock and not by the step: Lightning's bars gather the metrics in every
    step, and its Rich bar takes its refresh rate for redraws a second as well.

    Waiting for data is all that lies between two training steps: loading, the transfer, and augmentation. On a GPU the
    latter two are queued, not waited for.

    Args:
        refresh_seconds: time between two redraws of the bar.
        line_seconds: time between two lines where there is no terminal.
    """

    def __init__(self, refresh_seconds: float = 1.0, line_seconds: float = 60.0) -> None:
        super().__init__()
        self.refresh_seconds = refresh_seconds
        self.line_seconds = line_seconds
        self._enabled = True
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._epoch_ended = False
        self._tasks: dict[str, Any] = {}

    def enable(self) -> None:
        """Show progress: what Lightning calls on the first rank."""
        self._enabled = True

    def disable(self) -> None:
        """Show nothing: what Lightning calls on the other ranks."""
        self._enabled = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        if self._enabled:
            self._console.print(*args, **kwargs)

    # ---- training

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = self._window_start = self._drawn = time.perf_counter()
        self._first_step = trainer.global_step
        self._speed = ""
        self._open()
        self._begin_epoch(trainer)  # a run that is resumed in mid-epoch does not start one

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end_epoch(trainer, pl_module)
        self._begin_epoch(trainer)

    def _begin_epoch(self, trainer: L.Trainer) -> None:
        self._epoch = trainer.current_epoch + 1
        self._images, self._waited, self._window_start = 0, 0.0, time.perf_counter()
        self._step_end = self._window_start
        if self._bar is not None:
            epochs = f"/{trainer.max_epochs}" if trainer.max_epochs not in (None, -1) else ""
            self._task("train", f"Epoch {self._epoch}{epochs}", self.total_train_batches)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._waited += time.perf_counter() - self._step_end

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = self._step_end = time.perf_counter()
        images = batch[0] if isinstance(batch, list | tuple) else batch
        self._images += len(images) * trainer.world_size
        if now - self._drawn >= (self.refresh_seconds if self._bar is not None else self.line_seconds):
            self._show(trainer, pl_module, batch_idx + 1)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._measure()
        self._epoch_ended = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end_epoch(trainer, pl_module)
        self._close()

    def _end_epoch(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the epoch that has ended, now that its training metrics are known too."""
        if self._epoch_ended:
            self._show(trainer, pl_module, None)
        self._epoch_ended = False

    # ---- evaluation: a bar of its own, and no lines

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            if trainer.state.fn == "fit":
                self._measure()  # or the validation would count as waiting
            self._evaluation_starts("Validation", sum(trainer.num_val_batches))

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._evaluation_starts("Test", sum(trainer.num_test_batches))

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._evaluation_starts("Prediction", sum(trainer.num_predict_batches))

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._evaluation_advances()

    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._evaluation_advances()

    def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._evaluation_advances()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._evaluation_ends(trainer)

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._evaluation_ends(trainer)

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._evaluation_ends(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._close()

    # ---- internals

    def _open(self) -> None:
        if self._bar is None and self._enabled and self._console.is_terminal:
            self._bar = Progress(
                # what is too wide for the terminal goes on in a second line
                TextColumn("{task.description:<12}", table_column=Column(no_wrap=True)),
                BarColumn(bar_width=12, table_column=Column(no_wrap=True)),
                MofNCompleteColumn(table_column=Column(no_wrap=True)),
                TextColumn("{task.fields[text]}", table_column=Column()),
                console=self._console,
                auto_refresh=False,
            )
            self._bar.start()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.stop()
            self._bar = None
            self._tasks.clear()

    def _task(self, key: str, description: str, total: int | float) -> None:
        assert self._bar is not None
        if key in self._tasks:
            self._bar.remove_task(self._tasks.pop(key))
        self._tasks[key] = self._bar.add_task(description, total=total if total != float("inf") else None, text="")

    def _measure(self) -> None:
        """Throughput since the last measurement, as text."""
        now = time.perf_counter()
        if self._images:
            seconds = now - self._window_start
            self._speed = f"{self._images / seconds:,.0f} images/s, {self._waited / seconds:.0%} waiting for data"
        self._images, self._waited, self._window_start = 0, 0.0, now

    def _show(self, trainer: L.Trainer, pl_module: L.LightningModule, batches: int | None) -> None:
        """Draw the bar, or print a line, for ``batches`` of the epoch (None: all of them)."""
        if not self._enabled:
            return
        if not self._speed or time.perf_counter() - self._window_start >= _WINDOW_SECONDS:
            self._measure()
        left = self._time_left(trainer)
        metrics = {name: value for name, value in self.get_metrics(trainer, pl_module).items() if name != "v_num"}
        parts = [self._speed] if self._speed else []
        parts += [f"{duration(left)} left"] if left is not None else []
        parts += [f"{name} {float(str(value)):.4g}" for name, value in metrics.items()]
        text = ", ".join(parts)
        if self._bar is not None:
            self._bar.update(
                self._tasks["train"], text=text, completed=self.total_train_batches if batches is None else batches
            )
            self._bar.refresh()
        else:
            within = f", step {batches}/{self.total_train_batches}" if batches is not None else ""
            epochs = f"/{trainer.max_epochs}" if trainer.max_epochs not in (None, -1) else ""
            self._console.print(f"Epoch {self._epoch}{epochs}{within}: {text}", highlight=False, soft_wrap=True)
        self._drawn = self._step_end = time.perf_counter()  # drawing is not waiting for data

    def _time_left(self, trainer: L.Trainer) -> float | None:
        """Seconds to the planned end at the average pace so far, validation and all; None without a planned end."""
        limits = []
        if trainer.max_steps != -1:
            limits.append(float(trainer.max_steps))
        if trainer.max_epochs not in (None, -1):
            steps = self.total_train_batches / trainer.accumulate_grad_batches
            limits.append(float(trainer.max_epochs or 0) * steps)
        done = trainer.global_step - self._first_step
        if not limits or min(limits) == float("inf") or done <= 0:
            return None
        return (time.perf_counter() - self._started) / done * max(min(limits) - trainer.global_step, 0.0)

    def _evaluation_starts(self, name: str, total: int | float) -> None:
        self._open()
        if self._bar is not None:
            self._task("evaluation", name, total)
            self._evaluation_drawn = 0.0
            self._evaluated = 0

    def _evaluation_advances(self) -> None:
        if self._bar is not None and "evaluation" in self._tasks:
            self._evaluated += 1
            now = time.perf_counter()
            if now - self._evaluation_drawn >= self.refresh_seconds:
                self._bar.update(self._tasks["evaluation"], completed=self._evaluated)
                self._bar.refresh()
                self._evaluation_drawn = now

    def _evaluation_ends(self, trainer: L.Trainer) -> None:
        if self._bar is not None and "evaluation" in self._tasks:
            self._bar.update(self._tasks["evaluation"], completed=self._evaluated)
            self._bar.refresh()
            if trainer.state.fn == "fit":
                self._bar.remove_task(self._tasks.pop("evaluation"))
        if trainer.state.fn != "fit":
            self._close()
        elif not trainer.sanity_checking:
            self._window_start = self._step_end = time.perf_counter()
