"""Runs that are stopped, killed, moved or changed, and go on: through the real command line."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import NO_PICTURES, cli, read_csv, runs, start
from helpers import TESTS

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
import kill_test  # noqa: E402

#: Three epochs of ten steps.
RUN = [
    *NO_PICTURES,
    "--data.num_train=640",
    "--data.num_val=129",
    "--data.batch_size=64",
    "--trainer.max_epochs=3",
    "--trainer.log_every_n_steps=1",
    "--trainer.enable_model_summary=false",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a run that was never interrupted."""
    path = tmp_path_factory.mktemp("whole")
    cli(path, "fit", *RUN)
    return path / "runs"


def stop(cwd: Path, *arguments: str, after: int, number: int = signal.SIGTERM, **env: str) -> tuple[int, str]:
    """Start a fit, send it a signal once it has logged so many rows, and wait; status and output."""
    process = start(cwd, "-m", "lit_project.cli", "fit", *arguments, **env)
    while process.poll() is None and logged_rows(cwd) < after:
        time.sleep(0.01)
    process.send_signal(number)
    output = process.communicate(timeout=120)[0]
    return process.returncode, output


def logged_rows(cwd: Path) -> int:
    return sum(len(file.read_text().splitlines()) - 1 for file in cwd.glob("runs/fit-*/csv/metrics.csv"))


def table(run: Path) -> list[dict[str, str]]:
    return read_csv(run / "csv" / "metrics.csv")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_stopped_run_goes_on_in_its_folder_and_ends_bit_identical(
    tmp_path: Path, whole: Path, number: int, status: int
) -> None:
    code, output = stop(tmp_path, *RUN, after=4, number=number)
    assert code == status, output
    (run,) = runs(tmp_path)
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert 4 <= saved["global_step"] < 10, "in mid-epoch"
    assert f"--ckpt_path {run / 'checkpoints' / 'last.ckpt'}" in output
    cli(tmp_path, "fit", "--ckpt_path=last", "--data.num_workers=2")
    assert runs(tmp_path) == [run]
    assert kill_test.differences(whole, tmp_path / "runs") == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_all_processes_leaves_the_workers_to_the_trainer(
    tmp_path: Path, whole: Path, number: int, status: int
) -> None:
    """Ctrl-C in a terminal and SIGTERM of a scheduler reach the workers too."""
    with_workers = ["-m", "lit_project.cli", "fit", *RUN, "--data.num_workers=2"]
    process = start(tmp_path, *with_workers, group=0)
    while process.poll() is None and logged_rows(tmp_path) < 4:
        time.sleep(0.01)
    os.killpg(process.pid, number)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == status, output
    cli(tmp_path, "fit", "--ckpt_path=last")
    assert kill_test.differences(whole, tmp_path / "runs") == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("subcommand", ["fit", "test"])
def test_where_there_is_nothing_to_save_a_signal_ends_the_process_at_once(
    tmp_path: Path, whole: Path, subcommand: str, number: int, status: int
) -> None:
    """In the sanity check before training, and in a test."""
    slow = ["--trainer.callbacks+=helpers.Sleep", "--trainer.callbacks.seconds=60", "--trainer.callbacks.anywhere=true"]
    what = RUN if subcommand == "fit" else [f"--ckpt_path={next(whole.glob('fit-*'))}"]
    program = ["-m", "lit_project.cli", subcommand]
    process = start(tmp_path, *program, *what, *slow, PYTHONPATH=TESTS)
    assert process.stdout is not None
    for line in process.stdout:
        if "sleeping" in line:
            process.send_signal(number)
    assert process.wait(timeout=30) == status
    (run,) = runs(tmp_path, "*")
    record = json.loads((run / "run.json").read_text())
    assert record["exit_reason"] == f"interrupted by {signal.Signals(number).name}"
    assert not list(run.glob("checkpoints/*"))


@pytest.mark.slow
def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    # steps of a minute: the first signal would wait for the end of one
    slow = [*RUN, "--data.batch_size=640", "--trainer.callbacks+=helpers.Sleep", "--trainer.callbacks.seconds=60"]
    process = start(tmp_path, "-m", "lit_project.cli", "fit", *slow, PYTHONPATH=TESTS)
    assert process.stdout is not None
    for line in process.stdout:
        if "sleeping" in line:
            process.send_signal(signal.SIGTERM)
        if "A second signal stops at once" in line:
            process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    assert not list(tmp_path.glob("runs/*/checkpoints/last.ckpt"))


@pytest.mark.slow
def test_a_time_limit_stops_between_steps_and_each_process_has_its_own(tmp_path: Path, whole: Path) -> None:
    first = cli(tmp_path, "fit", *RUN, "--trainer.max_time=00:00:00:00")
    assert "Stopped as its time is up" in first.stderr
    (run,) = runs(tmp_path)
    step = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert 0 < step < 30
    cli(tmp_path, "fit", "--ckpt_path=last", "--trainer.max_time=00:00:10:00")
    assert kill_test.differences(whole, tmp_path / "runs") == []


def test_a_killed_run_goes_on_from_its_last_epoch_wherever_its_folder_is_now(tmp_path: Path, whole: Path) -> None:
    code, _ = stop(tmp_path, *RUN, after=14, number=signal.SIGKILL)
    assert code == -signal.SIGKILL
    (run,) = runs(tmp_path)
    moved = tmp_path / "elsewhere" / "runs" / run.name
    moved.parent.mkdir(parents=True)
    shutil.move(run, moved)
    cli(tmp_path, "fit", f"--ckpt_path={moved}")
    assert kill_test.differences(whole, tmp_path / "elsewhere" / "runs") == []
    assert runs(tmp_path) == []
    # best-so-far was not forgotten: the file and the score that the last checkpoint knows are the whole run's
    (state,) = (
        s
        for k, s in torch.load(moved / "checkpoints/last.ckpt", weights_only=True)["callbacks"].items()
        if "ModelCheckpoint" in k
    )
    assert state["best_model_path"] == str(moved / "checkpoints" / "best.ckpt")
    assert float(state["best_model_score"]) == pytest.approx(max(float(r["val/acc"] or 0) for r in table(moved)))


@pytest.mark.slow
@pytest.mark.parametrize("after", [5, 14, 25])
def test_validations_in_mid_epoch_are_whole_after_a_kill(tmp_path: Path, after: int) -> None:
    """PL#20277: with Lightning's checkpoints, the first validation after a resume may see one batch of its data."""
    often = [*RUN, "--trainer.val_check_interval=3", "--callbacks.last.every_n_steps=2"]
    cli(tmp_path, "fit", *often, "--trainer.default_root_dir=whole")
    code, output = stop(tmp_path, *often, after=after, number=signal.SIGKILL)
    assert code == -signal.SIGKILL, output
    cli(tmp_path, "fit", "--ckpt_path=last")
    assert kill_test.differences(tmp_path / "whole", tmp_path / "runs") == []
    validations = [row for row in table(runs(tmp_path)[0]) if row["val/loss"]]
    assert len(validations) == 9


@pytest.mark.slow
def test_a_checkpoint_of_ones_own_in_mid_epoch_goes_on_exactly(tmp_path: Path) -> None:
    """Written at a step after which a validation is due: that runs once, on all of its images (CASES 26)."""
    own = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=3"]
    own += ["--trainer.callbacks.save_top_k=-1", "--trainer.callbacks.filename={step}"]
    cli(tmp_path, "fit", *RUN, "--trainer.max_epochs=2", "--trainer.val_check_interval=3", *own)
    (run,) = runs(tmp_path)
    cli(tmp_path, "fit", f"--ckpt_path={run / 'checkpoints' / 'step=6.ckpt'}", "--trainer.default_root_dir=rest")
    whole, rest = table(run), table(next((tmp_path / "rest").glob("fit-*")))
    assert len([row for row in rest if row["val/loss"]]) == 4
    assert rest[:-1] == whole[6:-1], "but for the means of the epoch that was gone on with"


STEP = ["--model.scheduler=torch.optim.lr_scheduler.StepLR", "--model.scheduler.step_size=1"]
PLATEAU = [
    "--model.scheduler=lightning.pytorch.cli.ReduceLROnPlateau",
    "--model.scheduler.monitor=val/loss",
    "--model.scheduler.patience=0",
    "--model.scheduler.threshold=1.0",
]
COSINE = ["--model.scheduler=torch.optim.lr_scheduler.CosineAnnealingLR", "--model.scheduler.T_max=-1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheduler", "stop"),
    [
        (STEP, "--trainer.max_epochs=2"),
        (PLATEAU, "--trainer.max_epochs=2"),
        (COSINE, "--trainer.max_time=00:00:00:00"),
        ([*STEP, "--trainer.check_val_every_n_epoch=2"], "--trainer.max_epochs=3"),  # PL#20495
    ],
    ids=["each epoch", "on a plateau", "each step", "validated every second epoch"],
)
def test_the_learning_rate_goes_on_exactly(tmp_path: Path, scheduler: list[str], stop: str) -> None:
    arguments = [*RUN, *scheduler, "--trainer.limit_train_batches=3", "--trainer.max_epochs=4"]
    cli(tmp_path, "fit", *arguments, "--trainer.default_root_dir=whole")
    cli(tmp_path, "fit", *arguments, "--trainer.default_root_dir=cut", stop)
    cli(tmp_path, "fit", "--ckpt_path=last", "--trainer.default_root_dir=cut", "--trainer.max_epochs=4")
    assert kill_test.differences(tmp_path / "whole", tmp_path / "cut") == []
    rates = [row["lr-SGD"] for row in table(next((tmp_path / "whole").glob("fit-*")))]
    assert len(rates) == 12
    assert len(set(rates)) > 2


def test_what_changes_the_optimisation_is_refused_with_its_keys_unless_forced(tmp_path: Path) -> None:
    cli(tmp_path, "fit", *RUN, "--trainer.max_epochs=1")
    changed = ["--model.optimizer.lr=0.05", "--data.batch_size=32", "--trainer.accumulate_grad_batches=2"]
    refused = cli(tmp_path, "fit", "--ckpt_path=last", "--trainer.max_epochs=2", *changed, check=False)
    assert refused.returncode == 1
    for line in (
        "model.optimizer.lr: 0.2 -> 0.05",
        "data.batch_size: 64 -> 32",
        "trainer.accumulate_grad_batches: 1 -> 2",
    ):
        assert line in refused.stderr
    assert len(runs(tmp_path)) == 1
    harmless = [
        "--trainer.max_epochs=2",
        "--data.num_workers=1",
        "--loggers.tensorboard=null",
        "--trainer.accelerator=cpu",
    ]
    cli(tmp_path, "fit", "--ckpt_path=last", *harmless)
    (run,) = runs(tmp_path)
    assert len(table(run)) == 20
    assert len(list(run.glob("config-*.yaml"))) == 1, "the config before is kept"
    cli(tmp_path, "fit", "--ckpt_path=last", "--trainer.max_epochs=3", *changed[:1], "--force_resume=true")
    assert len(table(run)) == 30


def files(run: Path) -> dict[Path, bytes]:
    """All of a run's files; ``.lock`` is no record, and says who last looked."""
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.slow
def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    cli(tmp_path, "fit", *RUN, "--trainer.max_epochs=1")
    (run,) = runs(tmp_path)
    before = files(run)
    again = cli(tmp_path, "fit", "--ckpt_path=last")
    assert "Nothing was trained: the run is finished, as it is at its planned end" in again.stdout
    assert files(run) == before


@pytest.mark.slow
def test_more_steps_go_on_within_the_epoch_that_the_old_number_of_them_ended(tmp_path: Path) -> None:
    """14 of 24 steps are an epoch and four batches: the other six of that epoch are still to come."""
    endless = [*RUN, "--model.scheduler=null", "--trainer.max_epochs=-1"]
    weights = []
    for name, ends in (("whole", [24]), ("cut", [14, 24])):
        (tmp_path / name).mkdir()
        for number, steps in enumerate(ends):
            resume = ["--ckpt_path=last"] if number else []
            cli(tmp_path / name, "fit", *endless, f"--trainer.max_steps={steps}", *resume)
        (run,) = runs(tmp_path / name)
        assert [int(row["step"]) for row in table(run) if row["train/loss_step"]] == list(range(24))
        weights.append(torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"])
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.slow
def test_a_run_that_early_stopping_ended_is_left_as_it_is(tmp_path: Path) -> None:
    stops = ["--callbacks.early_stopping.patience=1", "--callbacks.early_stopping.min_delta=1.0"]
    done = cli(tmp_path, "fit", *RUN, "--trainer.max_epochs=9", *stops)
    assert "\nStopped early: val/acc has not got better in the last 1 validations.\nBest checkpoint: " in done.stdout
    (run,) = runs(tmp_path)
    assert len(table(run)) == 20
    before = files(run)
    again = cli(tmp_path, "fit", "--ckpt_path=last")
    assert "Nothing was trained: the run is finished, as early stopping ended it" in again.stdout
    assert files(run) == before, "run.json still tells how it ended"
    done = cli(tmp_path, "fit", "--ckpt_path=last", "--callbacks.early_stopping.patience=2")
    assert len(table(run)) == 30
    assert "Stopped early" in done.stdout


@pytest.mark.slow
def test_an_earlier_checkpoint_starts_a_run_of_its_own_that_knows_the_best(tmp_path: Path) -> None:
    cli(tmp_path, "fit", *RUN, "--callbacks.best.mode=min", "--callbacks.best.monitor=val/loss")
    (run,) = runs(tmp_path)
    best = run / "checkpoints" / "best.ckpt"
    early = torch.load(best, weights_only=True)
    early["global_step"] = 10  # as if an epoch in the middle had been the best
    torch.save(early, best)
    before = {path.name: path.read_bytes() for path in (run / "checkpoints").iterdir()}
    cli(tmp_path, "fit", f"--ckpt_path={best}", "--trainer.max_epochs=4")
    assert {path.name: path.read_bytes() for path in (run / "checkpoints").iterdir()} == before
    (new,) = set(runs(tmp_path)) - {run}
    recorded = json.loads((new / "run.json").read_text())["best"]
    (state,) = (s for key, s in early["callbacks"].items() if key.startswith("ModelCheckpoint"))
    scores = [float(row["val/loss"]) for row in table(new) if row["val/loss"]]
    assert recorded["path"] == "checkpoints/best.ckpt"
    assert recorded["score"] == pytest.approx(min([float(state["best_model_score"]), *scores]))
    assert (new / recorded["path"]).is_file()


@pytest.mark.slow
def test_last_is_the_newest_run_of_the_config_that_is_given(tmp_path: Path) -> None:
    (tmp_path / "wide.yaml").write_text(
        "data: {init_args: {batch_size: 64}}\nmodel: {init_args: {label_smoothing: 0.1}}\n"
    )
    cli(tmp_path, "fit", *RUN, "--trainer.max_epochs=1", "--config=wide.yaml")
    (wide,) = runs(tmp_path)
    cli(tmp_path, "fit", *RUN, "--trainer.max_epochs=1")
    cli(tmp_path, "fit", "--config=wide.yaml", "--ckpt_path=last", "--trainer.max_epochs=2")
    assert len(table(wide)) == 20
    (tmp_path / "other.yaml").write_text("model: {init_args: {label_smoothing: 0.2}}\n")
    missing = cli(tmp_path, "fit", "--config=other.yaml", "--ckpt_path=last", check=False)
    assert missing.returncode == 1
    assert "none of the 2 runs there has this config" in missing.stderr


@pytest.mark.slow
def test_a_requeued_job_goes_on_in_its_folder(tmp_path: Path, whole: Path) -> None:
    command = ["fit", *RUN, "--trainer.plugins=lightning.pytorch.plugins.environments.LightningEnvironment"]
    code, output = stop(tmp_path, *command[1:], after=4, SLURM_JOB_ID="77", SLURM_RESTART_COUNT="0")
    assert code == 143, output
    cli(tmp_path, *command, SLURM_JOB_ID="77", SLURM_RESTART_COUNT="1")
    (run,) = runs(tmp_path)
    assert run.name.endswith("-job77")
    assert kill_test.differences(whole, tmp_path / "runs") == []
    cli(tmp_path, *command, "--trainer.max_epochs=1", SLURM_JOB_ID="78", SLURM_RESTART_COUNT="1")
    assert len(runs(tmp_path)) == 2, "another job starts anew"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_while_writing_in_validation_and_anywhere(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quick part of scripts/kill_test.py: dropout, accumulation, averaged weights, checkpoints in mid-epoch."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = [*kill_test.RUN, f"--data.num_workers={workers}"]
    assert kill_test.fit(tmp_path / "whole", *options).wait() == 0
    done, status = kill_test.trial(tmp_path / "killed", 3, list(kill_test.WHERE), options, duration=4.0)
    assert status == 0, (tmp_path / "killed" / "out.log").read_text()
    assert len(done) >= 2
    assert kill_test.differences(tmp_path / "whole", tmp_path / "killed") == []


@pytest.mark.slow
@pytest.mark.parametrize("compile", ["false", "true"])
def test_ranks_stop_together_and_go_on(tmp_path: Path, compile: str) -> None:
    ranks = [*RUN, "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp"]
    ranks.append(f"--model.compile={compile}")
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    cli(tmp_path / "whole", "fit", *ranks)
    code, output = stop(tmp_path / "cut", *ranks, after=2)  # the signal reaches the first rank alone
    assert code == 143, output
    assert output.count("Stopped by SIGTERM") == 1
    weights = torch.load(runs(tmp_path / "cut")[0] / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert all(name.startswith("network.") and "_orig_mod" not in name for name in weights)
    cli(tmp_path / "cut", "fit", "--ckpt_path=last")
    assert kill_test.differences(tmp_path / "whole" / "runs", tmp_path / "cut" / "runs") == []
