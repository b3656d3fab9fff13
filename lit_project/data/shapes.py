"""Ten classes of drawn shapes: the data that is always there, without a download.

Every image shows one shape of random place, size, angle and colours on a shaded, noisy background, between smaller
blots of other colours. Light shapes on dark and dark ones on light are equally frequent, so neither a colour nor any
single pixel tells the class: a linear model gets nowhere near what a small convolutional network does.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_project.data.base import ImageDataModule, SplitName
from lit_project.data.batches import Arrays
from lit_project.errors import InputError
from lit_project.seeding import keyed_generator

# Signed distances, negative inside, in a frame where a shape fills about the unit circle, with y pointing down.
# Union is `minimum`, intersection `maximum`. Source: https://iquilezles.org/articles/distfunctions2d


def _disc(x: Tensor, y: Tensor, radius: float) -> Tensor:
    return torch.hypot(x, y) - radius


def _box(x: Tensor, y: Tensor, half_width: float, half_height: float) -> Tensor:
    return torch.maximum(x.abs() - half_width, y.abs() - half_height)


def _wedge(x: Tensor, y: Tensor, half_width: float, height: float) -> Tensor:
    """A triangle with its tip at the origin and its base at ``y = height``."""
    length = math.hypot(half_width, height)
    return torch.maximum((height * x.abs() - half_width * y) / length, y - height)


def _circle(x: Tensor, y: Tensor) -> Tensor:
    return _disc(x, y, 0.9)


def _ring(x: Tensor, y: Tensor) -> Tensor:
    return _disc(x, y, 0.75).abs() - 0.2


def _square(x: Tensor, y: Tensor) -> Tensor:
    return _box(x, y, 0.8, 0.8)


def _triangle(x: Tensor, y: Tensor) -> Tensor:
    return _wedge(x, y + 1.0, 1.0, 1.6)


def _star(x: Tensor, y: Tensor) -> Tensor:
    # a pentagram is what lies inside at least four of the five half-planes along its lines
    angles = [math.pi * (0.5 + 0.4 * i) for i in range(5)]
    sides = torch.stack([math.cos(a) * x + math.sin(a) * y for a in angles])
    return sides.topk(2, dim=0).values[1] - 0.38


def _cross(x: Tensor, y: Tensor) -> Tensor:
    return torch.minimum(_box(x, y, 1.0, 0.3), _box(x, y, 0.3, 1.0))


def _crescent(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(_disc(x, y, 1.0), -_disc(x, y + 0.55, 0.85))


def _heart(x: Tensor, y: Tensor) -> Tensor:
    # a square on its corner, and half a disc on each upper side
    side = 0.62
    lobes = _disc(x.abs() - side / math.sqrt(2), y + side / math.sqrt(2), side)
    diamond = (x.abs() + y.abs()) / math.sqrt(2) - side
    return torch.minimum(lobes, diamond)


def _arrow(x: Tensor, y: Tensor) -> Tensor:
    return torch.minimum(_wedge(x, y + 1.0, 0.9, 1.0), _box(x, y - 0.4, 0.25, 0.6))


def _hourglass(x: Tensor, y: Tensor) -> Tensor:
    return _wedge(x, y.abs(), 0.85, 0.9)


_SHAPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "circle": _circle,
    "ring": _ring,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "crescent": _crescent,
    "heart": _heart,
    "arrow": _arrow,
    "hourglass": _hourglass,
}

_SIZE = 32
# part of the key of every draw: another value is another data set
_SEED = 10


class Shapes10(ImageDataModule):
    """Drawn shapes: the same 32x32 RGB images in every run, whatever ``seed_everything`` says.

    Args:
        num_train: training images.
        num_val: validation images.
        num_test: test images.
        **kwargs: see :class:`~lit_project.data.base.ImageDataModule`.
    """

    class_names = list(_SHAPES)
    image_size = (_SIZE, _SIZE)

    def __init__(self, num_train: int = 10_000, num_val: int = 2_000, num_test: int = 2_000, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.sizes: dict[SplitName, int] = {"train": num_train, "val": num_val, "test": num_test}
        for split, size in self.sizes.items():
            if size < len(_SHAPES):
                raise InputError(f"data.num_{split} is {size}: it must be at least {len(_SHAPES)}, one of each shape.")

    def load(self, split: SplitName) -> Arrays:
        """Draw a split; classes take turns, so any stretch of it is balanced."""
        size = self.sizes[split]
        targets = torch.arange(size) % len(_SHAPES)
        images = torch.empty(size, _SIZE, _SIZE, 3, dtype=torch.uint8)
        for label, distance in enumerate(_SHAPES.values()):
            generator = keyed_generator(_SEED, list(self.sizes).index(split), label)
            images[label :: len(_SHAPES)] = _draw(distance, len(range(label, size, len(_SHAPES))), generator)
        return Arrays(images, targets)


def _draw(distance: Callable[[Tensor, Tensor], Tensor], count: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` images of one shape: uint8 ``[count, 32, 32, 3]``."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(count, *shape).uniform_(low, high, generator=generator)

    steps = torch.arange(_SIZE) - (_SIZE - 1) / 2
    row, column = steps[:, None], steps[None, :]

    # the background: one colour, shaded in a random direction
    light = torch.where(uniform(-1, 1, 1, 1, 1) > 0, 1.0, -1.0)
    background = 0.5 - light * uniform(0.15, 0.3, 1, 1, 1) + uniform(-0.12, 0.12, 1, 1, 3)
    shading = (uniform(-0.006, 0.006, 1, 1) * row + uniform(-0.006, 0.006, 1, 1) * column).unsqueeze(-1)
    image = background + shading

    # blots, too small to be taken for the shape
    for _ in range(3):
        x, y = column - uniform(-16, 16, 1, 1), row - uniform(-16, 16, 1, 1)
        inside = (0.5 + uniform(1.0, 2.5, 1, 1) - torch.hypot(x, y)).clamp(0, 1).unsqueeze(-1)
        image = torch.lerp(image, uniform(0, 1, 1, 1, 3), inside)

    # the shape itself, with an edge that is one pixel wide
    radius = uniform(7, 11, 1, 1)
    x, y = (axis - uniform(-4, 4, 1, 1) for axis in (column, row))
    angle = uniform(-0.6, 0.6, 1, 1)
    cos, sin = angle.cos() / radius, angle.sin() / radius
    inside = (0.5 - radius * distance(cos * x + sin * y, cos * y - sin * x)).clamp(0, 1).unsqueeze(-1)
    foreground = 0.5 + light * uniform(0.15, 0.3, 1, 1, 1) + uniform(-0.12, 0.12, 1, 1, 3)
    image = torch.lerp(image, foreground, inside)

    image = image + uniform(-0.08, 0.08, _SIZE, _SIZE, 3)
    return image.clamp(0, 1).mul(255).round().to(torch.uint8)
