"""Random geometry with bilinear interpolation, for whole batches: perspective, affine maps, crops that are resized.

Coordinates are in pixels, x to the right and y down, with pixel centres at whole numbers.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.v2.functional import resize

from lit_project.data.augment import (
    BatchTransform,
    Draw,
    checked_levels,
    checked_probability,
    checked_range,
    levels,
    random_places,
    random_rectangles,
)
from lit_project.errors import InputError


class RandomPerspective(BatchTransform):
    """See the image from another angle: move its corners inwards at random.

    The batched form of ``torchvision.transforms.v2.RandomPerspective``, bilinear.

    Args:
        distortion_scale: how far a corner may move: this share, 0 to 1, of half the image's width and height.
        p: probability that an image is transformed at all.
        fill: the level outside of the image, 0 to 255, or one a channel.
    """

    def __init__(self, distortion_scale: float = 0.5, p: float = 0.5, fill: int | list[int] = 0) -> None:
        super().__init__()
        if not 0.0 <= distortion_scale <= 1.0:
            raise InputError(f"RandomPerspective: distortion_scale is {distortion_scale}, it must lie between 0 and 1.")
        self.distortion_scale = distortion_scale
        self.p = checked_probability(self, p)
        self.fill = checked_levels(self, "fill", fill)

    def forward(self, images: Tensor, draw: Draw) -> Tensor:
        height, width = images.shape[-2:]
        chosen = draw.chosen(self.p)[:, None]
        # corners that stay where they are leave the image as it is
        x = chosen * draw.integers(int(self.distortion_scale * (width // 2)) + 1, 4)
        y = chosen * draw.integers(int(self.distortion_scale * (height // 2)) + 1, 4)
        x = torch.cat([x[:, :1], width - 1 - x[:, 1:3], x[:, 3:]], dim=1)
        y = torch.cat([y[:, :2], height - 1 - y[:, 2:]], dim=1)
        return perspective(images, x, y, levels(self, self.fill, images))


class RandomAffine(BatchTransform):
    """Turn, shift, scale and shear each image about its centre.

    The batched form of ``torchvision.transforms.v2.RandomAffine`` with bilinear interpolation.

    Args:
        degrees: the image turns clockwise by ``-degrees..degrees``.
        translate: greatest shift to either side, as shares of the width and the height; in whole pixels.
        scale: least and greatest factor.
        shear: slant parallel to the x axis by ``-shear..shear`` degrees, less than 90.
        fill: the level outside of the image, 0 to 255, or one a channel.
    """

    def __init__(
        self,
        degrees: float = 0.0,
        translate: tuple[float, float] = (0.0, 0.0),
        scale: tuple[float, float] = (1.0, 1.0),
        shear: float = 0.0,
        fill: int | list[int] = 0,
    ) -> None:
        super().__init__()
        if not 0.0 <= degrees <= 180.0:
            raise InputError(f"RandomAffine: degrees is {degrees}, it must lie between 0 and 180.")
        if len(translate) != 2 or not all(0.0 <= share <= 1.0 for share in translate):
            raise InputError(f"RandomAffine: translate is {translate}, it must be two shares between 0 and 1.")
        if not 0.0 <= shear < 90.0:
            raise InputError(f"RandomAffine: shear is {shear}, it must be 0 or more and less than 90.")
        self.degrees = degrees
        self.translate = translate
        self.scale = checked_range(self, "scale", scale, 0.01, 100.0)
        self.shear = shear
        self.fill = checked_levels(self, "fill", fill)

    def forward(self, images: Tensor, draw: Draw) -> Tensor:
        height, width = images.shape[-2:]
        right, down = self.translate[0] * width, self.translate[1] * height
        return affine(
            images,
            draw.uniform(-self.degrees, self.degrees),
            draw.uniform(-right, right).round(),
            draw.uniform(-down, down).round(),
            draw.uniform(*self.scale),
            draw.uniform(-self.shear, self.shear),
            levels(self, self.fill, images),
        )


class RandomResizedCrop(BatchTransform):
    """Cut out a rectangle of random place, area and shape, and enlarge it to the size of the image.

    The batched form of ``torchvision.transforms.v2.RandomResizedCrop(size)`` where ``size`` is the images' own.

    Args:
        scale: least and greatest share of the image's area.
        ratio: least and greatest width / height, uniform in its logarithm.
    """

    def __init__(self, scale: tuple[float, float] = (0.08, 1.0), ratio: tuple[float, float] = (3 / 4, 4 / 3)) -> None:
        super().__init__()
        self.scale = checked_range(self, "scale", scale, 0.0, 1.0)
        self.ratio = checked_range(self, "ratio", ratio, 0.01, 100.0)

    def forward(self, images: Tensor, draw: Draw) -> Tensor:
        rows, columns = images.shape[-2:]
        width, height, found = random_rectangles(draw, (columns, rows), (columns, rows), self.scale, self.ratio)
        top, left = random_places(draw, rows - height), random_places(draw, columns - width)
        # where no try fits: the largest rectangle of an allowed shape, in the middle
        shape = min(max(columns / rows, self.ratio[0]), self.ratio[1])
        largest = (min(rows, round(columns / shape)), min(columns, round(rows * shape)))
        height, width = torch.where(found, height, largest[0]), torch.where(found, width, largest[1])
        top = torch.where(found, top, (rows - largest[0]) // 2)
        left = torch.where(found, left, (columns - largest[1]) // 2)
        return resized_crop(images, top, left, height, width)


class ProgressiveResize(BatchTransform):
    """Shrink the images in the first epochs, which then take less time: half of it at 0.7 of height and width.

    Early on a network learns what small images show as well. Only for networks that take images of any size, and to
    be put last, after what crops and flips.

    Source: "progressive learning" in Tan and Le, "EfficientNetV2: Smaller Models and Faster Training", 2021
    (https://arxiv.org/abs/2104.00298), there with stronger augmentation for larger images as well.

    Args:
        size: pixels of the shorter side at first; images that are not larger stay as they are.
        epochs: in how many epochs.
    """

    def __init__(self, size: int, epochs: int) -> None:
        super().__init__()
        for name, value in {"size": size, "epochs": epochs}.items():
            if value < 1:
                raise InputError(f"ProgressiveResize: {name} is {value}, it must be at least 1.")
        self.size = size
        self.epochs = epochs

    def forward(self, images: Tensor, draw: Draw) -> Tensor:
        """Uint8 ``[B, C, H, W]``, in the first epochs with ``size`` as the lesser of H and W."""
        if draw.epoch >= self.epochs or min(images.shape[2:]) <= self.size:
            return images
        small: Tensor = resize(images, [self.size])
        return small.contiguous(memory_format=torch.channels_last)


def perspective(images: Tensor, corner_x: Tensor, corner_y: Tensor, fill: Tensor) -> Tensor:
    """Put the corners of each image at the given places.

    Args:
        images: uint8 ``[B, C, H, W]``.
        corner_x: ``[B, 4]``, where the top left, top right, bottom right and bottom left corner goes.
        corner_y: ``[B, 4]``.
        fill: ``[C]``, levels outside.

    Source: the projective map of the unit square to a quadrilateral is that of Heckbert, "Fundamentals of Texture
    Mapping and Image Warping", 1989, section 2.2.3.
    """
    height, width = images.shape[-2:]
    # in units of the image, so that single precision suffices
    x0, x1, x2, x3 = (corner_x.float() / (width - 1)).unbind(1)
    y0, y1, y2, y3 = (corner_y.float() / (height - 1)).unbind(1)
    dx1, dx2, dx3 = x1 - x2, x3 - x2, x0 - x1 + x2 - x3
    dy1, dy2, dy3 = y1 - y2, y3 - y2, y0 - y1 + y2 - y3
    scale = dx1 * dy2 - dx2 * dy1
    g, h = dx3 * dy2 - dx2 * dy3, dx1 * dy3 - dx3 * dy1
    # the columns of the 3x3 matrix from the square to the quadrilateral
    first = torch.stack([(x1 - x0) * scale + g * x1, (y1 - y0) * scale + g * y1, g], dim=1)
    second = torch.stack([(x3 - x0) * scale + h * x3, (y3 - y0) * scale + h * y3, h], dim=1)
    third = torch.stack([x0 * scale, y0 * scale, scale], dim=1)
    # what is wanted is the way back, from a pixel of the result to its source; up to a factor, which cancels, the rows
    # of the inverse matrix are cross products of these columns
    pixel_x, pixel_y = _pixels(images)
    # torchvision counts from the corners of the pixels here, half a pixel off its own corner points; so do we
    pixel_x, pixel_y = (pixel_x + 0.5) / (width - 1), (pixel_y + 0.5) / (height - 1)

    def project(row: Tensor) -> Tensor:
        a, b, c = row[:, :, None, None].unbind(1)
        return a * pixel_x + b * pixel_y + c

    depth = project(torch.linalg.cross(first, second))
    # a pixel on the horizon has its source at infinity, or nowhere at all: put it outside
    x = (project(torch.linalg.cross(second, third)) / depth).nan_to_num(-2.0).clamp(-2.0, 2.0)
    y = (project(torch.linalg.cross(third, first)) / depth).nan_to_num(-2.0).clamp(-2.0, 2.0)
    return _sample(images, x * (width - 1) - 0.5, y * (height - 1) - 0.5, fill)


def affine(
    images: Tensor, degrees: Tensor, right: Tensor, down: Tensor, scale: Tensor, shear: Tensor, fill: Tensor
) -> Tensor:
    """Shear each image by ``shear`` degrees, scale it, turn it clockwise, then shift it, each ``[B]``.

    Args:
        images: uint8 ``[B, C, H, W]``.
        degrees: angle.
        right: shift in pixels.
        down: shift in pixels.
        scale: factor.
        shear: angle in degrees.
        fill: ``[C]``, levels outside.
    """
    height, width = images.shape[-2:]
    degrees, right, down, scale, shear = (v[:, None, None] for v in (degrees, right, down, scale, shear))
    pixel_x, pixel_y = _pixels(images)
    centre_x, centre_y = (width - 1) / 2, (height - 1) / 2
    # backwards, from a pixel of the result to its source
    x, y = (pixel_x - centre_x - right) / scale, (pixel_y - centre_y - down) / scale
    cos, sin = torch.cos(degrees.deg2rad()), torch.sin(degrees.deg2rad())
    x, y = cos * x + sin * y, cos * y - sin * x
    x = x + torch.tan(shear.deg2rad()) * y
    return _sample(images, x + centre_x, y + centre_y, fill)


def resized_crop(images: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """Cut a rectangle, given by int64 ``[B]``, out of each image and enlarge it to the image's size."""
    rows, columns = images.shape[-2:]
    top, left, height, width = (v[:, None, None] for v in (top, left, height, width))
    pixel_x, pixel_y = _pixels(images)
    # pixels next to the crop do not take part
    x = left + ((pixel_x + 0.5) * width / columns - 0.5).clamp(min=0).minimum(width - 1.0)
    y = top + ((pixel_y + 0.5) * height / rows - 0.5).clamp(min=0).minimum(height - 1.0)
    return _sample(images, x.expand(-1, rows, -1), y, images.new_zeros(images.shape[1]))


# ---- internals


def _pixels(images: Tensor) -> tuple[Tensor, Tensor]:
    """x ``[W]`` and y ``[H, 1]`` of the pixels."""
    height, width = images.shape[-2:]
    return torch.arange(width, device=images.device), torch.arange(height, device=images.device)[:, None]


def _sample(images: Tensor, x: Tensor, y: Tensor, fill: Tensor) -> Tensor:
    """Bilinear samples of ``images`` at ``x`` and ``y`` (float ``[B, H, W]``, or ``y`` ``[B, H, 1]``)."""
    height, width = images.shape[-2:]
    grid = torch.empty(*x.shape, 2, device=images.device)
    grid[..., 0] = (2 * x + 1) / width - 1
    grid[..., 1] = (2 * y + 1) / height - 1
    # outside, grid_sample gives 0: have that stand for the level to fill with
    fill = fill.float().view(-1, 1, 1)
    shifted = images.to(torch.float32, memory_format=torch.contiguous_format).sub_(fill)
    samples = F.grid_sample(shifted, grid, padding_mode="zeros", align_corners=False).add_(fill)
    return samples.round_().to(torch.uint8, memory_format=torch.channels_last)
