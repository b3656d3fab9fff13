"""Gradient checkpointing: the same numbers from fewer kept activations."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import Tensor, nn

from lit_project.errors import InputError
from lit_project.gradient_checkpointing import checkpoint_blocks
from lit_project.module import ImageClassifier
from lit_project.networks import ResNet18, SimpleCNN, timm_model


class Blocks(nn.Module):
    """Two blocks with all that a second pass could spoil: running statistics of both kinds, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3, 3, 3),
                nn.BatchNorm2d(3, momentum=momentum),
                nn.InstanceNorm2d(3, track_running_stats=True),
                nn.Dropout(0.5),
                nn.GELU(),
            )
            for momentum in (0.1, None)
        )
        self.head = nn.Linear(3, 10)

    def forward(self, images: Tensor) -> Tensor:
        for block in self.blocks:
            images = block(input=images)
        return self.head(images.mean(dim=(2, 3)))


def step(network: nn.Module, images: Tensor) -> tuple[Tensor, dict[str, Tensor], int]:
    """A training step: the output, all gradients and buffers, and the bytes that are held between the two passes."""
    torch.manual_seed(1)
    network.train()
    activity = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activity, profile_memory=True, acc_events=True) as profile:
        output = network(images)
    held = sum(event.self_cpu_memory_usage for event in profile.key_averages())
    output.square().sum().backward()
    tensors = {name: parameter.grad for name, parameter in network.named_parameters()} | dict(network.named_buffers())
    assert all(tensor is not None for tensor in tensors.values())
    return output, tensors, held  # type: ignore[return-value]


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "own": (lambda: ResNet18(width=4), 32, 8),
    "with dropout": (Blocks, 32, 2),
    "in one Sequential": (lambda: nn.Sequential(*Blocks().blocks, nn.AdaptiveAvgPool2d(1)), 32, 2),
    "torchvision ResNet": (lambda: torchvision.models.resnet18(num_classes=10), 32, 8),
    "torchvision ConvNeXt": (lambda: torchvision.models.convnext_tiny(num_classes=10), 32, 22),
    "torchvision ViT": (lambda: torchvision.models.VisionTransformer(32, 8, 3, 2, 64, 128, 0.1, num_classes=10), 32, 3),
    "timm ResNet": (lambda: timm_model("resnet18"), 32, 8),
    "timm ViT": (lambda: timm_model("test_vit"), 160, 6),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_has_the_same_results_and_keeps_less(name: str) -> None:
    make, size, blocks = NETWORKS[name]
    if name.startswith("timm"):
        pytest.importorskip("timm")
    torch.manual_seed(0)
    plain = make()
    network = copy.deepcopy(plain)
    assert checkpoint_blocks(network) == blocks
    assert list(network.state_dict()) == list(plain.state_dict())
    images = torch.randn(4, 3, size, size)
    for _ in range(2):  # the second begins from the statistics of the first
        output, tensors, held = step(plain, images)
        output_again, tensors_again, held_again = step(network, images)
        assert torch.equal(output_again, output)
        assert all(torch.equal(tensors_again[key], tensor) for key, tensor in tensors.items())
    assert held_again < 0.6 * held
    plain.eval(), network.eval()
    assert torch.equal(network(images), plain(images))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
def test_a_copy_runs_its_own_weights(copied: Callable[[nn.Module], nn.Module]) -> None:
    network = ResNet18(width=4)
    checkpoint_blocks(network)
    images = torch.randn(2, 3, 32, 32)
    expected, tensors, _ = step(network, images)
    twin = copied(network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    twin.zero_grad()
    network.zero_grad()
    output, twin_tensors, _ = step(twin, images)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(twin_tensors["stages.0.conv1.weight"], tensors["stages.0.conv1.weight"])
    assert all(parameter.grad is None for parameter in network.parameters())


def test_a_compiled_network_has_the_same_results() -> None:
    """The compiler refuses the contexts that keep running statistics from counting twice."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.GELU()) for _ in range(2)))
    network = copy.deepcopy(plain)
    assert checkpoint_blocks(network) == 2
    network.compile(backend="aot_eager")
    images = torch.randn(4, 3, 16, 16)
    output, tensors, _ = step(plain, images)
    output_again, tensors_again, _ = step(network, images)
    torch.testing.assert_close(output_again, output)
    torch.testing.assert_close(tensors_again, tensors)


def test_a_network_without_blocks_is_refused() -> None:
    with pytest.raises(InputError, match="gradient_checkpointing: SimpleCNN has no blocks of several layers"):
        ImageClassifier(SimpleCNN(), gradient_checkpointing=True)


def test_timms_own_way_serves_networks_of_another_form() -> None:
    pytest.importorskip("timm")
    network = timm_model("regnety_002")
    assert checkpoint_blocks(network) == 1
    assert network.s1.grad_checkpointing
