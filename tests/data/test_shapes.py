"""The embedded shapes: the same everywhere, balanced, and not solved without looking at shape."""

import hashlib
import subprocess
import sys
from collections.abc import Iterator

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lit_project.data.base import channel_statistics, to_float
from lit_project.data.shapes import Shapes10
from lit_project.errors import InputError

FINGERPRINT = """
import hashlib, lightning, torch
from lit_project.data.shapes import Shapes10

torch.set_num_threads(1)
lightning.seed_everything(7, verbose=False)
data = Shapes10(num_train=200, num_val=100, num_test=100)
images = [data.load(split).images for split in ("train", "val", "test")]
print(hashlib.md5(b"".join(split.numpy().tobytes() for split in images)).hexdigest())
"""


@pytest.fixture(scope="module")
def shapes() -> Iterator[Shapes10]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tests run side by side: more threads than cores would only wait for each other
    data = Shapes10()
    data.setup("fit")
    data.setup("test")
    yield data
    torch.set_num_threads(threads)


def test_images_are_the_same_in_every_process_and_for_every_seed():
    L.seed_everything(1, verbose=False)
    before = torch.get_rng_state()
    data = Shapes10(num_train=200, num_val=100, num_test=100)
    images = [data.load(split).images for split in ("train", "val", "test")]
    here = hashlib.md5(b"".join(split.numpy().tobytes() for split in images)).hexdigest()
    there = subprocess.run([sys.executable, "-c", FINGERPRINT], capture_output=True, text=True, check=True)
    assert there.stdout.split()[-1] == here
    assert torch.equal(torch.get_rng_state(), before), "drawing must leave the global generator alone"


def test_splits_are_balanced_uint8_and_share_no_image(shapes: Shapes10):
    seen: set[bytes] = set()
    for split, size in (("train", shapes.sizes["train"]), ("val", 2_000), ("test", 2_000)):
        images, targets, _ = shapes.splits[split]
        assert images.shape == (size, 32, 32, 3)
        assert images.dtype == torch.uint8
        assert targets.dtype == torch.int64
        assert torch.bincount(targets).tolist() == [size // 10] * 10
        seen.update(image.numpy().tobytes() for image in images)
    assert len(seen) == sum(len(arrays.targets) for arrays in shapes.splits.values())


def test_sizes_that_ten_does_not_divide_and_sizes_too_small():
    data = Shapes10(num_train=25)
    assert torch.bincount(data.load("train").targets).tolist() == [3] * 5 + [2] * 5
    with pytest.raises(InputError, match="num_val is 9"):
        Shapes10(num_val=9)


def test_num_classes_and_names_are_known_before_anything_is_drawn():
    data = Shapes10()
    assert data.num_classes == len(set(data.class_names)) == 10
    assert not data.splits


def test_flipping_leaves_the_class_recognisable(shapes: Shapes10):
    """For each class the mean silhouette is its own mirror image, so a flip gives another image of the same class."""
    images, targets, _ = shapes.splits["train"]
    edges = _silhouettes(images)
    means = torch.stack([edges[targets == label].mean(0) for label in range(10)])
    nearest = torch.cdist(means.flip(-1).flatten(1), means.flatten(1)).argmin(1)
    assert nearest.tolist() == list(range(10))


def test_neither_colour_nor_contrast_gives_the_class_away(shapes: Shapes10):
    """A network that sees how often each colour occurs, but not where, stays far from solving it."""

    def histograms(images: Tensor) -> Tensor:
        return torch.stack([(images // 32 == level).float().mean((1, 2)) for level in range(8)], dim=1).flatten(1)

    train, test = shapes.splits["train"], shapes.splits["test"]
    model = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 10))
    inputs = histograms(train.images), histograms(test.images)
    assert _accuracy(model, inputs, (train.targets, test.targets), lr=0.01) < 0.5


@pytest.mark.parametrize("lr", [0.0005, 0.005])
def test_a_linear_model_does_not_solve_it(shapes: Shapes10, lr: float):
    mean, std = map(torch.tensor, channel_statistics(shapes.splits["train"].images))

    def pixels(split: str) -> Tensor:
        return to_float(shapes.splits[split].images.permute(0, 3, 1, 2), mean, std).flatten(1)

    targets = shapes.splits["train"].targets, shapes.splits["test"].targets
    assert _accuracy(nn.Linear(3072, 10), (pixels("train"), pixels("test")), targets, lr=lr) < 0.6


def _silhouettes(images: Tensor) -> Tensor:
    """How far each pixel is from the image's median colour, ``[N, 32, 32]`` in 0..1: light and dark shapes alike."""
    values = images.float() / 255
    background = values.flatten(1, 2).median(1).values[:, None, None, :]
    return (values - background).abs().mean(-1)


def _accuracy(model: nn.Module, inputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor], lr: float) -> float:
    """Accuracy on the second pair of inputs and targets after 15 epochs of AdamW on the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(0)
    for _ in range(15):
        for batch in torch.randperm(len(inputs[0]), generator=generator).split(250):
            loss = nn.functional.cross_entropy(model(inputs[0][batch]), targets[0][batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return (model(inputs[1]).argmax(1) == targets[1]).float().mean().item()
