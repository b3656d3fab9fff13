"""Run folders written by hand, with numbers that a test knows."""

import csv
import json
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "seed_everything": 0,
    "model": {"class_path": "Net", "init_args": {"optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1}}}},
    "trainer": {"max_epochs": 3, "callbacks": None, "default_root_dir": "runs"},
    "callbacks": {
        "last": {
            "class_path": "lit_project.callbacks.LastCheckpoint",
            "init_args": {"path": "x"},
        },
        "best": {"class_path": "x.ModelCheckpoint", "init_args": {"monitor": "val/acc", "mode": "max"}},
        "ema": None,
    },
}


def made_run(folder: Path, *epochs: dict[str, Any], config: dict[str, Any] = CONFIG, **record: Any) -> Path:
    """Write ``run.json``, and ``metrics.csv`` with a row for each epoch if there are any."""
    folder.mkdir(parents=True)
    scores = [value for row in epochs if isinstance(value := row.get("val/acc"), float)]
    values = {
        "subcommand": "fit",
        "ckpt_path": None,
        "start": "2026-11-30T09:00:00+00:00",
        "end": "2026-11-30T10:02:03+00:00",
        "exit_reason": "finished",
        "pid": 1,
        "best": {"path": "checkpoints/best.ckpt", "monitor": "val/acc", "score": max(scores, default=0.5)},
        "metrics": {},
        "seed": config["seed_everything"],
        "git": {"commit": "0123456789abcdef", "changed": False},
        "data": {split: {"images": 10, "sha256": f"{split}-sha256"} for split in ("train", "val")},
        "config": config,
        "earlier": [],
    }
    (folder / "run.json").write_text(json.dumps(values | record))
    if epochs:
        (folder / "csv").mkdir()
        with (folder / "csv" / "metrics.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["epoch", "step", *dict.fromkeys(name for row in epochs for name in row)])
            writer.writeheader()
            writer.writerows({"epoch": number, "step": 10 * number, **row} for number, row in enumerate(epochs))
    return folder


def made_test(run: Path, name: str = "test-1", checkpoint: str = "best.ckpt", **record: Any) -> Path:
    """Write the folder of a test of a run, beside it."""
    path = f"/elsewhere/{run.name}/checkpoints/{checkpoint}"
    values = {"data": {"test": {"images": 20, "sha256": "test-sha256"}}, "metrics": {"test/loss": 1.5, "test/acc": 0.5}}
    values |= {"start": "2026-11-30T10:30:00+00:00"}  # after the end of the run
    return made_run(run.parent / name, subcommand="test", ckpt_path=path, **values | record)
