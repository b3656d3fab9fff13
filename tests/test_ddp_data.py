"""Which images each of two processes is given, by what its network gets in the training step."""

import contextlib
import socket
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from conftest import cli, logged, runs
from helpers import QUIET, TESTS, Gathering, Numbered, numbers_and_crops, pixels

from lit_project.module import ImageClassifier

# of 17 validation images one rank gets 9, which must not be two batches: the other has but one of 8
BATCH_SIZE, NUM_TRAIN, NUM_VAL = 8, 58, 17
CPUS = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp"]
DDP = [
    *("fit", "--data=helpers.Numbered", f"--data.batch_size={BATCH_SIZE}", "--data.val_fraction=0.225", *CPUS),
    *("--model.network=helpers.Gathering", "--trainer.max_epochs=2", "--trainer.precision=32-true"),
    *("--trainer.enable_model_summary=false", "--trainer.callbacks+=helpers.Recorder"),
]


class Seen(NamedTuple):
    """What one rank was given, by (kind, epoch): the numbers of the images in order, their crops, the batches."""

    folder: Path
    numbers: dict[tuple[str, int], list[int]]
    crops: dict[tuple[str, int], list[tuple[int, int, int, int]]]
    batches: dict[tuple[str, int], list[int]]


def read(path: Path) -> Seen:
    record: dict[str, Any] = torch.load(path)
    seen = Seen(path.parent, defaultdict(list), defaultdict(list), defaultdict(list))
    for batch in record["batches"]:
        key = batch["kind"], batch["epoch"]
        found = numbers_and_crops(pixels(record, batch["images"]))
        numbers = [number for number, _ in found]
        assert batch["targets"].tolist() == [number % 2 for number in numbers], "each image with its own target"
        seen.numbers[key] += numbers
        seen.crops[key] += [crop for _, crop in found]
        seen.batches[key].append(len(found))
    return seen


@pytest.fixture(scope="module", params=[0, 2], ids=["no workers", "two workers"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    """Also: the port that launchers like to use is taken."""
    folder = tmp_path_factory.mktemp("ddp")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # somebody else has it already
            stack.enter_context(socket.create_server(("", 29500)))
        cli(folder, *DDP, f"--data.num_workers={request.param}", PYTHONPATH=TESTS, timeout=120)
    return [read(folder / f"fit-{rank}.pt") for rank in range(2)]


def test_two_processes_share_out_the_images(ranks: list[Seen]) -> None:
    first, second = ranks
    split: set[int] | None = None
    for epoch in (0, 1):
        mine, other = (rank.numbers["train", epoch] for rank in ranks)
        assert len(set(mine + other)) == len(mine + other), "no image twice"
        # whole batches only, as many on each rank
        assert (
            first.batches["train", epoch]
            == second.batches["train", epoch]
            == [BATCH_SIZE] * (NUM_TRAIN // 2 // BATCH_SIZE)
        )
        val = [number for rank in ranks for number in rank.numbers["val", epoch]]
        assert len(set(val)) == len(val) == NUM_VAL, "no image counts twice to even the ranks out"
        assert (first.batches["val", epoch], second.batches["val", epoch]) == ([7, 2], [7, 1]), "as many on each rank"
        assert not set(val) & set(mine + other), "both ranks split alike"
        assert split in (None, set(val)), "the same in each epoch"
        split = set(val)
        for rank in ranks:
            assert rank.crops["val", epoch] == [(0, 0, 0, 0)] * len(rank.crops["val", epoch]), "no augmentation"
    assert first.numbers["train", 0] != first.numbers["train", 1]
    assert sorted(first.numbers["train", 0]) != sorted(first.numbers["train", 1]), "dealt anew"


def test_two_processes_measure_what_one_does(ranks: list[Seen]) -> None:
    (run,) = runs(ranks[0].folder)
    model = ImageClassifier(Gathering(num_classes=2, image_size=(16, 16)), num_classes=2)
    model.load_state_dict(torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"])
    data = Numbered(batch_size=BATCH_SIZE, val_fraction=0.225)
    (values,) = L.Trainer(**QUIET).validate(model, datamodule=data, verbose=False)
    for name in ("val/acc", "val/loss", "val/auroc"):
        assert values[name] == pytest.approx(logged(run, name)[-1], abs=1e-5)


def test_each_process_and_epoch_augments_on_its_own(ranks: list[Seen]) -> None:
    draws = [rank.crops["train", epoch] for rank in ranks for epoch in (0, 1)]
    for position, draw in enumerate(draws):
        assert len(set(draw)) > len(draw) // 2, "another draw for each image"
        for other in draws[:position]:
            same = sum(a == b for a, b in zip(draw, other, strict=True))
            assert same < len(draw) // 2
