"""Batch transforms: right for each image, different between images, and fixed by the generator."""

from itertools import pairwise

import pytest
import torch
from augment_helpers import assert_same_counts, drawn, images
from jsonargparse import ArgumentParser
from torch import Tensor
from torch.nn.functional import pad
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as vision

from lit_project.data.augment import (
    AlternatingFlip,
    BatchTransform,
    Cutout,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    to_float,
)
from lit_project.data.augment_color import ColorJitter
from lit_project.data.augment_warp import RandomAffine, RandomPerspective, RandomResizedCrop
from lit_project.errors import InputError

DRAWING = {
    "crop": RandomCrop(3),
    "crop-reflect": RandomCrop(3, mode="reflect"),
    "flip": RandomHorizontalFlip(),
    "erasing": RandomErasing(),
    "erasing-noise": RandomErasing(value="random"),
    "cutout": Cutout(4),
    "jitter": ColorJitter(0.4, 0.4, 0.4, 0.2),
    "perspective": RandomPerspective(),
    "affine": RandomAffine(30, (0.2, 0.1), (0.8, 1.2), 10),
    "resized-crop": RandomResizedCrop(),
}
ALL = {**DRAWING, "alternating": AlternatingFlip()}
drawing = pytest.mark.parametrize("transform", DRAWING.values(), ids=DRAWING)
every = pytest.mark.parametrize("transform", ALL.values(), ids=ALL)


# ---- what holds for each of them


@every
@pytest.mark.parametrize("channels", [1, 3])
def test_shape_type_and_layout_are_kept_and_the_input_untouched(transform: BatchTransform, channels: int):
    batch = images(channels=channels)
    before = batch.clone()
    out = transform(batch, drawn(16))
    assert out.shape == batch.shape
    assert out.dtype == torch.uint8
    assert out.permute(0, 2, 3, 1).is_contiguous()
    assert torch.equal(batch, before)


@drawing
def test_only_the_generator_decides(transform: BatchTransform):
    batch = images(64)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = transform(batch, drawn(64, 1, 2))
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left alone"
    torch.manual_seed(2)
    assert torch.equal(first, transform(batch, drawn(64, 1, 2)))
    assert not torch.equal(first, transform(batch, drawn(64, 1, 3)))


@every
def test_images_of_a_batch_are_drawn_independently(transform: BatchTransform):
    same = images(1).expand(64, -1, -1, -1)
    results = transform(same, drawn(64)).flatten(1).unique(dim=0)
    assert len(results) == 2 if "Flip" in type(transform).__name__ else len(results) > 16


@every
def test_an_image_does_not_depend_on_the_others(transform: BatchTransform):
    batch = images()
    others = batch.flip(0)
    others[3] = batch[3]
    assert torch.equal(transform(batch, drawn(16))[3], transform(others, drawn(16))[3])


@every
def test_the_layout_in_memory_does_not_change_the_result(transform: BatchTransform):
    batch = images()
    assert torch.equal(transform(batch, drawn(16, 4)), transform(batch.contiguous(), drawn(16, 4)))


def test_all_are_chosen_in_a_config_by_class_path():
    package = "lit_project.data"
    arguments = {
        "augment.RandomCrop": {"padding": 2, "mode": "reflect"},
        "augment.AlternatingFlip": {},
        "augment.RandomErasing": {"p": 1, "scale": [0.1, 0.2], "ratio": [0.5, 2], "value": [1, 2, 3]},
        "augment.Cutout": {"size": 4, "value": 9},
        "augment_color.ColorJitter": {"brightness": 0.4, "hue": [-0.1, 0.2]},
        "augment_warp.RandomPerspective": {"distortion_scale": 0.3},
        "augment_warp.RandomAffine": {"degrees": 10, "translate": [0.1, 0.1]},
        "augment_warp.RandomResizedCrop": {"scale": [0.5, 1]},
    }
    parser = ArgumentParser()
    parser.add_argument("--augment", type=list[BatchTransform])
    given = [{"class_path": f"{package}.{name}", "init_args": init} for name, init in arguments.items()]
    config = parser.parse_object({"augment": given})
    assert parser.parse_string(parser.dump(config)) == config
    erasing, jitter = (parser.instantiate(config).augment[i] for i in (2, 4))
    assert (erasing.p, erasing.scale, erasing.ratio, erasing.value) == (1, (0.1, 0.2), (0.5, 2), [1, 2, 3])
    assert (jitter.brightness, jitter.contrast, jitter.hue) == ((0.6, 1.4), (1, 1), (-0.1, 0.2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomCrop(0),
        lambda: RandomCrop(2, "edge"),
        lambda: RandomHorizontalFlip(2),
        lambda: RandomErasing(-0.1),
        lambda: RandomErasing(scale=(0.3, 0.1)),
        lambda: RandomErasing(scale=(0.1, 1.1)),
        lambda: RandomErasing(ratio=(0, 1)),
        lambda: RandomErasing(value=256),
        lambda: RandomErasing(value=[]),
        lambda: Cutout(0),
        lambda: Cutout(value=-1),
    ],
)
def test_impossible_settings_are_refused(make: type[BatchTransform]):
    with pytest.raises(InputError, match="it must"):
        make()


@pytest.mark.parametrize("transform", [Cutout(value=[1, 2]), RandomErasing(value=[1, 2]), RandomAffine(fill=[1, 2])])
def test_levels_must_be_as_many_as_channels(transform: BatchTransform):
    with pytest.raises(InputError, match="2 levels to fill with, but the images have 3 channels"):
        transform(images(), drawn(16))


# ---- crop


def coordinates(batch: int, side: int) -> Tensor:
    """Channel 0 holds each pixel's row + 1, channel 1 its column + 1; 0 is left for padding."""
    rows = torch.arange(1, side + 1).view(side, 1).expand(side, side)
    return torch.stack([rows, rows.T]).to(torch.uint8).expand(batch, 2, side, side)


def offsets(crops: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """How far down and right each crop of ``coordinates`` was taken, -padding..padding."""
    centre = side // 2
    return crops[:, 0, centre, centre].long() - centre - 1, crops[:, 1, centre, centre].long() - centre - 1


@pytest.mark.parametrize("mode", ["constant", "reflect"])
@pytest.mark.parametrize(("height", "width"), [(11, 11), (12, 9), (9, 12)])
def test_crop_is_torchvisions_crop_at_the_same_offset(mode: str, height: int, width: int):
    padding = 4
    picture = images(64, height=height, width=width)
    crops = RandomCrop(padding, mode)(picture, drawn(64, 8))
    # the same draw on coordinates tells where each window lay
    down, right = offsets(RandomCrop(padding)(coordinates(64, 11), drawn(64, 8)), 11)
    # torchvision has no mirroring of bytes on every device either, so it is asked for floats
    padded = pad(picture.float(), (padding,) * 4, mode=mode).to(torch.uint8)
    for index in range(64):
        top, left = int(down[index]) + padding, int(right[index]) + padding
        assert torch.equal(crops[index], vision.crop(padded[index], top, left, height, width))


def test_crop_offsets_are_uniform_and_independent_in_both_directions():
    batch, side, padding = 20_000, 11, 4
    down, right = offsets(RandomCrop(padding)(coordinates(batch, side), drawn(batch, 3)), side)
    places = 2 * padding + 1
    assert down.min() == right.min() == -padding
    assert down.max() == right.max() == padding
    counts = torch.bincount((down + padding) * places + right + padding, minlength=places**2).double()
    expected = batch / places**2
    # chi-square with 80 degrees of freedom: 134 is passed once in 10,000 keys
    assert ((counts - expected) ** 2 / expected).sum() < 134


def test_an_image_too_small_to_mirror_is_refused():
    with pytest.raises(InputError, match="cannot mirror 9 pixels of a 12x9 image"):
        RandomCrop(9, "reflect")(images(), drawn(16))


# ---- flips


def flipped(out: Tensor, batch: Tensor) -> Tensor:
    """Bool ``[B]``: which images are mirrored; the others must be as before."""
    mirrored = (out == vision.horizontal_flip(batch)).flatten(1).all(1)
    assert (mirrored | (out == batch).flatten(1).all(1)).all()
    return mirrored


def test_flip_mirrors_whole_images_with_probability_p():
    batch = images(4_000, height=3, width=4)
    for p in (0.0, 0.25, 1.0):
        share = flipped(RandomHorizontalFlip(p)(batch, drawn(4_000, 6)), batch).double().mean()
        # four standard deviations of the share
        assert abs(share - p) <= 4 * (p * (1 - p) / 4_000) ** 0.5


def test_alternating_flip_shows_both_orientations_in_any_two_epochs():
    batch = images(500)
    by_epoch = [flipped(AlternatingFlip()(batch, drawn(500, 7, epoch, epoch=epoch)), batch) for epoch in range(5)]
    for before, after in pairwise(by_epoch):
        assert torch.equal(before, ~after)


def test_alternating_flip_goes_by_the_index_not_by_the_place_in_the_batch():
    batch = images(500)
    straight = flipped(AlternatingFlip()(batch, drawn(500)), batch)
    shuffled = drawn(500)._replace(indices=torch.arange(500).flip(0))
    assert torch.equal(flipped(AlternatingFlip()(batch, shuffled), batch), straight.flip(0))


def test_alternating_flip_begins_with_unrelated_halves():
    batch = images(1, height=1, width=2).expand(20_000, -1, -1, -1)
    coins = flipped(AlternatingFlip()(batch, drawn(20_000)), batch).double()
    assert abs(coins.mean() - 0.5) < 4 * 0.5 / 20_000**0.5
    # data often lies in the order of its classes, or has them take turns
    for period in (2, 3, 10, 100):
        for start in range(period):
            members = coins[start::period]
            assert abs(members.mean() - 0.5) < 4 * 0.5 / len(members) ** 0.5
        equal = (coins[period:] == coins[:-period]).double()
        assert abs(equal.mean() - 0.5) < 4 * 0.5 / len(equal) ** 0.5
    for block in coins.view(-1, 1_000):
        assert abs(block.mean() - 0.5) < 4 * 0.5 / 1_000**0.5


# ---- erasing


def rectangles(erased: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Top, left, height and width of what is erased (true in ``[B, H, W]``), which must be one rectangle."""
    rows, columns = erased.any(2), erased.any(1)
    assert torch.equal(erased, rows[:, :, None] & columns[:, None, :])
    height, width = rows.sum(1), columns.sum(1)
    top, left = rows.int().argmax(1), columns.int().argmax(1)
    for begin, length, inside in ((top, height, rows), (left, width, columns)):
        position = torch.arange(inside.shape[1])
        assert torch.equal(inside, (position >= begin[:, None]) & (position < (begin + length)[:, None]))
    return top, left, height, width


def test_erased_rectangles_are_distributed_as_torchvisions():
    # an oblong image, an uneven ratio and large areas: many tries do not fit and are drawn anew
    settings = {"p": 0.8, "scale": (0.1, 0.9), "ratio": (0.2, 1.5)}
    white = torch.full((1, 1, 12, 9), 255, dtype=torch.uint8)
    ours = RandomErasing(**settings)(white.expand(20_000, -1, -1, -1), drawn(20_000, 2))
    torch.manual_seed(3)
    reference = v2.RandomErasing(**settings)
    theirs = torch.stack([reference(white[0]) for _ in range(5_000)])
    # a value drawn from 12 has 11 degrees of freedom: 40 is passed less than once in 10,000
    for a, b in zip(rectangles(ours[:, 0] == 0), rectangles(theirs[:, 0] == 0), strict=True):
        assert_same_counts(a, b, limit=40)
    # the area, in ten bins
    a, b = ((out == 0).flatten(1).sum(1) * 10 // 108 for out in (ours, theirs))
    assert_same_counts(a, b, limit=36)
    share = (a == 0).double().mean()
    assert 0.15 < share < 0.3, "without a rectangle: those not chosen, and those where no try fits"


def test_erasing_fills_with_levels_or_noise_and_nothing_else_changes():
    batch = images(256)
    plain = RandomErasing(p=1.0, value=0)(batch, drawn(256))
    erased = plain == 0
    coloured = RandomErasing(p=1.0, value=[1, 2, 3])(batch, drawn(256))
    levels = torch.tensor([1, 2, 3], dtype=torch.uint8).view(3, 1, 1)
    assert torch.equal(coloured, torch.where(erased, levels, batch))
    noisy = RandomErasing(p=1.0, value="random")(batch, drawn(256))
    assert torch.equal(noisy[~erased], batch[~erased])
    noise = noisy[erased].double()
    assert abs(noise.mean() - 127.5) < 5 * 73.9 / len(noise) ** 0.5
    assert noise.std() == pytest.approx(73.9, rel=0.05)


def test_cutout_is_a_square_around_a_uniform_pixel_that_may_hang_over():
    size, height, width, batch = 4, 7, 9, 30_000
    white = torch.full((1, 1, height, width), 255, dtype=torch.uint8).expand(batch, -1, -1, -1)
    top, left, rows, columns = rectangles(Cutout(size)(white, drawn(batch))[:, 0] == 0)

    def expected(side: int) -> dict[tuple[int, int], int]:
        spans = [(max(0, centre - 2), min(side, centre + 2)) for centre in range(side)]
        return {span: spans.count(span) for span in spans}

    seen = torch.stack([top, top + rows, left, left + columns], dim=1)
    statistic = 0.0
    for (first, last), a in expected(height).items():
        for (begin, end), b in expected(width).items():
            count = (seen == torch.tensor([first, last, begin, end])).all(1).sum().item()
            mean = batch * a * b / (height * width)
            statistic += (count - mean) ** 2 / mean
    # chi-square with 62 degrees of freedom
    assert statistic < 111


def test_cutout_fills_with_one_level_a_channel():
    batch = images(64)
    erased = Cutout(3)(batch, drawn(64)) == 0
    levels = torch.tensor([7, 8, 9], dtype=torch.uint8).view(3, 1, 1)
    assert torch.equal(Cutout(3, [7, 8, 9])(batch, drawn(64)), torch.where(erased, levels, batch))


# ---- normalisation


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_to_float_normalises_every_channel(memory_format: torch.memory_format):
    batch = images().contiguous(memory_format=memory_format)
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.4])
    out = to_float(batch, mean, std)
    expected = (batch.double() / 255 - mean.double().view(3, 1, 1)) / std.double().view(3, 1, 1)
    assert out.dtype == torch.float32
    assert out.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
