"""Which run a checkpoint belongs to, and whether it can go on with other settings."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from lit_project.checkpoints import checkpoints_of_runs, holds_only_weights, read_checkpoint, record_of
from lit_project.errors import InputError
from lit_project.run_folders import flat, is_harmless, optimisation

_MAX_LISTED = 12


def run_to_continue(path: Path, checkpoint: dict[str, Any]) -> Path | None:
    """The folder of the run that wrote a checkpoint, if the run has come no further than it.

    From an earlier checkpoint, such as a best one, a run of its own starts, so that nothing is overwritten.
    """
    folder = path.parent.parent
    last = path.parent / "last.ckpt"
    if holds_only_weights(checkpoint) or not (folder / "config.yaml").is_file():
        return None
    if last.is_file() and last != path:
        try:
            newest = read_checkpoint(last)["global_step"]
        except InputError:  # it is damaged, which may be why another was chosen
            return None
        if newest > checkpoint["global_step"]:
            return None
    return folder


def newest_run_of(configs: list[dict[str, Any]], runs: Path, options: Collection[str] = ()) -> Path:
    """The newest run that has a ``last.ckpt`` and was started with what the given config files say of data and model.

    Args:
        configs: the content of the files.
        runs: the folder that holds the run folders.
        options: dotted names of settings on the command line: what a file says of them does not count.

    Raises:
        InputError: there is none.
    """
    found = checkpoints_of_runs("last", runs)
    wanted = {key: value for config in configs for key, value in flat(optimisation(config))}
    options = {option.replace(".init_args", "").removesuffix("+") for option in options}
    counts = {key for key, value in wanted.items() if _settles(key, value, options)}
    for path in reversed(found):
        saved = path.parent.parent / "config.yaml"
        had = dict(flat(yaml.safe_load(saved.read_text()))) if saved.is_file() else {}
        if all(_same(had.get(key), wanted[key]) for key in counts):
            return path
    have = (
        f"none of the {len(found)} runs there has this config" if found else "no run there has a checkpoint 'last.ckpt'"
    )
    raise InputError(
        f"--ckpt_path last: there is nothing to go on from in {runs.resolve()}: {have}. Train first, that is without "
        "--ckpt_path, or give the path of a checkpoint file or of a run folder."
    )


def _settles(key: str, value: Any, options: Collection[str]) -> bool:
    """Whether a run must have this value of a config file to be one of that file.

    What a file leaves open is found in the data, such as image_size; in a list of classes the run has their defaults
    too; what options replace may be anything. Where the images are does matter: it tells one data set from another.
    """
    classes = isinstance(value, list) and any(isinstance(part, dict) for part in value)
    replaced = any(key == option or key.startswith(f"{option}.") for option in options)
    return value is not None and not classes and not replaced and (key == "data.root" or not is_harmless(key))


def run_of_job(job: str, command: list[str], runs: Path) -> Path | None:
    """The ``last.ckpt`` of the newest run that this very command started within a SLURM job, if there is one."""
    for path in reversed(checkpoints_of_runs("last", runs)):
        run = path.parent.parent
        if run.name.endswith(f"-job{job}") and record_of(run).get("command") == command:
            return path
    return None


def refuse_changes(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on with settings that change what is optimised, or how.

    Args:
        before: the resolved config in the checkpoint.
        now: the resolved config of this run.

    Raises:
        InputError: some differ; the message lists them.
    """
    old, new = dict(flat(optimisation(before))), dict(flat(optimisation(now)))
    differing = [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if not is_harmless(key) and not _same(old.get(key), new.get(key))
    ]
    if differing:
        more = [f"and {len(differing) - _MAX_LISTED} more"] if len(differing) > _MAX_LISTED else []
        listed = "\n  ".join(differing[:_MAX_LISTED] + more)
        raise InputError(
            f"The run was started with other settings, and would become a mixture of both:\n  {listed}\nLeave them as "
            "they were (the checkpoint brings them), or go on all the same with --force_resume=true."
        )


def _same(one: Any, other: Any) -> bool:
    """Equal, also with a short class path, a path relative to here, or a number that YAML takes for text."""
    if one == other or (isinstance(one, bool) or isinstance(other, bool)):
        return bool(one == other)
    if isinstance(one, str) and isinstance(other, str):
        short, long = sorted((one, other), key=len)
        return long.endswith(f".{short}") or long == str(Path(short).absolute())
    try:
        return float(one) == float(other)
    except (TypeError, ValueError):
        return False
