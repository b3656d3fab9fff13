"""Weights & Biases: Lightning's logger, which goes offline by itself and ends with the run's exit status."""

import importlib.util
import json
import os
import shutil
import struct
import sys
import zlib
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import lightning as L
import lightning.pytorch.loggers
import yaml
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import Tensor

from lit_project.errors import InputError
from lit_project.files import short_path
from lit_project.provenance import git_state

#: Where runs go when neither the config nor WANDB_PROJECT nor wandb's settings file says.
DEFAULT_PROJECT = "lit-project"
_STEP = "trainer/global_step"  # Lightning's name for it


class WandbLogger(lightning.pytorch.loggers.WandbLogger):
    """Logs a run to Weights & Biases, or to files for it.

    What Lightning's logger does not do:

    * Without an API key, or when the server does not accept it within ``timeout`` seconds, the run goes offline and
      says so in one line. Nothing is asked, and no key or setting is written.
    * What is ``None`` here comes from wandb's environment variables (WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY,
      WANDB_RUN_GROUP, WANDB_TAGS, ...), else from its settings files.
    * The config is the run folder's ``config.yaml``; the commit is this project's, wherever the run folder is.
    * When the trainer is done, the run is closed with the status that the process ends with: a run that failed or was
      stopped is not left to be found dead. A later ``trainer.test`` with the same logger goes on in the same run.
    * A run that goes on after it was killed has each row once: anew where nothing was sent yet, else as it was sent.

    Args:
        save_dir: the run's folder; wandb's files come into ``wandb/`` there.
        id: identifies the run: with the same one, a run goes on.
        name: shown for the run; the ``id`` by default.
        project: the run's project.
        entity: the user or team whose project it is.
        group: a name that related runs share.
        job_type: the kind of run within the group.
        tags: labels.
        notes: a description.
        mode: ``online`` fails where the server cannot be reached, ``offline`` does not try, ``disabled`` logs nothing;
            ``None`` tries.
        log_model: whether the best checkpoint becomes an artifact, with the aliases ``best`` and ``latest``. Offline, a
            copy waits in wandb's data folder to be uploaded.
        timeout: seconds for the server to accept the key.

    Raises:
        InputError: wandb is not installed.

    Source: https://docs.wandb.ai/guides/integrations/lightning
    """

    def __init__(
        self,
        save_dir: str,
        id: str | None = None,
        name: str | None = None,
        project: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        tags: list[str] | None = None,
        notes: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        log_model: bool = False,
        timeout: float = 5.0,
    ) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise InputError("The W&B logger needs the package wandb: pip install 'wandb>=0.31'")
        super().__init__(save_dir=save_dir, id=id, log_model=log_model)
        self._wandb_init.pop("anonymous", None)  # wandb warns of it, whatever it is
        self._given: dict[str, Any] = {"name": name, "project": project, "entity": entity, "group": group}
        self._given |= {"job_type": job_type, "tags": tags, "notes": notes}
        self._mode = mode
        self._timeout = timeout
        folder = Path(save_dir)
        self._folder, self._config_file, self._diff = folder / "wandb", folder / "config.yaml", folder / "diff.patch"
        self._resume_step: int | None = None
        #: What the server has of the process that this one goes on from: JSON by name, by step.
        self._logged: dict[int, dict[str, str]] = {}
        self._said_differs = False

    # ---- the beginning

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The ``wandb.Run``, begun when it is first asked for.

        Raises:
            InputError: it cannot be begun in the mode that the config or the environment names.
        """
        if self._experiment is None:
            self._begin()
        return self._experiment

    def _begin(self) -> None:
        import wandb

        known = wandb.setup().settings  # from the environment and the settings files
        told = self._mode or (known.mode if "mode" in known.model_fields_set else None)
        mode: str = told or "online"
        mode = {"run": "online", "dryrun": "offline"}.get(mode, mode)  # two old names
        obstacle = self._obstacle(known) if mode == "online" else None
        if not obstacle:
            try:
                self._init(known, mode)
            except wandb.Error as error:  # such as a team that is not the user's
                obstacle = _first_line(error)
                wandb.teardown()  # its process would not begin another run of this id
        if obstacle and told:
            raise InputError(f"W&B is to be {told}, but {obstacle}. Without a mode a run goes offline by itself.")
        if obstacle:
            self._init(wandb.setup().settings, "offline")
        if obstacle or mode == "offline":
            reason = f", as {obstacle}" if obstacle else ""
            rank_zero_info(f"W&B: offline{reason}. To upload the run later: wandb sync {short_path(self._folder)}")

    def _obstacle(self, known: Any) -> str | None:
        """Why the run cannot be online, as a clause; None if the server has accepted the API key."""
        from wandb.apis.public.service_api import ServiceApi
        from wandb.sdk.lib import wbauth

        # wandb.login does the same, but may take ten seconds, and write to the user's settings file
        try:
            key = wbauth.authenticate_session(host=known.base_url, source="", prompt=False, update_session=False)
            if key is None:
                return "there is no API key (wandb login)"
            settings = known.model_copy()
            wbauth.set_auth_settings(settings, key)
            ServiceApi(settings, timeout=self._timeout).authenticate()
        except Exception as error:  # of many types, down to those of a service process that cannot be started
            if isinstance(error.__context__, TimeoutError):
                return f"{known.base_url} has not answered within {self._timeout:g} s"
            return f"{known.base_url} does not accept the API key: {_first_line(error)}"
        return None

    def _init(self, known: Any, mode: str) -> None:
        """Have Lightning call ``wandb.init``."""
        config, git = self._config(), git_state()
        settings = {
            "init_timeout": 30,  # seconds, in place of 90
            # a connection that was lost does not keep a finished process, as what was not sent is on disk
            "finish_timeout": known.finish_timeout or 300,
            # seconds; what is not written yet is lost when the process is killed
            "x_transaction_log_flush_interval": 0.1,
            "silent": known.silent or mode == "offline",  # one line of ours in place of eight
        }
        if git is not None:
            settings |= {"git_root": str(Path(__file__).parent), "git_commit": git.commit}
        self._wandb_init |= self._given | {"config": config, "mode": mode, "settings": settings}
        self._wandb_init["project"] = self._project = self._given["project"] or known.project or DEFAULT_PROJECT
        self._wandb_init["name"] = self._given["name"] or known.run_name or self._id
        if self._resume_step is not None and mode != "disabled":
            self._drop_from(self._resume_step)
        run = super().experiment
        self._resume_step = None  # from now on the logs are of this process too
        if mode == "online":  # what had been written but not sent is logged again
            sent = run.summary.get(_STEP, -1)
            self._logged = {step: names for step, names in self._logged.items() if step <= sent}
        if self._diff.is_file() and mode != "disabled":  # wandb would leave out new files
            copy = shutil.copy(self._diff, run.dir)
            run.save(copy, base_path=run.dir, policy="now", glob=False)

    def _config(self) -> dict[str, Any] | None:
        """The resolved config; None where no command line has written one."""
        return yaml.safe_load(self._config_file.read_text()) if self._config_file.is_file() else None

    # ---- what is logged

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Nothing where there is a config, which has them."""
        if self._config() is None:
            super().log_hyperparams(params)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log a row, less what the server has of it from the process that this one goes on from."""
        _ = self.experiment  # which knows what has been sent
        logged = {} if step is None else self._logged.get(step, {})
        for name in logged.keys() & metrics.keys() - {"epoch"}:
            before, now = json.loads(logged[name]), metrics[name]
            # as text, since a NaN comes back as one
            if not self._said_differs and isinstance(now, float) and str(float(before)) != str(now):
                self._said_differs = True
                rank_zero_info(
                    f"W&B: up to step {max(self._logged)} the server keeps what was sent before the run was resumed, "
                    f"which now differs: {name} of step {step} was {float(before)}, is {now}."
                )
        new = {name: value for name, value in metrics.items() if name not in logged or name == "epoch"}
        if not logged or new.keys() - {"epoch"}:
            super().log_metrics(new, step)

    @rank_zero_only
    def resume_at(self, step: int) -> None:
        """Replace what an interrupted run logged at ``step`` or later: it will be logged again."""
        self._resume_step = step

    def _drop_from(self, step: int) -> None:
        """Cut the logs that nothing was sent of; remember the rest, as the server does not change a row that it has."""
        for file in self._folder.glob("*run-*/*.wandb"):
            is_sent = not file.parent.name.startswith("offline-") or Path(f"{file}.synced").exists()
            for start, record in read_log(file):
                row = {item.nested_key[0]: item.value_json for item in record.history.item if item.nested_key}
                if int(row.get(_STEP, -1)) < step:
                    continue
                if not is_sent:
                    os.truncate(file, start)
                    break
                self._logged.setdefault(int(row[_STEP]), {}).update(row)

    # ---- the end

    @rank_zero_only
    def log_graph(  # type: ignore[override]  # as Lightning's own loggers do
        self, model: L.LightningModule, input_array: Tensor | None = None
    ) -> None:
        """No graph: Lightning calls this when a fit begins, and so tells whose best checkpoint is the run's.

        What ``after_save_checkpoint`` tells is not enough: a resumed run may end with the best of the process before.
        """
        trainer = model.trainer
        if self._log_model and trainer.state.fn == "fit":
            callbacks = (one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint))
            self._checkpoint_callbacks |= {id(callback): callback for callback in callbacks}

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Log the best checkpoint, if it is to be; close the run with the status that the process ends with."""
        if self._experiment is None:
            return
        super().finalize(status)
        code: Any = 0
        if status != "success":
            ending = sys.exc_info()[1]  # Lightning calls this while it handles it
            code = ending.code if isinstance(ending, SystemExit) else 1
        self._experiment.finish(exit_code=code if isinstance(code, int) else 1)
        self._experiment = None  # what is logged from now on begins the run again


def read_log(file: Path) -> Iterator[tuple[int, Any]]:
    """The records of a ``.wandb`` file to where it breaks off, each after the byte at which it starts.

    They are messages of ``wandb.proto.wandb_internal_pb2.Record``, in blocks as in LevelDB's log, after a header of
    seven bytes.

    Source: https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    from wandb.proto import wandb_internal_pb2

    parse = wandb_internal_pb2.Record.FromString  # type: ignore[attr-defined]
    data, at, start, parts = file.read_bytes(), 7, 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        checksum, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if left < 7 or kind == 0:  # the rest of the block is empty
            at += left
            continue
        end = at + 7 + length
        if zlib.crc32(data[at + 6 : end]) != checksum:
            return
        if kind in (1, 2):  # whole, or the first part
            start = at
        parts += data[at + 7 : end]
        at = end
        if kind in (1, 4):  # whole, or the last part
            yield start, parse(parts)
            parts = b""


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
