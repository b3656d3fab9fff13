"""Local loggers that go on where a resumed run goes on."""

import csv
import io
import warnings
from argparse import Namespace
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import Tensor

from lit_project.files import write_atomically
from lit_project.seeding import IsolatedRandomness

#: A larger network is traced for some seconds.
_TRACEABLE_WEIGHTS, _TRACEABLE_MODULES = 30_000_000, 300


class CSVLogger(Logger):
    """Writes ``metrics.csv``: one row for each step at which anything was logged, ``epoch`` and ``step`` first.

    What one step logs in several turns becomes one row. A metric that appears later gets its column at the end. A file
    that is there is replaced, unless ``resume_at`` says that its run goes on.

    Args:
        save_dir: the folder.
    """

    def __init__(self, save_dir: str) -> None:
        super().__init__()
        self.file = Path(save_dir) / "metrics.csv"
        self._columns = ["epoch", "step"]
        self._row: dict[str, Any] = {}
        self._row_start = 0  # in bytes; 0 while the file is none of this run's

    @property
    def name(self) -> str:
        """Empty: the folder is used as it is."""
        return ""

    @property
    def version(self) -> str:
        """Empty, as above."""
        return ""

    @property
    def save_dir(self) -> str:
        """The folder."""
        return str(self.file.parent)

    @rank_zero_only
    def resume_at(self, step: int) -> None:
        """Drop what an interrupted run logged at ``step`` or later: it will be logged again."""
        if not self.file.is_file():
            return
        with self.file.open(newline="") as file:
            reader = csv.DictReader(file)
            columns = list(reader.fieldnames or self._columns)
            # a row without all columns was being written when the machine went down
            rows = [row for row in reader if None not in row.values() and row["step"] and int(row["step"]) < step]
        self._write(columns, rows)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add to the row of ``step``, or begin it."""
        if self._row and self._row["step"] != step:
            self.save()
            self._row = {}
            self._row_start = self.file.stat().st_size
        values = {name: f"{float(value):.7g}" for name, value in metrics.items()}  # all that float32 holds
        self._row |= values | {"step": step}

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run folder has its config."""

    @rank_zero_only
    def save(self) -> None:
        """Write the row as it is so far; Lightning calls this whenever it has logged something."""
        if not self._row:
            return
        new = sorted(self._row.keys() - set(self._columns))
        begun = self._row_start > 0 and self.file.is_file()
        if new or not begun:
            rows: list[dict[str, Any]] = []
            if begun:
                with self.file.open(newline="") as file:
                    rows = [row for row in csv.DictReader(file) if row["step"] != str(self._row["step"])]
            self._write([*self._columns, *new], rows)
        with self.file.open("r+", newline="") as file:
            file.seek(self._row_start)
            csv.DictWriter(file, self._columns).writerow(self._row)
            file.truncate()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what is left."""
        self.save()

    def _write(self, columns: list[str], rows: list[dict[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(rows)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, lambda file: file.write(text.getvalue().encode()))
        self._columns = columns
        self._row_start = self.file.stat().st_size


class ResumableTensorBoardLogger(TensorBoardLogger):
    """Lightning's, which after a resume hides what the interrupted run logged beyond its checkpoint.

    Whenever a ``ModelCheckpoint`` has saved, the best score so far is logged as ``best/`` and what it monitors, and the
    hyper-parameters go with it: the HPARAMS tab needs a metric to show them beside. Where nothing was saved by a score,
    these are at the end the last metrics of validation, else of training, as ``last/``. A fit also logs the network's
    graph, unless it is compiled, sharded, or so large that tracing it would take long.

    Args:
        save_dir: the folder.
        log_graph: whether to log the graph.
        default_hp_metric: whether Lightning logs a metric of -1, before there is any, beside the hyper-parameters.
        **kwargs: see Lightning's ``TensorBoardLogger``.
    """

    def __init__(self, save_dir: str, log_graph: bool = True, default_hp_metric: bool = False, **kwargs: Any) -> None:
        super().__init__(save_dir, log_graph=log_graph, default_hp_metric=default_hp_metric, **kwargs)
        self._step = 0
        self._last: dict[str, float] = {}
        self._resumed = False
        self._has_hparams = False

    def resume_at(self, step: int) -> None:
        """Have TensorBoard drop what was logged at ``step`` or later: it will be logged again."""
        self._kwargs["purge_step"] = step
        self._resumed = True

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._step = self._step if step is None else step
        self._last |= metrics
        super().log_metrics(metrics, step)

    @rank_zero_only
    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Log the best score, at the step of the metrics before it, so that a resume from this checkpoint keeps it."""
        monitor, score = checkpoint_callback.monitor, checkpoint_callback.best_model_score
        if monitor is None or score is None:
            return
        best = {f"best/{monitor}": float(score)}
        if self._has_hparams:
            self.log_metrics(best, self._step)
        else:
            self.log_hyperparams(dict(self.hparams), best, self._step)
            self._has_hparams = True

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Log the last metrics with the hyper-parameters, if no best score was."""
        for stage in ("val/", "train/"):
            last = {f"last/{name}": value for name, value in self._last.items() if name.startswith(stage)}
            if last and not self._has_hparams and status == "success":  # what was interrupted may yet have a score
                self.log_hyperparams(dict(self.hparams), last, self._step)
                self._has_hparams = True
        super().finalize(status)

    @rank_zero_only
    def log_graph(  # type: ignore[override]  # as Lightning's own does
        self, model: L.LightningModule, input_array: Tensor | None = None
    ) -> None:
        """Log the graph of ``model.network``, for one training image; that it cannot be traced is a line of output."""
        trainer = model.trainer
        images = getattr(getattr(trainer, "datamodule", None), "sample_images", None)
        network: Any = getattr(model, "network", None)
        if not self._log_graph or self._resumed or trainer.state.fn != "fit" or images is None or network is None:
            return
        size, modules = sum(weight.numel() for weight in network.parameters()), len(list(network.modules()))
        reason = ""
        if network._compiled_call_impl is not None:
            reason = "it is compiled"
        elif not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
            reason = "it is sharded"
        elif size > _TRACEABLE_WEIGHTS or modules > _TRACEABLE_MODULES:
            reason = f"with {size / 1e6:,.0f} million weights in {modules:,} modules, tracing it would take long"
        else:
            weight = next(network.parameters())
            # torch prints what it also raises; what the tracer warns of does not matter for a picture
            with IsolatedRandomness(), redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    self.experiment.add_graph(network, images(1)[:1].to(weight))
                except Exception as error:
                    reason = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
        if reason:
            rank_zero_info(f"TensorBoard gets no graph of the network: {reason}.")
