"""Every command and every block of code in docs/ is run, as it stands there, in a folder as its reader has it."""

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import environment, logged, read_csv, runs
from PIL import Image

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
COMMAND = "python -m lit_project.cli "
#: Runs what it reads from stdin: a command line as a list, code as a string. One process imports torch once for all.
RUNNER = """
import json, sys
from lit_project import cli
for step in json.load(sys.stdin):
    print("===", step, flush=True)
    if isinstance(step, str):
        exec(step, {})
        continue
    sys.argv = ["cli", *step]
    try:
        cli.main()
    except SystemExit as end:
        if end.code:
            sys.exit(end.code)
"""
#: Small enough for a test, whatever is trained.
SHORT = ["--trainer.limit_train_batches=1", "--trainer.limit_val_batches=1", "--trainer.enable_model_summary=false"]
SHORT += ["--trainer.max_epochs=1"]
FEW = ["--data.num_train=256", "--data.num_val=20", "--data.num_test=20"]


def blocks(page: str) -> Iterator[tuple[str, str | None, str]]:
    """Of each block of code: its language, the file that its first line names, if any, and its text."""
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", PAGES[page], flags=re.MULTILINE | re.DOTALL):
        named = re.match(r"# (\w+\.\w+)\n", text)
        yield language, named and named[1], text


def commands(text: str) -> list[list[str]]:
    lines = text.splitlines()
    assert all(line.startswith(COMMAND) for line in lines), text
    return [shlex.split(line.removeprefix(COMMAND)) for line in lines]


def shortened(arguments: list[str]) -> list[str]:
    if arguments[0] != "fit" or {"--print_config", "--model.help"} & {*arguments}:
        return arguments
    if "configs/trainer/overfit.yaml" in arguments:  # it says how many batches
        return [*arguments, *FEW, *SHORT[2:]]
    config_of_data = any(part in " ".join(arguments) for part in ("image_folder", "my_regression", "--data "))
    return [*arguments, *([] if config_of_data else FEW), *SHORT]


def run_page(page: str, folder: Path, short: bool) -> str:
    """Write the page's files to ``folder`` and do what it says; the output."""
    steps: list[str | list[str]] = []
    for language, name, text in blocks(page):
        if name:
            (folder / name).write_text(text, encoding="utf-8")
            if name.endswith(".py"):
                steps.append(f"import {name[:-3]}")
        elif language == "python":
            steps.append(text)
        elif language == "bash":
            steps += [shortened(command) if short else command for command in commands(text)]
    assert steps
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        cwd=folder,
        env=environment(folder / "home"),
        input=json.dumps(steps),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.stdout.count("=== ") == len(steps)
    return done.stdout


@pytest.fixture
def workplace(tmp_path: Path, tiny_run: Path) -> Path:
    """The folders and files that the pages speak of."""
    random = np.random.default_rng(0)
    for name, colour in (("cats", 60), ("dogs", 180)):
        for split, count in (("train", 40), ("val", 4)):
            folder = tmp_path / "FOLDER" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(colour - 30, colour + 30, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    shutil.copytree(tmp_path / "FOLDER" / "val" / "cats", tmp_path / "IMAGES")
    shutil.copytree(tiny_run, tmp_path / "RUN_FOLDER")
    arrays = {"images": random.integers(0, 256, (300, 16, 24, 3), dtype=np.uint8), "targets": np.arange(300) % 2}
    np.savez(tmp_path / "images.npz", **arrays)
    return tmp_path


def fits(folder: Path) -> list[Path]:
    return runs(folder, "fit-*")


def config(run: Path) -> str:
    return (run / "config.yaml").read_text()


# ---- one test a page that has code


def test_own_data(workplace: Path) -> None:
    run_page("own_data", workplace, short=True)
    predictions = read_csv(workplace / "predictions.csv")
    assert [row["error"] for row in predictions] == [""] * 4
    assert {row["class"] for row in predictions} <= {"cats", "dogs"}
    folders, arrays = fits(workplace)
    assert "image_size: 64" in config(folders)
    assert "my_data.ArrayFile" in config(arrays)
    (last,) = runs(workplace, "predict-*")[1:]
    assert {row["class"] for row in read_csv(last / "predictions.csv")} <= {"left", "right"}


def test_own_loss_and_metric(workplace: Path) -> None:
    run_page("own_loss_and_metric", workplace, short=True)
    (run,) = fits(workplace)
    assert logged(run, "val/top2")[0] >= logged(run, "val/acc")[0]
    assert logged(run, "train/top2")
    assert json.loads((run / "run.json").read_text())["best"]["monitor"] == "val/top2"
    assert logged(runs(workplace, "test-*")[0], "test/top2")


def test_another_task(workplace: Path) -> None:
    run_page("another_task", workplace, short=True)
    labels, regression = fits(workplace)
    assert 0 <= logged(labels, "val/f1")[0] <= 1
    for row in read_csv(workplace / "labels.csv"):
        probabilities = dict(json.loads(row["top5"]))
        assert probabilities.keys() == {"red", "green", "blue"}
    assert logged(regression, "val/mse")
    assert (regression / "checkpoints" / "best.ckpt").is_file()
    assert logged(runs(workplace, "test-*")[1], "test/mse")


@pytest.mark.slow
def test_another_task_is_learnt(workplace: Path) -> None:
    """As it stands on the page, to the end."""
    run_page("another_task", workplace, short=False)
    labels, regression = fits(workplace)
    assert max(logged(labels, "val/acc")) > 0.9
    assert min(logged(regression, "val/mse")) < 1  # the variance of the values is 8


def test_from_pytorch(workplace: Path) -> None:
    output = run_page("from_pytorch", workplace, short=True)
    assert len(re.findall(r"^epoch \d: [01]\.\d{3}$", output, flags=re.MULTILINE)) == 5
    assert "OneCycleLR" in config(fits(workplace)[0])
    assert "test/acc" in output
    letters = re.findall(r"^ *# ([A-G]):", PAGES["from_pytorch"], flags=re.MULTILINE)
    assert letters == list("ABCDEFG")
    assert set(re.findall(r"^\| \*\*(\w)\*\*", PAGES["from_pytorch"], flags=re.MULTILINE)) == {*letters}


@pytest.mark.slow
def test_own_network(workplace: Path) -> None:
    pytest.importorskip("timm")
    run_page("own_network", workplace, short=True)
    own, torchvision, timm, overfit, _ = map(config, fits(workplace))
    assert "width: 32" in own
    assert "torchvision.models.resnet18" in torchvision
    assert "timm_model" in timm
    assert "overfit_batches: 4" in overfit


@pytest.mark.slow
def test_configs(workplace: Path) -> None:
    output = run_page("configs", workplace, short=True)
    assert "batch_size: 64" in output  # of --print_config
    assert "--model.label_smoothing" in output  # of --model.help
    without = [run for run in fits(workplace) if not (run / "tensorboard").exists()]
    assert len(without) == 1


# ---- what the pages say besides


def test_every_page_with_code_is_run() -> None:
    with_code = {page for page in PAGES if any(language in ("python", "bash") for language, *_ in blocks(page))}
    assert with_code == {name.removeprefix("test_") for name in globals() if name.removeprefix("test_") in PAGES}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {page for page in PAGES if f"docs/{page}.md" not in readme} == set(), "the README leads to every page"


@pytest.mark.parametrize("page", PAGES)
def test_what_it_names_exists(page: str) -> None:
    folders = ("configs", "lit_project", "scripts", "tests", "docs", r"\.ci")
    for path in re.findall(rf"`((?:{'|'.join(folders)})/[\w./]*)`", PAGES[page]):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", PAGES[page]):
        assert (DOCS / link).exists(), link


def test_the_page_of_files_names_every_file() -> None:
    page = PAGES["files"]
    folders = re.findall(r"`(\w+/(?:\w+/)*)` \|", page)  # named as a whole
    for path in sorted((ROOT / "lit_project").rglob("*.py")):
        relative = path.relative_to(ROOT).as_posix()
        if path.name != "__init__.py" and not relative.startswith(tuple(folders)):
            assert re.search(rf"`(?:[\w/]+/)?{re.escape(path.name)}`", page), f"docs/files.md lacks {relative}"


def test_keys_of_configs_in_the_comparison_exist() -> None:
    """The last column of the comparison with the loop names options there are."""
    rows = [row for row in csv.reader(PAGES["from_pytorch"].splitlines(), delimiter="|") if len(row) == 5]
    keys = [key for row in rows for key in re.findall(r"`([\w.]+)`", row[3])]
    assert len(keys) > 12
    source = "".join(
        (ROOT / path).read_text()
        for path in (
            "lit_project/module.py",
            "lit_project/data/base.py",
            "lit_project/data/image_folder.py",
        )
    )
    default = (ROOT / "configs" / "default.yaml").read_text()
    for key in keys:
        group, _, name = key.partition(".")
        assert group in ("data", "model", "trainer", "callbacks", "loggers"), key
        assert group == "trainer" or not name or f"{name}:" in source + default, key
