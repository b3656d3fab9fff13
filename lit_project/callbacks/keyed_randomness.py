"""Makes what training draws from the global generators depend on its place in the run alone."""

import warnings
from typing import Any

import lightning as L
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

from lit_project.seeding import derive_seed, global_seed, seed_everywhere


class KeyedRandomness(Callback):
    """Seeds torch, NumPy and Python before each epoch, and before each step by (seed, epoch, step, rank).

    Dropout and the like are then the same whether a run was resumed or not, however often it validates, and with any
    number of workers; and no generator's state has to be kept in checkpoints.

    A ``DataLoader`` that shuffles by the global generator gives each epoch its order again, too, and goes on within it:
    the batches that were trained on are loaded once more and passed over. One that has a ``state_dict``, such as that
    of :class:`lit_project.data.base.ImageDataModule`, knows by itself where it is.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loop = trainer.fit_loop
        if not loop.restarted_mid_epoch or _resumable(trainer):
            return  # if it begins with a new epoch, the hook below follows
        done = int(loop.epoch_loop.batch_progress.current.ready % loop.max_batches)
        for loader in _loaders(trainer):
            _set_sampler_epoch(loader, trainer.current_epoch)
        _seed_epoch(trainer)
        fetcher = iter(loop._data_fetcher)  # type: ignore[arg-type]
        if done:
            rank_zero_info(f"Loading the {done} batches of this epoch that were trained on, to pass over them.")
        for _ in range(done):
            next(fetcher)
        fetcher.fetched -= done  # Lightning adds them, for loaders that go on by themselves
        warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        _seed_epoch(trainer)
        loop = trainer.fit_loop
        first = trainer.current_epoch == 0 or loop.is_resuming
        if first and not _resumable(trainer):
            # Lightning has made this iterator long before, when no checkpoint was restored yet; later ones it makes now
            iter(loop._data_fetcher)  # type: ignore[arg-type]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        seed_step(trainer, batch_idx)


def seed_step(trainer: L.Trainer, batch_idx: int) -> None:
    """Seed the global generators for a training step."""
    seed_everywhere(derive_seed(global_seed(), trainer.current_epoch, batch_idx, trainer.global_rank, 0))


def _seed_epoch(trainer: L.Trainer) -> None:
    """Seed the global generators for what is drawn when an epoch's iterator is made: the same on all ranks."""
    seed_everywhere(derive_seed(global_seed(), trainer.current_epoch, 0, 0, 3))


def _loaders(trainer: L.Trainer) -> list[Any]:
    loader = trainer.fit_loop._combined_loader
    assert loader is not None
    return loader.flattened


def _resumable(trainer: L.Trainer) -> bool:
    return all(isinstance(loader, _Stateful) for loader in _loaders(trainer))
