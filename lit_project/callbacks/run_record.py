"""Keeps what a run was made of and how it ended, in ``run.json`` and in each checkpoint."""

import json
import math
import os
import platform
import signal
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_project.callbacks.last_checkpoint import Stopped
from lit_project.errors import InputError
from lit_project.files import short_path, write_atomically
from lit_project.provenance import MAIN_PACKAGES, git_state, machine, versions
from lit_project.run_folders import now

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

RUNNING = "running"


class RunRecord(Callback):
    """Writes ``run.json`` to the run folder, and makes each checkpoint self-contained.

    ``run.json`` is written when the run begins and again, atomically, when the data is ready and when the run ends.
    Its ``exit_reason`` is ``finished``, ``failed: …``, or such as ``interrupted by SIGTERM``; it stays ``running``
    while the run does, and for ever when the process was killed. What ``git diff`` says goes to ``diff.patch``. A run
    that goes on in its folder keeps the records of its earlier starts under ``earlier``. One process at a time may run
    in a folder, see :func:`hold`.

    Every checkpoint has the resolved config and the data's preprocessing as plain values: with them
    ``test --ckpt_path X`` and ``predict --ckpt_path X`` need nothing else.

    Args:
        config: the run's resolved config.
        started: how it was started, kept as it is: ``command``, ``subcommand``, ``ckpt_path``.
    """

    def __init__(self, config: dict[str, Any], started: dict[str, Any] | None = None) -> None:
        self.config = config
        self.started = started or {}
        self._record: dict[str, Any] = {}
        self._path: Path | None = None  # of rank 0 alone

    # ---- run.json

    def begin(self, trainer: L.Trainer) -> None:
        """Write what is known at the start. Called before the data is prepared, which may take long or fail.

        Raises:
            InputError: another process runs in the folder.
        """
        if not trainer.is_global_zero or self._path:
            return
        folder = Path(trainer.default_root_dir)
        hold(folder)
        self._path = folder / "run.json"
        git = git_state()
        self._record = {
            **self.started,
            "cwd": str(Path.cwd()),
            "start": now(),
            "end": None,
            "exit_reason": RUNNING,
            "pid": os.getpid(),
            "best": None,
            "metrics": {},
            "seed": self.config.get("seed_everything"),
            "git": {"commit": git.commit, "changed": bool(git.patch)} if git else None,
            "data": None,
            "machine": {**machine(), "processes": trainer.world_size},
            "versions": versions(),
            "config": self.config,
            "earlier": self._earlier(),
        }
        patch = self._path.with_name("diff.patch")
        if git and git.patch:
            self._write(patch, git.patch)
        else:
            patch.unlink(missing_ok=True)  # of an earlier start in this folder
        self._write_record()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.begin(trainer)
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        if getattr(profiler, "dirpath", None):  # each rank has named a run folder, but the first rank's is the one
            profiler.dirpath = trainer.strategy.broadcast(profiler.dirpath)
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        if self._path and hasattr(datamodule, "fingerprint"):
            data = self._record["data"] = datamodule.fingerprint()
            self._write_record()
            before = next((start["data"] for start in self._record["earlier"] if start.get("data")), data)
            if differing := sorted(split for split in before.keys() & data.keys() if before[split] != data[split]):
                rank_zero_warn(
                    f"The {' and '.join(differing)} images are not those that this run was started with: its scores "
                    "before and after do not compare, and it may be validated on images that it was trained on."
                )

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.end(trainer, "finished")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.end(trainer, describe(exception))

    def end(self, trainer: L.Trainer, exit_reason: str) -> None:
        """Write how the run ended; only the first reason counts."""
        if not self._path or self._record["end"]:
            return
        best = best_checkpoint(trainer)
        self._record |= {
            "end": now(),
            "exit_reason": exit_reason,
            "best": best and {"path": _relative(best.best_model_path, self._path.parent), **_score(best)},
            "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        }
        self._write_record()

    def _earlier(self) -> list[dict[str, Any]]:
        assert self._path is not None
        try:
            before = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return []
        if before["exit_reason"] == RUNNING:  # and yet its folder was free
            before["exit_reason"] = "killed"
        return [*before.pop("earlier"), before]

    def _write_record(self) -> None:
        assert self._path is not None
        self._write(self._path, json.dumps(_valid(self._record), indent=2, default=str, ensure_ascii=False) + "\n")

    def _write(self, path: Path, text: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda file: file.write(text.encode(errors="replace")))
        except OSError as error:
            rank_zero_warn(f"{path} cannot be written: {error.strerror}.")

    # ---- checkpoints

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        git = git_state()
        checkpoint["config"] = self.config
        checkpoint["git_commit"] = f"{git.commit}{'-dirty' if git.patch else ''}" if git else None
        installed = versions()
        checkpoint["versions"] = {name: installed[name] for name in ("python", *MAIN_PACKAGES) if name in installed}
        datamodule = getattr(trainer, "datamodule", None)
        if datamodule is not None and hasattr(datamodule, "preprocessing"):
            checkpoint["preprocessing"] = datamodule.preprocessing()


def hold(folder: Path) -> None:
    """Let no other process run in ``folder`` as long as this one lives; its number is in the hidden file ``.lock``.

    The operating system frees the folder when the process ends, be it by SIGKILL. Where the file system has no locks,
    or there is no such call (Windows), any number can run.

    Raises:
        InputError: another process runs there.
    """
    if fcntl is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)  # open from now on: closing it frees the folder
    except OSError:
        return  # that nothing can be written there is said of run.json
    try:
        # a lock of the process: workers that were forked and outlive it for seconds do not hold it, as with flock
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {platform.node()}".encode())
    except (BlockingIOError, PermissionError) as error:
        job, requeued = os.environ.get("SLURM_JOB_ID"), int(os.environ.get("SLURM_RESTART_COUNT", 0))
        if requeued and folder.name.endswith(f"-job{job}"):
            return  # the lock is that of its earlier start, whose machine has gone down: no job runs twice at a time
        holder = os.read(lock, 1000).decode(errors="replace") or "another process"
        os.close(lock)
        raise InputError(
            f"{short_path(folder)} is in use by {holder}: two would write over each other's checkpoints. Wait until "
            "it has ended, or stop it. Without --ckpt_path, a new run starts in a folder of its own. Should that "
            f"process have gone down with its machine, delete {short_path(folder / '.lock')}."
        ) from error
    except OSError:
        return


def best_checkpoint(trainer: L.Trainer) -> ModelCheckpoint | None:
    """The callback whose best checkpoint is meant by ``best``: the first that monitors something, else the last."""
    written = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.best_model_path]
    monitoring = (c for c in written if c.monitor and c.best_model_score is not None)
    return next(monitoring, written[-1] if written else None)


def describe(exception: BaseException) -> str:
    """An exit reason in one line."""
    if isinstance(exception, Stopped):
        return f"interrupted {exception.reason}"
    if isinstance(exception, KeyboardInterrupt):
        return f"interrupted by {signal.SIGINT.name}"
    if isinstance(exception, SIGTERMException):
        return f"interrupted by {signal.SIGTERM.name}"
    return f"failed: {type(exception).__name__}: {str(exception).strip() or 'no message'}".split("\n")[0]


def _score(callback: ModelCheckpoint) -> dict[str, Any]:
    score = callback.best_model_score
    return {"monitor": callback.monitor, "score": None if score is None else score.item()}


def _relative(path: str, folder: Path) -> str:
    inside = Path(path).resolve().is_relative_to(folder.resolve())
    return str(Path(path).resolve().relative_to(folder.resolve())) if inside else path


def _valid(value: Any) -> Any:
    """JSON has no word for NaN and infinity."""
    if isinstance(value, dict):
        return {str(key): _valid(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_valid(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
