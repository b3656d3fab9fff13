"""The LightningModule in Python: schedules, weights, clipping, checkpoints."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.cli import ReduceLROnPlateau
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, StepLR

from lit_project.callbacks import MonitorCheck
from lit_project.data import Shapes10
from lit_project.errors import InputError
from lit_project.module import ImageClassifier
from lit_project.schedulers import WarmupCosine


def linear() -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 10))


def trainer(tmp_path: Path, **options: object) -> L.Trainer:
    defaults = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": tmp_path,
    }
    return L.Trainer(**{**defaults, **options})  # type: ignore[arg-type]


def ten_batches() -> Shapes10:
    return Shapes10(num_train=160, num_val=20, num_test=20, batch_size=16)


class Steps(Callback):
    """Counts optimiser steps and records the learning rate each of them used."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.norms: list[float] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        optimizer = trainer.optimizers[0]
        original = optimizer.step

        def step(*args: object, **kwargs: object) -> object:
            before = optimizer.param_groups[0]["lr"]
            result = original(*args, **kwargs)
            # Lightning computes gradients and clips them in the closure, so here they are as the optimiser used them
            self.rates.append(before)
            self.norms.append(nn.utils.get_total_norm([p.grad for p in pl_module.parameters()]).item())
            return result

        optimizer.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize(("accumulate", "steps_per_epoch"), [(1, 10), (4, 3), (16, 1)])
def test_a_schedule_of_the_whole_run_ends_with_the_run(tmp_path: Path, accumulate: int, steps_per_epoch: int) -> None:
    model = ImageClassifier(linear(), partial(torch.optim.SGD, lr=0.1), partial(CosineAnnealingLR, T_max=-1))
    steps = Steps()
    fit = trainer(tmp_path, accumulate_grad_batches=accumulate, callbacks=[steps])
    fit.fit(model, datamodule=ten_batches())
    assert len(steps.rates) == fit.global_step == 2 * steps_per_epoch
    scheduler = fit.lr_scheduler_configs[0].scheduler
    assert scheduler.last_epoch == 2 * steps_per_epoch  # type: ignore[union-attr]
    assert fit.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("scheduler", "interval"),
    [
        (partial(CosineAnnealingLR, T_max=-1), "step"),
        (partial(CosineAnnealingLR, T_max=30), "epoch"),
        (partial(OneCycleLR, max_lr=0.1, total_steps=None), "step"),
        (partial(OneCycleLR, max_lr=0.1, total_steps=50), "step"),
        (partial(OneCycleLR, max_lr=0.1, epochs=2, steps_per_epoch=10), "step"),
        (partial(StepLR, step_size=1), "epoch"),
        (partial(ReduceLROnPlateau, monitor="val/loss"), "epoch"),
    ],
)
def test_interval_follows_the_scheduler(tmp_path: Path, scheduler: partial[LRScheduler], interval: str) -> None:
    model = ImageClassifier(linear(), partial(torch.optim.SGD, lr=0.1, momentum=0.9), scheduler)
    fit = trainer(tmp_path, max_epochs=1)
    fit.fit(model, datamodule=ten_batches())
    (config,) = fit.lr_scheduler_configs
    assert config.interval == interval
    assert config.scheduler.last_epoch == (10 if interval == "step" else 1)
    assert config.monitor == ("val/loss" if config.reduce_on_plateau else None)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"])
def test_every_optimiser_steps_with_the_schedule(tmp_path: Path, optimizer: str) -> None:
    factory = partial(getattr(torch.optim, optimizer), lr=0.01)
    model = ImageClassifier(linear(), factory, partial(WarmupCosine, total_steps=-1))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    fit = trainer(tmp_path, max_epochs=1)
    fit.fit(model, datamodule=ten_batches())
    assert type(fit.optimizers[0]).__name__ == optimizer
    assert all(not torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_a_length_in_steps_is_refused_for_a_schedule_by_epoch(tmp_path: Path) -> None:
    scheduler = partial(CosineAnnealingLR, T_max=-1)
    model = ImageClassifier(linear(), partial(torch.optim.SGD, lr=0.1), scheduler, scheduler_interval="epoch")
    with pytest.raises(InputError, match="scheduler_interval is 'epoch'"):
        trainer(tmp_path).fit(model, datamodule=ten_batches())


def test_early_stopping_without_validation_leaves_the_other_callbacks_in_place(tmp_path: Path) -> None:
    class Started(Callback):
        count = 0

        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.count += 1

    started = Started()
    callbacks = [EarlyStopping("val/acc"), MonitorCheck(), started]
    fit = trainer(tmp_path, max_epochs=1, limit_val_batches=0, callbacks=callbacks, log_every_n_steps=0)
    with pytest.warns(UserWarning, match="no validation"):
        fit.fit(ImageClassifier(linear()), datamodule=ten_batches())
    assert started.count == 1


def test_max_steps_bounds_the_schedule_when_epochs_do_not(tmp_path: Path) -> None:
    model = ImageClassifier(linear(), partial(torch.optim.SGD, lr=0.1), partial(CosineAnnealingLR, T_max=-1))
    fit = trainer(tmp_path, max_epochs=-1, max_steps=5)
    fit.fit(model, datamodule=ten_batches())
    assert fit.lr_scheduler_configs[0].scheduler.T_max == 5


@pytest.mark.parametrize(
    "scheduler",
    [
        partial(WarmupCosine, total_steps=-1),
        partial(CosineAnnealingLR, T_max=-1),
        partial(OneCycleLR, max_lr=0.1, total_steps=-1, cycle_momentum=False),
    ],
)
def test_a_resumed_run_follows_the_schedule_of_its_new_length(tmp_path: Path, scheduler: partial[LRScheduler]) -> None:
    """One epoch of one, resumed as the second of two: the rates are those of the second epoch of two."""

    def rates(epochs: int, checkpoint: Path | None = None) -> list[float]:
        steps = Steps()
        fit = trainer(tmp_path, max_epochs=epochs, callbacks=[steps])
        model = ImageClassifier(linear(), partial(torch.optim.SGD, lr=0.1), scheduler)
        fit.fit(model, datamodule=ten_batches(), ckpt_path=checkpoint)
        fit.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return steps.rates

    straight = rates(2)
    rates(1)
    assert rates(2, tmp_path / "1.ckpt") == pytest.approx(straight[10:])


def test_a_run_without_planned_end_keeps_the_learning_rate_and_says_so(tmp_path: Path) -> None:
    model = ImageClassifier(linear(), partial(torch.optim.SGD, lr=0.1), partial(CosineAnnealingLR, T_max=-1))
    fit = trainer(tmp_path, max_epochs=-1, max_time="00:00:00:01")
    with pytest.warns(UserWarning, match="no planned end"):
        fit.fit(model, datamodule=ten_batches())
    assert fit.lr_scheduler_configs == []
    assert fit.optimizers[0].param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("accumulate", [1, 4])
def test_clipping_bounds_the_gradient_the_optimiser_uses(tmp_path: Path, accumulate: int) -> None:
    model = ImageClassifier(linear(), partial(torch.optim.SGD, lr=0.1))
    steps = Steps()
    trainer(tmp_path, max_epochs=1, gradient_clip_val=1e-3, accumulate_grad_batches=accumulate, callbacks=[steps]).fit(
        model, datamodule=ten_batches()
    )
    assert steps.norms
    assert max(steps.norms) <= 1e-3 * 1.001


def test_balanced_weights_follow_the_class_counts(tmp_path: Path) -> None:
    data = ten_batches()
    data.setup("fit")
    train = data.splits["train"]
    keep = (train.targets != 0) | (torch.arange(len(train.targets)) % 2 == 0)
    data.splits["train"] = train.select(keep.nonzero().flatten())
    counts = data.class_counts
    model = ImageClassifier(linear(), class_weights="balanced")
    trainer(tmp_path, max_epochs=1).fit(model, datamodule=data)
    expected = counts.sum() / (10 * counts)
    torch.testing.assert_close(model.loss_weight, expected.float())
    assert "loss_weight" not in model.state_dict()


def test_listed_weights_and_smoothing_shape_the_training_loss_only(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = [float(k + 1) for k in range(10)]
    model = ImageClassifier(linear(), class_weights=weights, label_smoothing=0.2)
    fit = trainer(tmp_path, max_epochs=1, limit_val_batches=1)
    fit.fit(model, datamodule=ten_batches())
    images, targets = torch.randn(8, 3, 32, 32), torch.arange(8)
    logits = model(images)
    expected = nn.functional.cross_entropy(logits, targets, torch.tensor(weights), label_smoothing=0.2)
    torch.testing.assert_close(model.training_step((images, targets), 0), expected)
    model.val_metrics.reset()
    model.validation_step((images, targets), 0)
    torch.testing.assert_close(model.val_metrics.compute()["val/loss"], nn.functional.cross_entropy(logits, targets))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"class_weights": [1.0, 2.0]}, "2 entries, but there are 10 classes"),
        ({"class_names": ["a"]}, "1 entries, but there are 10 classes"),
        ({"label_smoothing": 1.5}, "between 0 and 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ImageClassifier(linear(), **arguments)  # type: ignore[arg-type]


def test_a_network_with_another_number_of_outputs_is_named() -> None:
    with pytest.raises(InputError, match=r"Sequential returns \[2, 10\] for 2 images and 20 classes"):
        ImageClassifier(linear(), num_classes=20)(torch.zeros(2, 3, 32, 32))


def test_a_checkpoint_from_python_holds_plain_values_and_loads_with_the_network_given(tmp_path: Path) -> None:
    model = ImageClassifier(linear(), partial(torch.optim.SGD, lr=0.1), label_smoothing=0.1)
    fit = trainer(tmp_path, max_epochs=1)
    fit.fit(model, datamodule=ten_batches())
    fit.save_checkpoint(tmp_path / "model.ckpt")
    hparams = torch.load(tmp_path / "model.ckpt", weights_only=True)["hyper_parameters"]
    assert hparams["label_smoothing"] == 0.1
    again = ImageClassifier.load_from_checkpoint(tmp_path / "model.ckpt", network=linear())
    images = torch.randn(4, 3, 32, 32)
    model.eval(), again.eval()
    torch.testing.assert_close(again(images), model(images))


def test_weights_of_another_network_are_refused_with_their_names(tmp_path: Path) -> None:
    fit = trainer(tmp_path, max_epochs=1)
    fit.fit(ImageClassifier(linear()), datamodule=ten_batches())
    fit.save_checkpoint(tmp_path / "model.ckpt")
    other = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 3))
    with pytest.raises(InputError, match=r"network\.2\.weight: \[10, 48\] in the checkpoint, \[3, 48\] in the model"):
        ImageClassifier.load_from_checkpoint(tmp_path / "model.ckpt", network=other, num_classes=3)


class HandCount(ImageClassifier):
    """Counts hits itself, beside the metrics."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hits: dict[str, list[bool]] = {"train": [], "val": []}

    def on_validation_start(self) -> None:
        self.hits["val"] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            self.hits["train"] += (self(batch[0]).argmax(1) == batch[1]).tolist()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.hits["val"] += (self(batch[0]).argmax(1) == batch[1]).tolist()
        super().validation_step(batch, batch_idx)


def test_metrics_equal_a_hand_count_with_validation_in_mid_epoch(tmp_path: Path) -> None:
    """Sanity batches and the other stage's batches count nowhere; short last batches count by their size."""
    model = HandCount(linear(), partial(torch.optim.SGD, lr=0.05))
    fit = trainer(tmp_path, max_epochs=1, val_check_interval=0.5, num_sanity_val_steps=1)
    fit.fit(model, datamodule=ten_batches())
    for stage, size in (("train", 160), ("val", 20)):
        assert len(model.hits[stage]) == size
        assert fit.callback_metrics[f"{stage}/acc"] == pytest.approx(sum(model.hits[stage]) / size)
