"""End to end through ``python -m lit_project.cli`` in a process of its own."""

import csv
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import TINY, RunCLI, cli, environment, read_csv, runs, start
from helpers import TESTS, in_process, small_cifar10
from PIL import Image

from lit_project import cli as cli_module
from lit_project.checkpoints import read_checkpoint
from lit_project.data import CIFAR10
from lit_project.module import ImageClassifier


def config_of(run: Path) -> Any:
    return yaml.safe_load((run / "config.yaml").read_text())


# ---- the run folder


def test_the_same_command_twice_gives_two_whole_runs(tmp_path: Path) -> None:
    """Also when both start in the same second."""
    command = ["-m", "lit_project.cli", "fit", *TINY]
    processes = [start(tmp_path, *command, f"--seed_everything={seed}") for seed in (1, 2)]
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
    first, second = runs(tmp_path)
    assert {config_of(run)["seed_everything"] for run in (first, second)} == {1, 2}
    for run in (first, second):
        checkpoint = read_checkpoint(run / "checkpoints" / "last.ckpt")
        assert checkpoint["config"] == config_of(run)
        assert (run / "checkpoints" / "best.ckpt").is_file()


def test_run_folder_is_complete_and_points_nowhere(tiny_run: Path) -> None:
    names = {path.name for path in tiny_run.iterdir()} - {"diff.patch"}  # there is one where the project was changed
    assert names == {"config.yaml", "run.json", ".lock", "checkpoints", "csv", "tensorboard"}
    text = (tiny_run / "config.yaml").read_text()
    assert "object at 0x" not in text
    assert str(tiny_run) not in text, "a run of this config would write into the old run's folder"
    logged = read_csv(tiny_run / "csv" / "metrics.csv")
    names = {name for row in logged for name, value in row.items() if value}
    stages = {f"{stage}/{name}" for stage in ("train", "val") for name in ("loss", "acc", "f1", "auroc")}
    assert names >= stages | {"train/loss_step", "train/grad_norm", "lr-SGD", "epoch", "step"}


def test_last_is_the_final_epoch_and_best_the_best(run_cli: RunCLI, tmp_path: Path) -> None:
    """A metric that only gets worse: best stays at the first epoch, last goes on (Lightning 2.6's save_last stays)."""
    run_cli("fit", *TINY, "--trainer.max_epochs=3", "--callbacks.best.monitor=train/acc", "--callbacks.best.mode=min")
    (run,) = runs(tmp_path)
    last, best = (read_checkpoint(run / "checkpoints" / f"{name}.ckpt") for name in ("last", "best"))
    assert last["epoch"] == 3, "three are over"
    assert last["global_step"] == 12
    accuracies = [float(row["train/acc"]) for row in read_csv(run / "csv" / "metrics.csv") if row.get("train/acc")]
    assert best["epoch"] == accuracies.index(min(accuracies))
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}


def test_last_lines_are_commands_that_work(tmp_path: Path) -> None:
    done = cli(tmp_path, "fit", *TINY)
    lines = done.stdout.splitlines()
    (best,) = (line for line in lines if line.startswith("Best checkpoint: "))
    (run,) = runs(tmp_path)
    assert f"runs/{run.name}/checkpoints/best.ckpt (val/acc 0." in best
    commands = [line.split(":", 1)[1].split() for line in lines[-3:]]
    assert [command[3] for command in commands] == ["test", "fit", "fit"]
    done = subprocess.run(
        commands[0], cwd=tmp_path, env=environment(tmp_path / "home"), capture_output=True, text=True, check=True
    )
    assert "Test, by class" in done.stdout
    for command in commands[1:]:
        config = command[command.index("--config") + 1]
        cli(
            tmp_path,
            "fit",
            "--config",
            config,
            "--data.root=x" if "image" in config else "--data.batch_size=8",
            "--print_config",
        )


# ---- configs


OWN_CALLBACK = ["--trainer.callbacks+=helpers.Plant", "--trainer.callbacks.name=x", "--trainer.callbacks.value=1e-5"]


@pytest.mark.parametrize("options", [[], ["--config=configs/cifar10_fast.yaml"], OWN_CALLBACK])
def test_print_config_round_trip(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, options: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    status, first, errors = in_process(monkeypatch, capfd, "fit", *options, "--print_config")
    assert status == 0, errors
    (tmp_path / "a.yaml").write_text(first)
    assert "object at 0x" not in first
    assert in_process(monkeypatch, capfd, "fit", "--config=a.yaml", "--print_config")[1] == first


def test_one_config_serves_every_subcommand(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What one subcommand alone is told does not keep another from reading the file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fit.yaml").write_text(in_process(monkeypatch, capfd, "fit", "--print_config")[1])
    _, _, errors = in_process(monkeypatch, capfd, "test", "--config=fit.yaml")
    assert "test needs a trained model" in errors, "the config was read"
    (tmp_path / "predict.yaml").write_text("images: x\noutput: y.csv\ntrainer: {max_epochs: 7}\n")
    _, _, errors = in_process(monkeypatch, capfd, "fit", "--config=predict.yaml", "--data.batch_size=0")
    assert "data.batch_size is 0" in errors
    _, text, _ = in_process(monkeypatch, capfd, "predict", "--config=predict.yaml", "--print_config")
    printed = yaml.safe_load(text)
    assert (printed["images"], printed["output"], printed["trainer"]["max_epochs"]) == ("x", "y.csv", 7)


@pytest.mark.slow
def test_a_saved_config_serves_every_subcommand(run_cli: RunCLI, tiny_run: Path, tmp_path: Path) -> None:
    config = f"--config={tiny_run / 'config.yaml'}"
    run_cli("fit", config, "--trainer.max_epochs=1")
    (again,) = runs(tmp_path)
    assert {**config_of(again), "trainer": None} == {**config_of(tiny_run), "trainer": None}
    for subcommand in ("validate", "test"):
        run_cli(subcommand, config, f"--ckpt_path={tiny_run}")
    Image.new("RGB", (32, 32)).save(tmp_path / "black.png")
    run_cli("predict", config, f"--ckpt_path={tiny_run}", "--images=black.png", "--output=found.csv")
    assert len(read_csv(tmp_path / "found.csv")) == 1


def test_extra_callbacks_are_added_and_default_ones_stay(run_cli: RunCLI, tmp_path: Path) -> None:
    extra = {
        "trainer": {
            "callbacks": [
                {
                    "class_path": "lightning.pytorch.callbacks.EarlyStopping",
                    "init_args": {"monitor": "val/loss", "patience": 77},
                }
            ]
        }
    }
    (tmp_path / "extra.yaml").write_text(yaml.safe_dump(extra))
    append = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=2"]
    run_cli("fit", *TINY, "--config=extra.yaml", *append, "--trainer.callbacks.dirpath=every")
    (run,) = runs(tmp_path)
    states = read_checkpoint(run / "checkpoints" / "last.ckpt")["callbacks"]
    assert sorted(Path(s["dirpath"]).name for key, s in states.items() if key.startswith("ModelCheckpoint")) == [
        "checkpoints",
        "every",
    ], "the default one once, beside the one that was added"
    (stopping,) = (state for key, state in states.items() if key.startswith("EarlyStopping"))
    assert stopping["patience"] == 77, "the user's takes the default one's place"
    assert list((tmp_path / "every").iterdir())


def test_a_default_callback_is_changed_or_removed_by_name(run_cli: RunCLI, tmp_path: Path) -> None:
    best = ["--callbacks.best.monitor=train/loss", "--callbacks.best.mode=min", "--callbacks.best.filename={epoch}"]
    half = ["--trainer.accelerator=cpu", "--trainer.precision=16-mixed"]
    done = run_cli("fit", *TINY, *best, *half, "--callbacks.early_stopping=null", "--callbacks.last=null")
    assert "not supported on CPU. Using `precision='bf16-mixed'` instead" in done.stderr
    (run,) = runs(tmp_path)
    (path,) = (run / "checkpoints").iterdir()
    assert path.name == "epoch=0.ckpt"
    assert f"checkpoints/{path.name} (train/loss" in done.stdout
    states = read_checkpoint(path)["callbacks"]
    assert not any(key.startswith("EarlyStopping") for key in states)


@pytest.mark.slow
def test_several_best_checkpoints_with_their_score_in_the_name(run_cli: RunCLI, tmp_path: Path) -> None:
    """PL#4468, also of a user's own: ``val/acc`` in a name is no folder. The best is what run.json says."""
    best = ["--callbacks.best.save_top_k=2", "--callbacks.best.filename={epoch}-{val/acc:.2f}"]
    own = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpath=own"]
    own += ["--trainer.callbacks.monitor=train/loss", "--trainer.callbacks.filename=x-{train/loss:.0f}"]
    run_cli("fit", *TINY, "--trainer.max_epochs=2", *best, *own, "--callbacks.last=null")
    (run,) = runs(tmp_path)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert [name.split("0.")[0] for name in names] == ["epoch=0-val_acc=", "epoch=1-val_acc="]
    assert [path.name[:13] for path in (tmp_path / "own").iterdir()] == ["x-train_loss="]
    accuracies = [float(row["val/acc"]) for row in read_csv(run / "csv" / "metrics.csv") if row.get("val/acc")]
    notes = run_cli("validate", "--ckpt_path=best").stderr
    assert f"checkpoints/epoch={accuracies.index(max(accuracies))}-val_acc=" in notes


@pytest.mark.slow
def test_downloaded_data_is_found_from_another_folder(tmp_path: Path) -> None:
    """A relative ``data_dir`` would be downloaded once more."""
    for name in ("a/data", "b"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "a" / "data" / CIFAR10.source.filename).write_bytes(small_cifar10()[0])
    data = ["--data=helpers.SmallCIFAR10", "--data.data_dir=data", "--data.batch_size=64", "--trainer.max_epochs=1"]
    cli(tmp_path / "a", "fit", *data, PYTHONPATH=TESTS)
    (run,) = runs(tmp_path / "a")
    cli(tmp_path / "b", "test", f"--ckpt_path={run}", PYTHONPATH=TESTS)
    assert not (tmp_path / "b" / "data").exists()
    assert read_checkpoint(run / "checkpoints" / "last.ckpt")["config"] == config_of(run)


def test_a_network_gets_the_class_count_of_the_data_not_the_default_networks(run_cli: RunCLI, tmp_path: Path) -> None:
    """jsonargparse hands the arguments of a replaced class on, so 10 is set although nobody gave it."""
    for name in ("a", "b", "c"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(30):
            Image.new("RGB", (32, 32), (number, 40, 50)).save(tmp_path / "images" / name / f"{number}.png")
    data = ["--data=ImageFolder", "--data.root=images", "--data.batch_size=16", "--trainer.max_epochs=1"]
    done = run_cli("fit", *data, "--model.network=torchvision.models.mobilenet_v3_small", "--model.optimizer=AdamW")
    assert "AdamW takes over the learning rate 0.2" in done.stderr
    (run,) = runs(tmp_path)
    state = read_checkpoint(run / "checkpoints" / "last.ckpt")["state_dict"]
    assert state["network.classifier.3.weight"].shape[0] == 3
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    again = cli(elsewhere, "fit", f"--ckpt_path={run}")
    assert "Nothing was trained" in again.stdout, "and the images are found from any folder"
    assert config_of(run)["data"]["init_args"]["root"] == str(tmp_path / "images")


@pytest.mark.slow
def test_a_checkpoint_without_config_is_not_tested_on_the_default(
    run_cli: RunCLI, tiny_run: Path, tmp_path: Path
) -> None:
    checkpoint = read_checkpoint(tiny_run / "checkpoints" / "best.ckpt")
    del checkpoint["config"]
    torch.save(checkpoint, tmp_path / "bare.ckpt")
    done = run_cli("test", "--ckpt_path=bare.ckpt", check=False)
    assert done.returncode == 1
    assert "give it with --config" in done.stderr
    run_cli("test", "--ckpt_path=bare.ckpt", f"--config={tiny_run / 'config.yaml'}")


def test_scientific_notation_is_a_number(run_cli: RunCLI, tmp_path: Path) -> None:
    (tmp_path / "lr.yaml").write_text("model:\n  init_args:\n    optimizer:\n      init_args:\n        lr: 1e-5\n")
    printed = yaml.safe_load(run_cli("fit", "--config=lr.yaml", "--print_config").stdout)
    assert printed["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 1e-5


def test_an_option_wins_over_a_config_wherever_it_stands(run_cli: RunCLI, tmp_path: Path) -> None:
    (tmp_path / "long.yaml").write_text("trainer:\n  max_epochs: 3\n  gradient_clip_val: 0.5\n")
    (tmp_path / "short.yaml").write_text("trainer:\n  gradient_clip_val: 0.25\n")
    command = ["fit", "--trainer.max_epochs=7", "--config", "long.yaml", "--print_config", "-c=short.yaml"]
    trainer = yaml.safe_load(run_cli(*command).stdout)["trainer"]
    assert (trainer["max_epochs"], trainer["gradient_clip_val"]) == (7, 0.25)


@pytest.mark.slow
def test_short_names_and_foreign_networks(run_cli: RunCLI, tmp_path: Path) -> None:
    tiny = [*TINY, "--trainer.limit_train_batches=1", "--trainer.limit_val_batches=1"]
    run_cli(
        "fit",
        *tiny,
        "--model.network=torchvision.models.resnet18",
        "--model.optimizer=SGD",
        "--model.optimizer.lr=0.1",
        "--model.scheduler=null",
    )
    run_cli(
        "fit",
        *tiny,
        "--model.network=lit_project.networks.timm_model",
        "--model.network.name=resnet10t",
        "--model.scheduler=StepLR",
        "--model.scheduler.step_size=1",
    )
    for run, name in zip(runs(tmp_path), ("network.fc.weight", "network.fc.weight"), strict=True):
        assert read_checkpoint(run / "checkpoints" / "last.ckpt")["state_dict"][name].shape[0] == 10


# ---- from a checkpoint


def test_test_needs_nothing_but_the_checkpoint(run_cli: RunCLI, tiny_run: Path, tmp_path: Path) -> None:
    """Also when the run folder moved: the checkpoint carries its config."""
    shutil.copy(tiny_run / "checkpoints" / "best.ckpt", tmp_path / "moved.ckpt")
    output = run_cli("test", "--ckpt_path=moved.ckpt").stdout
    (run,) = runs(tmp_path)
    assert config_of(run)["data"]["init_args"]["num_test"] == 131, "not the default data"
    with (run / "confusion_matrix.csv").open() as file:
        header, *matrix = list(csv.reader(file))
    classes = read_csv(run / "per_class.csv")
    assert header[1:] == [row["class"] for row in classes]
    counts = {row["class"]: int(row["images"]) for row in classes}
    assert {name: sum(map(int, cells)) for name, *cells in matrix} == counts
    assert sum(counts.values()) == 131, "every test image once, the last short batch too"
    correct = sum(int(row[k + 1]) for k, row in enumerate(matrix))
    (metrics,) = read_csv(run / "csv" / "metrics.csv")
    assert float(metrics["test/acc"]) == pytest.approx(correct / 131)
    assert "Test, by class" in output


@pytest.mark.parametrize("subcommand", ["fit", "test", "predict"])
def test_freed_memory_is_kept_in_every_subcommand(
    monkeypatch: pytest.MonkeyPatch, tiny_run: Path, tmp_path: Path, subcommand: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (32, 32)).save("a.png")
    told: list[str] = []
    monkeypatch.setattr(cli_module, "keep_freed_memory", lambda: told.append(subcommand))
    options = {"fit": TINY, "predict": [f"--ckpt_path={tiny_run}", "--images=a.png"]}
    monkeypatch.setattr(sys, "argv", ["cli", subcommand, *options.get(subcommand, [f"--ckpt_path={tiny_run}"])])
    cli_module.main()
    assert told == [subcommand]


def test_best_and_run_folder_name_the_checkpoint(run_cli: RunCLI, tmp_path: Path) -> None:
    run_cli("fit", *TINY)
    (run,) = runs(tmp_path, "fit-*")
    assert f"runs/{run.name}/checkpoints/best.ckpt" in run_cli("test", "--ckpt_path=best").stderr
    run_cli("validate", f"--ckpt_path=runs/{run.name}")


@pytest.mark.slow
def test_an_explicit_argument_wins_over_the_checkpoint(run_cli: RunCLI, tiny_run: Path, tmp_path: Path) -> None:
    """Lightning 2.6 lets the checkpoint's hyper-parameters beat the command line."""
    fitted, slower = (tmp_path / "runs" / name for name in ("fit-1", "fit-2"))
    force = ["--trainer.max_epochs=3", "--force_resume=true"]
    for run, changed in (
        (fitted, ["--model.label_smoothing=0.3"]),
        (slower, ["--model.optimizer.lr=0.001", "--model.scheduler=null"]),
    ):
        shutil.copytree(tiny_run, run)
        run_cli("fit", f"--ckpt_path={run}", *force, *changed)
    run_cli("test", f"--ckpt_path={tiny_run}", "--data.num_test=64")
    (tested,) = runs(tmp_path, "test-*")
    (group,) = read_checkpoint(slower / "checkpoints" / "last.ckpt")["optimizer_states"][0]["param_groups"]
    assert group["lr"] == 0.001, "not the rate in the optimiser's saved state"
    after = read_checkpoint(fitted / "checkpoints" / "last.ckpt")
    assert after["hyper_parameters"]["label_smoothing"] == 0.3
    assert after["global_step"] == 12, "resumed, not started anew"
    assert config_of(fitted)["data"] == config_of(tiny_run)["data"], "what was not given comes from the checkpoint"
    assert config_of(tested)["data"]["init_args"]["num_test"] == 64


def test_a_checkpoint_of_other_code_gives_a_readable_difference(
    run_cli: RunCLI, tiny_run: Path, tmp_path: Path
) -> None:
    checkpoint = read_checkpoint(tiny_run / "checkpoints" / "best.ckpt")
    arguments = checkpoint["config"]["model"]["init_args"]
    arguments["mixup"] = 0.2
    del arguments["label_smoothing"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    notes = run_cli("test", "--ckpt_path=old.ckpt").stderr
    name = "lit_project.module.ImageClassifier"
    assert f"model.mixup = 0.2: {name} has no such argument, ignored" in notes
    assert "model.label_smoothing: new here, has its default 0.0" in notes


def test_checkpoints_load_as_plain_data_and_rebuild_the_model(tiny_run: Path) -> None:
    for name in ("best", "last"):
        checkpoint = torch.load(tiny_run / "checkpoints" / f"{name}.ckpt", weights_only=True)
        model = ImageClassifier.load_from_checkpoint(tiny_run / "checkpoints" / f"{name}.ckpt")
        assert (
            checkpoint["preprocessing"]["class_names"]
            == model.class_names
            == checkpoint["config"]["model"]["init_args"]["class_names"]
        )
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


# ---- anywhere


@pytest.mark.slow
def test_from_another_folder(run_cli: RunCLI, tmp_path: Path) -> None:
    """The project's configs are found by their usual names, and runs land where one stands."""
    run_cli("fit", "--config=configs/trainer/debug.yaml", *TINY)
    absolute = cli_module.CONFIGS / "trainer" / "debug.yaml"
    run_cli("fit", "-c", absolute, *TINY, "--trainer.default_root_dir=elsewhere")
    assert len(runs(tmp_path)) == len(list((tmp_path / "elsewhere").iterdir())) == 1


@pytest.mark.slow
def test_an_installed_wheel_needs_no_checkout(tmp_path: Path) -> None:
    project = cli_module.CONFIGS.parent
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, project], check=True, timeout=300
    )
    (wheel,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    done = cli(tmp_path, "fit", "--config=configs/trainer/debug.yaml", *TINY, PYTHONPATH=str(tmp_path / "site"))
    assert "Best checkpoint" in done.stdout
    script = "from lit_project import cli; print(cli.CONFIGS)"
    env = environment(tmp_path / "home", PYTHONPATH=str(tmp_path / "site"))
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / "site" / "lit_project" / "configs")


# ---- messages


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ([], ["say what to do", "predict", "rerun"]),
        (["ft"], ["invalid choice: 'ft'", "predict", "rerun", "Did you mean 'fit'?"]),
        (["fit", "--trainer.max_epoch=3"], ["--trainer.max_epoch", "Did you mean '--trainer.max_epochs'?"]),
        (["fit", "--trainr.max_epochs=3"], ["Did you mean '--trainer.max_epochs'?"]),
        (["fit", "--max_epoch=3"], ["Did you mean '--trainer.max_epochs'?"]),
        (["fit", "--callbacks.bst.monitor=x"], ["Did you mean '--callbacks.best.monitor'?"]),
        (["fit", "--learning-rate=1"], ["Did you mean '--model.optimizer.lr'?"]),
        (["fit", "--data", "ImageFolder"], ["required: root", "Give it to ImageFolder with --data.root."]),
        (["fit", "--trainer.default_root_dir=y", "--data.root=x"], ["accepted (from --data.root=x)"]),
        (["fit", "--data.root=x"], ["'root' is not accepted", "ImageFolder would have it", "--data=ImageFolder"]),
        (["fit", "--model.network.widths=[1]"], ["WhitenedCNN would have it", "--model.network=WhitenedCNN"]),
        (["fit", "--trainer.accelerator=foo"], ["trainer: ", "accelerator='foo'", "cuda"]),
        (["fit", "--config=twice.yaml"], ["twice.yaml", "trainer is there twice, in lines 1 and 4"]),
        (["fit", "--config=word.yaml"], ["trainer.max_epochs", "three", "word.yaml)"]),
        (["fit", "-c", "word.yaml", "--trainer.max_time=1"], ["trainer.max_epochs", "three", "word.yaml)"]),
        (["fit", "--model.network=ResNet19"], ["ResNet19", "Did you mean 'ResNet18'?"]),
        (
            ["fit", "--model.network=lit_project.networks.ResNt18"],
            ["ResNt18", "Did you mean 'ResNet18'?"],
        ),
        (["fit", "--model.netwrk=ResNet18"], ["--model.netwrk", "Did you mean 'network'?"]),
        (["fit", "--model.optimizer=Admw"], ["Admw", "Did you mean 'AdamW'?"]),
        (["fit", "--data=CIFAR1"], ["CIFAR1", "Did you mean 'CIFAR10'?"]),
        (["fit", "--trainer.max_epochs=three"], ["trainer.max_epochs", "three"]),
        (["fit", "--model.class_weights=[1, 2]"], ["class_weights has 2 entries, but there are 10 classes"]),
        (["fit", "--model.network.num_classes=20"], ["num_classes is 20", "the data has 10"]),
        (["fit", "--model.network.num_classes=20", "--model.num_classes=10"], ["network.num_classes is 20"]),
        (["fit", "--data.batch_size=0"], ["data.batch_size is 0"]),
        (["fit", "--callbacks.best.save_top_k=3"], ["save_top_k 3, several checkpoints of the one name 'best'"]),
        (["fit", "--callbacks.best.save_top_k=-1"], ["save_top_k -1, several checkpoints of the one name 'best'"]),
        (["fit", "--trainer.max_time=01:30:00"], ["'01:30:00'", "DAYS:HOURS:MINUTES:SECONDS", "00:01:30:00"]),
        (["fit", "--model.network.image_size=3", "--data.augment=[]"], ["image_size is 3", "the data has 32"]),
        (["test", "--config=scalar.yaml", "--ckpt_path=best"], ["scalar.yaml: trainer is 5", "'name: value' lines"]),
        (["fit", "--config=sub/wrong.yaml"], ["Option 'momentun' is not accepted", "sub/wrong.yaml)", "'momentum'?"]),
        (["fit", "--config=sub/big.yaml", "--data.batch_size", "32"], ["Given value: big", "sub/big.yaml)"]),
        (["fit", "--config=list.yaml"], ["list.yaml: callbacks is [", "your own go to trainer.callbacks"]),
        (["fit", "--config=number.yaml"], ["number.yaml: ckpt_path is 5", "a path"]),
        (["fit", "--config=hollow.yaml"], ["hollow.yaml: data.init_args is empty"]),
        (["fit", "--config=loop.yaml"], ["loop.yaml: trainer.x contains itself"]),
        (["fit", "--config=tab.yaml"], ["tab.yaml", "line 2", "spaces, not tabs"]),
        (["fit", "--config=latin.yaml"], ["latin.yaml", "Save it as UTF-8"]),
        (["fit", "--config=group.yaml"], ["group.yaml", "Did you mean 'trainer.max_epochs'?"]),
        (["fit", "--config"], ["--config needs a file"]),
        (["fit", "sub/big.yaml"], ["Give a config with --config sub/big.yaml"]),
        (["fit", "--data.image_size=64"], ["ImageFolder would have it"]),
        (["fit", "--logger", "wandb"], ["--config configs/logger/NAME.yaml", "tensorboard"]),
        (["fit", "--trainer.logger=wandb"], ["--config configs/logger/NAME.yaml"]),
        (["fit", "--callbacks.early_stopping=none"], ["taken away with null"]),
        (["fit", "--model=ResNet18"], ["--model.network=ResNet18"]),
        (["fit", "--model.network=torchvision.models.resnet8"], ["Did you mean 'resnet18'?"]),
        (["fit", "--model.network=resnet50"], ["Did you mean 'torchvision.models.resnet50'?"]),
        (["fit", "--model.optimizer.lr", "--seed_everything=1"], ["--model.optimizer.lr needs a value"]),
        (["fit", "--config=empty.yaml", "--data.num_train=64"], ["empty.yaml: data is empty", "delete the line"]),
        (["fit", "--seed_everything", "1", "page.ckpt"], ["arguments: page.ckpt", "put it in quotes"]),
        (["fit", "--data.num_train", "64", "64"], ["unrecognized arguments: 64", "'[64,64]'"]),
        (["fit", "--config=nope.yaml"], ["nope.yaml", "configs/cifar10.yaml"]),
        (["fit", "--config=broken.yaml"], ["broken.yaml cannot be read as YAML"]),
        (["fit", "--config=typo.yaml"], ["trainer.max_epoch", "Did you mean 'trainer.max_epochs'?"]),
        (["test", "--ckpt_path=nope.ckpt"], ["nope.ckpt", "no such file"]),
        (["test", "--ckpt_path=page.ckpt"], ["page.ckpt", "not a checkpoint"]),
        (["fit", "--data=ImageFolder", "--data.root=nowhere"], ["nowhere"]),
        (["fit", "--trainer.default_root_dir=page.ckpt"], ["page.ckpt", "--trainer.default_root_dir"]),
        (["validate"], ["validate needs a trained model"]),
        (["test"], ["test needs a trained model"]),
        (["predict"], ["predict needs a trained model"]),
        (["fit", "--ckpt_path=last"], ["--ckpt_path last", "Train first"]),
        (["test", "--ckpt_path=best"], ["--ckpt_path best", "Train first"]),
    ],
)
def test_one_message_says_what_and_suggests(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    messages: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.yaml").write_text("a: [1\nb: }")
    (tmp_path / "twice.yaml").write_text("trainer:\n  max_epochs: 1\ndata: Shapes10\ntrainer:\n  devices: 1\n")
    (tmp_path / "word.yaml").write_text("trainer:\n  max_epochs: three\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "wrong.yaml").write_text("model:\n  optimizer:\n    init_args:\n      momentun: 0.8\n")
    (tmp_path / "sub" / "big.yaml").write_text("data:\n  batch_size: big\n")
    (tmp_path / "list.yaml").write_text("callbacks:\n  - class_path: EarlyStopping\n")
    (tmp_path / "number.yaml").write_text("ckpt_path: 5\n")
    (tmp_path / "hollow.yaml").write_text("data:\n  class_path: Shapes10\n  init_args:\n#    num_train: 3\n")
    (tmp_path / "loop.yaml").write_text("trainer: &t {x: *t}\n")
    (tmp_path / "tab.yaml").write_text("trainer:\n\tmax_epochs: 3\n")
    (tmp_path / "latin.yaml").write_bytes("# é\n".encode("latin-1"))
    (tmp_path / "group.yaml").write_text("trainer: {max_epoch: 3}\n")
    (tmp_path / "typo.yaml").write_text("trainer:\n  max_epoch: 3\n")
    (tmp_path / "scalar.yaml").write_text("trainer: 5\n")
    (tmp_path / "empty.yaml").write_text("data:\n#  class_path: CIFAR10\n")
    (tmp_path / "page.ckpt").write_text("<html>not found</html>")
    status, _, errors = in_process(monkeypatch, capfd, *arguments)
    assert status != 0
    for message in messages:
        assert message in errors
    assert "Traceback" not in errors
    assert errors.count("error: ") == 1
    assert not list(tmp_path.glob("runs/*")), "nothing half-done is left"


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (["--model.optimizer.lr=-1"], ["model.optimizer: Invalid learning rate: -1.0"]),
        (["--model.scheduler.warmup=3"], ["model.scheduler: WarmupCosine: warmup is 3.0"]),
        (["--callbacks.best.monitor=val/accc"], ["'val/accc'", "val/acc", "val/loss"]),
        (["--callbacks.early_stopping.monitor=vall/loss"], ["EarlyStopping monitors 'vall/loss'"]),
        (["--data.batch_size=1000"], ["data.batch_size is 1000", "256 training images", "--data.batch_size=64"]),
    ],
)
def test_mistakes_that_only_the_data_shows(
    run_cli: RunCLI, tmp_path: Path, options: list[str], messages: list[str]
) -> None:
    done = run_cli("fit", *TINY, *options, check=False)
    assert done.returncode == 1
    for message in messages:
        assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("runs/*/checkpoints/*"))


def test_a_fault_in_the_code_shows_one_message_and_keeps_the_traceback(run_cli: RunCLI, tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(
        "from torch import nn\n\n\nclass Faulty(nn.Module):\n"
        "    def __init__(self, num_classes: int = 10) -> None:\n        super().__init__()\n"
        "        self.fc = nn.Linear(3, num_classes)\n\n"
        "    def forward(self, x):\n        return undefined_name\n"
    )
    command = ["fit", *TINY, "--model.network=faulty.Faulty"]
    done = run_cli(*command, check=False, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "NameError: name 'undefined_name' is not defined" in done.stderr
    assert "faulty.py:10" in done.stderr
    assert "Traceback" not in done.stderr
    (run,) = runs(tmp_path)
    assert "Traceback" in (run / "error.txt").read_text()
    variables = {"PYTHONPATH": str(tmp_path), "LIT_DEBUG": "1"}
    debugged = run_cli(*command, check=False, **variables)
    assert "Traceback" in debugged.stderr


def test_without_validation_training_works_and_says_what_that_means(run_cli: RunCLI, tmp_path: Path) -> None:
    for options in (
        ["--trainer.limit_val_batches=0"],
        ["--trainer.check_val_every_n_epoch=2", "--trainer.num_sanity_val_steps=0"],
    ):
        done = run_cli("fit", *TINY, *options)
        assert "no validation" in done.stderr
        assert "Last checkpoint: " in done.stdout
    assert all((run / "checkpoints" / "last.ckpt").is_file() for run in runs(tmp_path))


@pytest.mark.parametrize("epochs", ["null", pytest.param("-1", marks=pytest.mark.slow)])
def test_a_run_that_only_time_ends_has_a_constant_learning_rate(run_cli: RunCLI, tmp_path: Path, epochs: str) -> None:
    """Lightning would plan 1000 epochs."""
    done = run_cli("fit", *TINY, f"--trainer.max_epochs={epochs}", "--trainer.max_time=00:00:00:01")
    assert "the learning rate stays constant" in done.stderr
    assert "Stopped as its time is up" in done.stderr
    (run,) = runs(tmp_path)
    assert read_checkpoint(run / "checkpoints" / "last.ckpt")["global_step"] > 0
    assert {float(row["lr-SGD"]) for row in read_csv(run / "csv" / "metrics.csv") if row.get("lr-SGD")} == {0.2}


def test_help_imports_no_optional_package(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom lit_project import cli\nsys.argv = ['cli', '--help']\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('timm', 'tensorboard', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment(tmp_path / "home"), capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize("options", [[], ["--trainer.fast_dev_run=true"]])
def test_no_logger_no_learning_rate_monitor(run_cli: RunCLI, options: list[str]) -> None:
    run_cli("fit", *TINY, "--trainer.logger=false", *options)


@pytest.mark.slow
@pytest.mark.parametrize("logger", [["false"], ["TensorBoardLogger", "--trainer.logger.version=7"]])
def test_a_second_run_without_logger_or_of_the_same_version_leaves_the_first_alone(
    run_cli: RunCLI, tmp_path: Path, logger: list[str]
) -> None:
    """CASES 35."""
    options = [f"--trainer.logger={logger[0]}", *logger[1:]]
    if logger[1:]:
        options.append("--trainer.logger.save_dir=tb")
    run_cli("fit", *TINY, *options)
    (first,) = runs(tmp_path)
    before = {path.name: path.read_bytes() for path in (first / "checkpoints").iterdir()}
    run_cli("fit", *TINY, *options, "--seed_everything=1")
    assert len(runs(tmp_path)) == 2
    assert {path.name: path.read_bytes() for path in (first / "checkpoints").iterdir()} == before
    assert before.keys() == {"best.ckpt", "last.ckpt"}


@pytest.mark.slow
def test_two_processes_train_as_one_run(run_cli: RunCLI, tmp_path: Path) -> None:
    ddp = ["--config=configs/trainer/ddp.yaml", "--trainer.accelerator=cpu", "--trainer.devices=2"]
    run_cli("fit", *TINY, *ddp, "--config=configs/trainer/profile.yaml")
    (run,) = runs(tmp_path)
    assert len(list(run.glob("*profile*"))) == 2, "of both ranks, in the folder of the first"
    checkpoint = read_checkpoint(run / "checkpoints" / "last.ckpt")
    assert checkpoint["global_step"] == 256 // 2 // 64
    run_cli("test", f"--ckpt_path={run}", *ddp)
    run_cli("test", f"--ckpt_path={run}", "--trainer.devices=1")
    two, one = runs(tmp_path, "test-*")
    assert (two / "confusion_matrix.csv").read_text() == (one / "confusion_matrix.csv").read_text()
    assert sum(int(row["images"]) for row in read_csv(two / "per_class.csv")) == 131, "no image twice to even ranks out"
    two_metrics, one_metrics = (read_csv(run / "csv" / "metrics.csv")[0] for run in (two, one))
    for name in ("test/loss", "test/acc", "test/f1", "test/auroc"):
        assert float(two_metrics[name]) == pytest.approx(float(one_metrics[name]), rel=1e-5)


@pytest.mark.slow
def test_one_failing_rank_ends_the_run(run_cli: RunCLI, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(
        "from lightning.pytorch.callbacks import Callback\n\n\nclass FailOnRankOne(Callback):\n"
        "    def on_train_batch_start(self, trainer, *_):\n"
        "        if trainer.global_rank == 1 and trainer.global_step == 1:\n"
        "            raise RuntimeError('rank one')\n"
    )
    done = run_cli(  # which waits so long and no longer: the other rank must not wait for ever
        "fit", *TINY, "--trainer.devices=2", "--trainer.accelerator=cpu", "--trainer.strategy=ddp",
        "--trainer.callbacks+=failing.FailOnRankOne", "--data.batch_size=16", check=False, PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    assert done.returncode != 0
    assert "rank one" in done.stderr
