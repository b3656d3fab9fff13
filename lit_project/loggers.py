"""Local loggers that go on where a resumed run goes on."""

import csv
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from lit_project.files import write_atomically


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
    """Lightning's, which after a resume hides what the interrupted run logged beyond its checkpoint."""

    def resume_at(self, step: int) -> None:
        """Have TensorBoard drop what was logged at ``step`` or later: it will be logged again."""
        self._kwargs["purge_step"] = step
