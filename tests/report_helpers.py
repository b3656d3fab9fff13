"""Data and modules that the tests of the report hand to fits."""

from typing import Any

import torch
from torch import Tensor, nn

from lit_project.data import Shapes10
from lit_project.module import ImageClassifier

#: Names that a page or a figure may take for something else.
ODD_NAMES = [
    "<b>&",
    "$x",
    "\"quote'",
    "$\\frac{1}$",
    "star",
    "cross",
    "crescent",
    "heart",
    "a name of many letters",
    "é",
]


class OddNames(Shapes10):
    """The shapes under other names."""

    class_names = ODD_NAMES


class Scripted(ImageClassifier):
    """In epoch ``e`` the first ``rights[e]`` validation images are classified rightly, the others as the next class."""

    def __init__(self, rights: list[int], **options: Any) -> None:
        super().__init__(nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(3 * 32 * 32, 10)), **options)
        self.rights = rights
        self.seen = 0

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self.seen = 0

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        targets = batch[1]
        right = torch.arange(self.seen, self.seen + len(targets)) < self.rights[self.current_epoch]
        self.seen += len(targets)
        logits = 4.0 * nn.functional.one_hot(torch.where(right, targets, (targets + 1) % 10), 10)
        return self._evaluate(logits, targets, self.val_metrics)
