"""Perspective, affine maps and resized crops: torchvision's results for given parameters, and its distribution."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from augment_helpers import assert_same_distribution, drawn, images
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as vision

from lit_project.data.augment import BatchTransform
from lit_project.data.augment_warp import (
    ProgressiveResize,
    RandomAffine,
    RandomPerspective,
    RandomResizedCrop,
    affine,
    perspective,
    resized_crop,
)
from lit_project.errors import InputError

BLACK = torch.zeros(3, dtype=torch.uint8)


def assert_within_a_level(ours: Tensor, theirs: Tensor) -> None:
    assert (ours.int() - theirs.int()).abs().max() <= 1


# ---- given parameters


@pytest.mark.parametrize(
    "corners",
    [
        [(0, 0), (8, 0), (8, 11), (0, 11)],
        [(2, 1), (7, 3), (6, 9), (1, 11)],
        [(0, 4), (8, 0), (5, 11), (3, 7)],
        [(4, 5), (4, 0), (8, 6), (0, 6)],
    ],
)
def test_perspective_with_given_corners_is_torchvisions(corners: list[tuple[int, int]]):
    batch = images(4)
    x, y = torch.tensor(corners).T.expand(4, 2, 4).unbind(1)
    start = [[0, 0], [8, 0], [8, 11], [0, 11]]
    expected = vision.perspective(batch, start, [list(corner) for corner in corners])
    assert_within_a_level(perspective(batch, x, y, BLACK), expected)


def test_each_image_has_its_own_perspective():
    batch = images(2)
    x, y = torch.tensor([[2, 7, 6, 1], [0, 8, 5, 3]]), torch.tensor([[1, 3, 9, 11], [4, 0, 11, 7]])
    out = perspective(batch, x, y, BLACK)
    for i in range(2):
        assert torch.equal(out[i : i + 1], perspective(batch[i : i + 1], x[i : i + 1], y[i : i + 1], BLACK))


@pytest.mark.parametrize(
    ("degrees", "right", "down", "scale", "shear"),
    [
        (0, 0, 0, 1.0, 0),
        (30, 0, 0, 1.0, 0),
        (0, 2, -3, 1.0, 0),
        (0, 0, 0, 0.7, 0),
        (0, 0, 0, 1, 20),
        (-70, 1, 2, 1.3, -15),
    ],
)
def test_affine_with_given_parameters_is_torchvisions(
    degrees: float, right: int, down: int, scale: float, shear: float
):
    batch = images(4)
    expected = vision.affine(batch, degrees, [right, down], scale, [shear, 0.0], InterpolationMode.BILINEAR)
    parameters = [torch.full((4,), float(value)) for value in (degrees, right, down, scale, shear)]
    assert_within_a_level(affine(batch, *parameters, BLACK), expected)


@pytest.mark.parametrize(("top", "left", "height", "width"), [(0, 0, 12, 9), (3, 2, 5, 4), (11, 0, 1, 9), (2, 8, 7, 1)])
def test_resized_crop_at_a_given_place_is_torchvisions(top: int, left: int, height: int, width: int):
    batch = images(4)
    expected = vision.resized_crop(batch, top, left, height, width, [12, 9])
    place = [torch.full((4,), value) for value in (top, left, height, width)]
    assert_within_a_level(resized_crop(batch, *place), expected)


# ---- drawn parameters


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (RandomPerspective(0.7, p=0.8), v2.RandomPerspective(0.7, p=0.8, fill=None)),
        (
            RandomAffine(40, (0.2, 0.1), (0.7, 1.5), 20),
            v2.RandomAffine(40, (0.2, 0.1), (0.7, 1.5), 20, InterpolationMode.BILINEAR, fill=None),
        ),
        (RandomAffine(translate=(0.4, 0.2)), v2.RandomAffine(0, translate=(0.4, 0.2), fill=None)),
        (RandomResizedCrop((0.2, 0.9), (0.3, 1.0)), v2.RandomResizedCrop((12, 9), (0.2, 0.9), (0.3, 1.0))),
        # the image has ratio 0.75, so hardly a try fits
        (RandomResizedCrop((0.7, 1.0), (1.0, 1.2)), v2.RandomResizedCrop((12, 9), (0.7, 1.0), (1.0, 1.2))),
        (RandomResizedCrop((0.8, 1.0), (0.3, 0.5)), v2.RandomResizedCrop((12, 9), (0.8, 1.0), (0.3, 0.5))),
    ],
    ids=["perspective", "affine", "shifts", "resized-crop", "no-wide-crop-fits", "no-high-crop-fits"],
)
def test_distribution_is_torchvisions(ours: BatchTransform, theirs: Any):
    picture = images(1)
    out = ours(picture.expand(10_000, -1, -1, -1), drawn(10_000, 9))
    torch.manual_seed(4)
    expected = torch.stack([theirs(picture[0].float()) for _ in range(2_000)])
    # torchvision's perspective has no number for a pixel on the horizon
    assert_same_distribution(out, expected.nan_to_num(0.0))


def test_perspective_transforms_a_share_p_and_leaves_the_others_exactly():
    batch = images(4_000)
    changed = (RandomPerspective(1.0, p=0.3)(batch, drawn(4_000)) != batch).flatten(1).any(1)
    assert abs(changed.double().mean() - 0.3) < 4 * (0.3 * 0.7 / 4_000) ** 0.5
    assert torch.equal(RandomPerspective(p=0.0)(batch, drawn(4_000)), batch)
    assert torch.equal(RandomPerspective(0.0, p=1.0)(batch, drawn(4_000)), batch)


def test_a_pixel_on_the_horizon_is_outside():
    # corners that move as far as they may: many lie in one line, or in one place
    flat = torch.full((1, 3, 8, 8), 200, dtype=torch.uint8).expand(2_000, -1, -1, -1)
    out = RandomPerspective(1.0, p=1.0, fill=7)(flat, drawn(2_000))
    assert (out.min(), out.max()) == (7, 200)


@pytest.mark.parametrize("make", [RandomPerspective, RandomAffine])
def test_outside_is_filled_with_one_level_a_channel(make: Callable[..., BatchTransform]):
    fill = [10, 128, 255]
    arguments = {"distortion_scale": 0.8, "p": 1.0} if make is RandomPerspective else {"scale": (0.3, 0.5)}
    flat = torch.tensor(fill, dtype=torch.uint8).view(3, 1, 1).expand(32, 3, 12, 9)
    # also along the edge, where inside and outside blend
    assert torch.equal(make(**arguments, fill=fill)(flat, drawn(32)), flat)
    dark, filled = (make(**arguments, fill=level)(images(32), drawn(32)) for level in (0, fill))
    outside = (dark == 0).all(1)
    assert 0.1 < outside.double().mean() < 0.95
    assert torch.equal(filled.permute(0, 2, 3, 1)[outside], flat.permute(0, 2, 3, 1)[outside])


def test_affine_without_arguments_changes_nothing():
    assert torch.equal(RandomAffine()(images(), drawn(16)), images())


def test_images_are_small_in_the_first_epochs_alone():
    batch = images(height=20, width=30)
    shrink = ProgressiveResize(size=8, epochs=2)
    for epoch in (0, 1):
        small = shrink(batch, drawn(16, epoch=epoch))
        assert_within_a_level(small, vision.resize(batch, [8, 12], antialias=True))
        assert small.shape == (16, 3, 8, 12)
        assert small.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(shrink(batch, drawn(16, epoch=2)), batch)
    assert torch.equal(ProgressiveResize(size=20, epochs=2)(batch, drawn(16)), batch), "never enlarged"


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomPerspective(1.1),
        lambda: RandomPerspective(p=-1),
        lambda: RandomPerspective(fill=300),
        lambda: RandomAffine(-1),
        lambda: RandomAffine(translate=(0.1, 1.5)),
        lambda: RandomAffine(scale=(0.0, 1.0)),
        lambda: RandomAffine(shear=90),
        lambda: RandomResizedCrop((0.5, 1.2)),
        lambda: RandomResizedCrop(ratio=(2.0, 1.0)),
        lambda: ProgressiveResize(size=0, epochs=1),
        lambda: ProgressiveResize(size=8, epochs=0),
    ],
)
def test_impossible_settings_are_refused(make: Callable[[], BatchTransform]):
    with pytest.raises(InputError, match="it must"):
        make()
