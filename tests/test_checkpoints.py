import errno
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from conftest import TINY, RunCLI, runs
from helpers import QUIET, TESTS, in_process
from lightning.pytorch.callbacks import ModelCheckpoint
from made_runs import made_run, made_test
from PIL import Image
from torch import Tensor, nn

from lit_project.callbacks import LastCheckpoint
from lit_project.checkpoints import (
    AtomicCheckpointIO,
    SaveError,
    find_checkpoint,
    keep_name_flat,
    match_keys,
    read_checkpoint,
    steps_logged,
)
from lit_project.data import Shapes10
from lit_project.errors import InputError
from lit_project.module import ImageClassifier


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> object:
        return Path.touch, (self.marker,)


# ---- writing


def test_a_failed_write_leaves_the_old_checkpoint_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has room for the file, but not for what fsync would bring to it."""
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"w": torch.zeros(3)}}, path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SaveError, match="No space left"):
        AtomicCheckpointIO().save_checkpoint({"state_dict": {"w": torch.ones(3)}}, path)
    assert torch.equal(read_checkpoint(path)["state_dict"]["w"], torch.zeros(3))
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_new_name_is_on_the_disk_before_the_write_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut may undo a rename whose folder was not flushed, and then rotation has deleted the only copy."""
    flushed: list[tuple[bool, bool]] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        flushed.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), (tmp_path / "a.ckpt").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    AtomicCheckpointIO().save_checkpoint({"w": torch.ones(3)}, tmp_path / "a.ckpt")
    assert flushed == [(False, False), (True, True)], "the file under its temporary name, then the folder"


def test_what_a_killed_process_left_half_written_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".a.ckpt.12345.tmp").write_bytes(bytes(1000))
    (tmp_path / ".b.ckpt.12345.tmp").write_bytes(bytes(1000))
    AtomicCheckpointIO().save_checkpoint({"w": torch.ones(3)}, tmp_path / "a.ckpt")
    assert {path.name for path in tmp_path.iterdir()} == {"a.ckpt", ".b.ckpt.12345.tmp"}


def test_what_could_never_be_read_again_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 29: torch.save takes any object, loading with ``weights_only`` does not."""
    plain = {"state_dict": {"w": torch.ones(3)}, "callbacks": {"Own": {"counts": (1, [None, 2.5, "x"])}}}
    odd = {
        "callbacks": {"Own": {"folders": [Path("a")]}},
        "hyper_parameters": {"thing": Evil(tmp_path / "ran"), "rate": 0.1},
    }
    saver = AtomicCheckpointIO()
    with pytest.raises(InputError) as refused:
        saver.save_checkpoint(plain | odd, tmp_path / "a.ckpt")
    assert "callbacks.Own.folders[0] is a pathlib.PosixPath" in str(refused.value)
    assert "hyper_parameters.thing is a test_checkpoints.Evil" in str(refused.value)
    assert "rate" not in str(refused.value)
    assert not list(tmp_path.iterdir()), "no file, and no code was run"
    saver.save_checkpoint(plain, tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["callbacks"] == plain["callbacks"]

    def load(*args: object, **kwargs: object) -> None:
        raise AssertionError("each save would be read again")

    monkeypatch.setattr(torch, "load", load)
    saver.save_checkpoint(plain, tmp_path / "b.ckpt")


def test_a_sharded_checkpoint_is_named_with_the_way_to_one_file(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").mkdir()
    with pytest.raises(InputError, match=r"sharded checkpoint.*consolidate_checkpoint .*last\.ckpt"):
        read_checkpoint(tmp_path / "last.ckpt")


@pytest.mark.slow
def test_a_path_among_the_hyperparameters_is_kept_as_text_and_an_object_is_refused(
    run_cli: RunCLI, tmp_path: Path
) -> None:
    """CASES 29."""
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n\nfrom lightning.pytorch.callbacks import Callback\n\n"
        "from lit_project.data import Shapes10\n\n\n"
        "class Mine(Shapes10):\n    def __init__(self, folder: Path, **kwargs):\n"
        "        super().__init__(**kwargs)\n        self.folder = folder\n        self.save_hyperparameters()\n\n\n"
        "class Own(Callback):\n    def state_dict(self):\n        return {'folder': Path('x')}\n"
    )
    data = [*TINY, "--data=mine.Mine", "--data.folder=x"]
    run_cli("fit", *data, PYTHONPATH=str(tmp_path))
    (run,) = runs(tmp_path)
    checkpoint = read_checkpoint(run / "checkpoints" / "last.ckpt")
    assert checkpoint["datamodule_hyper_parameters"]["folder"] == str(tmp_path / "x")
    run_cli("test", f"--ckpt_path={run}", PYTHONPATH=str(tmp_path))
    done = run_cli("fit", *data, "--trainer.callbacks+=mine.Own", check=False, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "callbacks.Own.folder is a pathlib.PosixPath" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("{epoch}-{val/acc:.2f}", "epoch=3-val_acc=0.50.ckpt"),
        ("x{val/acc:.1f}-{train/loss}", "xval_acc=0.5-train_loss=2.ckpt"),
        ("{epoch:02d}", "epoch=03.ckpt"),
        ("a/{epoch}", "a/epoch=3.ckpt"),  # the folder was asked for
        (None, "epoch=3-step=9.ckpt"),
    ],
)
def test_a_metric_in_a_checkpoints_name_makes_no_folder(pattern: str | None, name: str) -> None:
    """PL#4468."""
    callback = ModelCheckpoint(filename=pattern)
    keep_name_flat(callback)
    keep_name_flat(callback)
    metrics = {"epoch": 3, "step": 9, "val/acc": 0.5, "train/loss": 2}
    assert callback.format_checkpoint_name(metrics) == name  # type: ignore[arg-type]


# ---- reading


def test_loading_runs_no_code(tmp_path: Path) -> None:
    path, marker = tmp_path / "evil.ckpt", tmp_path / "ran"
    torch.save({"state_dict": {}, "payload": Evil(marker)}, path)
    with pytest.raises(InputError, match=r"evil\.ckpt is not a checkpoint that can be trusted"):
        read_checkpoint(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "content", [b"", b"<html>not found</html>", pickle.dumps([1, 2]), b"PK\x03\x04 cut short", b"seed_everything: 0\n"]
)
def test_what_is_no_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"x\.ckpt"):
        read_checkpoint(path)


def test_half_a_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    torch.save({"state_dict": {"w": torch.ones(10_000)}}, path)
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(InputError, match=r"x\.ckpt cannot be read"):
        read_checkpoint(path)


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_no_command_runs_what_a_checkpoint_brings(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2", "payload": Evil(tmp_path / "ran")}, "evil.ckpt")
    images = ["--images=evil.ckpt"] if command == "predict" else []
    status, _, errors = in_process(monkeypatch, capfd, command, "--ckpt_path=evil.ckpt", *images)
    assert status == 1
    assert "evil.ckpt is not a checkpoint that can be trusted" in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evil.ckpt"]


def test_weights_written_on_a_gpu_are_read_without_one(tmp_path: Path) -> None:
    torch.serialization.register_package(0, lambda storage: "cuda:0", lambda storage, location: None)
    try:
        torch.save({"state_dict": {"w": torch.ones(3)}}, tmp_path / "gpu.ckpt")
    finally:
        torch.serialization._package_registry.pop(0)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA"):
            torch.load(tmp_path / "gpu.ckpt", weights_only=True)
    assert read_checkpoint(tmp_path / "gpu.ckpt")["state_dict"]["w"].device.type == "cpu"


@pytest.mark.parametrize("content", [[1, 2], {}, {"epoch": 3, "model": {"w": torch.ones(2)}}, {"state_dict": {}}])
def test_a_file_without_weights_says_what_it_holds(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "x.pt")
    held = {list: "a list", dict: "epoch, model" if "epoch" in content else "state_dict"}[type(content)]
    with pytest.raises(InputError, match=held):
        read_checkpoint(tmp_path / "x.pt")


# ---- names of weights


class Block(nn.Module):
    def __init__(self, wrap: Any = lambda network: network) -> None:
        super().__init__()
        self.body = wrap(nn.Sequential(nn.Flatten(), nn.Linear(12, 10)))

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images)


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: f"module.{key}",
        lambda key: key.replace("network.", "network._orig_mod."),
        lambda key: "module." + key.replace("body.", "_orig_mod.body.module."),
        lambda key: key.removeprefix("network."),
        lambda key: "_orig_mod.module." + key.removeprefix("network."),
    ],
    ids=["DDP", "compiled", "nested", "network only", "network only, wrapped"],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_wrappers_in_names_do_not_matter_on_either_side(tmp_path: Path, rename: Any, compiled: bool) -> None:
    source = ImageClassifier(Block())
    model = ImageClassifier(Block(torch.compile) if compiled else Block())
    assert ("network.body._orig_mod.1.weight" in model.state_dict()) == compiled
    torch.save({rename(key): value for key, value in source.state_dict().items()}, tmp_path / "weights.pt")
    checkpoint = read_checkpoint(tmp_path / "weights.pt")
    model.on_load_checkpoint(checkpoint)
    model.load_state_dict(checkpoint["state_dict"], strict=True)
    pairs = zip(model.state_dict().values(), source.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_names_that_could_be_two_weights_are_left_alone() -> None:
    own = {"network.module.w", "network.w", "network.v"}
    assert match_keys({"w": 1, "module.v": 2, "v": 3, "network.w": 4}, own) == {
        "w": 1,  # two weights of the model have this name inside wrappers
        "network.v": 2,
        "v": 3,  # taken
        "network.w": 4,
    }


def test_weights_that_are_missing_or_left_over_are_listed(tmp_path: Path) -> None:
    weights = {f"module.{key}": value for key, value in Block().state_dict().items()}
    weights["module.head.weight"] = weights.pop("module.body.1.bias")
    torch.save({"state_dict": weights, "epoch": 3}, tmp_path / "weights.pt")
    with pytest.raises(InputError) as caught:
        ImageClassifier(Block()).on_load_checkpoint(read_checkpoint(tmp_path / "weights.pt"))
    assert "missing here: network.body.1.bias" in str(caught.value)
    assert "not in this model: module.head.weight" in str(caught.value)


# ---- plain files on the command line


@pytest.mark.slow
def test_plain_weights_are_a_start_for_every_command(run_cli: RunCLI, tmp_path: Path) -> None:
    """``fit`` starts at step 0 with them; ``test`` scores them; ``predict`` prepares images as the given data does."""
    linear = [*TINY, "--model.network=helpers.Linear"]
    torch.manual_seed(0)
    network = nn.Linear(3 * 32 * 32, 10)
    weights = {f"layers.1.{key}": value for key, value in network.state_dict().items()}
    torch.save({f"module.{key}": value for key, value in weights.items()}, tmp_path / "bare.pt")
    torch.save({"arch": "linear", "state_dict": weights}, tmp_path / "named.pt")

    frozen = ["--model.optimizer.lr=0", "--model.scheduler=null"]
    done = run_cli("fit", *linear, *frozen, "--ckpt_path=bare.pt", PYTHONPATH=TESTS)
    assert "a new one starts with them at step 0" in done.stderr
    (run,) = runs(tmp_path)
    after = read_checkpoint(run / "checkpoints" / "last.ckpt")
    assert after["global_step"] == 4
    assert torch.equal(after["state_dict"]["network.layers.1.weight"], network.weight)
    mean, std = (torch.tensor(after["preprocessing"][name]).view(-1, 1, 1) for name in ("mean", "std"))

    run_cli("test", *linear, "--ckpt_path=named.pt", "--trainer.precision=32-true", PYTHONPATH=TESTS)
    (run,) = runs(tmp_path, "test-*")
    images, targets, _ = Shapes10(num_test=131).load("test")
    with torch.no_grad():
        found = network(((images.permute(0, 3, 1, 2) / 255 - mean) / std).flatten(1)).argmax(1)
    matrix = torch.zeros(10, 10, dtype=torch.int64).index_put_((targets, found), torch.tensor(1), accumulate=True)
    written = (run / "confusion_matrix.csv").read_text().splitlines()[1:]
    assert [[int(cell) for cell in line.split(",")[1:]] for line in written] == matrix.tolist()

    Image.new("RGB", (32, 32), (200, 10, 10)).save(tmp_path / "red.png")
    options = ["--images=red.png", "--output=red.csv"]
    exact = "--trainer.precision=32-true"
    run_cli("predict", *linear, "--ckpt_path=named.pt", *options, exact, PYTHONPATH=TESTS)
    red = torch.tensor([200, 10, 10]).view(-1, 1, 1).expand(-1, 32, 32)
    with torch.no_grad():
        probability = network(((red / 255 - mean) / std).flatten()).softmax(0).max().item()
    (row,) = (tmp_path / "red.csv").read_text().splitlines()[1:]
    assert float(row.split(",")[2]) == pytest.approx(probability, rel=1e-4)


# ---- finding


def test_best_and_last_are_those_of_the_newest_run_that_has_them(tmp_path: Path) -> None:
    for age, (run, names) in enumerate({"new": ["last"], "old": ["best", "last"], "older": ["best"]}.items()):
        for name in names:
            path = tmp_path / run / "checkpoints" / f"{name}.ckpt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            os.utime(path, (1000 - age, 1000 - age))
    assert find_checkpoint("last", tmp_path, "best") == tmp_path / "new/checkpoints/last.ckpt"
    assert find_checkpoint("best", tmp_path, "last") == tmp_path / "old/checkpoints/best.ckpt"
    assert find_checkpoint(str(tmp_path / "old"), tmp_path, "last") == tmp_path / "old/checkpoints/last.ckpt"
    with pytest.raises(InputError, match=r"no checkpoints/best\.ckpt\. Checkpoints there: last\.ckpt\."):
        find_checkpoint(str(tmp_path / "new"), tmp_path, "best")
    with pytest.raises(InputError, match="Train first"):
        find_checkpoint("best", tmp_path / "new", "best")


def test_best_is_what_the_record_of_the_run_that_started_last_says(tmp_path: Path) -> None:
    """Whatever the name of the file, and although it was copied from another run with the time it had there."""
    old = made_run(tmp_path / "z", start="2026-11-30T10:00:00+00:00")
    new = made_run(
        tmp_path / "a", start="2026-11-30T12:00:00+01:00", best={"path": "checkpoints/epoch=1.ckpt"}
    )  # an hour later, in another time zone
    for number, path in enumerate((new / "checkpoints/epoch=1.ckpt", old / "checkpoints/best.ckpt")):
        path.parent.mkdir()
        path.touch()
        os.utime(path, (1000 + number, 1000 + number))
    made_test(old, best={"path": str(old / "checkpoints/best.ckpt")}, start="2026-11-30T13:00:00+00:00")
    best = new / "checkpoints/epoch=1.ckpt"
    for wanted in ("best", str(new), str(new / "checkpoints")):
        assert find_checkpoint(wanted, tmp_path, "best") == best
    best.rename(best.with_name("best.ckpt"))
    assert find_checkpoint("best", tmp_path, "best") == best.with_name("best.ckpt"), "the record's is not there"


class TwoOptimizers(L.LightningModule):
    """Steps twice a batch, by hand, or once."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.weight * batch.sum()
        for optimizer in self.optimizers():
            optimizer.step()
        return None

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([self.weight], lr=0.1) for _ in range(1 if self.automatic_optimization else 2)]


@pytest.mark.parametrize(("manual", "steps"), [(False, 3), (True, 6)])
def test_loggers_go_on_after_the_batches_not_after_all_optimizers_steps(
    tmp_path: Path, manual: bool, steps: int
) -> None:
    trainer = L.Trainer(**QUIET, max_epochs=1, callbacks=[LastCheckpoint(str(tmp_path / "last.ckpt"))])
    trainer.fit(TwoOptimizers(manual), torch.utils.data.DataLoader(torch.ones(3, 1)))
    checkpoint = read_checkpoint(tmp_path / "last.ckpt")
    assert (checkpoint["global_step"], steps_logged(checkpoint)) == (steps, 3)
