"""That it learns: what the README promises of a first run, and what a network that is too simple does not reach."""

import re
from pathlib import Path

import pytest
from conftest import cli, environment, logged, runs
from helpers import TESTS

from lit_project.checkpoints import read_checkpoint


@pytest.mark.slow
def test_the_small_network_learns_160_images_by_heart(tmp_path: Path) -> None:
    options = ["--data.num_train=160", "--data.num_val=10", "--data.batch_size=32", "--data.augment=[]"]
    options += ["--trainer.max_epochs=20", "--model.network.dropout=0", "--callbacks.early_stopping=null"]
    cli(tmp_path, "fit", *options, "--trainer.log_every_n_steps=5")
    (run,) = runs(tmp_path)
    accuracy = logged(run, "train/acc")
    assert accuracy[0] < 0.5
    assert accuracy[-1] == 1.0
    assert logged(run, "train/loss")[-1] < 0.05


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a bare ``fit``, from an empty folder and with an empty home."""
    folder = tmp_path_factory.mktemp("first")
    assert list(folder.iterdir()) == []
    assert list(Path(environment(folder / "home")["HOME"]).iterdir()) == []
    return folder, cli(folder, "fit").stdout


@pytest.mark.slow
def test_a_first_run_learns_the_shapes_and_says_how_to_go_on(first_run: tuple[Path, str]) -> None:
    folder, output = first_run
    (run,) = runs(folder)
    best, where, following, *commands = output.rstrip().splitlines()[-6:]
    path = f"runs/{run.name}/checkpoints/best.ckpt"
    found = re.fullmatch(rf"Best checkpoint: {re.escape(path)} \(val/acc (0\.\d{{4}}|1\.0000)\)", best)
    assert found, best
    accuracies = logged(run, "val/acc")
    assert float(found[1]) == pytest.approx(max(accuracies), abs=1e-4)
    assert max(accuracies) >= 0.95
    assert read_checkpoint(folder / path)["epoch"] == accuracies.index(max(accuracies))
    assert (where, following) == (f"Run folder: runs/{run.name}", "Next:")
    assert all("-m lit_project.cli" in command for command in commands)
    assert f"test --ckpt_path {path}" in commands[0]
    assert ["cifar10.yaml" in command or "image_folder.yaml" in command for command in commands] == [False, True, True]

    cli(folder, "test", "--ckpt_path=best")
    assert logged(runs(folder, "test-*")[0], "test/acc")[0] >= 0.95


@pytest.mark.slow
def test_a_linear_map_does_not_solve_the_shapes(tmp_path: Path) -> None:
    """As long a training as the default: the data asks for a convolutional network."""
    cli(tmp_path, "fit", "--model.network=helpers.Linear", "--model.optimizer.lr=0.02", PYTHONPATH=TESTS)
    losses = logged(runs(tmp_path)[0], "train/loss")
    assert losses[-1] < losses[0], "it does learn what it can"
    cli(tmp_path, "test", "--ckpt_path=best", PYTHONPATH=TESTS)
    (accuracy,) = logged(runs(tmp_path, "test-*")[0], "test/acc")
    assert accuracy < 0.6
