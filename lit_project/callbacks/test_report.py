"""The confusion matrix and a table by class, printed and saved when a test ends."""

import csv
from collections.abc import Sequence
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table
from torch import Tensor


class TestReport(Callback):
    """Writes ``confusion_matrix.csv`` and ``per_class.csv`` to the run folder and prints the latter.

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
        self._print(rows)

    @staticmethod
    def _print(rows: list[dict[str, str | int | float]]) -> None:
        table = Table(title="Test, by class")
        for name in rows[0]:
            table.add_column(name, justify="left" if name == "class" else "right")
        for row in rows:
            table.add_row(*(f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()))
        Console().print(table)


def per_class(confusion: Tensor, names: list[str]) -> list[dict[str, str | int | float]]:
    """Images, precision, recall and F1 of each class (0..1; 0 where undefined) from a confusion matrix.

    Args:
        confusion: int64 ``[num_classes, num_classes]``, rows true, columns predicted.
        names: the class names, in index order.
    """
    hits = confusion.diagonal().double()
    true, predicted = confusion.sum(1).double(), confusion.sum(0).double()
    precision = hits / predicted.clamp(min=1)
    recall = hits / true.clamp(min=1)
    f1 = 2 * hits / (true + predicted).clamp(min=1)
    return [
        {
            "class": name,
            "images": int(true[index]),
            "precision": round(precision[index].item(), 6),
            "recall": round(recall[index].item(), 6),
            "f1": round(f1[index].item(), 6),
        }
        for index, name in enumerate(names)
    ]


def _write(path: Path, rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
