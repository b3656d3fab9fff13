import csv
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml

DEFAULTS = yaml.safe_load((Path(__file__).parents[1] / "configs" / "default.yaml").read_text())
#: Drawing takes a second: this leaves it out where it is not what is tested.
NO_PICTURES = [f"--callbacks.{name}=null" for name in ("report",) if name in DEFAULTS["callbacks"]]
#: A run of the embedded data that takes a second.
TINY = [
    *NO_PICTURES,
    "--data.num_train=256",
    "--data.num_val=129",
    "--data.num_test=131",
    "--data.batch_size=64",
    "--trainer.max_epochs=1",
    "--trainer.enable_model_summary=false",
    "--trainer.log_every_n_steps=2",
]

Completed = subprocess.CompletedProcess[str]
RunCLI = Callable[..., Completed]


def pytest_configure() -> None:
    # two test processes on two cores; without this each would start as many threads as there are cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


def environment(home: Path, **extra: str) -> dict[str, str]:
    """The environment of a newcomer: an empty home folder, no settings of this machine's user."""
    settings = ("LIT_", "WANDB_", "PL_", "SLURM_", "XDG_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    home.mkdir(exist_ok=True)
    return kept | {"HOME": str(home), "COLUMNS": "120"} | extra


def cli(cwd: Path, *arguments: object, check: bool = True, timeout: float = 300, **env: str) -> Completed:
    """Run the real command line in ``cwd``; with ``check`` it has to succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "lit_project.cli", *map(str, arguments)],
        cwd=cwd,
        env=environment(cwd / "home", **env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if check:
        assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done


def start(cwd: Path, *arguments: str, group: int | None = None, **env: str) -> subprocess.Popen[str]:
    """Start Python with ``arguments`` beside the test; stdout and stderr come together. Group 0 is one of its own."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(cwd / "home", **env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=group,
    )


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def logged(run: Path, name: str) -> list[float]:
    """All values of a metric in a run's ``metrics.csv``."""
    return [float(row[name]) for row in read_csv(run / "csv" / "metrics.csv") if row.get(name)]


def runs(folder: Path, pattern: str = "*") -> list[Path]:
    """The run folders below ``folder``, oldest first."""
    return sorted((folder / "runs").glob(pattern), key=lambda path: path.stat().st_mtime)


@pytest.fixture(autouse=True, scope="session")
def image_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is decoded in the test's own process does not go to the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def run_cli(tmp_path: Path) -> RunCLI:
    """Runs the command line in this test's own folder."""

    def run(*arguments: object, **options: object) -> Completed:
        return cli(tmp_path, *arguments, **options)  # type: ignore[arg-type]

    return run


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a tiny finished training (read only: tests share it)."""
    folder = tmp_path_factory.mktemp("tiny")
    cli(folder, "fit", *TINY, "--trainer.max_epochs=2")
    return runs(folder)[0]
