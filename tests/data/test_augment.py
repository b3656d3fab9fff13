"""Batch transforms: right for each image, different between images, and fixed by the generator."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torchvision.transforms.v2 import functional as vision

from lit_project.data.augment import BatchTransform, RandomCrop, RandomHorizontalFlip, to_float
from lit_project.seeding import keyed_generator


def images(batch: int = 16, channels: int = 3, height: int = 12, width: int = 9) -> Tensor:
    return torch.randint(1, 256, (batch, channels, height, width), generator=keyed_generator(5)).to(torch.uint8)


def coordinates(batch: int, side: int) -> Tensor:
    """Channel 0 holds each pixel's row + 1, channel 1 its column + 1; 0 is left for padding."""
    rows = torch.arange(1, side + 1).view(side, 1).expand(side, side)
    return torch.stack([rows, rows.T]).to(torch.uint8).expand(batch, 2, side, side)


def offsets(crops: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """How far down and right each crop of ``coordinates`` was taken, -padding..padding."""
    centre = side // 2
    return crops[:, 0, centre, centre].long() - centre - 1, crops[:, 1, centre, centre].long() - centre - 1


TRANSFORMS = [RandomCrop(3), RandomCrop(3, mode="reflect"), RandomHorizontalFlip()]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=["crop", "crop-reflect", "flip"])
@pytest.mark.parametrize("channels", [1, 3])
def test_shape_and_type_are_kept_and_the_input_untouched(transform: BatchTransform, channels: int):
    batch = images(channels=channels)
    before = batch.clone()
    out = transform(batch, keyed_generator(0))
    assert out.shape == batch.shape
    assert out.dtype == torch.uint8
    assert torch.equal(batch, before)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=["crop", "crop-reflect", "flip"])
def test_only_the_generator_decides(transform: BatchTransform):
    batch = images(64)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = transform(batch, keyed_generator(1, 2))
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left alone"
    torch.manual_seed(2)
    assert torch.equal(first, transform(batch, keyed_generator(1, 2)))
    assert not torch.equal(first, transform(batch, keyed_generator(1, 3)))


@pytest.mark.parametrize("transform", TRANSFORMS, ids=["crop", "crop-reflect", "flip"])
def test_images_of_a_batch_are_drawn_independently(transform: BatchTransform):
    same = images(1).expand(64, -1, -1, -1)
    assert len(transform(same, keyed_generator(0)).flatten(1).unique(dim=0)) > 1


@pytest.mark.parametrize("transform", TRANSFORMS, ids=["crop", "crop-reflect", "flip"])
def test_channels_last_input_gives_the_same_result(transform: BatchTransform):
    batch = images()
    last = batch.contiguous(memory_format=torch.channels_last)
    assert torch.equal(transform(batch, keyed_generator(4)), transform(last, keyed_generator(4)))


def test_crop_is_torchvisions_crop_at_the_same_offset():
    side, padding = 11, 4
    picture = images(64, height=side, width=side)
    crop = RandomCrop(padding)
    crops = crop(picture, keyed_generator(8))
    # the same generator on coordinates tells where each window lay
    down, right = offsets(crop(coordinates(64, side), keyed_generator(8)), side)
    for index in range(64):
        padded = vision.pad(picture[index], [padding] * 4)
        top, left = int(down[index]) + padding, int(right[index]) + padding
        assert torch.equal(crops[index], vision.crop(padded, top, left, side, side))


def test_reflecting_crop_is_a_crop_of_the_mirrored_border():
    side, padding = 11, 4
    picture = images(64, height=side, width=side)
    crops = RandomCrop(padding, mode="reflect")(picture, keyed_generator(8))
    # constant padding draws the same offsets
    down, right = offsets(RandomCrop(padding)(coordinates(64, side), keyed_generator(8)), side)
    padded = pad(picture.float(), (padding,) * 4, mode="reflect").to(torch.uint8)
    for index in range(64):
        top, left = int(down[index]) + padding, int(right[index]) + padding
        assert torch.equal(crops[index], padded[index, :, top : top + side, left : left + side])


def test_crop_offsets_are_uniform_and_independent_in_both_directions():
    batch, side, padding = 20_000, 11, 4
    down, right = offsets(RandomCrop(padding)(coordinates(batch, side), keyed_generator(3)), side)
    places = 2 * padding + 1
    assert down.min() == right.min() == -padding
    assert down.max() == right.max() == padding
    counts = torch.bincount((down + padding) * places + right + padding, minlength=places**2).double()
    expected = batch / places**2
    # chi-square with 80 degrees of freedom: 134 is passed once in 10,000 keys
    assert ((counts - expected) ** 2 / expected).sum() < 134


def test_flip_mirrors_whole_images_with_probability_p():
    batch = images(4_000, height=3, width=4)
    for p in (0.0, 0.25, 1.0):
        out = RandomHorizontalFlip(p)(batch, keyed_generator(6))
        flipped = (out == vision.horizontal_flip(batch)).flatten(1).all(1)
        kept = (out == batch).flatten(1).all(1)
        assert (flipped | kept).all()
        # four standard deviations of the share
        assert abs(flipped.double().mean() - p) <= 4 * (p * (1 - p) / 4_000) ** 0.5


@pytest.mark.parametrize(
    "make", [lambda: RandomCrop(0), lambda: RandomCrop(2, "edge"), lambda: RandomHorizontalFlip(2)]
)
def test_impossible_settings_are_refused(make: type[BatchTransform]):
    with pytest.raises(ValueError, match="it must"):
        make()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_to_float_normalises_every_channel(memory_format: torch.memory_format):
    batch = images().contiguous(memory_format=memory_format)
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.4])
    out = to_float(batch, mean, std)
    expected = (batch.double() / 255 - mean.double().view(3, 1, 1)) / std.double().view(3, 1, 1)
    assert out.dtype == torch.float32
    assert out.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
