"""ColorJitter: torchvision's operations, ranges and distribution, whole batch at once."""

from collections.abc import Callable

import pytest
import torch
from augment_helpers import assert_same_distribution, drawn, images
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as vision

from lit_project.data.augment_color import ColorJitter
from lit_project.errors import InputError

OPERATIONS = {
    "brightness": vision.adjust_brightness,
    "contrast": vision.adjust_contrast,
    "saturation": vision.adjust_saturation,
    "hue": vision.adjust_hue,
}


def palette() -> Tensor:
    """Random colours, and those where HSV is special: greys, primaries, mixtures, and two channels alike."""
    corners = torch.cartesian_prod(*[torch.tensor([0, 1, 128, 254, 255])] * 3).to(torch.uint8)
    special = corners[:120].T.reshape(1, 3, 12, 10)
    return torch.cat([images(31, width=10), special])


def expected(batch: Tensor, **factors: float) -> Tensor:
    """Torchvision's operations in this order, on floats: on bytes it cuts off fractions after each, and its greys'."""
    result = vision.to_dtype(batch, torch.float32, scale=True)
    for name, factor in factors.items():
        result = OPERATIONS[name](result, factor)
    return 255 * result


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        *[(name, factor) for name in ("brightness", "contrast", "saturation") for factor in (0.0, 0.3, 0.9, 1.7)],
        *[("hue", turn) for turn in (-0.5, -0.2, 0.01, 0.33, 0.5)],
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_one_fixed_factor_is_torchvisions_operation(name: str, factor: float, channels: int):
    batch = palette()[:, :channels]
    out = ColorJitter(**{name: (factor, factor)})(batch, drawn(len(batch)))
    # rounded to the nearest level, so half a level at most
    assert (out - expected(batch, **{name: factor})).abs().max() < 0.51


@pytest.mark.parametrize("factors", [(1.3, 0.7, 1.5, 0.2), (0.6, 1.8, 0.4, -0.4)])
@pytest.mark.parametrize("channels", [1, 3])
def test_all_at_once_are_torchvisions_operations_in_the_stated_order(factors: tuple[float, ...], channels: int):
    batch = palette()[:, :channels]
    named = dict(zip(OPERATIONS, factors, strict=True))
    out = ColorJitter(**{name: (factor, factor) for name, factor in named.items()})(batch, drawn(len(batch)))
    assert (out - expected(batch, **named)).abs().max() < 0.51


def test_grey_images_change_in_brightness_and_contrast_only():
    grey = images(8, channels=1)
    assert torch.equal(ColorJitter(saturation=0.9, hue=0.5)(grey, drawn(8)), grey)
    assert not torch.equal(ColorJitter(brightness=0.9)(grey, drawn(8)), grey)
    assert not torch.equal(ColorJitter(contrast=0.9)(grey, drawn(8)), grey)


def test_without_arguments_nothing_changes():
    assert torch.equal(ColorJitter()(palette(), drawn(32)), palette())


@pytest.mark.parametrize(
    "arguments",
    [{"brightness": 1.4}, {"contrast": 0.6}, {"saturation": (0.2, 3.0)}, {"hue": 0.3}, {"hue": (-0.1, 0.4)}],
    ids=str,
)
def test_factors_are_distributed_as_torchvisions(arguments: dict[str, float | tuple[float, float]]):
    picture = images(1, height=4, width=5)
    ours = ColorJitter(**arguments)(picture.expand(20_000, -1, -1, -1), drawn(20_000, 3))
    torch.manual_seed(1)
    reference = v2.ColorJitter(**arguments)
    exact = vision.to_dtype(picture[0], torch.float32, scale=True)
    theirs = torch.stack([reference(exact) for _ in range(2_000)]) * 255
    assert_same_distribution(ours, theirs)


def test_factors_are_drawn_independently_of_each_other():
    # a grey pixel tells the brightness; how far a coloured one's channels lie apart for it, the saturation
    picture = torch.tensor([[100, 100, 100], [120, 100, 80]], dtype=torch.uint8).T.reshape(1, 3, 1, 2)
    out = ColorJitter(brightness=0.5, saturation=0.5)(picture.expand(5_000, -1, -1, -1), drawn(5_000)).double()
    brightness = out[:, 0, 0, 0]
    saturation = (out[:, 0, 0, 1] - out[:, 2, 0, 1]) / brightness
    correlation = torch.corrcoef(torch.stack([brightness, saturation]))[0, 1]
    assert saturation.std() > 0.05
    assert abs(correlation) < 4 / 5_000**0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: ColorJitter(brightness=-0.1),
        lambda: ColorJitter(contrast=(1.2, 0.8)),
        lambda: ColorJitter(saturation=(-0.1, 1.0)),
        lambda: ColorJitter(hue=0.6),
        lambda: ColorJitter(hue=(-0.6, 0.0)),
    ],
)
def test_impossible_settings_are_refused(make: Callable[[], ColorJitter]):
    with pytest.raises(InputError, match="it must"):
        make()


def test_other_numbers_of_channels_are_refused():
    with pytest.raises(InputError, match="the images have 4 channels"):
        ColorJitter(0.1)(images(channels=4), drawn(16))
