"""Networks, data and a callback that tests hand to the command line by class path, and what makes their files.

A process started with ``PYTHONPATH=TESTS`` finds them as ``helpers.Recorder`` and the like.
"""

import contextlib
import gzip
import hashlib
import io
import pickle
import resource
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
import torchvision
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lit_project import cli as cli_module
from lit_project.data import CIFAR10
from lit_project.data.base import ImageDataModule, SplitName
from lit_project.data.batches import Arrays

if TYPE_CHECKING:
    import pytest

TESTS = str(Path(__file__).parent)
#: For a Trainer within the test's own process: nothing but the training, on the CPU.
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def in_process(
    monkeypatch: "pytest.MonkeyPatch", capfd: "pytest.CaptureFixture[str]", *arguments: object
) -> tuple[int, str, str]:
    """Run a command that ends before anything is trained, without the seconds a new process takes to import torch.

    Returns:
        The exit status, stdout and stderr.
    """
    monkeypatch.setattr(sys, "argv", ["cli", *map(str, arguments)])
    capfd.readouterr()
    try:
        cli_module.main()
    except SystemExit as end:
        return int(end.code or 0), *capfd.readouterr()
    raise AssertionError("the command did not exit")


# ---- networks


class Linear(nn.Module):
    """What a network must beat: a linear map from pixels to logits."""

    def __init__(self, num_classes: int = 10, in_channels: int = 3, image_size: tuple[int, int] = (32, 32)) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size[0] * image_size[1], num_classes))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class Gathering(Linear):
    """Waits for the other processes in each pass of an evaluation, as FSDP does for their parts of the weights."""

    def forward(self, images: Tensor) -> Tensor:
        if torch.distributed.is_initialized() and not torch.is_grad_enabled():
            torch.distributed.all_reduce(torch.zeros(1))
        return super().forward(images)


class NotANumber(Linear):
    """Finite forward, not so backward: the derivative of the root at 0, times 0."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(num_classes)
        self.zero = nn.Parameter(torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + 0 * self.zero.sqrt()


class Hungry(Linear):
    """Asks for more memory than any machine can address, in its second step."""

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        if self.training and self.layers[1].weight.grad is not None:  # and there is optimiser state
            torch.empty(2**58, device=images.device)
        return logits


class Divide(nn.Module):
    """Divides by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("divisor", torch.ones(1))

    def forward(self, values: Tensor) -> Tensor:
        return values / self.divisor


class Fragile(nn.Module):
    """A layer that can be made to fail, before one whose statistics it would spoil."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 32))
        self.divide = Divide()
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, num_classes)
        self.register_buffer("offset", torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.divide(self.stem(images))) + self.offset)


class Unordered(Linear):
    """Uses an operation that has no deterministic implementation on any device."""

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        return logits + torch.zeros(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))[1]


# ---- what a run was fed


class Recorder(Callback):
    """Writes the batches that each rank was given to ``STAGE-RANK.pt`` in the working directory.

    Of a fit these are the batches of the first two epochs, as a list of {kind, epoch, images, targets}; ``kind`` is
    ``train``, ``val``, ``test`` or ``predict``, and the images are as the network gets them. ``mean`` and ``std`` are
    those they were normalised with.
    """

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []

    def _record(self, kind: str, trainer: L.Trainer, batch: Any) -> None:
        if not trainer.sanity_checking and trainer.current_epoch < 2:
            images, targets = batch[:2]
            self.batches.append(
                {"kind": kind, "epoch": trainer.current_epoch, "images": images.clone(), "targets": targets.clone()}
            )

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, *_: Any) -> None:
        self._record("train", trainer, batch)

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, *_: Any) -> None:
        self._record("val", trainer, batch)

    def on_test_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, *_: Any) -> None:
        self._record("test", trainer, batch)

    def on_predict_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, *_: Any) -> None:
        self._record("predict", trainer, batch)

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        preprocessing: Any = getattr(trainer.datamodule, "preprocessing", None)  # type: ignore[attr-defined]
        preprocessing = preprocessing() if callable(preprocessing) else preprocessing
        record = {"batches": self.batches, "mean": preprocessing["mean"], "std": preprocessing["std"]}
        torch.save(record, f"{trainer.state.fn.value}-{trainer.global_rank}.pt")  # type: ignore[union-attr]


# ---- what befalls a run


class Plant(Callback):
    """Sets the first value of a weight or buffer before batch ``step`` of the first epoch."""

    def __init__(self, name: str, value: float, step: int = 2) -> None:
        self.name, self.value, self.step = name, value, step

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.step and trainer.current_epoch == 0:
            pl_module.state_dict()[self.name].view(-1)[0] = self.value


class FullDisk(Callback):
    """From the start of epoch ``first`` to that of epoch ``end`` there is no room.

    Args:
        first: first epoch without room.
        end: first epoch with room again; none by default.
        limit: bytes a file may have meanwhile.
        ballast: a file to fill the disk with instead.
    """

    def __init__(self, first: int, end: int = -1, limit: int = 0, ballast: str = "") -> None:
        self.first, self.end, self.limit, self.ballast = first, end, limit, ballast

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        if trainer.current_epoch == self.first and self.ballast:
            with Path(self.ballast).open("wb", buffering=0) as file:
                for size in (65536, 1):
                    with contextlib.suppress(OSError):
                        while file.write(bytes(size)):
                            pass
        elif trainer.current_epoch == self.first:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, unlimited))
        elif trainer.current_epoch == self.end:
            resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))


@contextlib.contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Within the test's own process, files may have ``limit`` bytes: what is written beyond them is an ``OSError``."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def pixels(record: dict[str, Any], images: Tensor) -> Tensor:
    """Undo the normalisation: uint8 ``[B, C, H, W]``."""
    mean, std = (torch.tensor(record[name]).view(-1, 1, 1) for name in ("mean", "std"))
    return ((images * std + mean) * 255).round().to(torch.uint8)


# ---- data


class Numbered(ImageDataModule):
    """Images of one colour each, which is their number: it survives cropping, and the black border tells the crop.

    Validation images are cut from the training data.
    """

    class_names = ["even", "odd"]
    image_size = (16, 16)
    size = 75

    @property
    def provided_splits(self) -> set[SplitName]:
        return {"train", "test"}

    def load(self, split: SplitName) -> Arrays:
        numbers = torch.arange(self.size)
        colours = torch.stack([100 + numbers, 255 - numbers, torch.full_like(numbers, 128)], dim=1)
        images = colours.to(torch.uint8)[:, None, None, :].expand(-1, *self.image_size, -1).contiguous()
        return Arrays(images, numbers % 2)


def numbers_and_crops(images: Tensor) -> list[tuple[int, tuple[int, int, int, int]]]:
    """Of each uint8 image of ``Numbered``: its number, and the width of the border above, below, left and right."""
    found = []
    for image in images:
        lit = image[1] > 0
        rows, columns = lit.any(1).nonzero().flatten().tolist(), lit.any(0).nonzero().flatten().tolist()
        height, width = lit.shape
        border = (rows[0], height - 1 - rows[-1], columns[0], width - 1 - columns[-1])
        found.append((int(image[0].max()) - 100, border))
    return found


#: Images in each of the five training batches, and in the test batch, of ``small_cifar10``.
CIFAR_PER_BATCH, CIFAR_TEST_SIZE = 60, 30


def small_cifar10() -> tuple[bytes, dict[str, Any]]:
    """The bytes of a small archive with CIFAR-10's layout, and the class attributes that describe it to torchvision.

    The same bytes each time.
    """
    random = np.random.default_rng(0)
    files: dict[str, bytes] = {}
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        size = CIFAR_TEST_SIZE if name == "test_batch" else CIFAR_PER_BATCH
        images = random.integers(0, 256, (size, 3072), dtype=np.uint8)
        files[name] = pickle.dumps({"data": images, "labels": [i % 10 for i in range(size)]})
    files["batches.meta"] = pickle.dumps({"label_names": CIFAR10.class_names})

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{CIFAR10.source.base_folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    archive = gzip.compress(buffer.getvalue(), mtime=0)
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    attributes = {
        "tgz_md5": hashlib.md5(archive).hexdigest(),
        "train_list": [[f"data_batch_{i}", md5[f"data_batch_{i}"]] for i in range(1, 6)],
        "test_list": [["test_batch", md5["test_batch"]]],
        "meta": {"filename": "batches.meta", "key": "label_names", "md5": md5["batches.meta"]},
    }
    return archive, attributes


class SmallCIFAR10(CIFAR10):
    """CIFAR-10 from the small archive, which has to lie in ``data_dir``."""

    source = type("Small", (torchvision.datasets.CIFAR10,), small_cifar10()[1])


class Sleep(Callback):
    """Makes each training step last, and with ``anywhere`` those of validations and tests."""

    def __init__(self, seconds: float, anywhere: bool = False) -> None:
        self.seconds = seconds
        self.anywhere = anywhere

    def on_validation_batch_start(self, *args: Any) -> None:
        if self.anywhere:
            self.on_train_batch_start()

    on_test_batch_start = on_validation_batch_start

    def on_train_batch_start(self, *args: Any) -> None:
        print("sleeping", flush=True)
        for _ in range(int(self.seconds * 10)):  # a signal is only handled between two operations of the interpreter
            time.sleep(0.1)
