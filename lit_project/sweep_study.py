"""A sweep's trials, shared by all processes that work on it: who runs which, and who takes over a dead one's.

Optuna keeps the trials, in a journal file or in PostgreSQL, and gives each a number of its own. A running trial has a
lease: the lock on a file in its folder, which the kernel takes back when the last process that holds it has ended, be
it by SIGKILL; and a counter in the storage that goes on as long as it is looked after, by which another machine knows.
"""

import fcntl
import itertools
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage
from optuna.trial import FrozenTrial, TrialState

from lit_project.errors import InputError
from lit_project.run_folders import flat, is_harmless, optimisation
from lit_project.sweep_space import Sweep

#: Settings of the trainer that say how long a trial is, and what is scored how often.
_LENGTH = ("max_epochs", "max_steps", "limit_val_batches", "check_val_every_n_epoch", "val_check_interval")


class SharedStudy:
    """The study of a sweep, made or found.

    Args:
        sweep: what is searched.
        direction: ``maximize`` or ``minimize``.
        config: the resolved config of one trial, to tell whether the base has changed.
        database: where the trials are kept; None for a journal in the sweep's folder.

    Raises:
        InputError: the study was begun with another space.
    """

    #: Seconds between two signs of life, and without one after which another machine takes a trial over.
    BEAT, LEASE = 15.0, 90.0

    def __init__(
        self, sweep: Sweep, direction: str, config: dict[str, Any], database: "optuna.storages.RDBStorage | None" = None
    ) -> None:
        self.sweep = sweep
        sweep.path.mkdir(parents=True, exist_ok=True)
        trainer = config.get("trainer", {})
        self.optuna = optuna.create_study(
            storage=database or open_journal(sweep),
            study_name=sweep.name,
            direction=optuna.study.StudyDirection[direction.upper()],
            load_if_exists=True,
            pruner=sweep.make_pruner(max_epochs if (max_epochs := trainer.get("max_epochs") or 0) > 0 else None),
        )
        now = _described(sweep, direction, config)
        before = self.optuna.user_attrs.get("space")
        if before is None:
            self.optuna.set_user_attr("space", now)
        elif changed := [
            f"{key}: {before.get(key, 'nothing')} before, {now.get(key, 'nothing')} now"
            for key in {**before, **now}
            if before.get(key) != now.get(key)
        ]:
            more = [f"and {len(changed) - 12} more"] if len(changed) > 12 else []
            listed = "\n  ".join(changed[:12] + more)
            raise InputError(
                f"The study {sweep.name!r} was begun with another space; its trials would not compare:\n  {listed}\n"
                "Undo the change, or begin a new study with --new (or a name of your own with --name NAME)."
            )
        #: One at a time begins trials in this folder or looks who runs them: what is being begun has no lease yet.
        self.lock = FileLock(sweep.path / "lock")
        self._here = f"{socket.gethostname()}:{sweep.path}"
        #: The signs of life of trials elsewhere, and when they were first seen here: clocks differ between machines.
        self._signs: dict[tuple[int, Any], float] = {}

    def trials(self) -> list[FrozenTrial]:
        """The trials that count: not those begun again under another number, nor any above ``n_trials``.

        Two machines may have queued the same trial again, or one that had just come to its end after all: the number
        that counts is then the trial's own if it has a result, or else the first of the others.
        """
        trials = self.optuna.get_trials(deepcopy=False)
        results = {trial.number for trial in trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)}
        counts: dict[int, int] = {}
        for trial in trials:
            if (before := trial.user_attrs.get("retry_of")) is not None:
                counts.setdefault(before, before if before in results else trial.number)
        return [
            trial
            for trial in trials
            if counts.get(trial.number, trial.number) == trial.number
            and counts.get(trial.user_attrs.get("retry_of", -1), trial.number) == trial.number
            and "surplus" not in trial.user_attrs
        ]

    def any_running(self) -> bool:
        """Whether a trial is running, here or elsewhere."""
        return any(trial.state == TrialState.RUNNING for trial in self.trials())

    def ask(self) -> "tuple[optuna.Trial, dict[str, Any], Path, int] | None":
        """The next trial, its values, and what ``lease`` gives; None if all are taken."""
        with self.lock:
            try:
                return self._ask()
            except optuna.exceptions.UpdateFinishedTrialError:  # another machine took it for dead, while this one slept
                return None

    def _ask(self) -> "tuple[optuna.Trial, dict[str, Any], Path, int] | None":
        if sum(trial.state != TrialState.WAITING for trial in self.trials()) >= self.sweep.n_trials:
            return None
        trial = self.optuna.ask()
        trial.set_user_attr("host", self._here)
        if "retry_of" in trial.user_attrs:  # who queued it may have been killed before this
            self.tell(trial.user_attrs["retry_of"], state=TrialState.FAIL)
        first = trial.user_attrs.get("first", trial.number)
        rank = sum(
            other.number < first and not other.user_attrs.keys() & {"retry_of", "surplus"}
            for other in self.optuna.get_trials(deepcopy=False)
        )
        # two processes may have counted at the same time: the order of the numbers tells which was one too many
        if rank >= self.sweep.n_trials or trial.number not in [other.number for other in self.trials()]:
            trial.set_user_attr("surplus", True)
            self.optuna.tell(trial, state=TrialState.FAIL)
            return None
        self.optuna.sampler = self.sweep.make_sampler(rank)
        return trial, self.sweep.suggest(trial), *self.lease(trial)

    def lease(self, trial: optuna.Trial) -> tuple[Path, int]:
        """A trial's folder, and the open file whose lock says that somebody runs it.

        A trial that is begun again has the folder it had, so that it can go on from its last checkpoint.
        """
        names = itertools.chain(
            [trial.user_attrs["folder"]] if "folder" in trial.user_attrs else [],
            [f"{trial.number:04}"],
            (f"{trial.number:04}-{again}" for again in itertools.count(2)),
        )
        for name in names:
            folder = self.sweep.path / "trials" / name
            try:
                folder.mkdir(parents=True, exist_ok=name == trial.user_attrs.get("folder"))
            except FileExistsError:  # of a study of this name that is no more
                continue
            trial.set_user_attr("folder", name)
            if (file := _locked(folder)) is not None:
                return folder, file
        raise AssertionError

    def take_over(self) -> None:
        """Have the trials begun again that nobody runs any more."""
        with self.lock:
            self._take_over()

    def _take_over(self) -> None:
        for trial in self.optuna.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            folder = self.sweep.path / "trials" / trial.user_attrs.get("folder", "")
            here = trial.user_attrs.get("host") == self._here and "folder" in trial.user_attrs
            if here and folder.is_dir():
                file = _locked(folder)
                if file is not None:
                    try:
                        self.begin_again(trial)
                    finally:
                        os.close(file)
            else:
                sign = trial.number, trial.user_attrs.get("alive")
                if time.monotonic() - self._signs.setdefault(sign, time.monotonic()) > self.LEASE:
                    self.begin_again(trial)

    def begin_again(self, trial: FrozenTrial) -> None:
        """Queue another trial with the values of one whose process is gone, and end that one.

        In this order: who is killed in between leaves a trial that is found again.
        """
        trials = self.optuna.get_trials(deepcopy=False)
        if any(other.number == trial.number and other.state.is_finished() for other in trials):
            return  # since it was listed
        if not any(other.user_attrs.get("retry_of") == trial.number for other in trials):
            attributes = {key: value for key, value in trial.user_attrs.items() if key not in ("alive", "host")}
            self.optuna.add_trial(
                optuna.create_trial(
                    state=TrialState.WAITING,
                    params=trial.params,
                    distributions=trial.distributions,
                    user_attrs={"first": trial.number} | attributes | {"retry_of": trial.number},
                )
            )
        self.tell(trial.number, state=TrialState.FAIL)

    def tell(self, number: int, value: float | None = None, state: TrialState = TrialState.COMPLETE) -> bool:
        """End a trial; false if another process has done so."""
        try:
            self.optuna.tell(number, value, state)
        except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
            return False
        return True


def open_journal(sweep: Sweep) -> JournalStorage:
    """The file in the sweep's folder."""
    journal = str(sweep.path / "journal.log")
    return JournalStorage(JournalFileBackend(journal, lock_obj=_JournalLock(journal)))


def connect(sweep: Sweep) -> optuna.storages.RDBStorage | None:
    """The database; None if the sweep is kept in a file.

    Raises:
        InputError: the database cannot be used, and no fallback was asked for.
    """
    if sweep.storage is None:
        return None
    try:
        return _open_database(sweep.storage)
    except InputError as error:
        if sweep.storage_fallback != "local":
            raise
        sys.stderr.write(f"{error}\nstorage_fallback is local: the sweep is kept in {sweep.path} alone.\n")
        return None


def new_name(sweep: Sweep, database: optuna.storages.RDBStorage | None) -> str:
    """The first of ``NAME``, ``NAME-2``, ``NAME-3`` … that has no folder and no study yet."""
    taken = set(optuna.get_all_study_names(database)) if database else set()
    names = itertools.chain([sweep.name], (f"{sweep.name}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken and not (sweep.path.parent / name).exists())


class _JournalLock(JournalFileOpenLock):
    """A lock that the kernel takes back from a killed process; Optuna's own would stay for 30 seconds.

    What a process that was killed while writing has left of its last line is removed: the next line would be added to
    it, and the journal could not be read any more.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._path = Path(path)
        self._lock = FileLock(f"{path}.lock")

    def acquire(self) -> bool:
        self._lock.acquire()
        with self._path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if file.read(1) not in (b"", b"\n"):
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        self._lock.release()


def _open_database(url: str) -> optuna.storages.RDBStorage:
    from sqlalchemy.exc import OperationalError, SQLAlchemyError

    shown = re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", url)
    if not re.match(r"postgres(ql)?(\+\w+)?://", url):
        raise InputError(f"storage is {shown}: give postgresql://USER@HOST/DATABASE, or leave it out for a local file.")
    url = re.sub(r"^postgres(ql)?(\+\w+)?://", "postgresql+psycopg://", url)
    # the limit holds for each of a host's addresses
    options: dict[str, Any] = {"pool_pre_ping": True, "connect_args": {"connect_timeout": 4}}
    for attempt in itertools.count():
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs=options)
        except ImportError as error:
            raise InputError(f"storage {shown} needs psycopg: pip install 'psycopg[binary]'") from error
        except OperationalError as error:
            reason = str(error.orig).strip()
            raise InputError(
                f"storage {shown} cannot be reached: {reason}\nStart the database, correct the URL, or have the sweep "
                "kept in a local file with 'storage_fallback: local'."
            ) from error
        except SQLAlchemyError as error:
            if attempt == 5:  # the first time, another sweep may be making the tables at this very moment
                raise InputError(f"storage {shown} cannot be used: {error}") from error
            time.sleep(0.5)
    raise AssertionError


def _locked(folder: Path) -> int | None:
    """The open lease file of a trial's folder, with its lock; None if a process has it."""
    file = os.open(folder / "lease", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


def _described(sweep: Sweep, direction: str, config: dict[str, Any]) -> dict[str, Any]:
    """What makes trials comparable, flat: the space, the metric, and the part of the config that trains."""
    space = {f"parameters.{key}": _plain(vars(parameter)) for key, parameter in sweep.parameters.items()}
    trainer, callbacks = config.get("trainer") or {}, config.get("callbacks") or {}
    trained = dict(flat(optimisation(config)))
    trained |= {f"trainer.{key}": trainer.get(key) for key in _LENGTH}
    trained |= flat(callbacks.get("early_stopping"), "callbacks.early_stopping")
    best = (callbacks.get("best") or {}).get("init_args") or {}
    searched = [key.replace(".init_args.", ".") for key in sweep.parameters]
    return space | {
        "metric": f"{best.get('monitor')}, {direction}",
        **{
            key: value
            for key, value in trained.items()
            if not is_harmless(key) and not any(f"{key}.".startswith(f"{part}.") for part in searched)
        },
    }


def _plain(spec: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in spec.items() if value is not None and value is not False and value != {}}
