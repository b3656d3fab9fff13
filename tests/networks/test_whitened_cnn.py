"""WhitenedCNN: its first layer whitens, and it takes whatever shape, layout and precision it says it takes."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lit_project.networks import WhitenedCNN
from lit_project.optimizers import MuonSGD
from lit_project.schedulers import WarmupCosine


def photographs(count: int, channels: int = 3, size: int = 24) -> Tensor:
    """Smooth in space and alike across channels, as photographs are: their patches are far from white."""
    generator = torch.Generator().manual_seed(0)
    rough = torch.randn(count, channels, size + 4, size + 4, generator=generator)
    smooth = F.avg_pool2d(rough, 5, stride=1) + 0.1 * torch.randn(count, channels, size, size, generator=generator)
    images = smooth + 2 * smooth.mean(1, keepdim=True)
    return (images - images.mean()) / images.std()


def covariance(responses: Tensor) -> Tensor:
    """Of the channels of ``[N, C, H, W]``, over all images and places."""
    return torch.cov(responses.transpose(0, 1).flatten(1))


@pytest.mark.parametrize("channels", [1, 3])
def test_the_first_layer_whitens_patches_that_it_has_not_seen(channels: int) -> None:
    network = WhitenedCNN(in_channels=channels)
    images = photographs(2000, channels)
    correlated = covariance(F.unfold(images[1000:], 2).unsqueeze(-1))
    network.init_from_data(images[:1000])
    responses = network.whiten(images[1000:])
    half = responses.shape[1] // 2
    white = covariance(responses[:, :half])
    assert (correlated - torch.eye(half)).abs().max() > 0.5, "they were not white before"
    torch.testing.assert_close(white, torch.eye(half), atol=0.05, rtol=0)
    filters = network.whiten.weight
    assert torch.equal(filters[:half], -filters[half:]), "each has its negative"


def test_whitening_does_not_blow_up_what_the_images_do_not_have() -> None:
    """Grey images in three channels: nine of the twelve directions are empty."""
    network = WhitenedCNN()
    network.init_from_data(photographs(200, 1).expand(-1, 3, -1, -1))
    assert network.whiten.weight.isfinite().all()
    assert network.whiten.weight.abs().max() < 50


def test_without_data_the_filters_are_orthogonal() -> None:
    filters = WhitenedCNN().whiten.weight.flatten(1)[:12]
    torch.testing.assert_close(filters @ filters.T, torch.eye(12))


def test_the_whitening_is_not_trained_but_saved() -> None:
    network = WhitenedCNN()
    network.init_from_data(photographs(100))
    before = network.whiten.weight.clone()
    F.cross_entropy(network(photographs(8)), torch.arange(8)).backward()
    assert network.whiten.weight.grad is None
    MuonSGD(p for p in network.parameters() if p.requires_grad).step()
    other = WhitenedCNN()
    other.load_state_dict(network.state_dict())
    assert torch.equal(other.whiten.weight, before)


@pytest.mark.parametrize("size", [(9, 9), (28, 28), (33, 20), (64, 64)], ids=str)
@pytest.mark.parametrize("channels", [1, 3])
def test_takes_any_image_shape_from_9_pixels_on(size: tuple[int, int], channels: int) -> None:
    network = WhitenedCNN(num_classes=4, in_channels=channels, widths=(8, 8, 8))
    network.init_from_data(torch.randn(50, channels, *size))
    assert network(torch.randn(2, channels, *size)).shape == (2, 4)


@pytest.mark.parametrize("shape", [[8, 1, 32, 32], [8, 32, 32, 3], [3, 32, 32], [8, 3, 8, 32]], ids=str)
def test_names_expected_and_given_shape(shape: list[int]) -> None:
    with pytest.raises(ValueError, match=r"WhitenedCNN expects images of shape \[batch, 3, height, width\]") as raised:
        WhitenedCNN()(torch.randn(shape))
    assert f"at least 9x9 pixels, got {shape}: " in str(raised.value)


def test_channels_last_and_the_compiler_change_nothing() -> None:
    torch.manual_seed(0)
    network = WhitenedCNN(widths=(8, 16, 16))
    images = photographs(4)
    expected = network(images)
    last = network.to(memory_format=torch.channels_last)
    torch.testing.assert_close(last(images.to(memory_format=torch.channels_last)), expected)
    # traced as one graph; generating code for it is the compiler's own affair
    torch.testing.assert_close(torch.compile(last, backend="aot_eager", fullgraph=True)(images), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_few_steps_of_its_optimiser_learn_images_by_heart(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    network = WhitenedCNN(num_classes=4, widths=(8, 16, 16)).to(memory_format=torch.channels_last)
    images, targets = photographs(32), torch.arange(32) % 4
    network.init_from_data(images)
    optimizer = MuonSGD((p for p in network.parameters() if p.requires_grad), lr=0.05, sgd_lr=5.0)
    scheduler = WarmupCosine(optimizer, total_steps=40, warmup=0.0)
    losses = []
    for _ in range(40):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = network(images)
        assert logits.dtype == dtype
        loss = F.cross_entropy(logits.float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(4), abs=0.1), "it starts undecided"
    assert losses[-1] < 0.05
