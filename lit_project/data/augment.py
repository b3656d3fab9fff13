"""Augmentation of whole batches: a few tensor operations a batch, a different draw for every image.

Each transform takes a uint8 batch ``[B, C, H, W]``, channels last in memory, on any device, and a :class:`Draw`, and
returns a batch of the same dtype and layout, and of the same shape (but for ``ProgressiveResize``). All randomness
comes from the draw, nothing from global state, and no transform has the host wait for the device. Colours are in
``augment_color``, interpolating transforms in ``augment_warp``.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from lit_project.errors import InputError


class Draw(NamedTuple):
    """What the randomness of one batch is keyed by."""

    #: on the images' device
    generator: torch.Generator
    epoch: int
    #: int64 ``[B]``, on the images' device: the position of each image in its split
    indices: Tensor

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Float32 ``[B, *shape]``, uniform in ``low..high``."""
        values = torch.empty(len(self.indices), *shape, device=self.indices.device)
        return values.uniform_(low, high, generator=self.generator)

    def chosen(self, p: float) -> Tensor:
        """Bool ``[B]``: for each image whether it falls into the share ``p``."""
        return self.uniform(0.0, 1.0) < p

    def integers(self, count: int, *shape: int) -> Tensor:
        """Int64 ``[B, *shape]``, each of ``0..count - 1`` equally likely."""
        shape = (len(self.indices), *shape)
        return torch.randint(count, shape, generator=self.generator, device=self.indices.device)


class BatchTransform(nn.Module):
    """Base class: implement ``forward``."""

    def forward(self, images: Tensor, draw: Draw) -> Tensor:
        """Return the transformed batch: uint8 ``[B, C, H, W]``, channels last, like ``images``."""
        raise NotImplementedError


class RandomCrop(BatchTransform):
    """Pad each side, then cut a window of the original size at a random place, another one for each image.

    The batched form of ``torchvision.transforms.v2.RandomCrop(size, padding=padding, padding_mode=mode)``.

    Args:
        padding: pixels added on each side: at least 1, and less than the image's sides for ``reflect``.
        mode: ``constant`` pads with black, ``reflect`` mirrors the image without repeating its outermost pixels.
    """

    def __init__(self, padding: int = 4, mode: Literal["constant", "reflect"] = "constant") -> None:
        super().__init__()
        if padding < 1:
            raise InputError(f"RandomCrop: padding is {padding}, it must be at least 1.")
        if mode not in ("constant", "reflect"):
            raise InputError(f"RandomCrop: mode is {mode!r}, it must be 'constant' or 'reflect'.")
        self.padding = padding
        self.mode = mode

    def forward(self, images: Tensor, draw: Draw) -> Tensor:
        batch, channels, height, width = images.shape
        padded = self._pad(images.permute(0, 2, 3, 1))
        rows, columns = padded.shape[1:3]
        # A window is known by the pixel it begins at. Seen as one overlapping window a pixel, the padded batch gives
        # all crops in one index_select, which copies whole rows: much faster than to gather pixels.
        image, top, left = torch.arange(batch, device=images.device), *draw.integers(2 * self.padding + 1, 2).unbind(1)
        begin = (image * rows + top) * columns + left
        last = (batch * rows - height) * columns + 2 * self.padding
        windows = padded.as_strided((last + 1, height, width * channels), (channels, columns * channels, 1))
        return windows.index_select(0, begin).view(batch, height, width, channels).permute(0, 3, 1, 2)

    def _pad(self, images: Tensor) -> Tensor:
        """Pad ``[B, H, W, C]`` on all sides of H and W. (``F.pad`` cannot mirror uint8 on every device.)"""
        (batch, height, width, channels), pad = images.shape, self.padding
        padded = images.new_zeros(batch, height + 2 * pad, width + 2 * pad, channels)
        padded[:, pad:-pad, pad:-pad] = images
        if self.mode == "reflect":
            if pad >= min(height, width):
                raise InputError(f"RandomCrop: cannot mirror {pad} pixels of a {height}x{width} image.")
            first_row, last_row, first, last = pad, pad + height - 1, pad, pad + width - 1
            for i in range(1, pad + 1):
                padded[:, :, first - i] = padded[:, :, first + i]
                padded[:, :, last + i] = padded[:, :, last - i]
            for i in range(1, pad + 1):
                padded[:, first_row - i] = padded[:, first_row + i]
                padded[:, last_row + i] = padded[:, last_row - i]
        return padded


class RandomHorizontalFlip(BatchTransform):
    """Mirror each image left to right with probability ``p`` (0 to 1)."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = checked_probability(self, p)

    def forward(self, images: Tensor, draw: Draw) -> Tensor:
        return _flip(images, draw.chosen(self.p))


class AlternatingFlip(BatchTransform):
    """Mirror each image left to right in every second epoch; which images begin mirrored is a coin for each.

    So any two consecutive epochs show every image in both orientations, where independent coins show half of the
    images the same way twice. The coin is a hash of the image's index: nothing is drawn.

    Source: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024 (https://arxiv.org/abs/2404.00498).
    """

    def forward(self, images: Tensor, draw: Draw) -> Tensor:
        return _flip(images, (_coins(draw.indices) + draw.epoch) % 2 == 1)


class RandomErasing(BatchTransform):
    """Fill a random rectangle of each image.

    The batched form of ``torchvision.transforms.v2.RandomErasing``, with its distribution; but on pixel levels before
    normalisation, so give the data's mean, not 0, to erase to the mean.

    Source: Zhong et al., "Random Erasing Data Augmentation", 2017 (https://arxiv.org/abs/1708.04896).

    Args:
        p: probability that an image is erased at all.
        scale: least and greatest share of the image's area.
        ratio: least and greatest height / width, uniform in its logarithm.
        value: the level to fill with, 0 to 255; or one a channel; or ``random``: uniform noise.
    """

    def __init__(
        self,
        p: float = 0.5,
        scale: tuple[float, float] = (0.02, 0.33),
        ratio: tuple[float, float] = (0.3, 3.3),
        value: int | list[int] | Literal["random"] = 0,
    ) -> None:
        super().__init__()
        self.p = checked_probability(self, p)
        self.scale = checked_range(self, "scale", scale, 0.0, 1.0)
        self.ratio = checked_range(self, "ratio", ratio, 0.01, 100.0)
        self.value = None if value == "random" else checked_levels(self, "value", value)

    def forward(self, images: Tensor, draw: Draw) -> Tensor:
        rows, columns = images.shape[-2:]
        # as in torchvision, a rectangle as high or as wide as the image is not used
        height, width, found = random_rectangles(draw, (rows, columns), (rows - 1, columns - 1), self.scale, self.ratio)
        height = height * (found & draw.chosen(self.p))
        top, left = random_places(draw, rows - height), random_places(draw, columns - width)
        if self.value is None:
            value = images.new_empty(len(images), rows, columns, images.shape[1])
            value.random_(0, 256, generator=draw.generator)
        else:
            value = levels(self, self.value, images)
        return _fill(images, top, left, height, width, value)


class Cutout(BatchTransform):
    """Fill a square of each image, centred on a random pixel; it may hang over the border.

    Source: DeVries and Taylor, "Improved Regularization of Convolutional Neural Networks with Cutout", 2017
    (https://arxiv.org/abs/1708.04552).

    Args:
        size: side of the square in pixels, at least 1.
        value: the level to fill with, 0 to 255, or one a channel.
    """

    def __init__(self, size: int = 8, value: int | list[int] = 0) -> None:
        super().__init__()
        if size < 1:
            raise InputError(f"Cutout: size is {size}, it must be at least 1.")
        self.size = size
        self.value = checked_levels(self, "value", value)

    def forward(self, images: Tensor, draw: Draw) -> Tensor:
        top, left = (draw.integers(side) - self.size // 2 for side in images.shape[-2:])
        size = torch.full_like(top, self.size)
        return _fill(images, top, left, size, size, levels(self, self.value, images))


def to_float(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Normalise a uint8 batch ``[B, C, H, W]`` to float32 with per-channel ``mean`` and ``std`` (shape ``[C]``, 0..1).

    One multiply and one add; keeps the memory format of the input.
    """
    scale = (1.0 / (255.0 * std)).view(-1, 1, 1)
    shift = (-mean / std).view(-1, 1, 1)
    return images.float().mul_(scale).add_(shift)


# ---- shared with the other files of augmentation


def random_rectangles(
    draw: Draw, size: tuple[int, int], largest: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a rectangle for each image of ``size``: area in ``scale`` of the image's, height / width in ``ratio``.

    Returns:
        Height and width in pixels, int64 ``[B]``, and whether there is one, bool ``[B]``: like torchvision, the first
        of ten tries that is no larger than ``largest``.
    """
    area = size[0] * size[1] * draw.uniform(*scale, 10)
    aspect = draw.uniform(math.log(ratio[0]), math.log(ratio[1]), 10).exp()
    height, width = (area * aspect).sqrt().round().long(), (area / aspect).sqrt().round().long()
    fits = (height > 0) & (height <= largest[0]) & (width > 0) & (width <= largest[1])
    first = fits.int().argmax(1, keepdim=True)
    return height.gather(1, first)[:, 0], width.gather(1, first)[:, 0], fits.any(1)


def random_places(draw: Draw, room: Tensor) -> Tensor:
    """Int64 ``[B]``, each of ``0..room`` equally likely, where ``room`` is another number for each image."""
    return (draw.uniform(0.0, 1.0) * (room + 1)).long()  # uniform numbers are below 1, so this is at most room


def levels(transform: BatchTransform, value: list[int], images: Tensor) -> Tensor:
    """``value``, one level or one a channel, as uint8 ``[C]`` on the images' device."""
    channels = images.shape[1]
    if len(value) not in (1, channels):
        name = type(transform).__name__
        raise InputError(f"{name}: {len(value)} levels to fill with, but the images have {channels} channels.")
    # made there, number by number: to copy a list would have the host wait
    return torch.cat([images.new_full((1,), level) for level in value]).expand(channels)


def checked_probability(transform: BatchTransform, p: float) -> float:
    """``p``, or an InputError if it is none."""
    if not 0.0 <= p <= 1.0:
        raise InputError(f"{type(transform).__name__}: p is {p}, it must lie between 0 and 1.")
    return p


def checked_range(
    transform: BatchTransform, name: str, value: tuple[float, float], low: float, high: float
) -> tuple[float, float]:
    """``value``, or an InputError unless it is two ascending numbers in ``low..high``."""
    if len(value) != 2 or not low <= value[0] <= value[1] <= high:
        raise InputError(
            f"{type(transform).__name__}: {name} is {list(value)}, it must be two ascending numbers between {low:g} "
            f"and {high:g}."
        )
    return (value[0], value[1])


def checked_levels(transform: BatchTransform, name: str, value: int | list[int]) -> list[int]:
    """``value`` as a list, or an InputError unless it is one level, or one a channel, in 0..255."""
    value = [value] if isinstance(value, int) else list(value)
    if not value or not all(0 <= level <= 255 for level in value):
        raise InputError(
            f"{type(transform).__name__}: {name} is {value}, it must be one level or one a channel, each 0 to 255."
        )
    return value


# ---- internals


def _bit_mask(chosen: Tensor) -> Tensor:
    """Bool to uint8: all bits set where true."""
    return chosen.to(torch.uint8).neg_()


def _where(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """``torch.where`` for uint8, with a bit mask: several times as fast on a CPU, where that one goes byte by byte."""
    return (no ^ yes).bitwise_and_(mask).bitwise_xor_(no)


def _flip(images: Tensor, chosen: Tensor) -> Tensor:
    return _where(_bit_mask(chosen).view(-1, 1, 1, 1), images.flip(-1), images)


def _fill(images: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor, value: Tensor) -> Tensor:
    """Set a rectangle of each image, given by int64 ``[B]``, to ``value``: ``[C]`` or ``[B, H, W, C]``."""
    batch, channels, rows, columns = images.shape
    row, column = torch.arange(rows, device=images.device), torch.arange(columns, device=images.device)
    in_rows = _bit_mask((row >= top[:, None]) & (row < (top + height)[:, None]))
    in_columns = _bit_mask((column >= left[:, None]) & (column < (left + width)[:, None]))
    # whole rows of bytes at a time: with the channels as an axis of its own it takes several times as long
    mask = in_rows[:, :, None] & in_columns.repeat_interleave(channels, dim=1)[:, None, :]
    value = value.expand(*value.shape[:-2], columns, channels).flatten(-2)
    filled = _where(mask, value, images.permute(0, 2, 3, 1).flatten(2))
    return filled.view(batch, rows, columns, channels).permute(0, 3, 1, 2)


def _coins(indices: Tensor) -> Tensor:
    """One well-mixed bit for each index: int64 ``[B]``, 0 or 1.

    The 32-bit finaliser of MurmurHash3 (Appleby, https://github.com/aappleby/smhasher): neighbouring indices, and those
    at any fixed distance, get unrelated bits. A simpler rule, such as parity, could follow the order of the classes.
    """
    low32 = 0xFFFFFFFF
    bits = indices & low32
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & low32
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & low32
    return (bits ^ (bits >> 16)) & 1
