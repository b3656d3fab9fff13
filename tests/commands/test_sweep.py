"""``sweep``: most tests have ``fake_fit.py`` for the trials, which takes none of the seconds that torch does."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from conftest import TINY, RunCLI, runs, start
from optuna.trial import FrozenTrial, TrialState

from lit_project.commands import sweep
from lit_project.errors import InputError
from lit_project.sweep_space import Sweep, check_samplers, read_sweep
from lit_project.sweep_study import open_storage

FAKE = Path(__file__).with_name("fake_fit.py")
DRIVER = f"""
import sys
from lit_project import commands
from lit_project.commands import sweep
sweep.FIT = [sys.executable, {str(FAKE)!r}]
commands.dispatch(["cli", "sweep", *sys.argv[1:]])
"""
LR = {"model.optimizer.lr": {"low": 0.0, "high": 1.0}}
TINY_FIXED = {option[2:].split("=")[0]: option.split("=")[1] for option in TINY}


def write(folder: Path, **content: Any) -> Path:
    file = folder / "s.yaml"
    file.write_text(yaml.safe_dump({"parameters": LR} | content))
    return file


def begin(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return start(folder, "-c", DRIVER, "--config=s.yaml", *arguments)


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    output = process.communicate(timeout=200)[0]
    assert process.returncode == status, output
    assert "Traceback" not in output
    return output


def run(folder: Path, *arguments: str, status: int = 0) -> str:
    return finish(begin(folder, *arguments), status)


def trials(folder: Path, name: str = "s") -> list[FrozenTrial]:
    """All that the journal has, also what does not count."""
    read = Sweep(name, {}, 1, folder=str(folder / "runs" / "sweeps"))
    return optuna.load_study(study_name=name, storage=open_storage(read)).trials


def counted(found: list[FrozenTrial]) -> list[FrozenTrial]:
    again = {trial.user_attrs.get("retry_of") for trial in found}
    return [trial for trial in found if trial.number not in again and "surplus" not in trial.user_attrs]


def starts(folder: Path) -> dict[str, list[int]]:
    """The epochs that the processes of each trial began with."""
    files = (folder / "runs" / "sweeps" / "s" / "trials").glob("*/starts")
    return {file.parent.name: [int(line.split()[1]) for line in file.read_text().splitlines()] for file in files}


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def last_checkpoints(folder: Path) -> int:
    return len(list(folder.glob("runs/sweeps/s/trials/*/fit-*/checkpoints/last.ckpt")))


def pids(folder: Path) -> list[int]:
    files = (folder / "runs" / "sweeps" / "s" / "trials").glob("*/starts")
    return [int(line.split()[0]) for file in files for line in file.read_text().splitlines()]


def drawn(**options: Any) -> list[float]:
    """The rates that an uninterrupted sweep of one worker tries."""
    file = Sweep("s", {}, 1, **options)
    study = optuna.create_study()
    rates = []
    for number in range(12):
        trial = study.ask()
        study.sampler = file.make_sampler(number)
        rates.append(trial.suggest_float("model.optimizer.lr", 0.0, 1.0))
    return rates


# ---- going on


@pytest.mark.parametrize("orphans", [False, True], ids=["all killed", "the trials live on"])
def test_a_killed_sweep_goes_on(tmp_path: Path, orphans: bool) -> None:
    file = write(tmp_path, n_trials=12, n_workers=2, sampler={"name": "random", "seed": 3}, fixed={"pace": 0.05})
    process = begin(tmp_path)
    wait_for(lambda: last_checkpoints(tmp_path) >= 6, process)
    process.kill()
    process.wait()
    if not orphans:
        for pid in pids(tmp_path):
            with_pid = Path(f"/proc/{pid}/cmdline")
            if with_pid.is_file() and str(FAKE).encode() in with_pid.read_bytes():
                os.kill(pid, signal.SIGKILL)
    before = trials(tmp_path)
    done = [trial.number for trial in before if trial.state == TrialState.COMPLETE]
    cut = [trial.number for trial in before if trial.state == TrialState.RUNNING]
    assert done
    assert cut
    with (file.parent / "runs/sweeps/s/journal.log").open("ab") as journal:
        journal.write(b'{"op_code":7,"wor')  # what a process that is killed while writing leaves
    output = run(tmp_path)
    found = counted(trials(tmp_path))
    assert [trial.state for trial in found] == [TrialState.COMPLETE] * 12
    assert sorted(trial.value or 0 for trial in found) == sorted(drawn(sampler={"name": "random", "seed": 3}))
    began = starts(tmp_path)
    assert all(began[f"{number:04}"] == [0] for number in done), "what was finished is not run again"
    assert sum(map(len, began.values())) == 12 + len(cut)
    assert all(began[f"{number:04}"][0] == 0 < began[f"{number:04}"][1] for number in cut), "from its checkpoint"
    best = max(drawn(sampler={"name": "random", "seed": 3}))
    assert f"val/acc {best:.4g}. Plots: runs/sweeps/s/report.html" in output
    assert yaml.safe_load((tmp_path / "runs/sweeps/s/best.yaml").read_text())["model"]["lr"] == best
    page = (tmp_path / "runs/sweeps/s/report.html").read_text()
    assert page.count("<svg") == 4
    assert "http" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    ).replace("https://matplotlib.org", "")
    assert run(tmp_path).count("complete") == 12, "nothing is left to do"
    assert sum(map(len, starts(tmp_path).values())) == 12 + len(cut)


def test_two_sweeps_on_one_journal_share_the_trials(tmp_path: Path) -> None:
    write(tmp_path, n_trials=12, sampler={"name": "grid"}, fixed={"pace": 0.02},
          parameters={"model.optimizer.lr": {"low": 0.05, "high": 0.6, "step": 0.05}})  # fmt: skip
    outputs = [finish(process) for process in (begin(tmp_path), begin(tmp_path))]
    found = counted(trials(tmp_path))
    assert sorted(round(trial.value or 0, 6) for trial in found) == [round(0.05 * k, 6) for k in range(1, 13)]
    assert sum(map(len, starts(tmp_path).values())) == 12
    assert all(output.count(" complete ") == 12 for output in outputs), "both wait for the end and tell it"
    assert all(": begins" in output for output in outputs)


def test_ctrl_c_ends_the_trials_in_order_and_says_how_to_go_on(tmp_path: Path) -> None:
    write(tmp_path, n_trials=2, n_workers=2, fixed={"pace": 0.05, "trainer.max_epochs": 20})
    process = begin(tmp_path)
    wait_for(lambda: last_checkpoints(tmp_path) == 2, process)
    process.send_signal(signal.SIGINT)
    output = finish(process, 130)
    assert "Interrupted after 0 of 2 trials. The same command goes on: " in output
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids(tmp_path))
    assert run(tmp_path).count(": goes on") == 2
    assert sorted(trial.state for trial in counted(trials(tmp_path))) == [TrialState.COMPLETE] * 2


# ---- trials that do not come to their end


def test_a_bad_trial_is_stopped_early(tmp_path: Path) -> None:
    choices = [0.9, 0.1]
    seed = next(seed for seed in range(9) if Sweep("", {}, 1, sampler={"seed": seed}).grid() == [{}])
    for seed in range(9):
        file = write(tmp_path, n_trials=2, sampler={"name": "grid", "seed": seed}, fixed={"pace": 0.05},
                     parameters={"model.optimizer.lr": {"choices": choices}})  # fmt: skip
        if read_sweep(file).grid()[0]["model.optimizer.lr"] == 0.9:
            break
    content = yaml.safe_load(file.read_text())
    pruner = {"name": "median", "n_startup_trials": 1, "n_warmup_steps": 2}
    write(tmp_path, **content | {"pruner": pruner, "fixed": {"pace": 0.05, "trainer.max_epochs": 30}})
    output = run(tmp_path)
    good, bad = trials(tmp_path)
    assert (good.state, good.value) == (TrialState.COMPLETE, 0.9)
    assert (bad.state, bad.last_step) == (TrialState.PRUNED, 3), "the first step after those of the warm-up"
    assert "trial 1: pruned after 4 validations" in output
    (rows,) = (tmp_path / "runs/sweeps/s/trials/0001").glob("fit-*/csv/metrics.csv")
    assert len(rows.read_text().splitlines()) < 30


def test_a_failed_trial_is_recorded_and_the_sweep_goes_on(tmp_path: Path) -> None:
    crash = {"model.crash": {"choices": ["no", "message", "memory"]}}
    write(tmp_path, parameters=crash, sampler="grid")
    output = run(tmp_path)
    errors = {trial.params["model.crash"]: trial.user_attrs.get("error") for trial in trials(tmp_path)}
    assert errors == {
        "no": None,
        "message": "this data is broken\n  in line 2",
        "memory": "ended by SIGKILL; its last line: allocating",
    }
    assert output.count(" failed ") == 2
    assert "Best: trial" in output
    assert len(trials(tmp_path)) == 3
    write(tmp_path, parameters={"model.crash": {"choices": ["memory"]}}, n_trials=2)
    output = run(tmp_path, "--name=other", status=1)
    assert "error: all 2 trials failed, the first with: ended by SIGKILL; its last line: allocating" in output


# ---- one study, one space


def test_a_changed_space_is_refused_with_what_changed(tmp_path: Path) -> None:
    write(tmp_path, n_trials=1)
    run(tmp_path)
    write(tmp_path, n_trials=2, parameters={"model.optimizer.lr": {"low": 0.0, "high": 2.0}})
    output = run(tmp_path, "--trainer.max_epochs=3", status=1)
    assert "{'low': 0.0, 'high': 1.0} before, {'low': 0.0, 'high': 2.0} now" in output
    assert "trainer.max_epochs: 5 before, 3 now" in output
    assert "--new" in output
    output = run(tmp_path, "--new")
    assert "--name s-2" in output
    assert len(trials(tmp_path, "s-2")) == 2
    assert len(trials(tmp_path)) == 1
    write(tmp_path, n_trials=2)
    run(tmp_path, "--pace=0")  # an option that fit did not have before is a change as well
    assert len(trials(tmp_path)) == 2
