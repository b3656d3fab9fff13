"""MuonSGD: each kind of parameter takes the step of torch's own optimiser for it, and a resumed run the same steps."""

import io
from typing import Any

import pytest
import torch
from torch import nn

from lit_project.errors import InputError
from lit_project.optimizers import MuonSGD, orthogonalise
from lit_project.schedulers import WarmupCosine

FLOAT32, BFLOAT16 = ("32-true", "as if"), ("bf16-mixed", "as if")

SETTINGS: dict[str, float] = {
    "lr": 0.1,
    "momentum": 0.7,
    "weight_decay": 0.2,
    "sgd_lr": 0.3,
    "sgd_momentum": 0.8,
    "sgd_weight_decay": 0.01,
}


def network() -> nn.Sequential:
    """Filters with more rows than columns, and with fewer; a norm, a bias and a matrix beside them."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 40, 3), nn.BatchNorm2d(40), nn.ReLU(), nn.Conv2d(40, 8, 3), nn.Flatten(), nn.Linear(128, 5)]
    return nn.Sequential(*layers)


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        give_gradients(model, step)
        optimizer.step()


@pytest.mark.parametrize(("best", "tolerance"), [(FLOAT32, 0.03), (BFLOAT16, 1e-6)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_filters_take_the_step_of_torchs_muon_on_their_matrices(
    monkeypatch: pytest.MonkeyPatch, memory_format: torch.memory_format, best: tuple[str, str], tolerance: float
) -> None:
    monkeypatch.setattr("lit_project.optimizers.best_precision", lambda device: best)
    model = network().to(memory_format=memory_format)
    optimizer = MuonSGD(model.parameters(), **SETTINGS)
    filters = [parameter for parameter in model.parameters() if parameter.ndim == 4]
    matrices = [nn.Parameter(parameter.detach().clone().flatten(1)) for parameter in filters]
    before = [matrix.detach().clone() for matrix in matrices]
    muon = torch.optim.Muon(matrices, lr=0.1, momentum=0.7, weight_decay=0.2, nesterov=True)
    for step in range(4):
        give_gradients(model, step)
        for parameter, matrix in zip(filters, matrices, strict=True):
            matrix.grad = parameter.grad.flatten(1)
        optimizer.step()
        muon.step()
    for parameter, matrix, start in zip(filters, matrices, before, strict=True):
        moved = (matrix - start).norm()
        # torch always iterates in bfloat16
        assert (parameter.flatten(1) - matrix).norm() < tolerance * moved
        assert parameter.is_contiguous(memory_format=memory_format)


def test_the_rest_takes_the_step_of_torchs_sgd() -> None:
    model, other = network(), network()
    rest = [parameter for parameter in other.parameters() if parameter.ndim != 4]
    sgd = torch.optim.SGD(rest, lr=0.3, momentum=0.8, weight_decay=0.01, nesterov=True)
    train(model, MuonSGD(model.parameters(), **SETTINGS), range(4))
    train(other, sgd, range(4))
    for parameter, expected in zip((p for p in model.parameters() if p.ndim != 4), rest, strict=True):
        assert torch.equal(parameter, expected)


@pytest.mark.parametrize("shape", [(8, 8), (4, 30), (30, 4)])
def test_orthogonalise_keeps_the_singular_vectors_and_levels_the_values(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    monkeypatch.setattr("lit_project.optimizers.best_precision", lambda device: FLOAT32)
    left, _ = torch.linalg.qr(torch.randn(shape[0], 4, generator=torch.Generator().manual_seed(0)))
    right, _ = torch.linalg.qr(torch.randn(shape[1], 4, generator=torch.Generator().manual_seed(1)))
    for scale in (1e-6, 1.0, 1e6):
        result = orthogonalise(scale * (left * torch.tensor([10.0, 3.0, 1.0, 0.3])) @ right.T)
        core = left.T @ result @ right
        assert ((core.diag() > 0.65) & (core.diag() < 1.25)).all()
        torch.testing.assert_close(core, core.diag().diag(), atol=1e-4, rtol=0)
        torch.testing.assert_close(left @ core @ right.T, result, atol=1e-4, rtol=0)


def test_a_gradient_of_zero_leaves_everything_finite() -> None:
    model = network()
    optimizer = MuonSGD(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_scheduler_scales_the_rate_of_both_kinds() -> None:
    optimizer = MuonSGD(network().parameters(), **SETTINGS)
    scheduler = WarmupCosine(optimizer, total_steps=4, warmup=0.0)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.3])
    for factor in ((1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0.0):
        optimizer.step()
        scheduler.step()
        rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
        assert rates == pytest.approx({"filters": 0.1 * factor, "rest": 0.3 * factor})


def test_training_goes_on_bit_for_bit_from_a_saved_state() -> None:
    straight = network()
    train(straight, MuonSGD(straight.parameters(), **SETTINGS), range(6))

    first = network()
    optimizer = MuonSGD(first.parameters(), **SETTINGS)
    train(first, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved: dict[str, Any] = torch.load(file, weights_only=True)
    second = network()
    second.load_state_dict(saved["model"])
    optimizer = MuonSGD(second.parameters())  # its settings come with the state
    optimizer.load_state_dict(saved["optimizer"])
    train(second, optimizer, range(3, 6))
    for ours, expected in zip(second.parameters(), straight.parameters(), strict=True):
        assert torch.equal(ours, expected)


def test_parameters_without_a_gradient_stay() -> None:
    model = network()
    optimizer = MuonSGD(model.parameters(), **SETTINGS)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    give_gradients(model, 0)
    for name in ("0.weight", "1.bias"):
        model.get_parameter(name).grad = None
    optimizer.step()
    still = {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}
    assert still == {"0.weight", "1.bias"}


def test_a_closure_is_called_with_gradients_on() -> None:
    model = network()
    optimizer = MuonSGD(model.parameters())

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3, 8, 8)).square().sum()
        loss.backward()
        return loss.item()

    losses = [optimizer.step(closure) for _ in range(2)]
    assert losses[0] != losses[1]


def test_a_network_of_filters_alone_has_no_rest() -> None:
    model = nn.Conv2d(1, 1, 3, bias=False)
    before = model.weight.detach().clone()
    train(model, MuonSGD(model.parameters()), range(1))
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"lr": -0.1}, "lr is -0.1"),
        ({"sgd_lr": float("nan")}, "sgd_lr is nan"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"sgd_momentum": -0.5}, "sgd_momentum is -0.5"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"sgd_weight_decay": -1.0}, "sgd_weight_decay is -1.0"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(arguments: dict[str, float], named: str) -> None:
    with pytest.raises(InputError, match=f"MuonSGD: {named}, it must be"):
        MuonSGD(network().parameters(), **arguments)


def test_a_network_without_filters_is_refused() -> None:
    with pytest.raises(InputError, match=r"no filter of a convolution.* Choose another optimiser"):
        MuonSGD(nn.Linear(3, 2).parameters())
