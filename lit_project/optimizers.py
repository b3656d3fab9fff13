"""Muon for networks of convolutions: torch's own takes matrices only, and leaves the other parameters to another."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.sgd import sgd

from lit_project.errors import InputError
from lit_project.hardware import best_precision


class MuonSGD(Optimizer):
    """Muon for the filters of convolutions, SGD with Nesterov momentum for all other parameters.

    Muon replaces the update of a weight matrix by the nearest orthogonal one, so that a layer learns in all directions
    at the same speed. A filter ``[out, in, height, width]`` counts as the matrix ``[out, in * height * width]`` and is
    updated by the rule of ``torch.optim.Muon``. The two kinds of parameters are two groups, ``filters`` and ``rest``,
    each with its own learning rate; a scheduler scales both.

    A filter must be whole where its update is computed, so this is for one device or DDP, not for FSDP.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024
    (https://kellerjordan.github.io/posts/muon/).

    Args:
        params: the parameters to train; those with four dimensions are the filters.
        lr: learning rate of the filters: about the singular values of an update, whatever the size of the gradient.
        momentum: of the filters; Nesterov's, as all momentum here. At least 0 and less than 1.
        weight_decay: of the filters; each step multiplies them by ``1 - lr * weight_decay``.
        ns_steps: Newton-Schulz iterations that make an update orthogonal.
        sgd_lr: learning rate of all other parameters.
        sgd_momentum: their momentum, at least 0 and less than 1.
        sgd_weight_decay: their weight decay, a part of the gradient as in ``torch.optim.SGD``.

    Raises:
        InputError: an argument is out of its range, or there is no filter among the parameters.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.1,
        momentum: float = 0.6,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        sgd_lr: float = 0.1,
        sgd_momentum: float = 0.85,
        sgd_weight_decay: float = 0.0,
    ) -> None:
        for name, value in {"momentum": momentum, "sgd_momentum": sgd_momentum}.items():
            if not 0.0 <= value < 1.0:
                raise InputError(f"MuonSGD: {name} is {value}, it must be at least 0 and less than 1.")
        for name, value in {
            "lr": lr,
            "weight_decay": weight_decay,
            "sgd_lr": sgd_lr,
            "sgd_weight_decay": sgd_weight_decay,
        }.items():
            if not value >= 0.0:
                raise InputError(f"MuonSGD: {name} is {value}, it must be at least 0.")
        params = list(params)
        filters = [parameter for parameter in params if parameter.ndim == 4]
        rest = [parameter for parameter in params if parameter.ndim != 4]
        if not filters:
            raise InputError(
                "MuonSGD: the network has no filter of a convolution (a trainable parameter with four dimensions), or "
                "FSDP has cut them up. Choose another optimiser, such as torch.optim.SGD."
            )
        groups: list[dict[str, Any]] = [
            {"name": "filters", "params": filters, "ns_steps": ns_steps},
            {"name": "rest", "params": rest, "lr": sgd_lr, "momentum": sgd_momentum, "weight_decay": sgd_weight_decay},
        ]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return what ``closure``, if given, has returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        filters, rest = self.param_groups
        for parameter in filters["params"]:
            if parameter.grad is not None:
                self._step_filter(parameter, parameter.grad, filters)
        trained = [parameter for parameter in rest["params"] if parameter.grad is not None]
        sgd(
            trained,
            [parameter.grad for parameter in trained],
            [self._momentum_buffer(parameter) for parameter in trained],
            weight_decay=rest["weight_decay"],
            momentum=rest["momentum"],
            lr=rest["lr"],
            dampening=0.0,
            nesterov=True,
            maximize=False,
        )
        return loss

    def _step_filter(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        average = self._momentum_buffer(parameter).lerp_(gradient, 1 - group["momentum"])
        update = orthogonalise(gradient.lerp(average, group["momentum"]).flatten(1), group["ns_steps"])
        # so that the output of a layer changes alike whether it has more channels than inputs or fewer
        rate = group["lr"] * math.sqrt(max(1.0, update.shape[0] / update.shape[1]))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update.view(parameter.shape), alpha=-rate)

    def _momentum_buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """The matrix with its singular vectors kept and its singular values brought near 1 (0.7 to 1.2).

    Newton-Schulz iterations of the fifth degree, with Muon's coefficients: they rise so steeply from 0 that small
    singular values arrive within five steps, and do not settle at 1, which training does not need. Computed in bfloat16
    where the device has it (:func:`lit_project.hardware.best_precision`), else in float32: emulated, bfloat16 is many
    times slower.

    Args:
        matrix: float ``[rows, columns]``.
        steps: number of iterations.

    Returns:
        A matrix of the same shape, bfloat16 or float32.
    """
    x = matrix.to(torch.bfloat16 if best_precision(matrix.device)[0] == "bf16-mixed" else torch.float32)
    # the products below are square in the number of rows: let that be the smaller one
    if matrix.shape[0] > matrix.shape[1]:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.T if matrix.shape[0] > matrix.shape[1] else x
