"""What Lightning, metrics, loggers, progress bar and checkpoints cost: `fit` against a bare loop, in one run.

    python scripts/bench_overhead.py [--epochs 8] [--images 25600] [any option of `fit`]

A real `fit` with everything switched on is interrupted every 20 steps, and a bare PyTorch loop trains a copy of the
network for 20 steps on batches from the same loader, with the same augmentation, optimiser and clipping. So both see
the same machine in the same second, and its noise, which is many times larger than what is measured, averages out. What
`fit` does at the end of an epoch counts too. Exits with status 1 when `fit` reaches less than 0.97 of the bare loop.
"""

import argparse
import copy
import os
import platform
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from lit_project import cli
from lit_project.data.augment import Draw, to_float
from lit_project.seeding import global_seed, keyed_generator

TARGET = 0.97
BLOCK = 20  # steps
WARM_UP = 4  # blocks


class BareLoopBeside(Callback):
    """Times blocks of bare steps between blocks of `fit`."""

    pairs: list[tuple[float, float]] = []  # seconds: (bare, fit)
    batch_size = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.network = copy.deepcopy(pl_module.network)
        self.optimizer = pl_module.optimizer(self.network.parameters())
        self.batches: Iterator[Any] = iter(())
        self.bare: float | None = None
        self.started = 0.0
        BareLoopBeside.batch_size = trainer.datamodule.batch_size

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % BLOCK == 0:
            self._record()
            self.bare = self._bare_block(trainer)
            self.started = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._record()

    def _record(self) -> None:
        if self.bare is not None:
            self.pairs.append((self.bare, time.perf_counter() - self.started))

    def _bare_block(self, trainer: L.Trainer) -> float:
        data = trainer.datamodule
        mean, std = map(torch.tensor, data._statistics())
        self.network.train()
        started = time.perf_counter()
        for step in range(BLOCK):
            batch = next(self.batches, None)
            if batch is None:
                self.batches = iter(data.train_dataloader())
                batch = next(self.batches)
            images, targets, indices = batch
            generator = keyed_generator(global_seed(), trainer.current_epoch, step, 0)
            for transform in data.augment:
                images = transform(images, Draw(generator, trainer.current_epoch, indices))
            with torch.autocast("cpu", torch.bfloat16, enabled=trainer.precision == "bf16-mixed"):
                logits = self.network(to_float(images, mean, std))
            loss = torch.nn.functional.cross_entropy(logits.float(), targets)
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            self.optimizer.step()
        return time.perf_counter() - started


def main() -> None:
    """Run both side by side and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--images", type=int, default=25_600)
    options, rest = parser.parse_known_args()
    os.environ["TTY_COMPATIBLE"] = "1"  # have the progress bar drawn although nobody may be looking
    this: Any = sys.modules["__main__"]
    sys.modules.setdefault(Path(__file__).stem, this)
    sys.argv = [
        "fit",
        "fit",
        f"--data.num_train={options.images}",
        "--data.num_val=1000",
        "--trainer.accelerator=cpu",
        "--trainer.limit_val_batches=0",  # the bare loop does not validate
        f"--trainer.max_epochs={options.epochs}",
        f"--trainer.callbacks+={Path(__file__).stem}.BareLoopBeside",
        *rest,
    ]
    cli.main()
    pairs = BareLoopBeside.pairs[WARM_UP:]
    bare, fit = (sum(times) for times in zip(*pairs, strict=True))
    # how far the ratio would move with other blocks: resampled, 90 of 100
    samples = [random.choices(pairs, k=len(pairs)) for _ in range(1000)]
    ratios = sorted(sum(b for b, _ in sample) / sum(f for _, f in sample) for sample in samples)
    images = len(pairs) * BLOCK * BareLoopBeside.batch_size
    print(
        f"\n{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(f"bare loop {images / bare:,.0f} images/s, fit {images / fit:,.0f} images/s, over {len(pairs)} blocks")
    print(f"fit / bare loop: {bare / fit:.3f} (90 % interval {ratios[50]:.3f} to {ratios[949]:.3f}); target {TARGET}")
    sys.exit(bare / fit < TARGET)


if __name__ == "__main__":
    main()
