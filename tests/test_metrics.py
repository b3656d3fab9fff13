import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import SumMetric

from lit_project.metrics import EpochMetrics, MacroAUROC


def batches(sizes: list[int], classes: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, classes, generator=generator), torch.randint(0, classes, (size,), generator=generator))
        for size in sizes
    ]


def area_by_ranks(scores: Tensor, positive: Tensor) -> float:
    """Area under the ROC curve as the share of (positive, negative) pairs in the right order."""
    pairs = scores[positive][:, None] - scores[~positive][None, :]
    return ((pairs > 0).double() + 0.5 * (pairs == 0)).mean().item()


def compute(metrics: EpochMetrics, data: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    for logits, targets in data:
        metrics.update(logits, targets, torch.nn.functional.cross_entropy(logits, targets))
    return {name: value.item() for name, value in metrics.compute().items()}


@pytest.mark.parametrize("buffer_size", [1, 40, 8192])
def test_values_are_those_of_the_whole_epoch_not_averages_of_batches(buffer_size: int) -> None:
    data = batches([64, 64, 3])
    values = compute(EpochMetrics(4, "val", buffer_size), data)
    logits, targets = (torch.cat(part) for part in zip(*data, strict=True))
    predicted = logits.argmax(1)
    f1 = [
        2 * ((predicted == c) & (targets == c)).sum().item() / ((predicted == c).sum() + (targets == c).sum()).item()
        for c in range(4)
    ]
    probabilities = logits.softmax(1)
    auroc = [area_by_ranks(probabilities[:, c], targets == c) for c in range(4)]
    assert values == pytest.approx(
        {
            "val/loss": torch.nn.functional.cross_entropy(logits, targets).item(),
            "val/acc": (predicted == targets).float().mean().item(),
            "val/f1": sum(f1) / 4,
            "val/auroc": sum(auroc) / 4,
        },
        abs=1e-5,
    )


def test_an_absent_class_gives_no_warning_and_does_not_pull_auroc_down() -> None:
    ((logits, targets),) = batches([200])
    targets[targets == 3] = 0
    metric = MacroAUROC(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metric.update(logits.softmax(1), targets)
        value = metric.compute().item()
    probabilities = logits.softmax(1)
    assert value == pytest.approx(sum(area_by_ranks(probabilities[:, c], targets == c) for c in range(3)) / 3, abs=1e-5)


class Count(SumMetric):
    """Twice the number of samples."""

    def update(self, probabilities: Tensor, targets: Tensor) -> None:
        super().update(torch.full(targets.shape, 2.0))


def test_a_metric_that_is_added_is_reported_as_it_is_and_part_of_a_snapshot() -> None:
    """Those that end at 1 are kept from exceeding it by rounding; others may be larger."""
    metrics = EpochMetrics(4, "val")
    metrics.scores.add_metrics({"count": Count()})
    metrics.update(*batches([50])[0], torch.tensor(1.0))
    metrics._flush()
    resumed = EpochMetrics(4, "val")
    resumed.scores.add_metrics({"count": Count()})
    resumed.restore(metrics.snapshot())
    assert metrics.compute()["val/count"] == resumed.compute()["val/count"] == 100


def test_each_epoch_starts_from_nothing() -> None:
    metrics = EpochMetrics(4, "val")
    first, second = batches([50]), batches([20, 30])[1:]
    compute(metrics, first)
    assert compute(metrics, second) == compute(EpochMetrics(4, "val"), second)


def test_half_precision_logits_are_scored_in_float32() -> None:
    """bfloat16 sums lose samples: 1 + 256 is 256 in it."""
    data = [(logits.bfloat16(), targets) for logits, targets in batches([100] * 30)]
    metrics = EpochMetrics(4, "val", buffer_size=1)
    with torch.autocast("cpu", torch.bfloat16):
        for logits, targets in data:
            metrics.update(logits, targets, torch.tensor(1.0, dtype=torch.bfloat16))
        values = metrics.compute()
    assert {value.dtype for value in values.values()} == {torch.float32}
    hits = sum(int((logits.argmax(1) == targets).sum()) for logits, targets in data)
    assert values["val/acc"].item() == pytest.approx(hits / 3000)
    assert values["val/loss"].item() == 1.0


def test_confusion_rows_are_true_classes() -> None:
    metrics = EpochMetrics(3, "test")
    logits = torch.tensor([[9.0, 0, 0], [9.0, 0, 0], [0, 0, 9.0]])
    metrics.update(logits, torch.tensor([0, 1, 2]), torch.tensor(0.0))
    assert metrics.confusion_matrix().tolist() == [[1, 0, 0], [1, 0, 0], [0, 0, 1]]
    assert metrics.compute()["test/acc"].item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("buffer_size", [1, 100, 8192])
def test_an_epoch_that_is_taken_up_again_has_bit_identical_values(tmp_path: Path, buffer_size: int) -> None:
    """From nothing but the file, with the batches before and after the break in and beyond the buffer."""
    data = batches([64] * 7 + [3])
    expected = compute(EpochMetrics(4, "train", buffer_size), data)
    stopped, resumed = (EpochMetrics(4, "train", buffer_size) for _ in range(2))
    for logits, targets in data[:5]:
        stopped.update(logits, targets, torch.nn.functional.cross_entropy(logits, targets))
    torch.save(stopped.snapshot(), tmp_path / "snapshot.pt")
    compute(resumed, batches([9]))  # what it has seen before is forgotten
    resumed.update(*batches([9])[0], torch.tensor(1.0))
    resumed.restore(torch.load(tmp_path / "snapshot.pt", weights_only=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compute(resumed, data[5:]) == expected
        assert compute(stopped, data[5:]) == expected, "taking a snapshot changes nothing"


def test_a_snapshot_stays_as_it_was_taken() -> None:
    data = batches([64] * 4)
    metrics = EpochMetrics(4, "train", buffer_size=100)
    metrics.update(*data[0], torch.tensor(1.0))
    snapshot = metrics.snapshot()
    expected = EpochMetrics(4, "train", buffer_size=100)
    expected.restore(snapshot)
    compute(metrics, data[1:])
    again = EpochMetrics(4, "train", buffer_size=100)
    again.restore(snapshot)
    assert compute(again, data[1:]) == compute(expected, data[1:])


def test_a_snapshot_of_other_metrics_leaves_an_empty_epoch() -> None:
    """So a checkpoint can be tested after a metric was added to the code."""
    ((logits, targets),) = batches([20])
    metrics = EpochMetrics(4, "train")
    metrics.update(logits, targets, torch.tensor(1.0))
    snapshot = metrics.snapshot()
    del snapshot["states"]["f1.tp"]
    metrics.restore(snapshot)
    assert compute(metrics, batches([20])) == compute(EpochMetrics(4, "train"), batches([20]))
