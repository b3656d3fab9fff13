import pytest
import torch
from torch import Tensor
from torchmetrics.classification import MulticlassCalibrationError

from lit_project.results import NUM_BINS, Results, join, judge


def by_hand() -> Results:
    """Of three classes, eight images; those at 1, 3, 4 and 6 are mistaken."""
    return Results(
        targets=torch.tensor([0, 0, 1, 1, 2, 2, 2, 0], dtype=torch.int32),
        predicted=torch.tensor([0, 1, 1, 2, 0, 2, 0, 0], dtype=torch.int32),
        confidence=torch.tensor([0.9, 0.6, 1.0, 0.5, 0.7, 0.8, 0.75, 0.35]),
        true_probability=torch.tensor([0.9, 0.3, 1.0, 0.4, 0.1, 0.8, 0.1, 0.35]),
        positions=torch.arange(8, dtype=torch.int32),
    )


def test_rows_are_true_and_columns_predicted() -> None:
    assert by_hand().confusion_matrix(3).tolist() == [[2, 1, 0], [0, 1, 1], [2, 0, 1]]


def test_the_worst_is_what_was_held_least_likely_and_then_the_most_confident() -> None:
    assert by_hand().worst(8).tolist() == [6, 4, 1, 3]
    assert by_hand().worst(2).tolist() == [6, 4]


def test_reliability_by_hand() -> None:
    counts, confidence, accuracy = by_hand().reliability()
    # fifteenths: 0.35 is in the 6th, 0.5 in the 8th, 0.6 in the 10th, 0.7 in the 11th, 0.75 in the 12th, 0.8 in the
    # 13th, 0.9 in the 14th and 1 in the last
    assert counts.nonzero().flatten().tolist() == [5, 7, 9, 10, 11, 12, 13, 14]
    assert counts.sum() == 8
    assert [confidence[14].item(), accuracy[14].item(), accuracy[10].item()] == [1.0, 1.0, 0.0]
    assert accuracy[0].isnan()


def test_calibration_error_by_hand() -> None:
    # each image is alone in its bin, so it is the mean of |right - confidence|
    expected = (0.1 + 0.6 + 0.0 + 0.5 + 0.7 + 0.2 + 0.75 + 0.65) / 8
    assert by_hand().calibration_error() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("scale", [0.5, 3.0, 100.0], ids=["unsure", "sure", "often exactly 1"])
def test_calibration_error_is_that_of_torchmetrics(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 7, generator=generator) * scale
    targets = torch.randint(7, (500,), generator=generator)
    metric = MulticlassCalibrationError(num_classes=7, n_bins=NUM_BINS, norm="l1")
    expected = metric(logits.softmax(1), targets).item()
    assert judge(logits, targets, None).calibration_error() == pytest.approx(expected, abs=1e-6)


def test_probabilities_are_float32_whatever_the_logits_are() -> None:
    logits = torch.tensor([[0.0, 1.0], [3.0, 0.0]], dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        results = judge(logits, torch.tensor([0, 0]), torch.tensor([4, 2]))
    likely, unlikely = (1 / (1 + torch.tensor(x).exp()) for x in (-1.0, 1.0))
    torch.testing.assert_close(results.confidence, torch.stack([likely, 1 / (1 + torch.tensor(-3.0).exp())]))
    torch.testing.assert_close(results.true_probability[0], unlikely)
    assert results.predicted.tolist() == [1, 0]
    assert results.positions.tolist() == [4, 2]


def test_joined_results_are_in_order_and_each_image_counts_once() -> None:
    def part(*positions: int) -> Results:
        number: Tensor = torch.tensor(positions, dtype=torch.int32)
        return Results(number + 10, number, number / 10, number / 10, number)

    joined = join([part(4, 0, 2), part(1, 3, 0)])  # DistributedSampler repeats images to even ranks out
    assert joined.positions.tolist() == [0, 1, 2, 3, 4]
    assert joined.targets.tolist() == [10, 11, 12, 13, 14]
    assert len(join([part(-1, -1), part(-1)]).targets) == 3, "nobody knows which they are"
