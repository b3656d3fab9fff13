import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lit_project.checkpoints import AtomicCheckpointIO, find_checkpoint, read_checkpoint
from lit_project.errors import InputError


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> object:
        return Path.touch, (self.marker,)


def test_a_failed_write_leaves_the_old_checkpoint_and_no_litter(tmp_path: Path) -> None:
    """The disk is full half-way: a file size limit makes the kernel refuse the write."""
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"w": torch.zeros(3)}, "pytorch-lightning_version": "2"}, path)
    script = (
        "import sys, torch; from lit_project.checkpoints import AtomicCheckpointIO as IO\n"
        "IO().save_checkpoint({'state_dict': {'w': torch.ones(1_000_000)}}, sys.argv[1])"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    import signal

    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        preexec_fn=lambda: (signal.signal(signal.SIGXFSZ, signal.SIG_IGN), limit()),  # type: ignore[func-returns-value]
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0, done.stdout
    assert torch.equal(read_checkpoint(path)["state_dict"]["w"], torch.zeros(3))
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_loading_runs_no_code(tmp_path: Path) -> None:
    path, marker = tmp_path / "evil.ckpt", tmp_path / "ran"
    torch.save({"state_dict": {}, "payload": Evil(marker)}, path)
    with pytest.raises(InputError, match=r"evil\.ckpt is not a checkpoint that can be trusted"):
        read_checkpoint(path)
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", pickle.dumps([1, 2]), b"PK\x03\x04 cut short"])
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


def test_weights_without_a_checkpoint_around_them_are_explained(tmp_path: Path) -> None:
    for content, missing in (({"fc.weight": torch.ones(2)}, "state_dict"), ({"state_dict": {}}, "lightning_version")):
        torch.save(content, tmp_path / "x.ckpt")
        with pytest.raises(InputError, match=missing):
            read_checkpoint(tmp_path / "x.ckpt")


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
    with pytest.raises(InputError, match=r"no checkpoints/best\.ckpt"):
        find_checkpoint(str(tmp_path / "new"), tmp_path, "best")
    with pytest.raises(InputError, match="Train first"):
        find_checkpoint("best", tmp_path / "new", "best")
