"""Every notebook runs from its first cell to its last, and is kept without what it showed."""

import shutil
from pathlib import Path

import nbformat
import pytest
from conftest import environment, read_csv, runs
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
SMALL = "--trainer.max_epochs=1 --trainer.limit_train_batches=4 --trainer.enable_model_summary=false"
SHAPES = "--data.num_train=256 --data.num_val=20 --data.num_test=50"


def execute(name: str, folder: Path, options: str = "") -> str:
    """Run a notebook in ``folder``; what it printed."""
    notebook = nbformat.read(FOLDER / name, as_version=4)
    variables = environment(folder / "home", NOTEBOOK_OPTIONS=options, MPLBACKEND="agg")
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute(env=variables)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_is_kept_valid_and_without_outputs(name: str) -> None:
    notebook = nbformat.read(FOLDER / name, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in code] == [([], None)] * len(code)
    assert len(notebook.cells) < 20


@pytest.mark.slow
def test_first_run(tmp_path: Path) -> None:
    output = execute("01_first_run.ipynb", tmp_path, f"{SMALL} {SHAPES}")
    assert "Best checkpoint: runs/fit-" in output
    assert output.count("precision") >= 10  # one a class
    assert (runs(tmp_path, "test-*")[0] / "per_class.csv").is_file()


@pytest.mark.slow
def test_own_images(tmp_path: Path) -> None:
    execute("02_own_images.ipynb", tmp_path, SMALL)
    assert len(runs(tmp_path, "test-*")) == 1
    predictions = read_csv(tmp_path / "predictions.csv")
    assert len(predictions) == 30
    assert {row["error"] for row in predictions} == {""}


def test_inspect_a_run(tmp_path: Path, tiny_run: Path) -> None:
    shutil.copytree(tiny_run, tmp_path / "runs" / tiny_run.name)
    output = execute("03_inspect_a_run.ipynb", tmp_path)
    assert "ended: finished" in output
    assert "SimpleCNN with 2122378 parameters" in output
    assert "\n1  train/loss " in output
    assert "accuracy of these 64 images: " in output
