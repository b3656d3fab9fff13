"""Every file in ``configs/`` is read, runs, and does what its first line says."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import NO_PICTURES, TINY, RunCLI, logged, runs, start
from helpers import CIFAR_PER_BATCH, TESTS, in_process, small_cifar10
from PIL import Image

from lit_project.checkpoints import read_checkpoint
from lit_project.cli import CONFIGS
from lit_project.data import CIFAR10

PARTS = yaml.safe_load((CONFIGS / "default.yaml").read_text()).keys()
#: Those of ``fit``; a command may have files of its own kind.
FILES = sorted(
    path.relative_to(CONFIGS).as_posix()
    for path in CONFIGS.rglob("*.yaml")
    if yaml.safe_load(path.read_text()).keys() & PARTS
)
#: Have a test of what they do below, and run there.
OWN_TEST = {f"trainer/{name}.yaml" for name in ("debug", "deterministic", "multi_node", "overfit", "profile")}
SHORT = [*NO_PICTURES, "--trainer.max_epochs=1", "--trainer.enable_model_summary=false"]
HARDWARE = {"gpu": torch.accelerator.is_available(), "cuda": torch.cuda.is_available()}
HARDWARE |= {"mps": torch.backends.mps.is_available()}


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / name).read_text())


def accelerator(name: str) -> str:
    return str(read(name).get("trainer", {}).get("accelerator", "auto"))


def last(run: Path) -> dict[str, Any]:
    return read_checkpoint(run / "checkpoints" / "last.ckpt")


def missing(wanted: Any, got: Any, key: str = "") -> list[str]:
    """The keys of ``wanted`` whose value is another in ``got``."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        return [line for name in wanted for line in missing(wanted[name], got.get(name, "-"), f"{key}.{name}")]
    return [] if wanted == got else [f"{key}: {got} instead of {wanted}"]


@pytest.mark.parametrize("name", FILES)
def test_every_value_arrives(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--data.root=images"] if name == "image_folder.yaml" else []
    status, printed, errors = in_process(
        monkeypatch, capfd, "fit", f"--config=configs/{name}", *options, "--print_config"
    )
    assert status == 0, errors
    assert missing(read(name), yaml.safe_load(printed)) == []
    assert "Warning" not in errors


# ---- every file runs


def cifar_options(folder: Path) -> list[str]:
    (folder / CIFAR10.source.filename).write_bytes(small_cifar10()[0])
    return [*SHORT, "--data=helpers.SmallCIFAR10", f"--data.data_dir={folder}", "--data.batch_size=64"]


def image_folder_options(folder: Path) -> list[str]:
    for number in range(60):
        path = folder / "images" / f"class {number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 8), (number, 0, 200 * (number % 2))).save(path)
    return [*SHORT, f"--data.root={folder / 'images'}", "--data.batch_size=16"]


def resnet_options(folder: Path) -> list[str]:
    return [*cifar_options(folder), "--model.network.width=4"]


DATA_OPTIONS: dict[str, Callable[[Path], list[str]]] = {
    "cifar10.yaml": cifar_options,
    "cifar10_fast.yaml": cifar_options,
    "cifar10_resnet18.yaml": resnet_options,
    "image_folder.yaml": image_folder_options,
}
TWO_PROCESSES = ["--trainer.accelerator=cpu", "--trainer.devices=2"]
STEPS = {
    "cifar10.yaml": 5 * CIFAR_PER_BATCH * 9 // 10 // 64,
    "cifar10_fast.yaml": 5 * CIFAR_PER_BATCH * 98 // 100 // 64,
    "cifar10_resnet18.yaml": 5 * CIFAR_PER_BATCH * 98 // 100 // 64,
    "image_folder.yaml": 3,
    "trainer/ddp.yaml": 256 // 2 // 64,
}


def log_folders(name: str) -> set[str]:
    """Every logger's folder has the logger's name."""
    loggers = {"csv": True, "tensorboard": True} | read(name).get("loggers", {})
    return {logger for logger, config in loggers.items() if config}


@pytest.mark.parametrize("name", [name for name in FILES if name not in OWN_TEST])
def test_runs(run_cli: RunCLI, tmp_path: Path, name: str) -> None:
    options = DATA_OPTIONS[name](tmp_path) if name in DATA_OPTIONS else TINY
    options = [*options, *(TWO_PROCESSES if name == "trainer/ddp.yaml" else [])]
    done = run_cli("fit", f"--config=configs/{name}", *options, check=False, PYTHONPATH=TESTS)
    assert "Traceback" not in done.stderr
    if not HARDWARE.get(accelerator(name), True):
        assert done.returncode == 1
        (message,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
        assert accelerator(name) in message.lower()
        assert runs(tmp_path) == []
        return
    assert done.returncode == 0, done.stderr
    (run,) = runs(tmp_path)
    # what a training of the whole data takes, so that the options above have not been for other data
    assert last(run)["global_step"] == STEPS.get(name, 256 // 64)
    names = {path.name for path in run.iterdir()} - {"diff.patch"}  # there is one where the project was changed
    assert names == {"config.yaml", "run.json", ".lock", "checkpoints"} | log_folders(name)


# ---- what they say


def test_debug_runs_five_batches_and_names_the_operation_behind_a_nan(run_cli: RunCLI, tmp_path: Path) -> None:
    debug = ["--config=configs/trainer/debug.yaml", "--data.batch_size=16", "--data.num_train=160"]
    run_cli("fit", *debug)
    (run,) = runs(tmp_path)
    assert last(run)["global_step"] == 5
    assert len(logged(run, "train/loss_step")) == 5
    done = run_cli("fit", *debug, "--model.network=helpers.NotANumber", check=False, PYTHONPATH=TESTS)
    assert done.returncode == 1
    assert "SqrtBackward0" in done.stderr
    assert "Traceback" not in done.stderr.split("error: ")[1]


def test_profile_leaves_a_table_by_hook_in_the_run_folder(run_cli: RunCLI, tmp_path: Path) -> None:
    tiny = ["--data.num_train=1010", "--data.num_val=110", "--data.batch_size=10", "--trainer.max_epochs=1"]
    run_cli("fit", "--config=configs/trainer/profile.yaml", *tiny)
    (run,) = runs(tmp_path)
    (profile,) = run.glob("*profile*")
    (row,) = (line for line in profile.read_text().splitlines() if "run_training_batch" in line)
    assert "100" in [cell.strip() for cell in row.split("|")]
    assert {path.name for path in tmp_path.iterdir()} == {"home", "runs"}, "and nowhere else"


@pytest.mark.slow
def test_deterministic_gives_the_same_bits_and_names_what_cannot(run_cli: RunCLI, tmp_path: Path) -> None:
    deterministic = ["fit", *TINY, "--config=configs/trainer/deterministic.yaml"]
    weights = []
    for seed in (0, 0, 1):
        run_cli(*deterministic, f"--seed_everything={seed}")
        weights.append(last(runs(tmp_path)[-1])["state_dict"])
    first, second, other = weights
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if name.endswith("weight"))
    done = run_cli(*deterministic, "--model.network=helpers.Unordered", check=False, PYTHONPATH=TESTS)
    assert done.returncode == 1
    assert "put_ does not have a deterministic implementation" in done.stderr.replace("\n", " ")


def test_overfit_validates_on_the_very_batches_it_trains_on_and_learns_them(run_cli: RunCLI, tmp_path: Path) -> None:
    """PL#15021: with Lightning's option alone, validation uses batches of its own data."""
    run_cli(
        "fit",
        *TINY,
        "--config=configs/trainer/overfit.yaml",
        "--data.batch_size=16",
        "--trainer.max_epochs=25",
        "--trainer.callbacks+=helpers.Recorder",
        PYTHONPATH=TESTS,
    )
    batches = torch.load(tmp_path / "fit-0.pt")["batches"]
    seen = [
        torch.cat([batch["images"] for batch in batches if (batch["kind"], batch["epoch"]) == which])
        for which in (("train", 0), ("val", 0), ("train", 1), ("val", 1))
    ]
    assert len(seen[0]) == 4 * 16
    assert all(torch.equal(seen[0], images) for images in seen), "no shuffling, no augmentation"
    (run,) = runs(tmp_path)
    train, val = (logged(run, f"{stage}/acc") for stage in ("train", "val"))
    assert len(train) == len(val) == 25
    assert train[-1] >= 0.95
    assert val[-1] == 1.0


@pytest.mark.slow
def test_two_nodes_make_one_run(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}"]
    program = [
        "-m",
        "lit_project.cli",
        "fit",
        "--config=configs/trainer/multi_node.yaml",
        *TINY,
    ]
    cpu = ["--trainer.accelerator=cpu", "--trainer.devices=1"]
    nodes = [
        start(tmp_path, "-m", "torch.distributed.run", *torchrun, "--local_addr=127.0.0.1", *program, *cpu)
        for _ in range(2)
    ]
    try:
        outputs = [node.communicate(timeout=300)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    (run,) = runs(tmp_path)
    assert last(run)["global_step"] == 256 // 2 // 64, "each node had half of the data"
    assert sum("Best checkpoint: " in output for output in outputs) == 1, "one of them reports"
