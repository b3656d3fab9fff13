"""What Lightning, metrics, loggers, progress bar and checkpoints cost: `fit` against a bare loop, in one run.

    python scripts/bench_overhead.py [--epochs 6] [--images 25600] [any option of `fit`]

Before each epoch of a real `fit` with everything switched on, a bare PyTorch loop trains a copy of the network on the
same batches (same loader, augmentation, optimiser and clipping), so both see the same machine in the same minute. The
result is the median of the ratios of neighbouring epochs; the first pair warms up and is left out. Exits with status 1
when `fit` reaches less than 0.97 of the bare loop.
"""

import argparse
import copy
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from lit_project import cli
from lit_project.data.augment import to_float
from lit_project.seeding import global_seed, keyed_generator

TARGET = 0.97


class BareLoopBeside(Callback):
    """Times a bare epoch before each epoch of `fit`, and that epoch itself up to the start of the next."""

    pairs: list[tuple[float, float]] = []  # seconds: (bare, fit)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.network = copy.deepcopy(pl_module.network)
        self.optimizer = pl_module.optimizer(self.network.parameters())
        self.bare: float | None = None
        self.started = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._record()
        self.bare = self._bare_epoch(trainer)
        self.started = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._record()

    def _record(self) -> None:
        if self.bare is not None:
            self.pairs.append((self.bare, time.perf_counter() - self.started))

    def _bare_epoch(self, trainer: L.Trainer) -> float:
        data = trainer.datamodule
        mean, std = map(torch.tensor, data._statistics())
        self.network.train()
        started = time.perf_counter()
        for step, (images, targets) in enumerate(data.train_dataloader()):
            generator = keyed_generator(global_seed(), trainer.current_epoch, step, 0)
            for transform in data.augment:
                images = transform(images, generator)
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
    parser.add_argument("--epochs", type=int, default=6)
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
        f"--trainer.max_epochs={options.epochs + 1}",
        f"--trainer.callbacks+={Path(__file__).stem}.BareLoopBeside",
        *rest,
    ]
    cli.main()
    pairs = BareLoopBeside.pairs[1:]
    ratios = [bare / fit for bare, fit in pairs]
    bare, fit = (options.images / statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(ratios)
    print(
        f"\n{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(f"bare loop {bare:,.0f} images/s, fit {fit:,.0f} images/s")
    print(f"fit / bare loop: {ratio:.3f} (each epoch: {', '.join(f'{r:.3f}' for r in ratios)}); target {TARGET}")
    sys.exit(ratio < TARGET)


if __name__ == "__main__":
    main()
