"""Epoch metrics: torchmetrics fed rarely and in float32.

Updating three metrics on every step costs a tenth of a small network's training time, nearly all of it overhead. Here a
step only stores its logits; the metrics are updated with some thousand samples at a time and computed once an epoch
over all of it, so a score is never an average of batch scores. The loss is the mean over samples; with class weights,
each batch's weighted mean counts by the batch's size.

AUROC is exact and keeps the epoch's probabilities: 4 bytes a sample and class, which is 2 MB for CIFAR-10.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.utilities.data import dim_zero_cat


class MacroAUROC(MulticlassAUROC):
    """One-versus-rest area under the ROC curve, averaged over the classes that occur in the targets.

    torchmetrics counts a class without a single positive as area 0, which pulls the average down whenever a small split
    lacks a class. NaN when no class has both positives and negatives.

    Args:
        num_classes: number of classes, at least 2.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes=num_classes, average="none", validate_args=False)

    def compute(self) -> Tensor:  # type: ignore[override]
        """The macro average, a float32 scalar in 0..1."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="No (positive|negative) samples")
            areas = super().compute()
        targets = dim_zero_cat(self.target)
        counts = torch.bincount(targets, minlength=self.num_classes)
        return areas[(counts > 0) & (counts < len(targets))].mean()


class EpochMetrics(nn.Module):
    """Loss, accuracy, macro F1 and macro AUROC of one stage over one epoch.

    ``scores.add_metrics`` adds more of torchmetrics'; each computes one scalar. A task other than telling classes apart
    replaces ``scores`` and overrides ``predictions``.

    Under DDP the states of all ranks are combined when ``compute`` is called.

    Args:
        num_classes: number of classes, at least 2.
        stage: prefix of the names, as in ``val/acc``.
        buffer_size: samples kept before the metrics are updated with them.
    """

    def __init__(self, num_classes: int, stage: str, buffer_size: int = 8192) -> None:
        super().__init__()
        self.stage = stage
        self.buffer_size = buffer_size
        self.loss = MeanMetric()
        self.scores = MetricCollection(
            {
                "acc": MulticlassAccuracy(num_classes, average="micro", validate_args=False),
                "f1": MulticlassF1Score(num_classes, average="macro", validate_args=False),
                "auroc": MacroAUROC(num_classes),
            },
            prefix=f"{stage}/",
            compute_groups=False,  # they share no state
        )
        self.confusion = MulticlassConfusionMatrix(num_classes, validate_args=False) if stage == "test" else None
        self._buffer: list[tuple[Tensor, Tensor, Tensor]] = []
        self._buffered = 0

    def update(self, logits: Tensor, targets: Tensor, loss: Tensor) -> None:
        """Take one batch: ``logits`` and ``targets`` as the module's ``loss`` gets them, and the ``loss`` (scalar)."""
        self._buffer.append((logits.detach(), targets, loss.detach()))
        self._buffered += len(targets)
        if self._buffered >= self.buffer_size:
            self._flush()

    def predictions(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """What the scores get of many batches: probabilities ``[N, num_classes]`` and classes, int64 ``[N]``."""
        return F.softmax(logits, dim=1), targets if targets.ndim == 1 else targets.argmax(1)

    def compute(self) -> dict[str, Tensor]:
        """All values of the epoch so far, float32 scalars; forgets them, but not the confusions."""
        self._flush()
        # those that end at 1 come out as 1 + 1e-7 by rounding
        scores = {
            name: torch.where(score < 1.001, score.clamp(max=1.0), score)
            for name, score in self.scores.compute().items()
        }
        values = {f"{self.stage}/loss": self.loss.compute(), **scores}
        self.loss.reset()
        self.scores.reset()
        return values

    def confusion_matrix(self) -> Tensor:
        """Test stage only: int64 ``[num_classes, num_classes]``, rows true and columns predicted; forgets it."""
        assert self.confusion is not None, "only the test stage counts confusions"
        self._flush()
        matrix = self.confusion.compute()
        self.confusion.reset()
        return matrix

    def snapshot(self) -> dict[str, Any]:
        """What has been seen of an epoch that is not over, as plain values for a checkpoint."""
        states: dict[str, Any] = {}
        for name, metric in self._metrics():
            for state in metric._defaults:
                value = getattr(metric, state)
                states[f"{name}.{state}"] = list(value) if isinstance(value, list) else value.clone()
        # not flushed into the metrics: sums would come out otherwise in their last digits than without a checkpoint
        return {"states": states, "buffer": list(self._buffer)}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go on from a snapshot, in place of what has been seen; from nothing, if it is one of other metrics."""
        self.reset()
        if snapshot["states"].keys() != self.snapshot()["states"].keys():
            return
        device = self.loss.device
        for name, metric in self._metrics():
            for state in metric._defaults:
                setattr(metric, state, move_data_to_device(snapshot["states"][f"{name}.{state}"], device))
            metric._update_count = 1  # or computing it would warn that it has seen nothing
        self._buffer = move_data_to_device(snapshot["buffer"], device)
        self._buffered = sum(len(targets) for _, targets, _ in self._buffer)

    def _metrics(self) -> Iterator[tuple[str, Metric]]:
        yield "loss", self.loss
        yield from self.scores.items(keep_base=True)

    def reset(self) -> None:
        """Forget everything, as before an epoch."""
        self._buffer.clear()
        self._buffered = 0
        self.loss.reset()
        self.scores.reset()
        if self.confusion is not None:
            self.confusion.reset()

    def _flush(self) -> None:
        if not self._buffer:
            return
        logits, targets, losses = zip(*self._buffer, strict=True)
        sizes = torch.tensor([len(batch) for batch in targets], dtype=torch.float32, device=losses[0].device)
        # autocast would compute these in half precision
        with torch.autocast(device_type=logits[0].device.type, enabled=False):
            predictions, all_targets = self.predictions(torch.cat(logits).float(), torch.cat(targets))
            self.loss.update(torch.stack(losses).float(), sizes)
            self.scores.update(predictions, all_targets)
            if self.confusion is not None:
                self.confusion.update(predictions, all_targets)
        self._buffer.clear()
        self._buffered = 0


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
