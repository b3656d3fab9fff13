"""Every network: shapes, gradients, repeatability; and the errors that name what was expected."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torchvision.models import resnet18 as torchvision_resnet18

from lit_project.networks import ResNet18, SimpleCNN, WhitenedCNN, timm_model

OURS: dict[str, Callable[..., nn.Module]] = {"SimpleCNN": SimpleCNN, "ResNet18": ResNet18, "WhitenedCNN": WhitenedCNN}
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    **OURS,
    "timm resnet18": partial(timm_model, "resnet18"),
    "torchvision resnet18": torchvision_resnet18,
}
every_network = pytest.mark.parametrize("build", NETWORKS.values(), ids=NETWORKS)
each_of_ours = pytest.mark.parametrize("build", OURS.values(), ids=OURS)


@pytest.mark.parametrize(
    ("build", "expected"), [(SimpleCNN, 2_122_378), (ResNet18, 11_173_962), (WhitenedCNN, 1_972_792)]
)
def test_parameter_count(build: Callable[..., nn.Module], expected: int) -> None:
    assert sum(parameter.numel() for parameter in build().parameters()) == expected


@every_network
@pytest.mark.parametrize("num_classes", [2, 101])
def test_output_is_logits_per_class(build: Callable[..., nn.Module], num_classes: int) -> None:
    network = build(num_classes=num_classes).eval()
    for batch_size in (1, 2, 5):
        logits = network(torch.randn(batch_size, 3, 32, 32))
        assert logits.shape == (batch_size, num_classes)
        assert logits.dtype == torch.float32


@every_network
def test_gradients_reach_every_parameter(build: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    network = build(num_classes=4)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)  # timm starts some at zero: in the very first step nothing flows through them
    nn.functional.cross_entropy(network(torch.randn(4, 3, 32, 32)), torch.arange(4)).backward()
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@every_network
def test_same_seed_same_network(build: Callable[..., nn.Module]) -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(build(num_classes=3).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


@each_of_ours
def test_images_of_a_batch_do_not_influence_each_other(build: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    network = build().eval()
    images = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(network(images)[1:2], network(images[1:2]))


@each_of_ours
def test_nothing_is_changed_in_place(build: Callable[..., nn.Module]) -> None:
    network = build()
    assert not any(getattr(module, "inplace", False) for module in network.modules())

    # Every module's input, not only the images: hooks and saved features must see what the layer before them gave.
    changed = []

    def check(name: str, module: nn.Module) -> None:
        before: list[torch.Tensor] = []
        module.register_forward_pre_hook(lambda _, args: before.append(args[0].clone()))
        module.register_forward_hook(lambda _, args, __: changed.append(name) if (args[0] != before[0]).any() else None)

    for name, module in network.named_modules():
        check(name or "the network", module)
    network(torch.randn(2, 3, 32, 32))
    assert not changed


@pytest.mark.parametrize("image_size", [4, 7, 28, 33, [4, 9], [48, 20], (17, 64)], ids=str)
@pytest.mark.parametrize("in_channels", [1, 3, 5])
def test_simple_cnn_takes_any_image_shape(image_size: int | list[int] | tuple[int, int], in_channels: int) -> None:
    network = SimpleCNN(num_classes=3, in_channels=in_channels, image_size=image_size)
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    assert network(torch.randn(2, in_channels, height, width)).shape == (2, 3)


@pytest.mark.parametrize("size", [(8, 8), (28, 28), (33, 20)], ids=str)
@pytest.mark.parametrize("in_channels", [1, 4])
def test_resnet_takes_any_image_shape(size: tuple[int, int], in_channels: int) -> None:
    network = ResNet18(num_classes=3, in_channels=in_channels, width=8)
    assert network(torch.randn(2, in_channels, *size)).shape == (2, 3)


@pytest.mark.parametrize("shape", [[8, 1, 28, 28], [8, 3, 28, 28], [8, 3, 33, 33], [8, 32, 32, 3], [3, 32, 32]])
def test_simple_cnn_names_expected_and_given_shape(shape: list[int]) -> None:
    with pytest.raises(ValueError, match="SimpleCNN expects images of shape") as raised:
        SimpleCNN()(torch.randn(shape))
    assert f"[batch, 3, 32, 32], got {shape}: " in str(raised.value)


@pytest.mark.parametrize("shape", [[8, 1, 32, 32], [8, 32, 32, 3], [3, 32, 32]])
def test_resnet_names_expected_and_given_shape(shape: list[int]) -> None:
    with pytest.raises(ValueError, match="ResNet18 expects images of shape") as raised:
        ResNet18(width=8)(torch.randn(shape))
    assert f"[batch, 3, height, width], got {shape}: " in str(raised.value)


@pytest.mark.parametrize(
    ("build", "arguments", "named"),
    [
        (SimpleCNN, {"num_classes": 1}, "num_classes must be at least 2, got 1"),
        (SimpleCNN, {"in_channels": 0}, "in_channels must be at least 1, got 0"),
        (SimpleCNN, {"image_size": 3}, "at least 4, got 3"),
        (SimpleCNN, {"image_size": [32, 3]}, "at least 4, got [32, 3]"),
        (SimpleCNN, {"image_size": [3, 32, 32]}, "got [3, 32, 32]"),
        (SimpleCNN, {"dropout": 1.5}, "1.5"),
        (ResNet18, {"num_classes": 1}, "num_classes must be at least 2, got 1"),
        (ResNet18, {"in_channels": 0}, "in_channels must be at least 1, got 0"),
        (ResNet18, {"width": 0}, "width must be at least 1, got 0"),
        (WhitenedCNN, {"num_classes": 1}, "num_classes must be at least 2, got 1"),
        (WhitenedCNN, {"in_channels": 0}, "in_channels must be at least 1, got 0"),
        (WhitenedCNN, {"widths": [64, 0, 64]}, "each at least 1, got [64, 0, 64]"),
        (WhitenedCNN, {"widths": (64, 128)}, "three numbers, each at least 1, got [64, 128]"),
    ],
    ids=str,
)
def test_bad_arguments(build: Callable[..., nn.Module], arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  the message is checked below, literally
        build(**arguments)
    assert named in str(raised.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@each_of_ours
def test_shape_check_leaves_the_batch_size_free_in_torch_export(build: Callable[..., nn.Module]) -> None:
    network = build().eval()
    batch = torch.export.Dim("batch")
    exported = torch.export.export(network, (torch.randn(2, 3, 32, 32),), dynamic_shapes=({0: batch},)).module()
    for batch_size in (1, 5):
        images = torch.randn(batch_size, 3, 32, 32)
        torch.testing.assert_close(exported(images), network(images))


def test_timm_model_passes_its_arguments_on() -> None:
    network = timm_model("resnet18.a1_in1k", num_classes=7, in_channels=1).eval()
    assert network(torch.randn(2, 1, 32, 32)).shape == (2, 7)


def test_unknown_timm_name_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no network named 'ResNet-18': did you mean .*resnet18"):
        timm_model("ResNet-18")
    with pytest.raises(ValueError, match=r"timm\.list_models\(\) lists the names"):
        timm_model("#" * 20)


def test_missing_timm_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match="pip install timm") as raised:
        timm_model("resnet18")
    assert "\n" not in str(raised.value)


def test_importing_networks_does_not_import_timm() -> None:
    code = "import sys, lit_project.networks; sys.exit('timm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
