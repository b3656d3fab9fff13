"""What a model made of each single image of a split, and what follows from it: confusions, mistakes, calibration."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_calibration_error, multiclass_confusion_matrix

#: Bins of the calibration error and of the reliability diagram, as in Guo et al.
NUM_BINS = 15


class Results(NamedTuple):
    """One entry an image, each a tensor ``[N]``."""

    #: int32, the true class
    targets: Tensor
    #: int32, the class with the highest probability
    predicted: Tensor
    #: float32 in 0..1, the probability of the predicted class
    confidence: Tensor
    #: float32 in 0..1, the probability of the true class
    true_probability: Tensor
    #: int32, the position of the image in its split; -1 where the data does not tell
    positions: Tensor

    def confusion_matrix(self, num_classes: int) -> Tensor:
        """How many images of each class were taken for which: int64 ``[num_classes, num_classes]``, rows true."""
        return multiclass_confusion_matrix(self.predicted.long(), self.targets.long(), num_classes)

    def worst(self, count: int) -> Tensor:
        """Where the gravest mistakes are, int64 ``[at most count]``: the lower the true class's probability the worse.

        Among equals, the more confident is the worse.
        """
        wrong = (self.predicted != self.targets).nonzero().flatten()
        order = self.confidence[wrong].argsort(descending=True, stable=True)
        order = order[self.true_probability[wrong][order].argsort(stable=True)]
        return wrong[order][:count]

    def calibration_error(self) -> float:
        """Expected calibration error in 0..1: how far confidence and accuracy are apart, averaged over the images.

        Source: Guo et al., On Calibration of Modern Neural Networks, https://arxiv.org/abs/1706.04599
        """
        # whether the prediction is right is a binary question, and the confidence its answer
        right = (self.predicted == self.targets).long()
        return binary_calibration_error(self.confidence, right, n_bins=NUM_BINS, norm="l1").item()

    def reliability(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each bin of confidence its number of images, their mean confidence and their accuracy; float64 each.

        The bins ``[NUM_BINS]`` are equally wide, from 0 to 1; mean and accuracy of an empty one are NaN.
        """
        bins = (self.confidence.double() * NUM_BINS).long().clamp(0, NUM_BINS - 1)
        counts = torch.zeros(NUM_BINS, dtype=torch.float64)
        confidence, accuracy = counts.clone(), counts.clone()
        counts.index_add_(0, bins, torch.ones_like(self.confidence, dtype=torch.float64))
        confidence.index_add_(0, bins, self.confidence.double())
        accuracy.index_add_(0, bins, (self.predicted == self.targets).double())
        return counts, confidence / counts, accuracy / counts


def judge(logits: Tensor, targets: Tensor, positions: Tensor | None) -> Results:
    """The results of some images, on their device.

    Args:
        logits: float ``[N, num_classes]``.
        targets: int64 ``[N]``.
        positions: int64 ``[N]``, or ``None`` where they are not known.
    """
    with torch.autocast(logits.device.type, enabled=False):  # it would compute probabilities in half precision
        probabilities = logits.float().softmax(dim=1).nan_to_num(0.0)
    confidence, predicted = probabilities.max(dim=1)
    true_probability = probabilities.gather(1, targets[:, None]).squeeze(1)
    if positions is None:
        positions = torch.full_like(targets, -1)
    return Results(targets.int(), predicted.int(), confidence, true_probability, positions.to(logits.device).int())


def join(parts: Sequence[Results]) -> Results:
    """Results of several batches or processes as one, in the order of the images, each of them once; on the CPU."""
    joined = Results(*(torch.cat([column.cpu() for column in columns]) for columns in zip(*parts, strict=True)))
    if bool((joined.positions < 0).any()):
        return joined
    order = joined.positions.argsort(stable=True)
    first = joined.positions[order].diff(prepend=torch.tensor([-1], dtype=torch.int32)) != 0
    return Results(*(column[order[first]] for column in joined))
