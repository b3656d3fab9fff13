"""Reading and writing checkpoint files.

A checkpoint is data, not code: it is only ever read with ``weights_only=True``. It is written to a temporary name,
flushed to disk and then renamed, so the only copy is never half-written.
"""

import os
import pickle
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lit_project.errors import InputError


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's file format, written so that a crash or a full disk leaves the previous file intact."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write ``checkpoint`` to ``path``, or leave ``path`` as it was."""
        if "://" in str(path):  # such as s3://: the store itself shows whole files only
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Read ``path``; see ``read_checkpoint``."""
        if "://" in str(path):
            return super().load_checkpoint(path, map_location, weights_only=True)
        return read_checkpoint(path, map_location or "cpu")


def read_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a Lightning checkpoint without running any code it may contain.

    Raises:
        InputError: no such file, a damaged file, a file that is no checkpoint, or one that would run code.
    """
    path = Path(path)
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
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = str(error).split("\n")[0] or type(error).__name__
        raise InputError(
            f"{path} cannot be read as a checkpoint: it is damaged or of another kind ({reason})."
        ) from error
    missing = {"state_dict", "pytorch-lightning_version"} - (
        checkpoint.keys() if isinstance(checkpoint, dict) else set()
    )
    if missing:
        raise InputError(f"{path} holds no Lightning checkpoint: it has no {' and no '.join(sorted(missing))}.")
    return checkpoint


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
        found = sorted(runs.glob(f"*/checkpoints/{wanted}.ckpt"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise InputError(
                f"--ckpt_path {wanted}: no run in {runs.resolve()} has a checkpoint '{wanted}.ckpt'. "
                "Train first (fit), or give the path of a checkpoint file or of a run folder."
            )
        return found[-1]
    path = Path(wanted).expanduser()
    if path.is_dir():
        for candidate in (path / "checkpoints" / f"{default}.ckpt", path / f"{default}.ckpt"):
            if candidate.is_file():
                return candidate
        raise InputError(f"--ckpt_path {path}: the folder has no checkpoints/{default}.ckpt.")
    if not path.is_file():
        raise InputError(
            f"--ckpt_path {path}: there is no such file (looked in {Path.cwd()}). Give a .ckpt file, a run folder, or "
            "'best' or 'last' for the newest run's."
        )
    return path
