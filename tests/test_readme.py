"""Every command of the README does what it says, as it stands there."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from conftest import cli, runs
from PIL import Image

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROGRAM = "python -m lit_project.cli "
COMMANDS = [
    line.split("#")[0].removeprefix(PROGRAM).strip() for line in README.splitlines() if line.startswith(PROGRAM)
]
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
    elif arguments[0] == "predict":
        cli(workplace, *arguments)
        assert len((workplace / "predictions.csv").read_text().splitlines()) == 201
    else:
        cli(workplace, *arguments)
        assert (runs(workplace, f"{arguments[0]}-*")[-1] / "csv" / "metrics.csv").is_file()


def test_files_it_names_exist() -> None:
    named = re.findall(r"`((?:configs|lit_project|scripts|\.ci)/[\w./]+)`", README)
    assert len(named) > 8
    for path in named:
        assert (ROOT / path).exists(), path
    table = re.findall(r"`(trainer|logger)/([\w`, ]+)` \|", README)
    fragments = {f"{folder}/{name}" for folder, names in table for name in re.findall(r"\w+", names)}
    assert fragments == {str(path.relative_to(ROOT / "configs"))[:-5] for path in (ROOT / "configs").glob("*/*.yaml")}
