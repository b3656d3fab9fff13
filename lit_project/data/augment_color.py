"""Random brightness, contrast, saturation and hue for whole batches."""

import torch
from torch import Tensor

from lit_project.data.augment import BatchTransform, Draw
from lit_project.errors import InputError

Strength = float | tuple[float, float]


class ColorJitter(BatchTransform):
    """Change brightness, contrast, saturation and hue of each image by factors of its own.

    Arguments, ranges and operations are those of ``torchvision.transforms.v2.ColorJitter``. Two things differ: the
    order is always brightness, contrast, saturation, hue (torchvision draws one for each image, which a batch cannot
    follow without doing everything four times), and levels are rounded once at the end, not cut off after each
    operation. Greyscale images (1 channel) change in brightness and contrast only.

    Args:
        brightness: factor, uniform in ``max(0, 1 - brightness)..1 + brightness``, or in the given ``[min, max]``.
        contrast: factor, likewise, on the distance from the image's mean grey.
        saturation: factor, likewise, on the distance from each pixel's grey.
        hue: turn of the colour circle, uniform in ``-hue..hue``, at most 0.5, or in the given ``[min, max]``.
    """

    def __init__(
        self, brightness: Strength = 0.0, contrast: Strength = 0.0, saturation: Strength = 0.0, hue: Strength = 0.0
    ) -> None:
        super().__init__()
        self.brightness = _factor_range("brightness", brightness)
        self.contrast = _factor_range("contrast", contrast)
        self.saturation = _factor_range("saturation", saturation)
        low, high = (-hue, hue) if isinstance(hue, int | float) else hue
        if not -0.5 <= low <= high <= 0.5:
            raise InputError(f"ColorJitter: hue is {hue}, it must be 0 to 0.5, or [min, max] within -0.5 to 0.5.")
        self.hue = (low, high)

    def forward(self, images: Tensor, draw: Draw) -> Tensor:
        channels = images.shape[1]
        if channels not in (1, 3):
            raise InputError(f"ColorJitter: the images have {channels} channels, it must be 1 (grey) or 3 (RGB).")
        # channels first: each is one plane, and what happens to it is one operation over the whole batch
        planes = images.permute(1, 0, 2, 3).to(torch.float32, memory_format=torch.contiguous_format)
        if self.brightness != (1.0, 1.0):
            planes = planes.mul_(draw.uniform(*self.brightness, 1, 1)).clamp_(0, 255)
        if self.contrast != (1.0, 1.0):
            mean = _grey(planes).mean((-2, -1), keepdim=True)
            planes = torch.lerp(mean, planes, draw.uniform(*self.contrast, 1, 1)).clamp_(0, 255)
        if self.saturation != (1.0, 1.0) and channels == 3:
            planes = torch.lerp(_grey(planes), planes, draw.uniform(*self.saturation, 1, 1)).clamp_(0, 255)
        if self.hue != (0.0, 0.0) and channels == 3:
            planes = _turn_hue(planes, draw.uniform(*self.hue, 1, 1))
        levels = planes.round_().permute(1, 2, 3, 0).to(torch.uint8, memory_format=torch.contiguous_format)
        return levels.permute(0, 3, 1, 2)


def _factor_range(name: str, value: Strength) -> tuple[float, float]:
    low, high = (max(0.0, 1.0 - value), 1.0 + value) if isinstance(value, int | float) else value
    if not 0.0 <= low <= high:
        raise InputError(f"ColorJitter: {name} is {value}, it must be 0 or more, or [min, max] of 0 or more.")
    return (low, high)


def _grey(planes: Tensor) -> Tensor:
    """Luma ``[B, H, W]`` of ``[C, B, H, W]``, with the weights of torchvision (ITU-R BT.601)."""
    if len(planes) == 1:
        return planes[0]
    red, green, blue = planes
    return (0.2989 * red).add_(green, alpha=0.587).add_(blue, alpha=0.114)


def _turn_hue(planes: Tensor, turn: Tensor) -> Tensor:
    """Add ``turn`` (1 is once around) to the hue of RGB ``[3, B, H, W]``, keeping HSV saturation and value.

    With saturation and value fixed, a channel depends on the hue alone: as it goes around, the channel stays at the
    pixel's highest level for a third of the way, falls to the lowest in a sixth, stays, and rises again. Source: the
    formulas without cases at https://en.wikipedia.org/wiki/HSL_and_HSV#HSV_to_RGB_alternative.
    """
    red, green, blue = planes
    low, high = planes.amin(0), planes.amax(0)
    span = high - low
    divisor = span.clamp(min=1e-3)  # where there is no colour, any hue will do
    # in sixths of the circle, from red over green to blue
    hue = torch.where(
        red == high,
        (green - blue) / divisor,
        torch.where(green == high, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    hue += 6 * turn
    for plane, start in zip(planes, (5.0, 3.0, 1.0), strict=True):
        position = hue + start
        position -= 6 * (position / 6).floor_()
        plane.copy_(high - span * torch.minimum(position, 4.0 - position).clamp_(0.0, 1.0))
    return planes
