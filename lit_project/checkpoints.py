"""Reading and writing checkpoint files.

A checkpoint is data, not code: it is only ever read with ``weights_only=True``. It is written to a temporary name,
flushed to disk and then renamed, so the only copy is never half-written.
"""

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from lit_project.errors import InputError
from lit_project.files import write_atomically
from lit_project.run_folders import Record, read_record

#: What ``DistributedDataParallel``, ``DataParallel`` and ``torch.compile`` put into the names of weights.
_WRAPPERS = ("module", "_orig_mod")


# ---- writing


class SaveError(OSError):
    """A checkpoint could not be written. The file that was there before, if any, is untouched."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's file format, written so that a crash or a full disk leaves the previous file intact.

    It serves every strategy that writes one file, FSDP with ``state_dict_type: full`` among them. Sharded checkpoints
    (``state_dict_type: sharded``, DeepSpeed) are folders that these strategies write by themselves, not atomically.
    """

    #: Whether a file that this object wrote could be read again.
    _proven = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write ``checkpoint`` to ``path``, or leave ``path`` as it was.

        Raises:
            SaveError: the file cannot be written; its ``strerror`` says why.
            InputError: it could not be read again, as the checkpoint holds more than plain values and tensors. Only
                the first file is tried: what a run puts into them is always of the same kinds.
        """
        if "://" in str(path):  # such as s3://: the store itself shows whole files only
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, partial(self._write, checkpoint))
        except OSError as error:
            raise SaveError(error.errno, error.strerror or str(error), str(target)) from error

    def _write(self, checkpoint: dict[str, Any], file: BinaryIO) -> None:
        torch.save(checkpoint, file)
        if not self._proven:
            file.flush()
            try:  # mapped: the tensors, which may be large, are not looked at
                torch.load(file.name, map_location="cpu", weights_only=True, mmap=True)
            except pickle.UnpicklingError as error:
                culprits = ", ".join(_unreadable(checkpoint)) or str(error).split("\n")[0]
                raise InputError(
                    f"A checkpoint of this run could be written, but never read again, as reading it is not to run any "
                    f"code: {culprits}. Keep plain values there instead (str, int, float, list, dict, tensor), such as "
                    "str(path) for a path, in the callback's state_dict or in what goes to save_hyperparameters."
                ) from error
            self._proven = True

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Read ``path``; see ``read_checkpoint``."""
        if "://" in str(path):
            return super().load_checkpoint(path, map_location, weights_only=True)
        return read_checkpoint(path, map_location or "cpu")

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint that another has replaced; that it cannot be removed is no reason to stop a run."""
        try:
            super().remove_checkpoint(path)
        except OSError as error:
            rank_zero_warn(f"The replaced checkpoint {path} cannot be removed: {error.strerror}.")


def _unreadable(value: Any, key: str = "") -> Iterator[str]:
    """What in a checkpoint is not loaded with ``weights_only=True``, by its dotted name and type."""
    if type(value) in (dict, OrderedDict):
        for name, part in value.items():
            yield from _unreadable(part, f"{key}.{name}".lstrip("."))
    elif type(value) in (list, tuple):
        for number, part in enumerate(value):
            yield from _unreadable(part, f"{key}[{number}]")
    elif not isinstance(value, torch.Tensor) and type(value) not in (str, int, float, bool, type(None)):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        try:
            torch.load(buffer, weights_only=True)
        except pickle.UnpicklingError:
            yield f"{key} is a {type(value).__module__}.{type(value).__qualname__}"


def keep_name_flat(callback: ModelCheckpoint) -> None:
    """Have ``{val/acc:.2f}`` in a file name become ``val_acc=0.50``: ``val/acc=0.50`` would be within a folder."""
    if callback.auto_insert_metric_name and re.search(r"\{[^}:]*/", callback.filename or ""):
        equals = callback.CHECKPOINT_EQUALS_CHAR
        callback.filename = re.sub(
            r"\{([^}:]+)", lambda name: f"{name[1].replace('/', '_')}{equals}{name[0]}", str(callback.filename)
        )
        callback.auto_insert_metric_name = False


# ---- reading


def read_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint without running any code it may contain.

    A plain PyTorch file, a ``state_dict`` or a dict that has one under this name, is returned as the checkpoint of a
    training that is about to start with these weights, as is one that Lightning wrote with ``save_weights_only``.

    Raises:
        InputError: no such file, a damaged file, a file that is no checkpoint, or one that would run code.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(
            f"{path} is a folder: a sharded checkpoint, as FSDP and DeepSpeed write them, which is not read here. Make "
            f"one file of it: python -m lightning.pytorch.utilities.consolidate_checkpoint {path}"
        )
    if not path.is_file():
        raise InputError(f"There is no checkpoint {path}.")
    try:
        checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise InputError(
            f"{path} is not a checkpoint that can be trusted: loading it would need more than plain values and tensors,"
            f" or it is no checkpoint at all ({reason}) Choose a .ckpt file that a run of this project wrote."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = str(error).split("\n")[0] or type(error).__name__
        raise InputError(
            f"{path} cannot be read as a checkpoint: it is damaged or of another kind ({reason})."
        ) from error
    if not isinstance(checkpoint, dict):
        raise InputError(f"{path} holds no checkpoint and no state_dict, but a {type(checkpoint).__name__}.")
    if "pytorch-lightning_version" not in checkpoint or "state_dict" not in checkpoint:
        weights = checkpoint.get("state_dict", checkpoint)
        if not isinstance(weights, dict) or not weights or not all(torch.is_tensor(w) for w in weights.values()):
            held = ", ".join(str(key) for key in list(checkpoint)[:8]) or "nothing"
            raise InputError(
                f"{path} holds neither a checkpoint nor a state_dict, which is a dict of tensors by name, but: {held}. "
                "Write the weights with torch.save(network.state_dict(), FILE)."
            )
        checkpoint = {"state_dict": weights, "pytorch-lightning_version": L.__version__}
    if "optimizer_states" not in checkpoint:
        checkpoint.pop("loops", None)
        checkpoint |= {"optimizer_states": [], "lr_schedulers": [], "epoch": 0, "global_step": 0}
    return checkpoint


def holds_only_weights(checkpoint: dict[str, Any]) -> bool:
    """Whether a training starts at step 0 with the weights of this checkpoint, instead of going on from it."""
    return "loops" not in checkpoint


def steps_logged(checkpoint: dict[str, Any]) -> int:
    """The step at which loggers go on after the end of the training that a checkpoint holds.

    Loggers count batches that ended with a step. ``global_step`` is that, except with manual optimisation, where each
    optimiser's steps count.
    """
    loop = checkpoint["loops"]["fit_loop"]
    manual = loop["epoch_loop.manual_optimization.optim_step_progress"]["total"]["completed"] > 0
    return int(loop["epoch_loop.state_dict"]["_batches_that_stepped"] if manual else checkpoint["global_step"])


def match_keys(weights: dict[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Give ``weights`` the keys of a model whose ``state_dict`` has the keys ``own``.

    Keys may differ by what wrappers put in anywhere, on either side (``module.`` by DDP, ``_orig_mod.`` by
    ``torch.compile``), and those of a network alone lack its name in the module, ``network.``. A key that fits none of
    ``own``, or more than one, or one that is taken, is left as it is.
    """
    by_bare_name: dict[str, list[str]] = {}
    for key in own:
        by_bare_name.setdefault(_without_wrappers(key), []).append(key)
    matched = {key: value for key, value in weights.items() if key in own}
    for key, value in weights.items():
        bare = _without_wrappers(key)
        fitting = by_bare_name.get(bare) or by_bare_name.get(f"network.{bare}") or []
        if key not in own:
            matched[fitting[0] if len(fitting) == 1 and fitting[0] not in matched else key] = value
    return matched


def _without_wrappers(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


# ---- finding


def record_of(run: Path) -> Record:
    """A run's ``run.json``; empty if there is none, or it cannot be read."""
    try:
        return read_record(run)
    except InputError:
        return {}


def checkpoints_of_runs(name: str, runs: Path) -> list[Path]:
    """The checkpoint ``best`` or ``last`` of each run folder in ``runs`` that has one, in the order the runs began."""
    found = []
    for run in runs.glob("*/"):
        record = record_of(run)
        if path := _checkpoint_of(run, name, record):
            found.append((_started(record, path), path))
    return [path for _, path in sorted(found)]


def _checkpoint_of(run: Path, name: str, record: Record) -> Path | None:
    """A run's best checkpoint has the name that ``filename`` gave it, which its record tells."""
    paths = [run / "checkpoints" / f"{name}.ckpt"]
    if name == "best" and record.get("best") and record.get("subcommand") == "fit":
        paths.insert(0, run / record["best"]["path"])
    return next((path for path in paths if path.exists()), None)


def _started(record: Record, checkpoint: Path) -> tuple[float, float]:
    """When a run was started: a copy of its checkpoint may be older. Without a record, when that was written."""
    start, written = record.get("start"), checkpoint.stat().st_mtime
    return datetime.fromisoformat(start).timestamp() if start else written, written


def find_checkpoint(wanted: str, runs: Path, default: Literal["best", "last"]) -> Path:
    """Resolve what ``--ckpt_path`` was given to a file.

    Args:
        wanted: a file, a run folder, or ``best`` or ``last`` of the newest run that has one.
        runs: the folder that holds the run folders.
        default: which checkpoint of a run folder is meant.

    Raises:
        InputError: nothing there; the message says what was looked for.
    """
    if wanted in ("best", "last"):
        found = checkpoints_of_runs(wanted, runs)
        if not found:
            raise InputError(
                f"--ckpt_path {wanted}: no run in {runs.resolve()} has a {wanted} checkpoint. "
                "Train first (fit), or give the path of a checkpoint file or of a run folder."
            )
        return found[-1]
    path = Path(wanted).expanduser()
    if path.suffix == ".ckpt" and path.is_dir():
        return path  # which says why it cannot be read
    if path.is_dir():
        run = path.parent if path.name == "checkpoints" else path
        candidate = _checkpoint_of(run, default, record_of(run)) or path / f"{default}.ckpt"
        if candidate.is_file():
            return candidate
        there = {file.name for folder in (path, run / "checkpoints") for file in folder.glob("*.ckpt")}
        raise InputError(
            f"--ckpt_path {path}: the folder has no checkpoints/{default}.ckpt. Checkpoints there: "
            f"{', '.join(sorted(there)) or 'none'}."
        )
    if not path.is_file():
        raise InputError(
            f"--ckpt_path {path}: there is no such file (looked in {Path.cwd()}). Give a .ckpt file, a run folder, or "
            "'best' or 'last' for the newest run's."
        )
    return path
