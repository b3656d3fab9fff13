"""Writes predictions to a CSV file, one row an image."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from lit_project.files import write_atomically

Row = tuple[int, list[str]]


class PredictionWriter(BasePredictionWriter):
    """Collects class probabilities and writes ``path, class, probability, top5, error`` when prediction ends.

    ``top5`` is a JSON list of ``[class, probability]`` pairs, best first. An image that could not be read has a row
    with only its path and the error. Rows come in the order of the images, whatever the number of devices, and the file
    appears complete or not at all.

    Args:
        output: the CSV file.
    """

    HEADER = ("path", "class", "probability", "top5", "error")

    def __init__(self, output: str | Path) -> None:
        super().__init__(write_interval="batch")
        self.output = Path(output)
        self._rows: list[Row] = []
        self.num_errors = 0

    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        prediction: Tensor,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Turn one batch into rows; ``batch`` is (images, indices ``[B]``, errors: one string or None an image)."""
        _, indices, errors = batch
        paths = trainer.datamodule.paths  # type: ignore[attr-defined]
        probabilities, classes = prediction.float().cpu().topk(min(5, prediction.shape[1]))
        names = getattr(pl_module, "class_names", None) or [str(index) for index in range(prediction.shape[1])]
        for row, index in enumerate(torch.as_tensor(indices).tolist()):
            path = str(paths[index])
            if errors[row] is not None:
                self._rows.append((index, [path, "", "", "", errors[row]]))
                continue
            top = [
                (names[c], round(p, 6)) for c, p in zip(classes[row].tolist(), probabilities[row].tolist(), strict=True)
            ]
            self._rows.append((index, [path, top[0][0], str(top[0][1]), json.dumps(top), ""]))

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the file."""
        rows = self._rows
        if trainer.world_size > 1:
            gathered: list[list[Row]] = [[] for _ in range(trainer.world_size)]
            torch.distributed.all_gather_object(gathered, rows)
            rows = [row for part in gathered for row in part]
        if not trainer.is_global_zero:
            return
        by_index = dict(rows)  # a distributed sampler may have dealt an image out twice
        self.num_errors = sum(bool(row[-1]) for row in by_index.values())
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(self.HEADER)
        writer.writerows(by_index[index] for index in sorted(by_index))
        self.output.parent.mkdir(parents=True, exist_ok=True)
        # a file name may hold bytes that are no text
        write_atomically(self.output, lambda file: file.write(text.getvalue().encode(errors="surrogateescape")))
