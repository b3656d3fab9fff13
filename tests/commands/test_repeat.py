"""``repeat`` trains with several seeds; most tests have a stand-in for ``fit`` and ``test``, which takes no time."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, cli, environment, read_csv, start
from helpers import TESTS

from lit_project import commands
from lit_project.commands import _fit, repeat
from lit_project.errors import InputError

#: Does what the real command line does to folders. `--fail=N` has seed N fail, `--hang=N` has it train for ever, and
#: `--late=N` has its time be up.
STAND_IN = """
import json, os, signal, sys, time
from datetime import datetime
from pathlib import Path

subcommand, *options = sys.argv[1:]
given = dict(option.removeprefix("--").split("=", 1) for option in options if "=" in option)
if "bad" in given:
    sys.exit("error: no such option")
if "--print_config" in options:
    best = {"class_path": "x.ModelCheckpoint", "init_args": {"monitor": "val/acc", "mode": "max"}}
    seed = json.loads(given.get("seed_everything", "7"))
    config = {"seed_everything": seed, "trainer": {"default_root_dir": None}, "callbacks": {"best": best}}
    print(json.dumps(config | {"lr": Path("lr").read_text() if Path("lr").exists() else "0.1", "ckpt_path": None}))
    sys.exit()
root = Path(given["trainer.default_root_dir"])
names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SLURM_RESTART_COUNT")
environment = {name: os.environ.get(name) for name in names}
with (root / "calls").open("a") as file:
    file.write(json.dumps({"subcommand": subcommand, **given, "environment": environment, "pid": os.getpid()}) + "\\n")
print("training")
seed = int(given.get("seed_everything", 0))
record = {"subcommand": subcommand, "ckpt_path": given.get("ckpt_path"), "metrics": {}}
record["start"] = record["end"] = datetime.now().astimezone().isoformat()
record |= {"seed": seed, "exit_reason": "finished", "best": {"path": "checkpoints/best.ckpt"}, "config": {}}
if subcommand == "test":
    run = Path(given["ckpt_path"]).parent.parent.name
    assert Path(given["config"]).read_text() == "of " + run
    folder, record["metrics"] = root / f"test-{run}", {"test/acc": int(run[-1]) / 100}
else:
    folder = root / f"fit-{seed}"
    (folder / "csv").mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(f"of {folder.name}")
    loss = "nan" if seed == 8 else seed
    (folder / "csv" / "metrics.csv").write_text(f"epoch,val/acc,val/loss\\n0,{seed / 10},{loss}\\n")
folder.mkdir(exist_ok=True)
file = folder / "run.json"
if given.get("hang") == str(seed) and not Path("go").exists():
    def stop(*_):
        file.write_text(json.dumps(record | {"exit_reason": "interrupted by SIGTERM"}))
        sys.exit(143)
    signal.signal(signal.SIGTERM, stop)
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "last.ckpt").touch()
    file.write_text(json.dumps(record | {"exit_reason": "running"}))
    while not Path("go").exists():
        time.sleep(0.01)
if given.get("late") == str(seed) and not Path("go").exists():
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "last.ckpt").touch()
    file.write_text(json.dumps(record | {"exit_reason": "interrupted as its time is up"}))
    sys.exit()
if given.get("fail") in (str(seed), "all") and not Path("go").exists():
    file.write_text(json.dumps(record | {"exit_reason": "failed"}))
    sys.exit("error: no luck\\n  traceback: somewhere")
if given.get("fail") == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
file.write_text(json.dumps(record))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory; a repeat there runs the stand-in."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "repeat.py").write_text(
        "import sys\nfrom lit_project.commands import _fit, repeat\n"
        "_fit.CLI = [sys.executable, 'stand_in.py']\nsys.exit(repeat.main(sys.argv[1:]))\n"
    )
    monkeypatch.setattr(_fit, "CLI", [sys.executable, "stand_in.py"])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(folder: Path) -> Path:
    """The only repeat."""
    (path,) = (folder / "runs").glob("repeat-*")
    return path


def state(path: Path) -> dict[str, Any]:
    return json.loads((path / "repeat.json").read_text())


def calls(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "calls").read_text().splitlines()]


def told(path: Path) -> list[tuple[int, str | None, str | None]]:
    return [(result["seed"], result["folder"], result["exit"]) for result in state(path)["results"]]


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# ---- statistics


def test_the_spread_is_that_of_the_textbook() -> None:
    # Student 1908: hours of sleep gained, drug 2 over drug 1. R: t.test(Pair(extra[11:20], extra[1:10]) ~ 1, sleep)
    hours = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    known = {"n": 10, "mean": 1.58, "sd": 1.229995, "low": 0.7001142, "high": 2.4598858}
    assert repeat.spread(hours) == pytest.approx(known, rel=1e-6)
    assert repeat.spread([2.0]) == {"n": 1, "mean": 2.0, "sd": None, "low": None, "high": None}
    assert repeat.spread([0.9, 0.9, 0.9]) == {"n": 3, "mean": 0.9, "sd": 0.0, "low": 0.9, "high": 0.9}


# ---- with the stand-in


def test_each_seed_is_run_and_tested_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert repeat.main(["--runs", "3", "--test", "true", "--lr=1"]) == 0
    path = found(folder)
    assert told(path) == [(seed, f"fit-{seed}", "finished") for seed in (7, 8, 9)], "7 is the config's seed"
    assert [(call["subcommand"], call.get("seed_everything")) for call in calls(path)] == [
        (subcommand, seed) for n in "789" for subcommand, seed in (("fit", n), ("test", None))
    ]
    assert calls(path)[2]["lr"] == "1"
    assert calls(path)[3]["ckpt_path"] == f"{path}/fit-8/checkpoints/best.ckpt"
    spreads = state(path)["statistics"]
    assert list(spreads) == ["val/acc", "val/loss", "test/acc"]
    assert spreads["val/acc"]["n"] == spreads["test/acc"]["n"] == 3
    assert spreads["val/acc"]["mean"] == pytest.approx(0.8)
    assert spreads["val/acc"]["sd"] == pytest.approx(0.1)
    assert spreads["test/acc"]["mean"] == pytest.approx(0.08)
    assert spreads["val/loss"]["n"] == 2, "no mean is taken of NaN"
    printed = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["8", "fit-8", "0.8000", "0.0800"] in printed
    assert ["runs", "3", "2", "3"] in printed
    assert ["mean", "0.8000", "8.0000", "0.0800"] in printed
    # nothing is left to do; more seeds are added, and the metrics stay although a run was deleted
    (path / "fit-7" / "run.json").unlink()
    assert repeat.main(["--folder", str(path), "--runs", "4"]) == 0
    assert len(calls(path)) == 8
    assert state(path)["statistics"]["val/acc"]["mean"] == pytest.approx(0.85)
    with pytest.raises(InputError, match="has 4 runs already: --runs can only add some"):
        repeat.main(["--folder", str(path), "--runs", "3"])
    # a repeat that has ended is not gone on with unasked
    repeat.main(["--runs", "3", "--test", "true", "--lr=1"])
    assert len(list((folder / "runs").iterdir())) == 2


def test_a_failure_is_told_and_tried_again_when_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert repeat.main(["--runs", "3", "--folder", "mine", "--seed_everything=1", "--fail=2"]) == 1
    path = folder / "mine"
    assert told(path) == [(1, "fit-1", "finished"), (2, "fit-2", "failed in fit: no luck"), (3, "fit-3", "finished")]
    assert state(path)["statistics"]["val/acc"]["n"] == 2
    printed = capsys.readouterr().out
    assert "2 of 3 runs" in printed
    assert "seed 2: failed in fit: no luck; see mine/seed-2.log\n" in printed
    command = "python -m lit_project.cli"
    assert printed.endswith(f"1 of 3 runs failed. To try them again: {command} repeat --folder mine\n")
    assert (path / "seed-2.log").read_text() == "training\nerror: no luck\n  traceback: somewhere\n"
    (folder / "go").touch()
    assert repeat.main(["--folder", "mine", "--runs", "3", "--seed_everything=1", "--fail=2"]) == 0
    assert [call["seed_everything"] for call in calls(path)] == ["1", "2", "3", "2"]
    assert "ckpt_path" not in calls(path)[3], "it had none"


def test_when_all_fail_there_is_nothing_to_tell(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert repeat.main(["--runs", "2", "--fail=killed"]) == 1
    assert [result["exit"] for result in state(found(folder))["results"]] == ["failed in fit: killed by SIGKILL"] * 2
    assert "2 of 2 runs failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_it_ends_in_order_and_the_same_command_goes_on(folder: Path, number: int, status: int) -> None:
    command = [sys.executable, "repeat.py", "--runs=3", "--hang=8"]
    process = start(folder, *command[1:])
    wait_for(lambda: list(folder.glob("runs/*/fit-8/checkpoints/last.ckpt")))
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    path = found(folder)
    assert process.returncode == status, output
    short = f"runs/{path.name}"
    assert output.splitlines()[-1] == (
        f"Stopped by {signal.Signals(number).name}. To go on: python -m lit_project.cli repeat --folder {short}"
    )
    assert told(path) == [(7, "fit-7", "finished"), (8, None, None), (9, None, None)]
    assert "1 of 3 runs" in output, "what there is, is told"
    (folder / "go").touch()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"Going on with {short}, which has not come to its end." in done.stdout
    assert [(call["seed_everything"], call.get("ckpt_path")) for call in calls(path)] == [
        ("7", None),
        ("8", None),
        ("8", f"{path}/fit-8/checkpoints/last.ckpt"),
        ("9", None),
    ]
    assert {exit for _, _, exit in told(path)} == {"finished"}


def test_a_run_whose_time_was_up_is_unfinished_and_gone_on_with(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--runs", "3", "--test", "true", "--late=8"]
    assert repeat.main(arguments) == 1, "although its exit status is 0"
    path = found(folder)
    assert told(path) == [(7, "fit-7", "finished"), (8, None, None), (9, "fit-9", "finished")]
    assert state(path)["statistics"]["val/acc"]["mean"] == pytest.approx(0.8), "of 7 and 9 alone"
    assert state(path)["statistics"]["val/acc"]["n"] == 2
    assert [call["subcommand"] for call in calls(path)] == ["fit", "test", "fit", "fit", "test"]
    printed = capsys.readouterr().out
    assert "seed 8: fit interrupted as its time is up, after 0:00:0" in printed
    command = f"python -m lit_project.cli repeat --folder runs/{path.name}"
    assert printed.endswith(f"1 of 3 runs did not come to their end. To go on: {command}\n")
    (folder / "go").touch()
    assert repeat.main(arguments) == 0
    assert [call.get("ckpt_path") for call in calls(path)[5:]] == [
        f"{path}/fit-8/checkpoints/{name}.ckpt" for name in ("last", "best")
    ]
    assert {exit for _, _, exit in told(path)} == {"finished"}


def test_a_killed_one_waits_for_what_it_left_running(folder: Path) -> None:
    command = [sys.executable, "repeat.py", "--runs=2", "--hang=7"]
    process = start(folder, *command[1:])
    wait_for(lambda: list(folder.glob("runs/*/fit-7/checkpoints/last.ckpt")))
    process.kill()
    process.wait()
    path = found(folder)
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 1
    assert f"The repeat in {path} is still going on, or a run that it started is." in again.stderr
    (folder / "go").touch()
    wait_for(lambda: '"finished"' in (path / "fit-7" / "run.json").read_text())
    wait_for(lambda: not Path(f"/proc/{calls(path)[0]['pid']}").exists() or sys.platform != "linux")
    subprocess.run(command, capture_output=True, text=True, check=True)
    assert [call["seed_everything"] for call in calls(path)] == ["7", "8"], "what finished meanwhile counts"


def test_jobs_share_the_cores_and_the_devices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(9)))
    assert repeat.main(["--runs", "2", "--jobs", "2", "--folder", "mine"]) == 0
    environments = [call["environment"] for call in calls(folder / "mine")]
    assert sorted(found["CUDA_VISIBLE_DEVICES"] for found in environments) == ["2,5", "3"]
    assert [found["OMP_NUM_THREADS"] for found in environments] == ["4", "4"]
    assert [found["SLURM_RESTART_COUNT"] for found in environments] == [None, None], "or one would take another's run"
    # added runs are to add their sums up in the same order
    assert repeat.main(["--runs", "3", "--jobs", "1", "--folder", "mine"]) == 0
    assert calls(folder / "mine")[2]["environment"]["OMP_NUM_THREADS"] == "4"


def test_a_mistake_is_said_before_anything_runs(folder: Path) -> None:
    assert repeat.main(["--runs", "2", "--folder", "mine", "--lr=1"]) == 0
    (folder / "other").mkdir()
    (folder / "other" / "file").touch()
    for arguments, message in {
        ("--ckpt_path=last",): "repeat starts each run anew",
        ("--runs", "1"): "--runs of 2 or more, as one run has no spread",
        ("--runs", "0"): "--runs of 2 or more",
        ("--bad=1",): "^fit does not take these options: no such option$",
        ("--seed_everything=true",): "repeat counts on from a seed, but seed_everything is True",
        ("--folder", "other"): "other holds other things than a repeat",
        ("--folder", "mine", "--lr=2"): "was started with other options: --lr=1. Leave them out",
    }.items():
        with pytest.raises(InputError, match=message):
            repeat.main(list(arguments))
    (folder / "lr").write_text("0.2")
    with pytest.raises(InputError, match=r"another config, so .*\n  lr: 0\.1 -> 0\.2\n"):
        repeat.main(["--folder", "mine"])
    (folder / "mine" / "repeat.json").write_text("[]")
    with pytest.raises(InputError, match=r"repeat\.json cannot be read as what a repeat wrote"):
        repeat.main(["--folder", "mine"])
    assert not (folder / "runs").exists()


def test_on_windows_it_says_where_it_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.delattr(signal, "SIGHUP")
    monkeypatch.setattr(commands, "repeat", repeat)  # which is imported anew, and is to be this one again afterwards
    monkeypatch.delitem(sys.modules, "lit_project.commands.repeat")
    with pytest.raises(SystemExit, match="error: repeat needs Linux or macOS"):
        commands.dispatch(["cli", "repeat", "--runs", "2"])
    assert not (folder / "runs").exists()


def test_without_scipy_it_says_how_to_get_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(InputError, match="pip install scipy"):
        repeat.main(["--runs", "2"])


# ---- with the real command line


@pytest.mark.slow
def test_a_real_repeat(tmp_path: Path) -> None:
    printed = cli(tmp_path, "repeat", "--runs=2", "--jobs=2", "--seed_everything=3", *TINY).stdout
    path = found(tmp_path)
    runs = [path / result["folder"] for result in state(path)["results"]]
    assert [json.loads((run / "run.json").read_text())["seed"] for run in runs] == [3, 4]
    scores = [float(row["val/acc"]) for run in runs for row in read_csv(run / "csv" / "metrics.csv") if row["val/acc"]]
    assert state(path)["statistics"]["val/acc"]["mean"] == pytest.approx(statistics.fmean(scores))
    assert f"{scores[1]:.4f}" in printed


@pytest.mark.slow
def test_a_killed_repeat_goes_on_bit_identically_and_tests(tmp_path: Path) -> None:
    options = ["--runs=2", "--test=true", "--data.num_train=640", "--data.num_val=129", "--data.num_test=131"]
    options += ["--data.batch_size=64", "--trainer.max_epochs=3", "--trainer.log_every_n_steps=1"]
    slowly = ["--trainer.callbacks+=helpers.Sleep", "--trainer.callbacks.seconds=0.2"]
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    cli(tmp_path / "whole", "repeat", "--jobs=2", *options, *slowly, PYTHONPATH=with_tests(), timeout=600)
    process = subprocess.Popen(
        [sys.executable, "-m", "lit_project.cli", "repeat", *options, *slowly],
        cwd=tmp_path / "killed",
        env=environment(tmp_path / "killed" / "home", PYTHONPATH=with_tests()),
        stdout=subprocess.DEVNULL,
    )
    # in the second epoch of the second run
    rows = tmp_path / "killed"
    wait_for_minutes(lambda: len(list(rows.glob("runs/*/fit-*/checkpoints/last.ckpt"))) == 2)
    process.kill()
    process.wait()
    path = found(rows)
    (record,) = (
        record
        for file in path.glob("fit-*/run.json")
        if (record := json.loads(file.read_text()))["exit_reason"] == "running"
    )
    os.kill(record["pid"], signal.SIGKILL)
    wait_for_minutes(lambda: not Path(f"/proc/{record['pid']}").exists())
    done = cli(rows, "repeat", *options, *slowly, PYTHONPATH=with_tests(), timeout=600)
    assert "Going on with runs/repeat-" in done.stdout
    assert "seed 1: fit goes on" in done.stdout
    whole = found(tmp_path / "whole")
    for one, other in zip(state(whole)["results"], state(path)["results"], strict=True):
        assert one["metrics"] == other["metrics"]
        assert one["tested"]
        assert other["tested"]
        weights = [
            torch.load(p / r["folder"] / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
            for p, r in ((whole, one), (path, other))
        ]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def with_tests() -> str:
    return os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])


def wait_for_minutes(condition: Any) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
