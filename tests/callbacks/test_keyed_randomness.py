import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lit_project.callbacks import KeyedRandomness

Draws = tuple[list[bool], float, float]


def draws(epoch: int = 1, step: int = 3, rank: int = 0) -> Draws:
    """What a step draws: dropout's mask, and numbers of NumPy and Python."""
    trainer: Any = SimpleNamespace(current_epoch=epoch, global_rank=rank)
    KeyedRandomness().on_train_batch_start(trainer, None, None, step)  # type: ignore[arg-type]
    mask = torch.nn.functional.dropout(torch.ones(64), 0.5) > 0
    return mask.tolist(), float(np.random.rand()), random.random()


def test_a_step_draws_the_same_whatever_was_drawn_before() -> None:
    first = draws()
    torch.rand(5), np.random.rand(5), random.random()
    draws(step=4)
    assert draws() == first


@pytest.mark.parametrize("other", [{"epoch": 2}, {"step": 4}, {"rank": 1}, {"epoch": 3, "step": 1}])
def test_steps_epochs_and_ranks_draw_differently(other: dict[str, int]) -> None:
    assert all(one != another for one, another in zip(draws(), draws(**other), strict=True))


def test_seeds_draw_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    first = draws()
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    assert all(one != another for one, another in zip(first, draws(), strict=True))
