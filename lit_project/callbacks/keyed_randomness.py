"""Makes what a training step draws from the global generators depend on its place in the run alone."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from lit_project.seeding import derive_seed, global_seed, seed_everywhere


class KeyedRandomness(Callback):
    """Seeds torch, NumPy and Python before each training step, keyed by (seed, epoch, step, rank).

    Dropout and the like are then the same whether a run was resumed or not, however often it validates, and with any
    number of workers; and no generator's state has to be kept in checkpoints.
    """

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        seed_step(trainer, batch_idx)


def seed_step(trainer: L.Trainer, batch_idx: int) -> None:
    """Seed the global generators for a training step."""
    seed_everywhere(derive_seed(global_seed(), trainer.current_epoch, batch_idx, trainer.global_rank, 0))
