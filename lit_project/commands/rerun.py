"""Run a recorded run again and tell whether the result is bit-identical, or what differs.

The run is started anew from the config in its folder, with the same seed and number of threads, in a new folder beside
it. Compared are the weights in each checkpoint, tensor by tensor, and the logged metrics. Where they differ, the
recorded facts that differ are named: commit, versions, machine, threads, data. The code is the present one.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_project import commands
from lit_project.commands import _fit
from lit_project.errors import InputError
from lit_project.run_folders import flat, read_record, read_rows

#: What ``run.json`` records of what a result depends on.
FACTS = ("git", "versions", "machine", "data")


def main(argv: list[str]) -> int:
    """Exit status 0 if the new run's result is bit-identical, 1 if it is not."""
    parser = commands.parser("rerun", __doc__)
    parser.add_argument("run_folder", type=Path, help="The folder of a finished fit, validate or test.")
    old = parser.parse_args(argv).run_folder.absolute()
    before = read_finished(old)
    new = run_again(old, before)
    after = read_finished(new)
    compared, differences = compare(old, new)
    if not compared:
        raise InputError(f"{old} has neither a checkpoint nor metrics that could be compared.")
    print(f"\nAgain: {new}")
    if not differences:
        print(f"Bit-identical: {', '.join(compared)}.")
        return 0
    facts = [*changed_facts(before, after), *changed_patch(old, new), *changed_on_the_way(before)]
    print("Not identical:", *differences, sep="\n  ")
    if facts:
        print("What is recorded differs in:", *facts, sep="\n  ")
    else:
        print(
            "Nothing that is recorded differs, so some operation is not deterministic: "
            "--config configs/trainer/deterministic.yaml refuses those, and names them."
        )
    return 1


def read_finished(folder: Path) -> dict[str, Any]:
    """The ``run.json`` of a run that finished.

    Raises:
        InputError: no record, or not of a run that finished and can be repeated.
    """
    record = read_record(folder)
    if record["exit_reason"] != "finished":
        raise InputError(f"The run in {folder} did not finish ({record['exit_reason']}): it has no result to compare.")
    if record.get("subcommand") not in ("fit", "validate", "test"):
        raise InputError(f"{folder} is not of a fit, validate or test: there is nothing to run and compare.")
    return record


def run_again(old: Path, record: dict[str, Any]) -> Path:
    """Run what ``record`` tells of in a process of its own; return the folder of the new run."""
    command = [*_fit.CLI, record["subcommand"], f"--config={old / 'config.yaml'}"]
    command.append(f"--trainer.default_root_dir={old.parent}")
    checkpoint = record["ckpt_path"]
    # a run that went on from a checkpoint of its own is repeated from its very start
    if checkpoint and not (record["subcommand"] == "fit" and Path(checkpoint).is_relative_to(old)):
        command.append(f"--ckpt_path={checkpoint}")
    environment = {"OMP_NUM_THREADS": str(record["machine"]["threads"])} | _fit.environment()
    cwd = record["cwd"] if Path(record["cwd"]).is_dir() else None  # relative paths in the config start there
    pattern = f"{record['subcommand']}-*/run.json"
    earlier = set(old.parent.glob(pattern))
    process = subprocess.Popen(command, cwd=cwd, env=environment)
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.wait()  # Ctrl-C has reached it too, and it writes its last checkpoint
        raise
    if status:
        raise InputError(f"Running {old} again failed with exit status {status}; the reason is above.")
    for path in set(old.parent.glob(pattern)) - earlier:  # in containers a process ID comes again and again
        if read_record(path.parent)["pid"] == process.pid:
            return path.parent
    raise InputError(f"The new run has left no run.json in {old.parent}.")


def compare(old: Path, new: Path) -> tuple[list[str], list[str]]:
    """What the two folders have in common to compare, and how it differs, in words."""
    compared, differences = [], []
    for path in sorted((old / "checkpoints").glob("*.ckpt")):
        other = new / "checkpoints" / path.name
        if not other.is_file():
            differences.append(f"{path.name}: not written this time")
            continue
        number, found = compare_weights(path, other)
        compared.append(f"{number} tensors of {path.name}")
        differences += found
    metrics = old / "csv" / "metrics.csv"
    if metrics.is_file():
        number, found = compare_metrics(metrics, new / "csv" / "metrics.csv")
        compared.append(f"{number} rows of metrics.csv")
        differences += found
    return compared, differences


def compare_weights(path: Path, other: Path) -> tuple[int, list[str]]:
    """The number of tensors in ``path``, and a line on those that have other bits in ``other``."""
    import torch

    from lit_project.checkpoints import read_checkpoint

    one, two = (read_checkpoint(file)["state_dict"] for file in (path, other))
    different = [name for name in {**one, **two} if not _same_bits(one.get(name), two.get(name))]
    if not different:
        return len(one), []
    first = different[0]
    by = ""
    if first in one and first in two and one[first].shape == two[first].shape:
        by = f" (by up to {torch.max(torch.abs(one[first].double() - two[first].double())).item():.2g})"
    return len(one), [f"{path.name}: {len(different)} of {len(one)} tensors, the first is {first}{by}"]


def compare_metrics(path: Path, other: Path) -> tuple[int, list[str]]:
    """The number of rows in ``path``, and a line on the first value that is another in ``other``."""
    one, two = read_rows(path), read_rows(other)
    for number, (before, after) in enumerate(zip(one, two, strict=False), start=1):
        for name in {**before, **after}:
            if before.get(name) != after.get(name):
                values = f"{before.get(name) or 'nothing'} before, {after.get(name) or 'nothing'} now"
                return len(one), [f"metrics.csv: first in row {number} (step {before.get('step')}), {name}: {values}"]
    return len(one), [] if len(one) == len(two) else [f"metrics.csv: {len(one)} rows before, {len(two)} now"]


def changed_facts(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """A line on each recorded fact that changed."""
    for name, one, two in _differing_facts(before, after):
        yield f"{name}: {one} before, {two} now"


def changed_on_the_way(record: dict[str, Any]) -> Iterator[str]:
    """A line on each recorded fact that was another when a run was started than when it went on."""
    for start in record["earlier"]:
        for name, one, two in _differing_facts(start, record):
            if one is not None:  # that start was cut short before it was known
                yield f"{name}: {one} at an earlier start of the run, {two} when it was resumed"


def _differing_facts(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    one, two = (dict(flat({name: record[name] for name in FACTS if record[name]})) for record in (before, after))
    for name in {**one, **two}:
        if one.get(name) != two.get(name):
            yield name, one.get(name), two.get(name)


def changed_patch(old: Path, new: Path) -> Iterator[str]:
    """A line if the code was changed otherwise since the commit."""
    one, two = (path.read_bytes() if path.is_file() else b"" for path in (old / "diff.patch", new / "diff.patch"))
    if one != two:
        yield "diff.patch: what was changed since the commit"


def _same_bits(one: Any, two: Any) -> bool:
    import torch

    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return one is not None and bool(one == two)
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, two)))  # NaN is itself
