"""Learning-rate schedules torch lacks in a form that follows the optimiser's own rate and warms it up."""

import math

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class Triangular(LRScheduler):
    """Rise linearly from 0 to the optimiser's learning rate, then fall linearly to 0.

    Unlike ``OneCycleLR`` the peak is the optimiser's ``lr``, so there is one number to tune. The rate is a function of
    the step alone, so it is right after a resume with another length. Source: Smith, "Cyclical Learning Rates for
    Training Neural Networks", 2017 (https://arxiv.org/abs/1506.01186), of which this is one cycle.

    Args:
        optimizer: the optimiser whose rate is scheduled, every step.
        total_steps: length in optimiser steps, at least 1. In a config, -1 stands for the whole run.
        warmup: share of the steps spent rising, in 0..1 (1 excluded).

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int = -1, warmup: float = 0.25) -> None:
        name = type(self).__name__
        if total_steps < 1:
            raise ValueError(f"{name}: total_steps is {total_steps}, it must be at least 1.")
        if not 0.0 <= warmup < 1.0:
            raise ValueError(f"{name}: warmup is {warmup}, it must be at least 0 and less than 1.")
        self.total_steps = total_steps
        self.warmup = warmup
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """The rates of the present step."""
        rising = self.warmup * self.total_steps
        step = min(self.last_epoch, self.total_steps)
        # the first step is the first of the rise, not a wasted one at rate 0
        factor = min(1.0, (step + 1) / (rising + 1))
        if step > rising:
            factor = self.fall((step - rising) / (self.total_steps - rising))
        return [base * factor for base in self.base_lrs]

    def fall(self, done: float) -> float:
        """What is left of the peak rate when this share of the fall, in 0..1, is done."""
        return 1 - done


class WarmupCosine(Triangular):
    """Rise linearly from 0 to the optimiser's learning rate, then fall to 0 along half a cosine.

    Arguments and errors are those of :class:`Triangular`. Source: Loshchilov and Hutter, "SGDR", 2017
    (https://arxiv.org/abs/1608.03983), and Goyal et al., "Accurate, Large Minibatch SGD", 2017
    (https://arxiv.org/abs/1706.02677), for the warm-up.
    """

    def fall(self, done: float) -> float:
        """What is left of the peak rate when this share of the fall, in 0..1, is done."""
        return (1 + math.cos(math.pi * done)) / 2
