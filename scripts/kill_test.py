"""Kills runs at random moments, resumes them, and compares with a run that was never killed: nothing may differ.

    python scripts/kill_test.py [--kills 20] [--seed 0] [any option of `fit`]

Each run is killed with SIGKILL several times before it is left to end: some times while a checkpoint is being written,
some times within a validation, else after a random time; half of the runs use two workers. Weights of `last.ckpt` and
`best.ckpt` and every line of `metrics.csv` are compared. Exits with status 1 when anything differs.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

#: A run of three epochs, with what a resume gets wrong most easily: dropout, accumulation, averaged weights.
RUN = [
    "--data.num_train=1280",
    "--data.num_val=300",
    "--data.batch_size=64",
    "--trainer.max_epochs=3",
    "--trainer.log_every_n_steps=1",
    "--trainer.accumulate_grad_batches=3",
    "--trainer.enable_model_summary=false",
    "--callbacks.ema=lightning.pytorch.callbacks.EMAWeightAveraging",
    "--callbacks.ema.decay=0.9",
    "--callbacks.last.every_n_steps=2",
]
#: Moments to kill at.
WHERE = ("anywhere", "checkpoint", "validation")


class ValidationMarker(Callback):
    """Leaves a file in place while a validation runs, for the killer to see."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_validation_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if not trainer.sanity_checking:
            self.path.touch()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.path.unlink(missing_ok=True)


def fit(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start a fit whose runs go to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "lit_project.cli",
        "fit",
        f"--trainer.default_root_dir={folder}",
        *options,
    ]
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": path},
        stdout=(folder / "out.log").open("a"),
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill(process: subprocess.Popen[str], folder: Path, where: str, seconds: float) -> bool:
    """Kill a fit at a moment; False when it ended before."""
    started: float | None = None
    while process.poll() is None:
        time.sleep(0.001)
        if started is None:
            # counted from the first logged step: starting Python is no moment to be interested in
            started = time.monotonic() if list(folder.glob("*/csv/metrics.csv")) else None
            continue
        reached = {
            "anywhere": time.monotonic() - started >= seconds,
            "checkpoint": bool(list(folder.glob("*/checkpoints/.*.tmp"))),
            "validation": (folder / "validating").exists(),
        }[where]
        if reached and (where == "anywhere" or time.monotonic() - started >= seconds / 2):
            process.kill()
            process.wait()
            (folder / "validating").unlink(missing_ok=True)
            return True
    return False


def differences(whole: Path, killed: Path) -> list[str]:
    """What differs between the results of two runs, each the only one in its folder."""
    found = []
    for name in ("last.ckpt", "best.ckpt"):
        one, other = (torch.load(next(f.glob(f"*/checkpoints/{name}")), weights_only=True) for f in (whole, killed))
        for part in ("state_dict", "current_model_state", "optimizer_states"):
            if not _equal(one.get(part), other.get(part)):
                found.append(f"{name}: {part}")
        if one["global_step"] != other["global_step"]:
            found.append(f"{name}: step {one['global_step']} and {other['global_step']}")
    one_csv, other_csv = (next(f.glob("*/csv/metrics.csv")).read_text().splitlines() for f in (whole, killed))
    if len(one_csv) != len(other_csv):
        found.append(f"metrics.csv: {len(one_csv)} and {len(other_csv)} lines")
    found += [f"metrics.csv: {a} | {b}" for a, b in zip(one_csv, other_csv, strict=False) if a != b][:3]
    return found


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def trial(folder: Path, kills: int, wanted: list[str], options: list[str], duration: float) -> tuple[list[str], int]:
    """Run once with up to ``kills`` kills in it, then to the end.

    Returns:
        Where it was killed, and the status of the last command.
    """
    marker = [
        f"--trainer.callbacks+={Path(__file__).stem}.ValidationMarker",
        f"--trainer.callbacks.path={folder}/validating",
    ]
    done: list[str] = []
    for where in wanted[:kills]:
        resume = ["--ckpt_path=last"] if list(folder.glob("*/checkpoints/last.ckpt")) else []
        if kill(fit(folder, *options, *marker, *resume), folder, where, random.uniform(0, duration)):
            done.append(where)
        if not resume and not list(folder.glob("*/checkpoints/last.ckpt")):
            for run in folder.glob("fit-*"):  # killed before there was anything to resume: it starts anew
                run.rename(folder / f"lost-{run.name}")
            for lost in folder.glob("lost-*/csv/metrics.csv"):
                lost.unlink()
    resume = ["--ckpt_path=last"] if list(folder.glob("fit-*/checkpoints/last.ckpt")) else []
    return done, fit(folder, *options, *marker, *resume).wait()


def main() -> None:
    """Kill, resume, compare, and say what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given, rest = parser.parse_known_args()
    random.seed(given.seed)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = RUN + rest
    failures = total = number = 0
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name) / "whole"
        started = time.monotonic()
        assert fit(whole, *options).wait() == 0, (whole / "out.log").read_text()
        duration = (time.monotonic() - started) / 2  # the rest is starting Python
        while total < given.kills:
            folder = Path(name) / f"killed-{number}"
            workers = 2 * (number % 2)
            wanted = [WHERE[(total + i) % 3] for i in range(min(3, given.kills - total))]
            done, status = trial(folder, 3, wanted, [*options, f"--data.num_workers={workers}"], duration)
            different = differences(whole, folder) if status == 0 else [(folder / "out.log").read_text()[-1500:]]
            total += len(done)
            number += 1
            failures += bool(different)
            print(f"{workers} workers, killed in: {', '.join(done) or 'never'}: {different or 'identical'}", flush=True)
    print(f"{total} kills in {number} runs, {failures} runs differ")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
