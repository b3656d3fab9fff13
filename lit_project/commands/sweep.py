"""Search config keys for the best metric: each trial is a fit of its own, and a killed sweep goes on.

The file given with --config says which keys are searched and how; configs/sweeps/lr_wd.yaml explains each of its
settings. Options of fit may follow and hold for every trial. A trial is a process of its own with a folder of its own,
so a crash or a lack of memory costs that trial alone; it is recorded with its error, and the sweep goes on.

The same command goes on with a sweep that was stopped or killed, from the last checkpoints of the trials that ran, and
helps with one that is running. At the end, the sweep's folder has best.yaml for fit --config, and report.html.
"""

import csv
import io
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_project import commands
from lit_project.commands import _fit
from lit_project.errors import InputError
from lit_project.files import short_path, write_atomically
from lit_project.hardware import threads_each, usable_cpus

if TYPE_CHECKING:
    import optuna

    from lit_project.sweep_space import Sweep
    from lit_project.sweep_study import SharedStudy

#: Seconds that a fit has to write its last checkpoint when it is told to end.
PATIENCE = 60.0


def main(argv: list[str]) -> int:
    """Exit status 0; 1 if all trials failed; after a signal 128 and its number, such as 130 after Ctrl-C."""
    parser = commands.parser("sweep", __doc__)
    parser.add_argument("--config", type=Path, required=True, help="The sweep's YAML file.")
    parser.add_argument("--name", help="Another name for the study and its folder than the file's.")
    parser.add_argument("--new", action="store_true", help="Begin a new study beside the one there is.")
    parser.add_argument("--export-wandb", type=Path, metavar="FILE", help="Write the same as a W&B sweep, and end.")
    arguments, options = parser.parse_known_args(argv)
    _fit.require_posix("sweep")

    from lit_project.sweep_space import check_samplers, read_sweep

    sweep = read_sweep(arguments.config, fit_options(options))
    sweep.name = arguments.name or sweep.name
    if arguments.export_wandb is not None:
        exported = sweep.for_wandb(*objective(check_space(sweep)))
        return export(exported, arguments.export_wandb)
    require_packages()

    import optuna

    from lit_project.sweep_study import SharedStudy, connect, new_name

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    check_samplers(sweep)
    database = connect(sweep)  # before what takes longer, so that an error comes at once
    config = check_space(sweep)
    metric, direction = objective(config)
    command = [short_path(Path(sys.executable)), *(word for word in sys.orig_argv[1:] if word != "--new")]
    if arguments.new:
        sweep.name = new_name(sweep, database)
        command += ["--name", sweep.name]
        print(f"New study {sweep.name}; to go on with it: {shlex.join(command)}")
    study = SharedStudy(sweep, direction, config, database)
    goes_on = f"The same command goes on: {shlex.join(command)}"
    try:
        received = search(sweep, study, metric)
    except optuna.exceptions.StorageInternalError as error:
        raise InputError(f"The storage does not answer: {error.__cause__ or error}\n{goes_on}") from error
    if received:
        done = sum(trial.state.is_finished() for trial in study.trials())
        print(f"\nInterrupted after {done} of {sweep.n_trials} trials. {goes_on}")
        return 128 + received
    return report(sweep, study, metric)


# ---- before anything starts


def fit_options(options: list[str]) -> dict[str, str]:
    """``--key=value`` and ``--key value`` as a dict.

    Raises:
        InputError: something else.
    """
    found, waiting = {}, list(options)
    while waiting:
        key, equals, value = waiting.pop(0).partition("=")
        if not key.startswith("--") or not (equals or waiting):
            raise InputError(f"{key} is neither an option of sweep nor a --key=value of fit.")
        found[key[2:]] = value if equals else waiting.pop(0)
    return found


def require_packages() -> None:
    """Refuse to begin without the packages of the extra.

    Raises:
        InputError: one is not installed.
    """
    if missing := [name for name in ("optuna", "cmaes", "scipy", "matplotlib") if find_spec(name) is None]:
        raise InputError(
            f"sweep needs {missing[0]}, which is not installed: pip install 'optuna>=5' cmaes scipy matplotlib"
        )


def check_space(sweep: "Sweep") -> dict[str, Any]:
    """Have ``fit`` read the options of trials that together have all keys, classes and names of the space.

    Returns:
        The resolved config of one of them.

    Raises:
        InputError: what ``fit`` says of a key or value that it does not know.
    """
    import yaml

    with ThreadPoolExecutor(min(usable_cpus(), 4)) as pool:  # each takes a core and the memory of torch
        printed = list(pool.map(lambda values: _fit.resolved(sweep.options(values)), sweep.examples()))
    return yaml.safe_load(printed[0])


def objective(config: dict[str, Any]) -> tuple[str, str]:
    """The metric and its direction: what the best checkpoint is chosen by.

    Raises:
        InputError: there is neither; the metrics would not be written to where they are read from; a fit may be cut.
    """
    loggers, trainer = config.get("loggers") or {}, config.get("trainer") or {}
    if not (loggers.get("csv") and trainer.get("logger") in (None, True)):
        raise InputError("A sweep reads what the CSV logger writes: leave loggers.csv and trainer.logger as they are.")
    if trainer.get("max_time") is not None:
        raise InputError(
            "trainer.max_time would end trials at different epochs, and their results would not compare: leave it out, "
            "limit trials by trainer.max_epochs, and the sweep by 'timeout' in its file."
        )
    best = ((config.get("callbacks") or {}).get("best") or {}).get("init_args") or {}
    if not best.get("monitor"):
        raise InputError("callbacks.best monitors no metric, so a sweep does not know what is best: set its monitor.")
    return best["monitor"], "minimize" if best.get("mode", "min") == "min" else "maximize"


def export(wandb: dict[str, Any], file: Path) -> int:
    """Write W&B's sweep and say how it is started.

    Raises:
        InputError: it cannot be written there.
    """
    import yaml

    try:
        file.write_text(yaml.safe_dump(wandb, sort_keys=False))
    except OSError as error:
        raise InputError(f"--export-wandb {file} cannot be written: {error.strerror}.") from error
    if "early_terminate" not in wandb:
        print("No trial will be stopped early: of the pruners, W&B has hyperband only.")
    print(f"{file} is written. Start it: wandb sweep --project PROJECT {file}, then run the agent that it names.")
    return 0


# ---- trials


class Run:
    """A trial's fit in a process of its own, and what it has logged so far.

    Args:
        study: the study.
        trial: the trial.
        values: what is searched, by key.
        folder: the trial's own.
        lease: the open file whose lock says that the trial is run.
        metric: the column of ``metrics.csv`` that counts.
        slot: which of the sweep's workers it is, from 0 on.
    """

    def __init__(
        self,
        study: "SharedStudy",
        trial: "optuna.Trial",
        values: dict[str, Any],
        folder: Path,
        lease: int,
        metric: str,
        slot: int,
    ) -> None:
        self.study, self.trial, self.metric, self.slot = study, trial, metric, slot
        self.folder, self.lease = folder, lease
        self.number_reported = 0
        #: Which file the metric was read from, its size and time of change then; and what was read.
        self._read: tuple[tuple[Path, int, int] | None, list[float]] = None, []
        self.beaten = time.monotonic()
        self.pruned = self.lost = False
        self.told_to_end: float | None = None
        runs = self._runs()
        checkpoints = [path for run in runs if (path := run / "checkpoints" / "last.ckpt").is_file()]
        #: Run folders of an earlier process of this trial that left no checkpoint.
        self.abandoned = set() if checkpoints else set(runs)
        command = [*_fit.CLI, "fit", *study.sweep.options(values), f"--trainer.default_root_dir={self.folder}"]
        command += [f"--ckpt_path={checkpoints[-1]}"] if checkpoints else []
        with (self.folder / "output.txt").open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,  # Ctrl-C is for the sweep, which tells its trials
                pass_fds=[self.lease],  # the lease is held until the last of both has ended
            )
        shown = ", ".join(f"{key.rsplit('.', 1)[-1]} {_short(value)}" for key, value in values.items())
        print(f"trial {trial.number}: {'goes on' if checkpoints else 'begins'}, {shown}", flush=True)

    def _environment(self) -> dict[str, str]:
        sweep = self.study.sweep
        environment = _fit.environment()
        if sweep.n_workers > 1:  # else each would use all cores
            environment.setdefault("OMP_NUM_THREADS", str(threads_each(sweep.n_workers)))
        if sweep.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = str(sweep.gpus[self.slot % len(sweep.gpus)])
        return environment

    def _runs(self) -> list[Path]:
        return sorted(self.folder.glob("fit-*"))

    def logged(self) -> list[float]:
        """The metric at each validation so far."""
        runs = [run for run in self._runs() if run not in self.abandoned]
        file = runs[-1] / "csv" / "metrics.csv" if runs else None
        if file is None or not file.is_file():
            return []
        state = file.stat()
        seen = file, state.st_size, state.st_mtime_ns
        if seen != self._read[0]:  # it is asked for ten times a second, and the file may be long
            text = file.read_text(encoding="utf-8", errors="replace")
            rows = csv.DictReader(io.StringIO(text.rpartition("\n")[0]))  # whole lines only
            self._read = seen, [float(row[self.metric]) for row in rows if row.get(self.metric)]
        return self._read[1]

    def end(self) -> None:
        """Tell the process to end in order, if it has not been told."""
        if self.told_to_end is None:
            self.told_to_end = time.monotonic()
            self.process.terminate()

    def ended(self) -> bool:
        """Report what is new to the study, end a trial that is not worth going on with; true if the process is gone."""
        from optuna.exceptions import UpdateFinishedTrialError

        status = self.process.poll()
        values = self.logged()  # after the status, so that nothing is missing once it has ended
        try:
            if time.monotonic() - self.beaten > self.study.BEAT:
                self.beaten = time.monotonic()
                self.trial.set_user_attr("alive", time.time())
            while self.number_reported < len(values) and not (self.pruned or self.lost):
                self.trial.report(values[self.number_reported], self.number_reported)
                self.number_reported += 1
                if status is None and self.trial.should_prune():
                    self.pruned = True
                    self.end()
        except UpdateFinishedTrialError:  # taken for dead, such as while this machine was asleep
            self.lost = True
            self.end()
        if status is None and self.told_to_end and time.monotonic() - self.told_to_end > PATIENCE:
            self.process.kill()
        return status is not None

    def record(self) -> None:
        """Tell the study how the trial went."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        values = [value for value in self.logged() if math.isfinite(value)]
        error = None
        if self.process.returncode:
            error = _fit.error_in((self.folder / "output.txt").read_text(errors="replace"))
            if self.process.returncode < 0:
                error = f"ended by {signal.Signals(-self.process.returncode).name}; its last line: {error}"
        elif not values:
            error = f"{self.metric} was never logged, or never a finite number"
        if self.lost:
            outcome = "ended here, as it has been taken over elsewhere"
        elif self.pruned and error:
            self.study.tell(self.trial.number, state=TrialState.PRUNED)
            outcome = f"pruned after {self.number_reported} validations"
        elif error:
            with suppress(UpdateFinishedTrialError):
                self.trial.set_user_attr("error", error)
            self.study.tell(self.trial.number, state=TrialState.FAIL)
            outcome = f"failed: {error}"
        else:
            best = max(values) if self.study.optuna.direction.name == "MAXIMIZE" else min(values)
            self.study.tell(self.trial.number, best)
            outcome = f"{self.metric} {best:.4g}"
        print(f"trial {self.trial.number}: {outcome}", flush=True)
        os.close(self.lease)


def search(sweep: "Sweep", study: "SharedStudy", metric: str) -> int | None:
    """Run trials, as many at a time as there are workers, until all are done; the signal that came before, if one did.

    What runs at a signal ends in order. Nobody holds the leases of these trials then, so that whoever goes on with the
    sweep takes them over.
    """
    start = time.monotonic()
    looked = -math.inf
    running: list[Run] = []
    with signals() as received:
        try:
            while not received:
                in_time = sweep.timeout is None or time.monotonic() - start < sweep.timeout * 60
                if time.monotonic() - looked > 1:  # a database need not be asked more often
                    looked = time.monotonic()
                    study.take_over()
                    for slot in {*range(sweep.n_workers)} - {run.slot for run in running}:
                        if in_time and (asked := study.ask()):
                            running.append(Run(study, *asked, metric, slot))
                    if not running and not (in_time and study.any_running()):
                        return None
                for run in [run for run in running if run.ended()]:
                    running.remove(run)
                    run.record()
                    looked = -math.inf
                time.sleep(0.1)
        finally:
            for run in running:
                run.end()
            while any(run.process.poll() is None for run in running):
                if len(received) > 1 or time.monotonic() - min(run.told_to_end or 0 for run in running) > PATIENCE:
                    for run in running:
                        run.process.kill()
                time.sleep(0.1)
    return received[0]


@contextmanager
def signals() -> Iterator[list[int]]:
    """Collect Ctrl-C, a scheduler's SIGTERM and the end of a terminal: none may strike in the middle of a record."""
    received: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {kind: signal.signal(kind, lambda number, frame: received.append(number)) for kind in kinds}
    try:
        yield received
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


# ---- at the end


def report(sweep: "Sweep", study: "SharedStudy", metric: str) -> int:
    """Print the trials, write the best config and the plots; the exit status."""
    from optuna.trial import TrialState

    trials = study.trials()
    shown = table(trials, metric)
    print(f"\n{shown}\n")
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    errors = [trial.user_attrs.get("error", "it was killed") for trial in trials if trial.state == TrialState.FAIL]
    if trials and len(errors) == len(trials):
        print(f"error: all {len(trials)} trials failed, the first with: {errors[0]}", file=sys.stderr)
        return 1
    if not complete:
        print("No trial has come to its end, so there is no best one yet.")
        return 0
    best = study.optuna.best_trial
    file = sweep.path / "best.yaml"
    config = _fit.resolved(sweep.options(best.params))
    head = f"# Trial {best.number} of the sweep {sweep.name}: {metric} {best.value:.6g}, with\n"
    head += "".join(f"#   {key}: {value}\n" for key, value in best.params.items())
    page = sweep.path / "report.html"
    drawn = html(sweep.name, study.optuna, metric, shown)
    with study.lock:  # others that work on the study come to the same end
        write_atomically(file, lambda opened: opened.write((head + config).encode()))
        write_atomically(page, lambda opened: opened.write(drawn.encode()))
    print(f"Best: trial {best.number}, {metric} {best.value:.4g}. Plots: {short_path(page)}")
    program = f"{short_path(Path(sys.executable))} -m lit_project.cli"
    print(f"Train with its config: {program} fit --config {short_path(file)}")
    return 0


def table(trials: "list[optuna.trial.FrozenTrial]", metric: str) -> str:
    """A line for each trial, in columns."""
    keys = list(dict.fromkeys(key for trial in trials for key in trial.params))
    rows = [["trial", "state", metric, *(key.rsplit(".", 1)[-1] for key in keys), "time", ""]]
    for trial in trials:
        state = {"FAIL": "failed"}.get(trial.state.name, trial.state.name.lower())
        value = "" if trial.value is None else f"{trial.value:.4g}"
        seconds = "" if trial.duration is None else f"{trial.duration.total_seconds():.0f} s"
        error = trial.user_attrs.get("error", "").splitlines()[:1]
        shown = [_short(trial.params[key]) if key in trial.params else "" for key in keys]
        rows.append([str(trial.number), state, value, *shown, seconds, *(error or [""])])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)] + [0]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def html(name: str, study: "optuna.Study", metric: str, trials: str) -> str:
    """A page of its own: the table of the trials, and Optuna's plots.

    History, the keys' importance (PED-ANOVA, https://arxiv.org/abs/2304.10255), their values, each trial's course.
    """
    import warnings
    from html import escape

    import matplotlib as mpl

    mpl.use("agg")  # needs no display
    import optuna
    from matplotlib import pyplot as plt
    from optuna.visualization import matplotlib as plots

    from lit_project.pages import page, svg

    importance = optuna.importance.PedAnovaImportanceEvaluator()
    drawn: dict[str, Callable[[], object]] = {
        "History": lambda: plots.plot_optimization_history(study, target_name=metric),
        "Importance": lambda: plots.plot_param_importances(study, evaluator=importance, target_name=metric),
        "Values": lambda: plots.plot_slice(study, target_name=metric),
        "Trials, validation by validation": lambda: plots.plot_intermediate_values(study),
    }
    sections = [("Trials", f"<pre>{escape(trials)}</pre>")]
    for title, draw in drawn.items():
        # Optuna sets a style for good
        with warnings.catch_warnings(), mpl.rc_context({"savefig.bbox": "tight", "legend.frameon": False}):
            warnings.simplefilter("ignore")  # that the plots are experimental
            draw()
            sections.append((title, svg(plt.gcf()).replace("#555555", "currentColor")))  # it is dark on a dark page
            plt.close("all")
    return page(f"Sweep {name}", sections)


def _short(value: Any) -> str:
    """A value in as few characters as tell it: a class without its module."""
    if isinstance(value, str):
        return value if value.startswith("{") else value.rsplit(".", 1)[-1]
    return f"{value:.4g}" if isinstance(value, float) else str(value)
