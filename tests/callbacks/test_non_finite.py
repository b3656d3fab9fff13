"""A loss that is not finite ends the run, names its cause, and leaves the state before it."""

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from conftest import TINY, RunCLI, runs
from helpers import QUIET, TESTS, Fragile, Linear, NotANumber, Plant
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lit_project.callbacks import KeyedRandomness, NonFinite
from lit_project.checkpoints import read_checkpoint
from lit_project.data import Shapes10
from lit_project.errors import InputError
from lit_project.module import ImageClassifier


class State(Callback):
    """What the model, the optimiser and the batch were when each batch began."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        state = {"state_dict": pl_module.state_dict(), "optimizer": trainer.optimizers[0].state_dict(), "batch": batch}
        self.steps.append(copy.deepcopy(state))


def fit(folder: Path, network: nn.Module, *callbacks: Callback, lr: float = 0.1, **options: Any) -> L.Trainer:
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9)  # noqa: E731
    trainer = L.Trainer(
        max_epochs=1,
        **QUIET,
        default_root_dir=folder,
        callbacks=[NonFinite(), *callbacks],
        **options,
    )
    data = Shapes10(num_train=64, num_val=16, batch_size=16)
    trainer.fit(ImageClassifier(network, optimizer), datamodule=data)
    return trainer


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return all(map(equal, one, other)) if isinstance(one, list | tuple) else bool(one == other)


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        ("network.stem.2.weight", float("nan"), "the first layer whose output is not finite: network.stem.2 (Linear)"),
        ("network.divide.divisor", 0.0, "the first layer whose output is not finite: network.divide (Divide)"),
        ("network.offset", float("inf"), "in the forward of network, between network.norm and network.head"),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_error_names_the_layer_and_the_state_before_is_kept(
    tmp_path: Path, name: str, value: float, where: str, accumulate: int
) -> None:
    """With accumulation the third batch gets no optimiser step of its own."""
    states = State()
    with pytest.raises(InputError) as caught:
        fit(tmp_path, Fragile(), states, Plant(name, value), accumulate_grad_batches=accumulate)
    message = str(caught.value)
    assert f"The loss is nan, at step {2 // accumulate} (epoch 0, batch 2 of 4, rank 0)" in message
    assert where in message
    assert "learning rate 0.1, gradient norm nan" in message
    assert ("not finite before this batch: network.stem.2.weight" in message) == ("weight" in name)
    assert len(states.steps) == 3
    before = states.steps[2]
    before["state_dict"][name].view(-1)[0] = value
    saved = read_checkpoint(tmp_path / "nonfinite" / "state.ckpt")
    assert all(
        torch.equal(saved["state_dict"][key].nan_to_num(7), before["state_dict"][key].nan_to_num(7))
        for key in before["state_dict"]
    ), "weights before the optimiser step, statistics before the forward pass"
    assert equal(saved["optimizer_states"][0], before["optimizer"])
    record = torch.load(tmp_path / "nonfinite" / "batch.pt", weights_only=True)
    assert equal(record["batch"], before["batch"])
    assert (record["batch_idx"], record["epoch"], record["step"]) == (2, 0, 2 // accumulate)


class Chance(nn.Module):
    """Infinite whenever a draw falls below 0.3."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (torch.rand(()) > 0.3)


def test_a_layer_that_fails_by_chance_is_found_with_the_draws_that_the_step_had(tmp_path: Path) -> None:
    network = Fragile()
    network.divide = Chance()
    with pytest.raises(InputError, match=r"not finite: network\.divide \(Chance\)"):
        fit(tmp_path, network, KeyedRandomness())


def test_divergence_is_stopped_before_the_weights_are_lost(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="The loss is nan, at step"):
        fit(tmp_path, Fragile(), lr=1e30)
    saved = read_checkpoint(tmp_path / "nonfinite" / "state.ckpt")
    assert all(weight.isfinite().all() for weight in saved["state_dict"].values())


def test_a_gradient_that_is_not_finite_is_never_used(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"A gradient is not finite, though the loss is, at step 0 [^$]*backward pass"):
        fit(tmp_path, NotANumber())
    saved = read_checkpoint(tmp_path / "nonfinite" / "state.ckpt")
    assert all(weight.isfinite().all() for weight in saved["state_dict"].values())


def test_a_gradient_seen_late_is_told_from_the_weights_it_spoilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where gradients are not looked at."""
    monkeypatch.setattr("lit_project.callbacks.non_finite._SMALL", 0)
    with pytest.raises(
        InputError, match=r"The loss is nan, at step 1 [^$]*not finite before this batch: network\.zero"
    ):
        fit(tmp_path, NotANumber(), gradient_clip_val=None)


class OneImage(Callback):
    """A transform that goes wrong, in data that knows which images a batch has."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        trainer.datamodule.batch_indices = torch.arange(100, 116)  # type: ignore[attr-defined]
        batch[0][5, 0, 0, 0] = float("inf")


def test_images_that_are_not_finite_are_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        fit(tmp_path, Linear(), OneImage())
    assert "given images that are not finite: 1, such as number 105 of the training data" in str(caught.value)
    assert "images, by position in the training data: 100, 101," in str(caught.value)
    record = torch.load(tmp_path / "nonfinite" / "batch.pt", weights_only=True)
    assert torch.equal(record["indices"], torch.arange(100, 116))


@pytest.mark.parametrize("scale", [2.0**40, 2.0**127], ids=["gradients overflow", "the scaled loss overflows"])
def test_an_overflow_that_the_scaler_skips_is_no_fault(tmp_path: Path, scale: float) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    trainer = fit(tmp_path, Linear(), plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert trainer.global_step == 4
    assert scaler.get_scale() < scale, "steps were skipped"
    assert not (tmp_path / "nonfinite").exists()


def test_the_scaler_hides_no_real_fault(tmp_path: Path) -> None:
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    plant = Plant("network.stem.2.weight", float("nan"))
    with pytest.raises(InputError, match=r"The loss is nan, at step 2 [^$]*network\.stem\.2"):
        fit(tmp_path, Fragile(), plant, plugins=[precision])


class NaNInEvaluation(Linear):
    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        return logits if self.training else logits * float("nan")


def test_a_validation_loss_that_is_not_finite_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="val/loss is nan after epoch 0"):
        trainer = fit(tmp_path, NaNInEvaluation())
    assert trainer.global_step == 4


def test_on_the_command_line_it_is_one_message_and_a_failure(run_cli: RunCLI, tmp_path: Path) -> None:
    plant = ["helpers.Plant", "name=network.divide.divisor", "value=0"]
    options = [f"--trainer.callbacks{'.' if '=' in part else '+='}{part}" for part in plant]
    done = run_cli("fit", *TINY, "--model.network=helpers.Fragile", *options, check=False, PYTHONPATH=TESTS)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "The loss is nan, at step 2" in done.stderr.split("error: ")[1]
    assert "network.divide (Divide)" in done.stderr
    (run,) = runs(tmp_path)
    assert read_checkpoint(run / "nonfinite" / "state.ckpt")["config"]["model"]["init_args"]
