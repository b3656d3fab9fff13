"""Augmentation of whole batches: one tensor operation a batch, a different draw for every image.

Each transform takes a uint8 batch ``[B, C, H, W]`` on any device and a generator on that device, and returns a batch of
the same shape and dtype. Nothing is drawn from global random state, so the same generator gives the same result.
"""

import torch
from torch import Tensor, nn


class BatchTransform(nn.Module):
    """Base class: implement ``forward(images, generator)`` for ``images`` of shape ``[B, C, H, W]``, dtype uint8."""

    def forward(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the transformed batch."""
        raise NotImplementedError


class RandomCrop(BatchTransform):
    """Pad each side, then cut a window of the original size at a random place, another one for each image.

    The batched form of ``torchvision.transforms.v2.RandomCrop(size, padding=padding)``, as one gather.

    Args:
        padding: pixels added on each side: at least 1, and less than the image's sides for ``reflect``.
        mode: ``constant`` pads with black, ``reflect`` mirrors the image.
    """

    def __init__(self, padding: int = 4, mode: str = "constant") -> None:
        super().__init__()
        if padding < 1:
            raise ValueError(f"RandomCrop: padding is {padding}, it must be at least 1.")
        if mode not in ("constant", "reflect"):
            raise ValueError(f"RandomCrop: mode is {mode!r}, it must be 'constant' or 'reflect'.")
        self.padding = padding
        self.mode = mode

    def forward(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the cropped batch, channels last in memory."""
        batch, _, height, width = images.shape
        if self.mode == "reflect" and self.padding >= min(height, width):
            raise ValueError(f"RandomCrop: cannot mirror {self.padding} pixels of a {height}x{width} image.")
        shifts = torch.randint(
            -self.padding, self.padding + 1, (2, batch, 1), generator=generator, device=images.device
        )
        rows, row_inside = self._source(shifts[0], height)
        columns, column_inside = self._source(shifts[1], width)
        which = torch.arange(batch, device=images.device)[:, None, None]
        # pixels are gathered channels last: each is one short contiguous copy
        crops = images.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]]
        if self.mode == "constant":
            crops = crops * (row_inside[:, :, None] & column_inside[:, None, :]).unsqueeze(-1)
        return crops.permute(0, 3, 1, 2)

    def _source(self, shift: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Source coordinates ``[B, size]`` along one axis, and which of them lie inside the image."""
        position = shift + torch.arange(size, device=shift.device)
        inside = (position >= 0) & (position < size)
        if self.mode == "reflect":
            return (size - 1) - ((size - 1) - position.abs()).abs(), inside
        return position.clamp(0, size - 1), inside


class RandomHorizontalFlip(BatchTransform):
    """Mirror each image left to right with probability ``p`` (0 to 1)."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"RandomHorizontalFlip: p is {p}, it must lie between 0 and 1.")
        self.p = p

    def forward(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the batch with some images mirrored."""
        flip = torch.rand(len(images), 1, 1, 1, generator=generator, device=images.device) < self.p
        return torch.where(flip, images.flip(-1), images)


def to_float(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Normalise a uint8 batch ``[B, C, H, W]`` to float32 with per-channel ``mean`` and ``std`` (shape ``[C]``, 0..1).

    One multiply and one add; keeps the memory format of the input.
    """
    scale = (1.0 / (255.0 * std)).view(-1, 1, 1)
    shift = (-mean / std).view(-1, 1, 1)
    return images.float().mul_(scale).add_(shift)
