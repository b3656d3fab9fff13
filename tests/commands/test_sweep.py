"""``sweep``: most tests have ``fake_fit.py`` for the trials, which takes none of the seconds that torch does."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
import optuna
import pytest
import yaml
from conftest import TINY, RunCLI, runs, start
from helpers import full_disk
from optuna.trial import FrozenTrial, TrialState

from lit_project import commands
from lit_project.commands import _fit, sweep
from lit_project.config_files import CONFIGS
from lit_project.errors import InputError
from lit_project.sweep_space import WANDB_CONFIG, Sweep, check_samplers, read_sweep
from lit_project.sweep_study import SharedStudy, connect, open_journal

FAKE = Path(__file__).with_name("fake_fit.py")
DRIVER = f"""
import sys
from lit_project import commands
from lit_project.commands import _fit, sweep
_fit.CLI = [sys.executable, {str(FAKE)!r}]
if "--no-plots" in sys.argv:  # they take longer than all the rest
    sys.argv.remove("--no-plots")
    sweep.html = lambda *_: ""
commands.dispatch(["cli", "sweep", *sys.argv[1:]])
"""
LR = {"model.optimizer.lr": {"low": 0.0, "high": 1.0}}
TINY_FIXED = {option[2:].split("=")[0]: option.split("=")[1] for option in TINY}


def write(folder: Path, **content: Any) -> Path:
    file = folder / "s.yaml"
    file.write_text(yaml.safe_dump({"parameters": LR} | content, sort_keys=False))
    return file


def begin(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return start(folder, "-c", DRIVER, "--config=s.yaml", "--no-plots", *arguments)


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    output = process.communicate(timeout=900)[0]
    assert process.returncode == status, output
    assert "Traceback" not in output
    return output


def run(folder: Path, *arguments: str, status: int = 0) -> str:
    return finish(begin(folder, *arguments), status)


def trials(folder: Path, name: str = "s") -> list[FrozenTrial]:
    """All that the journal has, also what does not count."""
    return optuna.load_study(study_name=name, storage=open_journal(journal_of(folder, name))).trials


def journal_of(folder: Path, name: str) -> Sweep:
    return Sweep(name, {}, 1, folder=str(folder / "runs" / "sweeps"))


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
    assert run(tmp_path).count("complete") == 12, "nothing is left to do"
    assert sum(map(len, starts(tmp_path).values())) == 12 + len(cut)


def test_the_page_leaves_the_style_of_other_plots_alone() -> None:
    """Optuna's plots set one for the whole process."""
    study = optuna.create_study()
    study.optimize(lambda trial: trial.suggest_float("lr", 0, 1), n_trials=3)
    before = {name: value for name, value in matplotlib.rcParams.items() if not name.startswith("backend")}
    assert "<svg" in sweep.html("s", study, "val/loss", "")
    assert before.items() <= dict(matplotlib.rcParams).items()


def test_two_sweeps_on_one_journal_share_the_trials(tmp_path: Path) -> None:
    write(tmp_path, n_trials=12, sampler={"name": "grid"}, fixed={"pace": 0.02},
          parameters={"model.optimizer.lr": {"low": 0.05, "high": 0.6, "step": 0.05}})  # fmt: skip
    outputs = [finish(process) for process in (begin(tmp_path), begin(tmp_path))]
    found = counted(trials(tmp_path))
    assert sorted(round(trial.value or 0, 6) for trial in found) == [round(0.05 * k, 6) for k in range(1, 13)]
    assert sum(map(len, starts(tmp_path).values())) == 12
    assert all(output.count(" complete ") == 12 for output in outputs), "both wait for the end and tell it"
    assert all(": begins" in output for output in outputs)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_trials_in_order_and_says_how_to_go_on(tmp_path: Path, kind: signal.Signals) -> None:
    write(tmp_path, n_trials=2, n_workers=2, fixed={"pace": 0.05, "trainer.max_epochs": 20})
    process = begin(tmp_path)
    wait_for(lambda: last_checkpoints(tmp_path) == 2, process)
    process.send_signal(kind)
    output = finish(process, 128 + kind)
    assert "Interrupted after 0 of 2 trials. The same command goes on: " in output
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids(tmp_path))
    assert run(tmp_path).count(": goes on") == 2
    assert sorted(trial.state for trial in counted(trials(tmp_path))) == [TrialState.COMPLETE] * 2


def test_ctrl_c_before_a_trial_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(options: list[str]) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(_fit, "resolved", interrupted)
    with pytest.raises(SystemExit) as end:
        commands.dispatch(["cli", "sweep", f"--config={write(tmp_path, n_trials=1)}"])
    assert end.value.code == 130


def test_the_metrics_are_read_again_only_when_there_are_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_fit, "CLI", ["true"])
    study = SharedStudy(read_sweep(write(tmp_path, n_trials=1)), "maximize", {})
    asked = study.ask()
    assert asked is not None
    run = sweep.Run(study, *asked, metric="val/acc", slot=0)
    file = run.folder / "fit-1" / "csv" / "metrics.csv"
    file.parent.mkdir(parents=True)
    file.write_text("val/acc\n0.25\n0.5")
    reads: list[Path] = []
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, **how: reads.append(self) or read_text(self, **how))
    assert [run.logged(), run.logged()] == [[0.25], [0.25]], "the second line is not whole yet"
    file.write_text("val/acc\n0.25\n0.5\n")
    assert [run.logged(), run.logged()] == [[0.25, 0.5], [0.25, 0.5]]
    assert reads == [file, file]
    run.process.wait()


def test_a_trial_gets_its_share_of_the_cores_that_the_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(9)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    script = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ.get('SLURM_RESTART_COUNT'))"
    monkeypatch.setattr(_fit, "CLI", [sys.executable, "-c", script])
    study = SharedStudy(read_sweep(write(tmp_path, n_trials=1, n_workers=2)), "maximize", {})
    asked = study.ask()
    assert asked is not None
    run = sweep.Run(study, *asked, metric="val/acc", slot=0)
    run.process.wait()
    assert (run.folder / "output.txt").read_text() == "4 None\n"


@pytest.mark.parametrize(("usable", "most"), [(1, 1), (63, 4)])
def test_few_fits_at_a_time_read_the_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usable: int, most: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(usable)), raising=False)
    reading: list[str] = []
    together: list[int] = []

    def slowly(options: list[str]) -> str:
        reading.append(options[-1])
        together.append(len(reading))
        time.sleep(0.02)
        reading.remove(options[-1])
        return f"lr: {options[-1]}"

    monkeypatch.setattr(_fit, "resolved", slowly)
    names = {"model.network": {"choices": [f"n{number}" for number in range(12)]}}
    config = sweep.check_space(read_sweep(write(tmp_path, n_trials=1, parameters=names)))
    assert config == {"lr": "--model.network=n0"}
    assert len(together) == 12
    assert max(together) == most


def test_a_write_that_fails_leaves_the_best_config_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    space = read_sweep(write(tmp_path, n_trials=1))
    study = SharedStudy(space, "maximize", {})
    asked = study.ask()
    assert asked is not None
    study.tell(asked[0].number, 0.5)
    monkeypatch.setattr(sweep, "html", lambda *_: "")
    monkeypatch.setattr(_fit, "resolved", lambda options: "old: 1\n")
    assert sweep.report(space, study, "val/acc") == 0
    monkeypatch.setattr(_fit, "resolved", lambda options: "new: 1\n" * 1000)
    with full_disk(1000), pytest.raises(OSError, match="too large"):
        sweep.report(space, study, "val/acc")
    assert yaml.safe_load((space.path / "best.yaml").read_text()) == {"old": 1}


# ---- trials that do not come to their end


def test_a_bad_trial_is_stopped_early(tmp_path: Path) -> None:
    grid = {"n_trials": 2, "parameters": {"model.optimizer.lr": {"choices": [0.9, 0.1]}}}
    grid |= {"fixed": {"pace": 0.05, "trainer.max_epochs": 30}}
    pruner = {"name": "median", "n_startup_trials": 1, "n_warmup_steps": 2}
    seed = next(seed for seed in range(9) if first_rate(write(tmp_path, sampler=grid_sampler(seed), **grid)) == 0.9)
    write(tmp_path, sampler=grid_sampler(seed), pruner=pruner, **grid)
    output = run(tmp_path)
    good, bad = trials(tmp_path)
    assert (good.state, good.value) == (TrialState.COMPLETE, 0.9)
    assert (bad.state, bad.last_step) == (TrialState.PRUNED, 2), "the first step after those of the warm-up"
    assert "trial 1: pruned after 3 validations" in output
    (rows,) = (tmp_path / "runs/sweeps/s/trials/0001").glob("fit-*/csv/metrics.csv")
    assert len(rows.read_text().splitlines()) < 30


def grid_sampler(seed: int) -> dict[str, Any]:
    return {"name": "grid", "seed": seed}


def first_rate(file: Path) -> float:
    return read_sweep(file).grid()[0]["model.optimizer.lr"]


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


def test_a_trial_that_was_taken_over_is_given_up(tmp_path: Path) -> None:
    """As after a machine has slept for longer than a lease."""
    write(tmp_path, n_trials=1, gpus=[7], fixed={"pace": 0.1, "trainer.max_epochs": 100})
    process = begin(tmp_path)
    wait_for(lambda: last_checkpoints(tmp_path), process)
    study = optuna.load_study(study_name="s", storage=open_journal(journal_of(tmp_path, "s")))
    study.tell(0, state=TrialState.FAIL)
    assert "trial 0: ended here, as it has been taken over elsewhere" in finish(process, 1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids(tmp_path))
    assert next(tmp_path.glob("runs/sweeps/s/trials/*/starts")).read_text().split()[2] == "7", "the GPU it was given"


def test_no_trial_is_begun_after_the_time_is_over(tmp_path: Path) -> None:
    write(tmp_path, n_trials=3, timeout=0.005, fixed={"pace": 0.1})
    assert run(tmp_path).count(": begins") == 1
    assert [trial.state for trial in trials(tmp_path)] == [TrialState.COMPLETE]


# ---- one study, one space


def test_a_changed_space_is_refused_with_what_changed(tmp_path: Path) -> None:
    write(tmp_path, n_trials=1)
    run(tmp_path)
    write(tmp_path, n_trials=2, parameters={"model.optimizer.lr": {"low": 0.0, "high": 2.0}})
    output = run(tmp_path, "--trainer.max_epochs=3", status=1)
    assert "{'low': 0.0, 'high': 1.0} before, {'low': 0.0, 'high': 2.0} now" in output
    assert "trainer.max_epochs: 5 before, 3 now" in output
    assert "--new" in output
    output = run(tmp_path, "--new", "--pace=0")
    assert "New study s-2; to go on with it: " in output
    assert "--pace=0 --name s-2\n" in output
    assert len(trials(tmp_path, "s-2")) == 2
    assert len(trials(tmp_path)) == 1
    write(tmp_path, n_trials=2)
    assert "begun with another space" not in run(tmp_path), "more trials are the same space"
    assert len(trials(tmp_path)) == 2


def test_what_makes_another_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    optimizer = {"class_path": "SGD", "init_args": {"lr": 0.1, "lr_scale": 1.0}}
    base: dict[str, Any] = {
        "data": {"class_path": "D", "init_args": {"num_workers": 2}},
        "model": {"class_path": "M", "init_args": {"optimizer": optimizer}},
        "trainer": {"max_epochs": 5, "gradient_clip_val": 1.0, "enable_progress_bar": True},
        "callbacks": {"ema": None, "best": {"init_args": {"monitor": "val/acc", "filename": "best"}}},
    }

    def refused(path: str, value: Any, **fixed: Any) -> str:
        """What is said of a sweep with another value, after one with ``base``."""
        *parts, last = path.split("/")
        config = part = json.loads(json.dumps(base))
        for name in parts:
            part = part.setdefault(name, {})
        part[last] = value
        try:
            SharedStudy(read_sweep(write(tmp_path, n_trials=1, fixed=fixed)), "maximize", config)
        except InputError as error:
            return str(error)
        return ""

    assert not refused("trainer/max_epochs", 5)
    assert "trainer.gradient_clip_val: 1.0 before, 2.0 now" in refused("trainer/gradient_clip_val", 2.0)
    for key in ("gradient_clip_algorithm", "accumulate_grad_batches", "overfit_batches", "limit_val_batches"):
        assert f"trainer.{key}: " in refused(f"trainer/{key}", 7)
    assert "callbacks.ema: nothing before, EMA now" in refused("callbacks/ema", {"class_path": "EMA"})
    assert "metric: val/acc, maximize before, val/f1" in refused("callbacks/best/init_args/monitor", "val/f1")
    assert not refused("callbacks/best/init_args/filename", "other")
    scale = "model/init_args/optimizer/init_args/lr_scale"
    assert "model.optimizer.lr_scale: 1.0 before, 2.0 now" in refused(scale, 2.0), "its name begins as the searched lr"
    assert not refused("model/init_args/optimizer/init_args/lr", 0.2), "each trial has its own"
    assert not refused("data/init_args/num_workers", 4, **{"data.num_workers": 4})
    assert not refused("trainer/enable_progress_bar", False, **{"trainer.enable_progress_bar": False})


# ---- several machines


@pytest.fixture
def database(tmp_path: Path) -> Iterator[str]:
    """The URL of a PostgreSQL of its own."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not programs:
        pytest.skip("PostgreSQL is not installed")
    # it refuses to run as root, and a test's folder is its owner's alone
    runuser = shutil.which("runuser", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or "runuser"
    as_user = [runuser, "-u", "postgres", "--"] if os.geteuid() == 0 else []
    folder = Path(subprocess.check_output([*as_user, "mktemp", "-d"], text=True).strip())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    control = [*as_user, str(programs[-1].with_name("pg_ctl")), "-D", str(folder / "data"), "-w"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": "/"}
    subprocess.run(
        [*as_user, str(programs[-1]), "-D", str(folder / "data"), "-U", "sweeper", "-N"], check=True, **quiet
    )
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
    subprocess.run([*control, "-l", str(folder / "log"), "-o", options, "start"], check=True, **quiet)
    try:
        yield f"postgresql://sweeper@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], check=True, **quiet)
        subprocess.run([*as_user, "rm", "-rf", str(folder)], check=True)


def test_two_sweeps_share_a_postgresql(tmp_path: Path, database: str) -> None:
    """On two machines: neither sees the other's folder. One is killed, and what it ran is begun again."""
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
        write(folder, n_trials=12, storage=database, sampler="random", fixed={"pace": 0.05})
    first, second = (begin(folder) for folder in folders)
    wait_for(lambda: last_checkpoints(folders[0]) >= 2, first)
    first.kill()
    first.wait()
    outputs = [run(folders[0]), finish(second)]
    study = optuna.load_study(study_name="s", storage=database.replace("://", "+psycopg://"))
    found = counted(study.trials)
    assert [trial.state for trial in found] == [TrialState.COMPLETE] * 12
    assert len({trial.value for trial in found}) == 12, "two at a time do not draw the same"
    assert len({trial.number for trial in study.trials}) == len(study.trials)
    began = [sum(map(len, starts(folder).values())) for folder in folders]
    assert min(began) >= 2
    assert sum(began) == 12 + sum("retry_of" in trial.user_attrs for trial in study.trials)
    assert all(output.count(" complete ") == 12 for output in outputs)
    for folder in folders:
        assert yaml.safe_load((folder / "runs/sweeps/s/best.yaml").read_text())["model"]["lr"] == study.best_value


def test_another_machine_takes_over_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own clock: the lease has run out when the other's last sign of life has been the same for its length."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, n_trials=1)
    space = read_sweep(tmp_path / "s.yaml")
    study = SharedStudy(space, "maximize", {})
    asked = study.ask()
    assert asked is not None
    asked[0].set_user_attr("host", "far-away")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    study.take_over()
    now += study.LEASE - 1
    asked[0].set_user_attr("alive", 5.0)
    study.take_over()
    now += study.LEASE - 1
    study.take_over()
    assert study.any_running()
    now += 2
    study.take_over()
    assert not study.any_running()
    assert not study.tell(asked[0].number, 1.0), "which it learns when it comes back"
    again = study.ask()
    assert again is not None
    assert again[1] == asked[1], "the same values"
    assert study.ask() is None


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SharedStudy, dict[str, Any]]:
    """A study whose only trial, with these values, was begun by a process that is gone."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, n_trials=1)
    study = SharedStudy(read_sweep(tmp_path / "s.yaml"), "maximize", {})
    asked = study.ask()
    assert asked is not None
    os.close(asked[3])
    return study, asked[1]


def test_a_trial_that_is_just_beginning_again_is_left_alone(
    killed: tuple[SharedStudy, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sweeps go on at the same time: it has its folder from before, and nobody holds the lease yet."""
    study, _ = killed
    study.take_over()
    other = SharedStudy(study.sweep, "maximize", {})
    looking = threading.Thread(target=other.take_over)
    suggest = Sweep.suggest

    def while_the_other_looks(self: Sweep, trial: optuna.Trial) -> dict[str, Any]:
        looking.start()
        looking.join(1)
        return suggest(self, trial)

    monkeypatch.setattr(Sweep, "suggest", while_the_other_looks)
    asked = study.ask()
    looking.join()
    assert asked is not None
    assert study.tell(asked[0].number, 1.0)
    assert len(study.optuna.trials) == 2


def test_a_trial_that_is_taken_over_while_it_begins_is_given_up(
    killed: tuple[SharedStudy, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, values = killed
    study.take_over()
    suggest = Sweep.suggest

    def after_a_long_sleep(self: Sweep, trial: optuna.Trial) -> dict[str, Any]:
        study.begin_again(trial.storage.get_trial(trial._trial_id))
        return suggest(self, trial)

    with monkeypatch.context() as patch:
        patch.setattr(Sweep, "suggest", after_a_long_sleep)
        assert study.ask() is None
    again = study.ask()
    assert again is not None
    assert again[1] == values


@pytest.mark.parametrize("step", ["add_trial", "tell"])
def test_a_kill_during_a_takeover_loses_no_trial(
    killed: tuple[SharedStudy, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    study, values = killed

    def kill(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(study.optuna, step, kill)
        with pytest.raises(KeyboardInterrupt):
            study.take_over()
    study.take_over()
    again = study.ask()
    assert again is not None
    assert again[1] == values
    assert [trial.state for trial in study.optuna.trials] == [TrialState.FAIL, TrialState.RUNNING]


@pytest.mark.parametrize("came_to_its_end", [False, True])
def test_two_machines_take_over_the_same_trial(
    killed: tuple[SharedStudy, dict[str, Any]], came_to_its_end: bool
) -> None:
    """At the same moment, so that both queue it; or its own machine wakes up in just that moment."""
    study, _ = killed
    dead = study.optuna.trials[0]
    if came_to_its_end:
        study.tell(0, 0.5)
    for _ in range(2):
        study.optuna.add_trial(
            optuna.create_trial(
                state=TrialState.WAITING,
                params=dead.params,
                distributions=dead.distributions,
                user_attrs={"first": 0, "retry_of": 0},
            )
        )
    study.take_over()
    asked = [study.ask() for _ in range(3)]
    assert sum(one is not None for one in asked) == (0 if came_to_its_end else 1)
    assert [trial.number for trial in study.trials()] == [0 if came_to_its_end else 1]


def test_a_database_that_does_not_answer(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"postgresql://user:secret@127.0.0.1:{silent.getsockname()[1]}/db"
        write(tmp_path, n_trials=1, storage=url)
        output = run(tmp_path, status=1)
        assert output.startswith(f"error: storage {url.replace('secret', '***')} cannot be reached: connection timeout")
        assert "storage_fallback: local" in output
        write(tmp_path, n_trials=1, storage=url, storage_fallback="local", fixed={"pace": 0})
        assert "Best: trial 0" in run(tmp_path)
    assert len(trials(tmp_path)) == 1


# ---- bad input


RANGE = {"low": 0.1, "high": 1.0}
OPTIMIZER = {"choices": ["torch.optim.SGD", "torch.optim.AdamW"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"n_trails": 3}, "there is no key 'n_trails' here. Did you mean 'n_trials'?"),
        ({"parameters": {}}, "the space is empty"),
        ({"parameters": {"a": {"choices": []}}}, "parameters.a: choices is empty"),
        ({"parameters": {"a": {"low": 1, "high": 1}}}, "parameters.a: low (1) must be below high (1)"),
        ({"parameters": {"a": {"low": "1e-1", "high": "1e-2"}}}, "parameters.a: low (0.1) must be below high (0.01)"),
        ({"parameters": {"a": {"low": "small", "high": 1}}}, "parameters.a.low must be a finite number"),
        ({"parameters": {"a": {"low": 0, "high": 1, "log": True}}}, "a logarithmic range must begin above 0"),
        ({"parameters": {"a": RANGE | {"log": True, "step": 0.1}}}, "a logarithmic range has no step"),
        ({"parameters": {"a": RANGE | {"step": 2}}}, "parameters.a: step is 2; it must be above 0 and fit"),
        ({"parameters": {"a": RANGE | {"choices": [1]}}}, "parameters.a has choices and also high"),
        ({"parameters": {"a": {"low": 1}}}, "parameters.a has no high"),
        ({"parameters": {"a": RANGE | {"hihg": 1}}}, "parameters.a: there is no key 'hihg' here. Did you mean 'high'?"),
        ({"parameters": {"a": 3}}, "parameters.a is 3: give a range"),
        ({"parameters": {"a": RANGE}, "fixed": {"a": 1}}, "a is searched under 'parameters', and also fixed"),
        ({"parameters": {"a": RANGE | {"when": {"b": 1}}}}, "'when' names b, which is no parameter with choices above"),
        ({"parameters": {"o": OPTIMIZER, "a": RANGE | {"when": {"o": "Adam"}}}}, "'Adam', which is no choice of o"),
        ({"sampler": "grid"}, "sampler grid: model.optimizer.lr is continuous"),
        ({"sampler": "cmaes", "parameters": {"o": OPTIMIZER}}, "sampler cmaes: o has choices"),
        ({"sampler": "bayes"}, "sampler.name is 'bayes': it must be one of tpe, random, grid, cmaes"),
        ({"sampler": {"name": "tpe", "startup": 3}}, "sampler tpe: "),
        ({"pruner": {"name": "median", "patience": 3}}, "pruner median: "),
        ({"metric": "val/loss"}, "give 'metric' with 'direction"),
        ({"n_trials": 0}, "n_trials must be a whole number from 1 on"),
        ({"n_workers": "two"}, "n_workers must be a whole number from 1 on"),
        ({"configs": "cifar10.yaml"}, "configs is 'cifar10.yaml', which is no value for it"),
        ({"storage_fallback": "sqlite"}, "storage_fallback is 'sqlite'"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_space_that_cannot_be(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    file = write(tmp_path, **{"n_trials": 1} | content)
    with pytest.raises(InputError) as error:
        check_samplers(read_sweep(file))
    assert message in str(error.value)


def test_on_windows_it_says_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.delattr(signal, "SIGHUP")
    monkeypatch.setattr(commands, "sweep", sweep)  # which is imported anew, and is to be this one again afterwards
    for name in ("commands.sweep", "sweep_study"):
        monkeypatch.delitem(sys.modules, f"lit_project.{name}")
    with pytest.raises(SystemExit, match="error: sweep needs Linux or macOS"):
        commands.dispatch(["cli", "sweep", f"--config={write(tmp_path, n_trials=1)}"])


def test_bad_input_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"there is no such file. The project's own: .*configs/sweeps/lr_wd.yaml"):
        sweep.main(["--config=none.yaml"])
    file = write(tmp_path, n_trials=1, storage="mysql://user:secret@host/db")
    with pytest.raises(InputError, match=r"storage is mysql://user:\*\*\*@host/db: give postgresql://"):
        connect(read_sweep(file))
    with pytest.raises(InputError, match=r"model\.optimizer\.lr is searched under 'parameters', and also fixed"):
        sweep.main([f"--config={file}", "--model.optimizer.lr", "0.1"])
    with pytest.raises(InputError, match="stray is neither an option of sweep nor a --key=value of fit"):
        sweep.main([f"--config={file}", "stray"])
    for config, message in (
        ({"loggers": {"csv": None}}, r"leave loggers\.csv"),
        ({"loggers": {"csv": {}}, "trainer": {"logger": False}}, r"leave loggers\.csv"),
        ({"loggers": {"csv": {"a": 1}}, "trainer": {"max_time": "00:01:00:00"}}, r"trainer\.max_time would end trials"),
        ({"loggers": {"csv": {"class_path": "C"}}, "callbacks": {"best": None}}, r"callbacks\.best monitors no metric"),
    ):
        with pytest.raises(InputError, match=message):
            sweep.objective(config)
    with pytest.raises(InputError, match=r"--export-wandb none/w\.yaml cannot be written: No such file or directory"):
        sweep.export({}, Path("none/w.yaml"))
    monkeypatch.setattr(sweep, "find_spec", lambda name: None if name == "cmaes" else name)
    with pytest.raises(InputError, match="sweep needs cmaes, which is not installed: pip install 'optuna>=5' cmaes"):
        sweep.main([f"--config={file}"])


def test_a_key_that_fit_does_not_know_is_named_with_the_nearest(tmp_path: Path) -> None:
    """With the real fit: it is what knows the keys, also those of a class that is only one of the choices."""
    space: dict[str, Any] = {"model.optimizer": {"choices": ["torch.optim.AdamW"]}}
    space["model.optimizer.amsgard"] = {"choices": [True], "when": {"model.optimizer": "torch.optim.AdamW"}}
    with pytest.raises(InputError, match=r"--model\.optimizer\.amsgard=\w+\)\nDid you mean 'amsgrad'\?") as error:
        sweep.check_space(read_sweep(write(tmp_path, n_trials=1, parameters=space)))
    assert "All options" not in str(error.value)


# ---- the space


def test_a_trial_has_the_keys_that_its_choices_have(tmp_path: Path) -> None:
    network = {"class_path": "ResNet18", "init_args": {"width": 8}}
    space = read_sweep(
        write(
            tmp_path,
            n_trials=1,
            configs=["a.yaml"],
            fixed={"trainer.max_epochs": 3},
            metric="val/loss",
            direction="minimize",
            parameters={
                "model.optimizer.lr": {"low": "1e-3", "high": 1, "log": True},
                "model.optimizer": OPTIMIZER,
                "model.optimizer.momentum": {"low": 0.0, "high": 0.9, "when": {"model.optimizer": "torch.optim.SGD"}},
                "model.network": {"choices": ["SimpleCNN", network, None]},
                "data.batch_size": {"low": 32, "high": 96, "step": 32},
            },
        )
    )
    assert space.parameters["data.batch_size"].points() == [32, 64, 96]
    seen = []
    study = optuna.create_study()
    for number in range(20):
        study.sampler = space.make_sampler(number)
        values = space.suggest(study.ask())
        assert ("model.optimizer.momentum" in values) == (values["model.optimizer"] == "torch.optim.SGD")
        assert 1e-3 <= values["model.optimizer.lr"] <= 1
        seen.append(space.options(values))
    first = seen[0]
    fixed = [
        "--config=a.yaml",
        "--trainer.max_epochs=3",
        "--callbacks.best.monitor=val/loss",
        "--callbacks.best.mode=min",
    ]
    assert first[:4] == fixed
    assert all(options.index(next(o for o in options if o.startswith("--model.optimizer="))) < 7 for options in seen)
    given = {option for options in seen for option in options}
    assert {"--model.network=SimpleCNN", f"--model.network={json.dumps(network)}", "--model.network=null"} <= given
    assert len({option for option in given if ".lr=" in option}) == 20
    examples = space.examples()
    assert {example["model.network"] for example in examples} == {"SimpleCNN", json.dumps(network), None}
    assert any("model.optimizer.momentum" in example for example in examples)


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid", "cmaes"])
def test_every_sampler_searches_and_is_repeatable(tmp_path: Path, sampler: str) -> None:
    space = {"a": {"low": 0.0, "high": 1.0, "step": 0.125}, "b": {"low": 1, "high": 3}}
    if sampler != "grid":
        space["a"].pop("step")
    read = read_sweep(write(tmp_path, n_trials=27, parameters=space, sampler={"name": sampler, "seed": 1}))
    found = []
    for _ in range(2):
        study = optuna.create_study(direction="maximize")
        for number in range(read.n_trials):
            trial = study.ask()
            study.sampler = read.make_sampler(number)
            values = read.suggest(trial)
            study.tell(trial, -((values["a"] - 0.5) ** 2) - (values["b"] - 2) ** 2)
        found.append([tuple(trial.params.items()) for trial in study.trials])
    assert found[0] == found[1]
    assert len(set(found[0])) == 27, "a grid has each of its points, and nothing is tried twice"
    assert study.best_params["b"] == 2
    assert abs(study.best_params["a"] - 0.5) < 0.2


@pytest.mark.parametrize(("pruner", "fewest", "most"), [("none", 0, 0), ("median", 5, 20), ("hyperband", 5, 20)])
def test_every_pruner_ends_trials_but_not_the_best(tmp_path: Path, pruner: str, fewest: int, most: int) -> None:
    read = read_sweep(write(tmp_path, n_trials=24, pruner=pruner, sampler="random"))
    study = optuna.create_study(study_name="s", direction="maximize", pruner=read.make_pruner(9))
    for number in range(24):
        trial = study.ask()
        study.sampler = read.make_sampler(number)
        value = read.suggest(trial)["model.optimizer.lr"]
        for step in range(9):
            trial.report(value, step)
            if trial.should_prune():
                study.tell(trial, state=TrialState.PRUNED)
                break
        else:
            study.tell(trial, value)
    assert fewest <= sum(trial.state == TrialState.PRUNED for trial in study.trials) <= most
    assert study.best_value == max(trial.params["model.optimizer.lr"] for trial in study.trials)


# ---- W&B


needs_wandb = pytest.mark.skipif(not (CONFIGS.parent / WANDB_CONFIG).is_file(), reason="there is no config for W&B")


@needs_wandb
def test_the_space_as_a_sweep_of_wandb(tmp_path: Path) -> None:
    parameters = {
        "model.optimizer.lr": {"low": 0.001, "high": 1.0, "log": True},
        "model.optimizer": OPTIMIZER,
        "model.optimizer.nesterov": {"choices": [True, False]},
        "data.batch_size": {"low": 32, "high": 96, "step": 32},
        "model.network.width": {"low": 1, "high": 9},
        "model.label_smoothing": {"low": 0.0, "high": 0.2, "step": 0.1},
    }
    pruner = {"name": "hyperband", "min_resource": 2}
    file = write(tmp_path, n_trials=7, parameters=parameters, pruner=pruner, fixed={"trainer.max_epochs": 1})
    exported = read_sweep(file).for_wandb("val/acc", "maximize")
    assert exported["method"] == "bayes"
    assert exported["metric"] == {"name": "val/acc", "goal": "maximize"}
    assert exported["early_terminate"] == {"type": "hyperband", "min_iter": 2, "eta": 3}
    assert exported["run_cap"] == 7
    assert exported["parameters"] == {
        "model.optimizer.lr": {"distribution": "log_uniform_values", "min": 0.001, "max": 1.0},
        "model.optimizer": {"values": OPTIMIZER["choices"]},
        "model.optimizer.nesterov": {"values": ["true", "false"]},
        "data.batch_size": {"values": [32, 64, 96]},
        "model.network.width": {"distribution": "int_uniform", "min": 1, "max": 9},
        "model.label_smoothing": {"values": [0.0, 0.1, 0.2]},
    }
    conditional = parameters | {"model.optimizer.momentum": RANGE | {"when": {"model.optimizer": "torch.optim.SGD"}}}
    for content, message in ((({"parameters": conditional}), "no conditions"), ({"sampler": "cmaes"}, "no sampler")):
        with pytest.raises(InputError, match=message):
            read_sweep(write(tmp_path, n_trials=1, **content)).for_wandb("val/acc", "maximize")


# ---- the plots


def test_the_report_is_one_file_with_its_plots(tmp_path: Path) -> None:
    study = optuna.create_study(direction="maximize")
    for number in range(8):
        trial = study.ask()
        value = trial.suggest_float("model.optimizer.lr", 0.0, 1.0) + 0 * trial.suggest_float("a<b", 0.0, 1.0)
        trial.report(value, 0)
        study.tell(trial, value) if number else study.tell(trial, state=TrialState.FAIL)
    page = sweep.html("s", study, "val/acc", sweep.table(study.trials, "val/acc"))
    assert page.count("<svg") == 4
    assert page.count("<?xml") == page.count("<script") == 0
    assert "a&lt;b" in page
    assert "#555555" not in page, "which cannot be read on a dark page"
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids)), "those of each plot are its own"
    links = re.findall(r'(?:src|href)="([^#"][^"]*)"', page)
    assert all(link.startswith("data:") for link in links), "it needs no other file"


# ---- the real fit


@needs_wandb
@pytest.mark.slow
def test_the_command_of_the_exported_sweep_runs(run_cli: RunCLI, tmp_path: Path) -> None:
    """Filled in as W&B's agent does it, by the agent's own functions."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    space = {"model.optimizer.lr": RANGE, "model.optimizer": OPTIMIZER, "model.compile": {"choices": [False]}}
    write(tmp_path, n_trials=1, parameters=space, fixed=TINY_FIXED)
    assert "wandb sweep --project" in run_cli("sweep", "--config=s.yaml", "--export-wandb=w.yaml").stdout
    exported = yaml.safe_load((tmp_path / "w.yaml").read_text())
    values = {"model.optimizer.lr": 0.25, "model.optimizer": "torch.optim.AdamW", "model.compile": "false"}
    assert values.keys() == exported["parameters"].keys()
    arguments = create_sweep_command_args({"args": {key: {"value": value} for key, value in values.items()}})
    arguments |= {"env": ["/usr/bin/env"], "interpreter": [sys.executable]}
    command = []
    for part in create_sweep_command(exported["command"]):
        command += arguments[part[2:-1]] if part.startswith("${") else [part]
    assert command[:5] == ["/usr/bin/env", sys.executable, "-m", "lit_project.cli", "fit"]
    run_cli(*command[4:], WANDB_MODE="offline", WANDB_SWEEP_ID="abcd1234", WANDB_RUN_ID="run1")
    (folder,) = runs(tmp_path)
    config = yaml.safe_load((folder / "config.yaml").read_text())["model"]["init_args"]
    assert config["optimizer"]["class_path"] == "torch.optim.AdamW"
    assert config["optimizer"]["init_args"]["lr"] == 0.25
    assert list(folder.glob("wandb/*run-*-run1")), "W&B's agent finds it under the name that it gave"


@pytest.mark.slow
def test_the_best_config_runs_under_fit(run_cli: RunCLI, tmp_path: Path) -> None:
    space = {"model.optimizer": {"choices": ["torch.optim.AdamW"]}, "model.optimizer.lr": {"choices": [0.01]}}
    write(tmp_path, parameters=space, fixed=TINY_FIXED, n_trials=1)
    printed = run_cli("sweep", "--config=s.yaml").stdout
    assert "Train with its config: " in printed
    run_cli(*printed.split("lit_project.cli ")[-1].split())
    (again,) = runs(tmp_path, "fit-*")
    (trial,) = runs(tmp_path, "sweeps/s/trials/*/fit-*")
    configs = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in (trial, again)]
    assert configs[1]["trainer"].pop("default_root_dir") == "runs"
    configs[0]["trainer"].pop("default_root_dir")
    assert configs[0] == configs[1]
    records = [json.loads((folder / "run.json").read_text())["best"]["score"] for folder in (trial, again)]
    assert records[0] == records[1], "and it is the same training"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_example_searches_twenty_trials_and_stops_bad_ones_early(run_cli: RunCLI, tmp_path: Path) -> None:
    printed = run_cli(
        "sweep", "--config=configs/sweeps/lr_wd.yaml", *TINY[:4], "--trainer.max_epochs=4", timeout=1700
    ).stdout
    found = trials(tmp_path, "lr_wd")
    assert len(found) == 20
    assert {trial.state for trial in found} == {TrialState.COMPLETE, TrialState.PRUNED}
    assert all(trial.last_step == 3 for trial in found if trial.state == TrialState.COMPLETE)
    for trial in found:
        (record,) = (tmp_path / "runs/sweeps/lr_wd/trials" / trial.user_attrs["folder"]).glob("fit-*/run.json")
        reason = json.loads(record.read_text())["exit_reason"]
        assert reason == "finished" or trial.state == TrialState.PRUNED
        assert reason in ("finished", "interrupted by SIGTERM"), "a pruned trial ends in order, if not of itself"
    assert "Best: trial" in printed


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_real_sweep_killed_in_the_middle(run_cli: RunCLI, tmp_path: Path) -> None:
    """What was cut at a random moment ends with the result of an undisturbed training."""
    space = {"model.optimizer.lr": {"low": 0.01, "high": 0.5, "log": True}}
    fixed = TINY_FIXED | {"trainer.max_epochs": 6}
    write(tmp_path, n_trials=12, n_workers=2, fixed=fixed, sampler="random", parameters=space)
    command = ["-m", "lit_project.cli", "sweep", "--config=s.yaml"]
    process = start(tmp_path, *command)
    records = tmp_path / "runs" / "sweeps" / "s" / "trials"
    wait_for(lambda: sum('"finished"' in file.read_text() for file in records.glob("*/*/run.json")) >= 3, process)
    wait_for(lambda: any('"running"' in file.read_text() for file in records.glob("*/*/run.json")), process)
    process.kill()
    process.wait()
    cut = []
    for file in records.glob("*/*/run.json"):
        record = json.loads(file.read_text())
        if record["exit_reason"] == "running":
            os.kill(record["pid"], signal.SIGKILL)
            cut.append(file.parent.parent.name)
    finish(start(tmp_path, *command))
    found = counted(trials(tmp_path))
    assert [trial.state for trial in found] == [TrialState.COMPLETE] * 12
    assert cut
    for trial in found:
        if trial.user_attrs["folder"] in cut:
            config = sorted((records / trial.user_attrs["folder"]).glob("fit-*"))[-1] / "config.yaml"
            run_cli("fit", f"--config={config}", "--trainer.default_root_dir=again")
            (record,) = (tmp_path / "again").glob("*/run.json")
            assert json.loads(record.read_text())["best"]["score"] == pytest.approx(trial.value, rel=1e-6)
            shutil.rmtree(tmp_path / "again")
