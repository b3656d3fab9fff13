import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from helpers import QUIET
from torch.utils.data import DataLoader, TensorDataset

from lit_project.callbacks import KeyedRandomness, LastCheckpoint

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


class Noted(L.LightningModule):
    """Notes each training batch with the learning rate it meets; its validation loss never gets better."""

    def __init__(self, workers: int, cut: int | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.workers, self.cut = workers, cut
        self.seen: dict[int, tuple[list[float], float]] = {}

    def train_dataloader(self) -> DataLoader[Any]:
        torch.rand(len(self.seen) + 3)  # as many a library draws before training
        return DataLoader(TensorDataset(torch.arange(10.0)), 2, shuffle=True, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(2)), 2)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.global_step == self.cut:
            raise InterruptedError
        self.seen[self.global_step] = batch[0].tolist(), self.trainer.optimizers[0].param_groups[0]["lr"]
        return self.weight * 0

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val/loss", 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss"}}


def fit_noted(path: Path, limit: dict[str, int], workers: int, cut: int | None = None, **options: Any) -> Noted:
    L.seed_everything(0)
    torch.rand(cut or 0)  # what a process has drawn before is not to matter
    model = Noted(workers, cut)
    callbacks = [LastCheckpoint(str(path / "last.ckpt"), every_n_steps=1), KeyedRandomness()]
    trainer = L.Trainer(**QUIET, **limit, callbacks=callbacks)  # type: ignore[arg-type]
    trainer.fit(model, **options)
    return model


@pytest.mark.parametrize("limit", [{"max_epochs": 4}, {"max_epochs": -1, "max_steps": 20}], ids=str)
@pytest.mark.parametrize(("cut", "workers"), [(3, 0), (5, 0), (8, 2), (10, 2), (12, 0)])
def test_a_plain_loader_and_a_plateau_go_on_exactly(
    tmp_path: Path, limit: dict[str, int], cut: int, workers: int
) -> None:
    """Cut within an epoch (3, 8, 12) and between two (5, 10); an epoch has five steps."""
    whole = fit_noted(tmp_path, limit, workers=0).seen
    epochs = [[whole[step][0] for step in range(epoch, epoch + 5)] for epoch in range(0, 20, 5)]
    assert all(sorted(number for batch in epoch for number in batch) == list(range(10)) for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) == 4, "each epoch has its own order"
    assert [whole[step][1] for step in range(0, 20, 5)] == [1.0, 1.0, 0.5, 0.25]
    (tmp_path / "last.ckpt").unlink()
    with pytest.raises(InterruptedError):
        fit_noted(tmp_path, limit, workers, cut)
    rest = fit_noted(tmp_path, limit, workers, ckpt_path=tmp_path / "last.ckpt").seen
    assert rest == {step: seen for step, seen in whole.items() if step >= cut}
