"""Out of memory: where it went, for which batch, and what to do."""

import re
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from conftest import TINY, RunCLI
from helpers import QUIET, TESTS, Hungry
from torch import Tensor, nn

from lit_project.data import Shapes10
from lit_project.module import ImageClassifier
from lit_project.out_of_memory import explain_out_of_memory


class HungryInNumPy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 10))

    def forward(self, images: Tensor) -> Tensor:
        np.empty(2**58)
        return self.layers(images)


class Faulty(HungryInNumPy):
    def forward(self, images: Tensor) -> Tensor:
        raise RuntimeError("this has nothing to do with memory")


def explain(network: nn.Module, checkpointing: bool | None = None, stage: str = "fit", **options: object) -> str | None:
    trainer = L.Trainer(
        max_epochs=1,
        **QUIET,
        num_sanity_val_steps=0,
        **options,  # type: ignore[arg-type]
    )
    model = ImageClassifier(network, torch.optim.Adam)
    if checkpointing is not None:
        model.hparams["gradient_checkpointing"] = checkpointing
    data = Shapes10(num_train=64, num_val=16, num_test=16, batch_size=16)
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        getattr(trainer, stage)(model, datamodule=data)
    message = explain_out_of_memory(caught.value, trainer)
    return message and str(message)


def test_the_memory_is_split_and_the_batch_named() -> None:
    message = explain(Hungry()) or ""
    size = (3 * 32 * 32 * 10 + 10) * 4
    assert "Out of memory in fit, with a batch of [16, 3, 32, 32] float32, [16] int64 (it asked for another" in message
    assert f"{2**60 / 2**20:,.1f} MiB)" in message
    # Adam keeps two values a weight
    split = re.search(
        r"weights ([\d.]+) MiB, gradients ([\d.]+) MiB, optimiser state ([\d.]+) MiB, .* ([\d,.]+) MiB", message
    )
    assert split is not None
    assert [float(part.replace(",", "")) for part in split.groups()[:3]] == [
        pytest.approx(share * size / 2**20, abs=0.06) for share in (1, 1, 2)
    ]
    assert float(split[4].replace(",", "")) > 50, "this process, PyTorch and all"


@pytest.mark.parametrize(
    ("checkpointing", "stage", "options", "expected"),
    [
        (
            False,
            "fit",
            {"accumulate_grad_batches": 3},
            [
                "--data.batch_size=8 --trainer.accumulate_grad_batches=6",
                "--trainer.precision=bf16-mixed",
                "--model.gradient_checkpointing=true",
            ],
        ),
        (
            True,
            "fit",
            {"precision": "bf16-mixed"},
            ["--data.batch_size=8 --trainer.accumulate_grad_batches=2", "--model.network=", "--data.image_size="],
        ),
        (False, "test", {}, ["--data.batch_size=8  (", "--trainer.precision=bf16-mixed", "--model.network="]),
    ],
)
def test_three_things_to_try_that_are_not_tried_yet(
    checkpointing: bool, stage: str, options: dict[str, object], expected: list[str]
) -> None:
    message = explain(HungryInNumPy(), checkpointing, stage, **options) or ""
    tries = [line.strip() for line in message.splitlines() if line.strip().startswith("--")]
    assert len(tries) == 3
    for line, start in zip(tries, expected, strict=True):
        assert line.startswith(start)


def test_another_error_is_left_alone() -> None:
    assert explain(Faulty()) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_knows_its_peak() -> None:
    trainer = L.Trainer(max_epochs=1, accelerator="cuda", devices=1, logger=False, enable_checkpointing=False)
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(ImageClassifier(Hungry()), datamodule=Shapes10(num_train=64, num_val=16, batch_size=16))
    message = str(explain_out_of_memory(caught.value, trainer))
    assert torch.cuda.get_device_name() in message
    assert "are taken by other processes" in message


def test_on_the_command_line_it_is_one_message(run_cli: RunCLI, tmp_path: Path) -> None:
    done = run_cli("fit", *TINY, "--model.network=helpers.Hungry", check=False, PYTHONPATH=TESTS)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    message = done.stderr.split("error: ")[1]
    assert message.startswith("Out of memory in fit, with a batch of [64, 3, 32, 32] float32, [64] int64")
    assert "--data.batch_size=32 --trainer.accumulate_grad_batches=2" in message
    (run,) = tmp_path.glob("runs/*")
    assert '"exit_reason": "failed: RuntimeError: ' in (run / "run.json").read_text()
