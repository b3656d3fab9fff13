"""Callbacks that measure a `fit` from within, for `bench.py`.

Run as a module with the name of `BareLoopBeside` or `LoggersInTurns`, this is a `fit` that is compared with something
less in blocks of steps; its last line of output has the seconds of each pair of blocks (less, all).
"""

import copy
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from lit_project import cli
from lit_project.data.augment import Draw
from lit_project.hardware import usable_cpus
from lit_project.seeding import global_seed, keyed_generator

BLOCK = 20


class Times(Callback):
    """Writes `times.json` to the run folder: seconds of each epoch, when the first batch came, memory by epoch."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {"epochs": [], "epoch_ends": [], "epoch_memory": []}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.started = self.epoch_started = time.perf_counter()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.found.setdefault("first_batch", time.time())

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        now = time.perf_counter()
        self.found["epochs"].append(now - self.epoch_started)
        self.found["epoch_ends"].append(now - self.started)
        self.found["epoch_memory"].append(_memory())
        self.epoch_started = now

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        self.found["images"] = trainer.num_training_batches * data.batch_size
        self.found["data_bytes"] = sum(arrays.nbytes for arrays in data.splits.values())
        (Path(trainer.default_root_dir) / "times.json").write_text(json.dumps(self.found))


def _memory() -> int:
    """Bytes of this process and its children; pages that they share count once."""
    try:
        own = Path("/proc/self/task").iterdir()
        children = [pid for task in own for pid in (task / "children").read_text().split()]
        text = [Path("/proc", pid, "smaps_rollup").read_text() for pid in ("self", *children)]
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for part in text for line in part.splitlines() if line.startswith("Pss:"))


class BareLoopBeside(Callback):
    """Times blocks of 20 bare steps, on batches of the same kind, between blocks of `fit`."""

    pairs: list[tuple[float, float]] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.network = copy.deepcopy(pl_module.network)
        self.optimizer = pl_module.optimizer(self.network.parameters())
        self.batches: Iterator[Any] = iter(())
        self.bare: float | None = None
        self.started = 0.0

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
        data = trainer.datamodule  # type: ignore[attr-defined]
        device = trainer.strategy.root_device
        self.network.train().to(device)
        started = time.perf_counter()
        for step in range(BLOCK):
            batch = next(self.batches, None)
            if batch is None:
                loader = data.train_dataloader()
                loader.position = lambda: 0  # not where the trainer is
                self.batches = iter(loader)
                batch = next(self.batches)
            images, targets, indices = (part.to(device, non_blocking=True) for part in batch)
            draw = Draw(keyed_generator(global_seed(), 0, step, 0, device=device), 0, indices)
            for transform in data.augment:
                images = transform(images, draw)
            with torch.autocast(device.type, torch.bfloat16, enabled=trainer.precision == "bf16-mixed"):
                logits = self.network(data._normalise(images))
            loss = torch.nn.functional.cross_entropy(logits.float(), targets)
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            self.optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started


class LoggersInTurns(Callback):
    """Takes the loggers away in every second block, each as long as the interval at which they log.

    What a logger's own process (W&B's) takes of the processors goes on all the time: its share is added to the blocks
    with loggers.
    """

    pairs: list[tuple[float, float]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.loggers, self.seconds = trainer.loggers, [0.0, 0.0]
        self.block, self.started = -1, 0.0
        self.first, self.first_helpers = time.perf_counter(), _helpers_time()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if trainer.global_step % every == 0:
            self._record(trainer)
            self.block = trainer.global_step // every
            # in turns also in what ends the epochs
            trainer.loggers = self.loggers if (self.block + trainer.current_epoch) % 2 else []
            self.started = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._record(trainer)
        trainer.loggers = self.loggers
        share = (_helpers_time() - self.first_helpers) / (time.perf_counter() - self.first) / usable_cpus()
        self.pairs[:] = [(without, with_all * (1 + share)) for without, with_all in self.pairs]

    def _record(self, trainer: L.Trainer) -> None:
        if self.block >= 0:
            self.seconds[bool(trainer.loggers)] = time.perf_counter() - self.started
            if self.block % 2:
                self.pairs.append((self.seconds[0], self.seconds[1]))


def _helpers_time() -> float:
    """Seconds of processor time that the processes below this one have taken, if the system tells."""
    ticks, waiting = 0, ["self"]
    try:
        while waiting:
            process = Path("/proc", waiting.pop())
            if process.name != "self":
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])  # in user and kernel mode
            waiting += [pid for task in (process / "task").iterdir() for pid in (task / "children").read_text().split()]
    except OSError:
        pass  # one has ended meanwhile
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    import bench_callbacks  # under the name that the option below imports it by

    name = sys.argv[1]
    sys.argv[1:] = [
        "fit",
        "--trainer.limit_val_batches=0",  # the bare loop does not validate
        f"--trainer.callbacks+=bench_callbacks.{name}",
        *sys.argv[2:],
    ]
    cli.main()
    print(f"\n{json.dumps(getattr(bench_callbacks, name).pairs)}")
