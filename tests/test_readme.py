"""Every command of the README does what it says, as it stands there."""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import cli, read_csv, runs
from PIL import Image

from lit_project import commands

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROGRAM = "python -m lit_project.cli "


def commands_in(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith(PROGRAM)]
    return [line.split("#")[0].removeprefix(PROGRAM).strip() for line in lines]


#: From a folder of images to predictions; run in this order, and to the end.
OWN_IMAGES = commands_in(README.split("## Make it yours")[1].split("## ")[0])
COMMANDS = [command for command in commands_in(README) if command not in OWN_IMAGES]
#: Small enough for a test, whatever the command trains.
SHORT = ["--trainer.limit_train_batches=1", "--trainer.limit_val_batches=1", "--trainer.enable_model_summary=false"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, tiny_run: Path) -> Path:
    """A folder as the README's reader has it: images to learn from, images to predict, a finished run."""
    folder = tmp_path_factory.mktemp("readme")
    for name, colour in (("cats", (200, 10, 10)), ("dogs", (10, 10, 200))):
        (folder / "FOLDER" / "train" / name).mkdir(parents=True)
        for number in range(200):
            Image.new("RGB", (32, 32), colour).save(folder / "FOLDER" / "train" / name / f"{number}.png")
    shutil.copytree(folder / "FOLDER" / "train" / "cats", folder / "IMAGES")
    shutil.copytree(tiny_run, folder / "RUN_FOLDER")
    return folder


def test_the_readme_has_the_two_commands_that_set_it_up() -> None:
    lines = [line for line in README.splitlines() if line.startswith("python3 -m venv")]
    assert [line.rsplit("&&", 1)[1].strip() for line in lines] == [
        ".venv/bin/python -m lit_project.cli fit",
        ".venv/bin/python -m pytest",
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_command(workplace: Path, tiny_run: Path, command: str) -> None:
    arguments = shlex.split(command)
    shutil.copytree(tiny_run, workplace / "runs" / tiny_run.name, dirs_exist_ok=True)
    if "configs/cifar10.yaml" in arguments:  # needs a download, and the GPU config a GPU: as far as one can go here
        printed = cli(workplace, *arguments, "--print_config").stdout
        assert "class_path: lit_project.data.CIFAR10" in printed
    elif arguments[0] == "fit":
        # a run cannot go on with fewer batches than it had; the finished run is short as it is
        short = SHORT if not {"--print_config", "--ckpt_path"} & {*arguments} else []
        epochs = 4 if "--ckpt_path" in arguments else 3
        done = cli(workplace, *arguments, *short, f"--trainer.max_epochs={epochs}")
        assert "Run folder: runs/fit-" in done.stdout or "--print_config" in arguments
    elif arguments[0] == "compare":
        assert "RUN_FOLDER" in cli(workplace, *arguments).stdout
    elif arguments[0] in commands.names():  # hours of training: what it does has tests of its own, which take less
        usage = f"{PROGRAM}{arguments[0]} "
        assert usage in cli(workplace, *arguments, "--help").stdout
    else:
        cli(workplace, *arguments)
        assert (runs(workplace, f"{arguments[0]}-*")[-1] / "csv" / "metrics.csv").is_file()


@pytest.mark.slow
def test_own_images_from_the_folder_to_predictions(tmp_path: Path) -> None:
    """Ten images a class, of different sizes, and nothing else: with the clone and the installation, five commands."""
    assert [command.split()[0] for command in OWN_IMAGES] == ["fit", "test", "predict"]
    random = np.random.default_rng(0)
    colours = {"berry": (170, 40, 80), "leaf": (60, 150, 40), "sky": (60, 120, 210)}
    for name, colour in colours.items():
        for number in range(12):
            folder = tmp_path / "FOLDER" / name if number < 10 else tmp_path / "IMAGES"
            folder.mkdir(parents=True, exist_ok=True)
            noise = random.normal(0, 30, (60 + number, 90 - number, 3))
            pixels = (np.array(colour) + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{name}-{number}.jpg")
    fit, test, _ = (cli(tmp_path, *shlex.split(command)) for command in OWN_IMAGES)
    assert "predict --ckpt_path runs/fit-" in fit.stdout
    assert "Test, by class" in test.stdout
    predictions = read_csv(tmp_path / "predictions.csv")
    assert len(predictions) == 6
    right = [Path(row["path"]).name.startswith(row["class"]) for row in predictions]
    assert sum(right) >= 5, "colours are told apart even after few steps"
    assert "Traceback" not in fit.stderr
    assert "Warning" not in fit.stderr


def test_files_it_names_exist() -> None:
    named = re.findall(r"`((?:configs|lit_project|scripts|\.ci)/[\w./]+)`", README)
    assert len(named) > 8
    for path in named:
        assert (ROOT / path).exists(), path
    table = re.findall(r"`(trainer|logger)/([\w`, ]+)` \|", README)
    fragments = {f"{folder}/{name}" for folder, names in table for name in re.findall(r"\w+", names)}
    files = [path for folder in ("trainer", "logger") for path in (ROOT / "configs" / folder).glob("*.yaml")]
    assert fragments == {str(path.relative_to(ROOT / "configs"))[:-5] for path in files}
