"""What the tests of all batch transforms share."""

import torch
from torch import Tensor

from lit_project.data.augment import Draw
from lit_project.seeding import keyed_generator


def drawn(batch: int, *keys: int, epoch: int = 0) -> Draw:
    return Draw(keyed_generator(*(keys or (0,))), epoch, torch.arange(batch))


def images(batch: int = 16, channels: int = 3, height: int = 12, width: int = 9) -> Tensor:
    """Random levels, 1 to 255, channels last: 0 is left for what a transform fills with."""
    levels = torch.randint(1, 256, (batch, height, width, channels), generator=keyed_generator(5))
    return levels.to(torch.uint8).permute(0, 3, 1, 2)


def assert_same_distribution(ours: Tensor, theirs: Tensor) -> None:
    """Compare mean and spread of each column of two samples ``[N, ...]``, ``[M, ...]``; ours is in whole levels."""
    ours, theirs = ours.flatten(1).double(), theirs.flatten(1).double()
    spread, their_spread = ours.std(0), theirs.std(0)
    error = (spread**2 / len(ours) + their_spread**2 / len(theirs)).sqrt()
    # five standard errors are passed by one column in two million; the constant is what rounding may do
    assert ((ours.mean(0) - theirs.mean(0)).abs() <= 5 * error + 0.51).all()
    torch.testing.assert_close(spread, their_spread, rtol=0.15, atol=0.5)


def assert_same_counts(ours: Tensor, theirs: Tensor, limit: float) -> None:
    """Compare two samples of small whole numbers by a chi-square statistic, which is to stay below ``limit``."""
    length = int(max(ours.max(), theirs.max())) + 1
    a, b = torch.bincount(ours, minlength=length).double(), torch.bincount(theirs, minlength=length).double()
    ratio = (len(ours) / len(theirs)) ** 0.5
    statistic = ((a / ratio - b * ratio) ** 2 / (a + b).clamp(min=1)).sum()
    assert statistic < limit
