"""The confusion matrix and a table by class, printed and saved when a test ends."""

import csv
from collections.abc import Sequence
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lit_project.metrics import per_class
from lit_project.tables import print_table


class TestReport(Callback):
    """Writes ``confusion_matrix.csv`` and ``per_class.csv`` to the run folder and prints both.

    The matrix is printed for up to 20 classes; more would not fit a screen.

    Reads ``confusion_matrix`` from the module: int64 ``[num_classes, num_classes]``, rows true, columns predicted.
    """

    __test__ = False  # its name would have pytest collect it

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        matrix = getattr(pl_module, "confusion_matrix", None)
        if not trainer.is_global_zero or not isinstance(matrix, Tensor):
            return
        counts = matrix.cpu()
        names = getattr(pl_module, "class_names", None) or [str(index) for index in range(len(counts))]
        rows = per_class(counts, names)
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        _write(
            folder / "confusion_matrix.csv",
            [["true", *names], *([n, *r] for n, r in zip(names, counts.tolist(), strict=True))],
        )
        _write(folder / "per_class.csv", [list(rows[0]), *(list(row.values()) for row in rows)])
        if len(names) <= 20:
            numbered = [f"{index} {name}" for index, name in enumerate(names)]
            header = ["true \\ predicted", *map(str, range(len(names)))]
            print_table("Confusion matrix", header, [[n, *r] for n, r in zip(numbered, counts.tolist(), strict=True)])
        print_table("Test, by class", list(rows[0]), [list(row.values()) for row in rows])


def _write(path: Path, rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
