"""Train with several seeds, and tell mean, standard deviation and 95 % interval of each metric.

Each run is a `fit` with the given options, in a process and a run folder of its own, below one folder repeat-... for
all. The first has the seed of the config or of --seed_everything, each further one the next seed. What a run prints
goes to seed-N.log. The result is printed and kept in repeat.json: the validation metrics are those of each run's best
epoch; with --test true its best checkpoint is tested too. The interval is Student's t for the mean over seeds.

A run that fails is reported, and the others go on; the exit status is then 1, as when --trainer.max_time cut a run off.
After that, a kill or Ctrl-C the same command, or --folder alone, goes on: finished runs are kept, an interrupted one
continues exactly where its last checkpoint is. With --folder, failed runs are tried again, and --runs 10 adds to what
were 5.
"""

import argparse
import contextlib
import json
import math
import os
import secrets
import shlex
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from lit_project import commands
from lit_project.commands import _fit
from lit_project.errors import InputError
from lit_project.files import short_path, write_atomically
from lit_project.hardware import threads_each
from lit_project.run_folders import (
    best_epoch,
    flat,
    monitored,
    now,
    read_metrics,
    read_record,
    read_repeat,
    test_of,
    tests_in,
)
from lit_project.tables import print_table

FINISHED = "finished"
#: Options of `fit` for a run that goes on, which a repeat decides for itself.
_NOT_OURS = ("--ckpt_path", "--force_resume")
_LOCK = ".lock"


def main(argv: list[str]) -> int:
    """Exit status 0 if all runs finished, 1 if one did not, 128 + the number of the signal that told it to stop.

    That is 130 for Ctrl-C, 143 for SIGTERM and 129 for SIGHUP.
    """
    parser = commands.parser(
        "repeat", __doc__, usage="%(prog)s [--runs N] [--test true] [--jobs N] [--folder FOLDER] [any option of fit]"
    )
    parser.add_argument("--runs", type=int, help="how many; default: 5")
    parser.add_argument(
        "--test", choices=("true", "false"), help="whether to test each best checkpoint; default: false"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="how many run at a time; default: 1. CPU cores are shared out, as are the GPUs in CUDA_VISIBLE_DEVICES",
    )
    parser.add_argument("--folder", type=Path, help="the folder to make, or to go on in; default: runs/repeat-...")
    wanted, options = parser.parse_known_args(argv)
    _fit.require_posix("repeat")
    for option in options:
        if option.split("=")[0] in _NOT_OURS:
            raise InputError(f"repeat starts each run anew and lets it go on by itself: leave {option} out.")
    if (wanted.runs is not None and wanted.runs < 2) or wanted.jobs < 1:
        raise InputError("repeat needs --runs of 2 or more, as one run has no spread, and --jobs of 1 or more.")
    if "--print_config" in options:
        return subprocess.call([*_fit.CLI, "fit", *options], env=_fit.environment())
    student_t()  # if it is missing, that is to be said before hours of training
    folder, state = _open(wanted, options)
    with _held(folder) as lock:
        return Repeat(folder, state, wanted.jobs, lock).run()


# ---- what is to be done


def _open(wanted: argparse.Namespace, options: list[str]) -> tuple[Path, dict[str, Any]]:
    """The folder, and what its ``repeat.json`` says or is going to say."""
    given = wanted.folder and wanted.folder.expanduser().absolute()
    before = read_repeat(given) if given and (given / "repeat.json").is_file() else None
    if given and before is None and given.is_dir() and {path.name for path in given.iterdir()} - {_LOCK}:
        raise InputError(
            f"--folder {given} holds other things than a repeat: choose a new folder, or that of a repeat."
        )
    if before and options and options != before["options"]:
        raise InputError(
            f"The repeat in {given} was started with other options: {shlex.join(before['options']) or 'none'}. Leave "
            "them out to go on with it, or start another one without --folder."
        )
    options = before["options"] if before else options
    cwd = before["cwd"] if before and Path(before["cwd"]).is_dir() else str(Path.cwd())
    config = _resolved_config(options, cwd)
    state: dict[str, Any] = {
        "options": options,
        "cwd": cwd,
        "runs": wanted.runs or 5,
        "test": wanted.test == "true",
        "config": config,
    }
    if before is None and given is None:
        root = Path(cwd) / Path(config["trainer"]["default_root_dir"] or "runs").expanduser()
        given, before = _interrupted(root, state)
        if given:
            print(
                f"Going on with {short_path(given)}, which has not come to its end. To start anew, name a new --folder."
            )
        else:
            given = root / f"repeat-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    assert given is not None
    if before is not None:
        _refuse_changes(given, before["config"], config)
        state = before
        state["runs"] = wanted.runs or before["runs"]
        state["test"] = before["test"] if wanted.test is None else wanted.test == "true"
        if state["runs"] < len(before["results"]):
            raise InputError(
                f"The repeat in {given} has {len(before['results'])} runs already: --runs can only add some."
            )
    else:
        state |= {"threads": _threads(wanted.jobs), "start": now(), "end": None, "results": [], "statistics": {}}
    first = config["seed_everything"]
    for seed in range(first + len(state["results"]), first + state["runs"]):
        state["results"].append({"seed": seed, "folder": None, "exit": None, "tested": False, "metrics": {}})
    return given, state


def _resolved_config(options: list[str], cwd: str) -> dict[str, Any]:
    """What `fit` makes of the options, if a repeat can be made of it."""
    import yaml

    printed = yaml.safe_load(_fit.resolved(options, cwd))
    config: dict[str, Any] = json.loads(json.dumps(printed, default=str))  # as it is kept
    if type(config["seed_everything"]) is not int:
        raise InputError(
            f"repeat counts on from a seed, but seed_everything is {config['seed_everything']}: give a number."
        )
    if config.get("ckpt_path"):
        raise InputError(f"repeat starts each run anew: leave ckpt_path: {config['ckpt_path']} out of the config.")
    return config


def _interrupted(root: Path, wanted: dict[str, Any]) -> tuple[Path | None, dict[str, Any] | None]:
    """The newest repeat below ``root`` that was to do the same and has not ended."""
    for file in sorted(root.glob("repeat-*/repeat.json"), reverse=True):
        with contextlib.suppress(InputError):
            state = read_repeat(file.parent)
            if state["end"] is None and all(state[key] == wanted[key] for key in wanted):
                return file.parent, state
    return None, None


def _refuse_changes(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    old, new = dict(flat(before)), dict(flat(now))
    differing = [f"{key}: {old.get(key)} -> {new.get(key)}" for key in {**old, **new} if old.get(key) != new.get(key)]
    if differing:
        raise InputError(
            f"The repeat in {folder} was started with another config, so its runs could not be taken together:\n  "
            + "\n  ".join(differing)
            + "\nStart another repeat, without --folder."
        )


def _threads(jobs: int) -> int | None:
    """Threads of each run; None leaves it to torch. A run that goes on keeps them: sums depend on their number."""
    if "OMP_NUM_THREADS" in os.environ or jobs == 1:
        return None
    return threads_each(jobs)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[int]:
    """Hold the folder's lock. Runs inherit it: it stays held as long as one goes on, whatever befalls this process."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"The repeat in {folder} is still going on, or a run that it started is. Wait for it, or name another "
                "--folder for a new one."
            ) from None
        yield lock.fileno()


# ---- doing it


class Job(NamedTuple):
    """A process that works on a result."""

    process: subprocess.Popen[bytes]
    result: dict[str, Any]
    #: What is done now, and what then: ``fit``, ``test``.
    stages: list[str]
    #: Which of the jobs at a time this is, from 0.
    slot: int
    #: Where in the log file it began to write.
    log_start: int
    started: float


class Repeat:
    """Runs what is missing, keeping ``repeat.json`` up to date.

    Args:
        folder: where it and all run folders are.
        state: its content.
        jobs: how many processes at a time.
        lock: file descriptor of the held lock, for the processes to inherit.
    """

    def __init__(self, folder: Path, state: dict[str, Any], jobs: int, lock: int) -> None:
        self.folder = folder
        self.state = state
        self.jobs = jobs
        self.lock = lock
        self.running: list[Job] = []
        #: The first signal that told to stop.
        self.signal: int | None = None

    def run(self) -> int:
        """Do it all and print the result; returns the exit status."""
        print(f"Repeat folder: {short_path(self.folder)}", flush=True)
        self.state["end"] = None
        self._save()
        handlers = {
            number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        try:
            self._run_all()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        done = not self.signal and all(result["exit"] for result in self.state["results"])
        self.state["end"] = now() if done else None
        self._save()
        return self._report()

    def _run_all(self) -> None:
        waiting = [(result, stages) for result in self.state["results"] if (stages := self._missing(result))]
        while self.running or (waiting and not self.signal):
            while waiting and len(self.running) < self.jobs and not self.signal:
                self._start(*waiting.pop(0))
            for job in [job for job in self.running if job.process.poll() is not None]:
                self.running.remove(job)
                _, record = self._run_of(job.result["seed"])
                finished = job.process.returncode == 0 and record["exit_reason"] == FINISHED
                if finished and len(job.stages) > 1:
                    waiting.insert(0, (job.result, job.stages[1:]))
                else:
                    self._conclude(job)
            time.sleep(0.05)

    def _missing(self, result: dict[str, Any]) -> list[str]:
        """What is still to be done for a result; what an interrupted repeat had done, but not noted, is noted."""
        finished, test = result["exit"] == FINISHED, self.state["test"]
        if finished and (result["tested"] or not test):
            return []
        result["exit"] = None
        folder, record = self._run_of(result["seed"])
        if folder is None or not (finished or record["exit_reason"] == FINISHED):
            return ["fit", "test"] if test else ["fit"]
        if test and test_of(folder, record, tests_in(self.folder)) is None:
            return ["test"]
        self._note(result, folder, record)
        return []

    def _run_of(self, seed: int) -> tuple[Path | None, dict[str, Any]]:
        """The folder and the record of the run with this seed; of several those of the one that has come furthest.

        The record tells how it ended: one that ``trainer.max_time`` cut off has exit status 0 too.
        """
        found = []
        for file in self.folder.glob("fit-*/run.json"):
            record = read_record(file.parent)
            if record["seed"] == seed:
                finished = record["exit_reason"] == FINISHED
                rank = (finished, _last_checkpoint(file.parent).is_file(), record["start"])
                found.append((rank, file.parent, record))
        return max(found, key=lambda run: run[0])[1:] if found else (None, {"exit_reason": None})

    def _start(self, result: dict[str, Any], stages: list[str]) -> None:
        seed = result["seed"]
        folder, record = self._run_of(seed)
        command = [*_fit.CLI, stages[0]]
        if stages[0] == "test":
            assert folder is not None
            best = (record.get("best") or {}).get("path") or "checkpoints/best.ckpt"
            # the run's own config: on the same data and the same hardware
            command += [f"--config={folder / 'config.yaml'}", f"--ckpt_path={folder / best}"]
        else:
            command += [*self.state["options"], f"--seed_everything={seed}"]
            if folder is not None and _last_checkpoint(folder).is_file():
                command.append(f"--ckpt_path={_last_checkpoint(folder)}")
        command.append(f"--trainer.default_root_dir={self.folder}")
        slot = min({*range(self.jobs)} - {job.slot for job in self.running})
        log = self._log(seed)
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=self.state["cwd"],
                env=self._environment(slot),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(self.lock,),
                process_group=0,  # Ctrl-C reaches this process alone: a second signal would deny a run its checkpoint
            )
            self.running.append(Job(process, result, stages, slot, output.tell(), time.monotonic()))
        if self.signal:  # it came while the process was being started
            process.terminate()
        how = "goes on" if command[-2].startswith("--ckpt_path") and stages[0] == "fit" else "started"
        print(f"seed {seed}: {stages[0]} {how}, see {short_path(log)}", flush=True)

    def _environment(self, slot: int) -> dict[str, str]:
        environment = _fit.environment()
        if self.state["threads"]:
            environment["OMP_NUM_THREADS"] = str(self.state["threads"])
        devices = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if self.jobs > 1 and len(devices) > 1:
            mine = devices[slot :: self.jobs] or [devices[slot % len(devices)]]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        return environment

    def _conclude(self, job: Job) -> None:
        """Note how a result's last process ended."""
        seed, status = job.result["seed"], job.process.returncode
        duration = timedelta(seconds=round(time.monotonic() - job.started))
        folder, record = self._run_of(seed)
        if status == 0 and folder is not None and record["exit_reason"] != FINISHED:
            print(f"seed {seed}: {job.stages[0]} {record['exit_reason']}, after {duration}", flush=True)
        elif status == 0 and folder is not None:
            self._note(job.result, folder, record)
            metric, _ = monitored(self.state["config"]) or ("", "")
            metrics = job.result["metrics"]
            names = [name for name in (metric, metric.replace("val", "test", 1)) if name in metrics]
            scores = "".join(f", {name} {metrics[name]:.4f}" for name in dict.fromkeys(names))
            print(f"seed {seed}: {job.stages[0]} finished in {duration}{scores}", flush=True)
        elif status == 0 or not self.signal:
            text = self._log(seed).read_bytes()[job.log_start :].decode(errors="replace")
            reason = f"failed in {job.stages[0]}: {_reason(text, status)}"
            job.result.update({"folder": folder and folder.name, "exit": reason})
            print(f"seed {seed}: {job.result['exit']}, after {duration}", flush=True)
        else:
            print(f"seed {seed}: {job.stages[0]} stopped after {duration}", flush=True)
        self._save()

    def _note(self, result: dict[str, Any], folder: Path, record: dict[str, Any]) -> None:
        """A result's metrics; what is not finite is left out, since no mean can be taken of it."""
        test = test_of(folder, record, tests_in(self.folder))
        _, scores = best_epoch(record, read_metrics(folder))
        metrics = {**scores, **(dict(sorted(test["metrics"].items())) if test else {})}
        finite = {name: value for name, value in metrics.items() if not isinstance(value, str) and math.isfinite(value)}
        result |= {"folder": folder.name, "exit": FINISHED, "tested": test is not None, "metrics": finite}

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            print(
                "Stopping: each run writes a checkpoint after its present step. A second signal stops at once.",
                flush=True,
            )
        self.signal = self.signal or number
        for job in self.running:
            job.process.terminate()

    # ---- the result

    def _statistics(self) -> Iterator[tuple[str, dict[str, Any]]]:
        results = [result["metrics"] for result in self.state["results"] if result["exit"] == FINISHED]
        for name in dict.fromkeys(name for metrics in results for name in metrics):
            yield name, spread([metrics[name] for metrics in results if name in metrics])

    def _report(self) -> int:
        results, spreads = self.state["results"], self.state["statistics"]
        finished = [result for result in results if result["exit"] == FINISHED]
        if spreads:
            rows = [
                [str(result["seed"]), result["folder"], *(result["metrics"].get(name) for name in spreads)]
                for result in finished
            ]
            lines = {"n": "runs", "mean": "mean", "sd": "sd", "low": "95 % from", "high": "95 % to"}
            summary = [[text, "", *(each[key] for each in spreads.values())] for key, text in lines.items()]
            title = f"{len(finished)} of {len(results)} runs"
            print_table(title, ["seed", "run", *spreads], rows, summary)
        for result in results:
            if result["exit"] not in (FINISHED, None):
                print(f"seed {result['seed']}: {result['exit']}; see {short_path(self._log(result['seed']))}")
        command = "python -m lit_project.cli"
        go_on = f"{command} repeat --folder {shlex.quote(short_path(self.folder))}"
        if self.signal:
            print(f"Stopped by {signal.Signals(self.signal).name}. To go on: {go_on}")
            return 128 + self.signal
        print(f"Repeat folder: {short_path(self.folder)}")
        unfinished = sum(result["exit"] is None for result in results)
        if unfinished:
            print(f"{unfinished} of {len(results)} runs did not come to their end. To go on: {go_on}")
        if failed := len(results) - len(finished) - unfinished:
            print(f"{failed} of {len(results)} runs failed. To try them again: {go_on}")
        return 1 if failed or unfinished else 0

    def _log(self, seed: int) -> Path:
        return self.folder / f"seed-{seed}.log"

    def _save(self) -> None:
        self.state["statistics"] = dict(self._statistics())
        text = json.dumps(self.state, indent=2, ensure_ascii=False) + "\n"
        write_atomically(self.folder / "repeat.json", lambda file: file.write(text.encode()))


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Number, mean, standard deviation (n - 1) and the 95 % interval of the mean by Student's t.

    Of a single value there is a mean alone; the rest is None.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"n": len(values), "mean": mean, "sd": None, "low": None, "high": None}
    deviation = statistics.stdev(values)
    half = student_t().ppf(0.975, len(values) - 1) * deviation / math.sqrt(len(values))
    return {"n": len(values), "mean": mean, "sd": deviation, "low": float(mean - half), "high": float(mean + half)}


def student_t() -> Any:
    """SciPy's Student's t distribution."""
    try:
        from scipy.stats import t
    except ImportError as error:
        raise InputError("repeat needs SciPy, which is not installed: pip install scipy") from error
    return t


def _reason(log: str, status: int) -> str:
    """Why a process failed, in one line."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return _fit.error_in(log).split("\n")[0]


def _last_checkpoint(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"
