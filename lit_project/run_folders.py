"""What run folders tell: the record, the logged metrics, the scores of the best epoch and of a test.

Only files are read, without torch, so that a command which needs no more starts at once.
"""

import csv
import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from lit_project.errors import InputError

Row = dict[str, str]
Record = dict[str, Any]
# Settings that leave the result of an optimisation as it is: how fast it runs, where it runs, and what is scored.
_HARMLESS = {"num_workers", "placement", "root", "data_dir", "cache_dir", "compile", "gradient_checkpointing"}
_HARMLESS |= {"test_time_augmentation", "class_names", "num_test"}
# Settings of the trainer that do not.
_TRAINER = {"accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "limit_train_batches"}
_TRAINER |= {"overfit_batches"}


def now() -> str:
    """The time as ``run.json`` has it: ISO 8601, to the second, with the offset from UTC."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def time_taken(record: Record) -> tuple[timedelta, bool]:
    """How long all starts of a run took together, and whether that is all: one that was killed does not tell."""
    starts = [*(record.get("earlier") or []), record]
    ended = [start for start in starts if start.get("start") and start.get("end")]
    spans = [datetime.fromisoformat(start["end"]) - datetime.fromisoformat(start["start"]) for start in ended]
    return sum(spans, timedelta()), len(ended) == len(starts)


def read_record(folder: Path) -> Record:
    """The ``run.json`` of a run.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if not isinstance(record, dict) or "exit_reason" not in record:
            raise ValueError("it does not say how a run ended")
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} is not the folder of a run: its run.json cannot be read ({error}).") from error
    return record


def read_repeat(folder: Path) -> Record:
    """The ``repeat.json`` of a repeat.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    try:
        state = json.loads((folder / "repeat.json").read_text(encoding="utf-8"))
        if not isinstance(state, dict) or not {"options", "results", "statistics"} <= state.keys():
            raise ValueError("it does not say what was repeated")
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / 'repeat.json'} cannot be read as what a repeat wrote ({error}).") from error
    return state


def read_rows(file: Path) -> list[Row]:
    """The rows of a CSV file, by the names in its first line; none if there is no such file."""
    if not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8", errors="replace") as lines:
        return list(csv.DictReader(lines))


def read_metrics(folder: Path) -> list[Row]:
    """The rows of a run's ``metrics.csv``; none if the run logged nothing, or not there."""
    return read_rows(folder / "csv" / "metrics.csv")


def number(text: Any) -> float | None:
    """A cell or a value of ``run.json`` as a number; None for an empty one, and one that was cut off in writing."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a config or record with their dotted names, those that options have on the command line."""
    if isinstance(value, dict):
        for name, part in value.items():
            below = key if name == "init_args" else f"{key}.{name}".lstrip(".")
            yield from flat(part, below)
    else:
        yield key.removesuffix(".class_path"), value


def optimisation(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that decides on the trained weights."""
    trainer = config.get("trainer") or {}
    part: dict[str, Any] = {key: config[key] for key in ("seed_everything", "model", "data") if key in config}
    part["trainer"] = {key: trainer[key] for key in _TRAINER if key in trainer}
    ema = (config.get("callbacks") or {}).get("ema")
    return part | ({"callbacks": {"ema": ema}} if ema else {})


def is_harmless(key: str) -> bool:
    """Whether a setting of data or model, by its dotted name, leaves the trained weights as they are."""
    return key.rsplit(".", 1)[-1] in _HARMLESS


# ---- scores


def monitored(config: dict[str, Any]) -> tuple[str, str] | None:
    """The metric by which a run's best checkpoint is chosen, and whether ``max`` or ``min`` is best; None without one.

    It is the first ``ModelCheckpoint`` that monitors something, of the named callbacks and then of the user's own.
    """
    own = (config.get("trainer") or {}).get("callbacks") or []
    for part in [*(config.get("callbacks") or {}).values(), *(own if isinstance(own, list) else [own])]:
        if isinstance(part, dict) and str(part.get("class_path")).endswith("ModelCheckpoint"):
            arguments = part.get("init_args") or {}
            if arguments.get("monitor"):
                return arguments["monitor"], arguments.get("mode") or "min"
    return None


def best_epoch(record: Record, rows: list[Row]) -> tuple[int | None, dict[str, float]]:
    """The epoch whose checkpoint a run kept as best, counted from 0, and all validation metrics of that epoch.

    It is the epoch with the score that the record has of the checkpoint, the first of equals. That score may be in no
    row of ``metrics.csv``, as when the checkpoint is from an earlier run's folder: then nothing else is known of it. A
    run that was killed, or goes on, has recorded none: it is the epoch in which the monitored metric was best, and the
    last one if none is monitored.
    """
    best = record.get("best") or {}
    metric, mode = monitored(record.get("config") or {}) or (best.get("monitor") or "", "max")
    score = number(best.get("score")) if best.get("monitor") == metric else None
    found = [row for row in rows if (value := number(row.get(metric))) is not None and math.isfinite(value)]
    if score is not None and math.isfinite(score):
        found = [row for row in found if math.isclose(float(row[metric]), score, rel_tol=1e-6)]
        if not found:
            return None, {metric: score}
    if found:
        row = (max if mode == "max" else min)(found, key=lambda row: float(row[metric]))
    else:
        row = next((row for row in reversed(rows) if any(_is_val(name) and row[name] for name in row)), {})
    values = {name: number(text) for name, text in row.items() if _is_val(name) or name == metric}
    scores = {name: value for name, value in values.items() if value is not None}
    epoch = number(row.get("epoch"))
    return None if epoch is None else int(epoch), scores


def tests_in(runs: Path) -> dict[tuple[str, str], Record]:
    """The records of the finished tests in a folder of runs: the newest one of each checkpoint.

    Their key is the name of the tested run's folder and that of the checkpoint: paths change when runs are moved.
    """
    found: dict[tuple[str, str], Record] = {}
    for file in sorted(runs.glob("test-*/run.json")):
        try:
            record = read_record(file.parent)
        except InputError:
            continue
        checkpoint = Path(record.get("ckpt_path") or "")
        key = (checkpoint.parent.parent.name, checkpoint.name)
        if record["exit_reason"] == "finished" and (key not in found or _start(record) >= _start(found[key])):
            found[key] = record
    return found


def test_of(folder: Path, record: Record, tests: dict[tuple[str, str], Record]) -> Record | None:
    """The record of the newest test of a run's best checkpoint; ``tests`` are those in the folder the run is in.

    One that was made before the run went on and replaced the checkpoint is of another model, and not returned.
    """
    best = record.get("best") or {}
    path = folder / (best.get("path") or "checkpoints/best.ckpt")
    test = tests.get((folder.name, path.name))
    return test if test and (written := _last_written(record, path)) and _start(test) >= written else None


def _last_written(record: Record, checkpoint: Path) -> datetime | None:
    """A time, in whole seconds, after which a run's best checkpoint was not replaced; None if nothing tells it."""
    best, end = record.get("best") or {}, record["end"]
    if end is None:  # it was killed, or goes on
        return datetime.fromtimestamp(int(checkpoint.stat().st_mtime), UTC) if checkpoint.is_file() else None
    for earlier in reversed(record.get("earlier", [])):
        if best.get("score") is None or earlier["best"] != best:
            break
        end = earlier["end"]
    return datetime.fromisoformat(end)


def _start(record: Record) -> datetime:
    return datetime.fromisoformat(record["start"])


def _is_val(name: str | None) -> bool:
    return name is not None and name.startswith("val")
