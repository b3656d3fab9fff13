"""The LightningModule in Python: schedules, weights, clipping, checkpoints."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers import QUIET
from lightning.pytorch.callbacks import Callback, EarlyStopping, EMAWeightAveraging
from lightning.pytorch.cli import ReduceLROnPlateau
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, StepLR

from lit_project.callbacks import MonitorCheck
from lit_project.data import Shapes10
from lit_project.errors import InputError
from lit_project.module import ImageClassifier
from lit_project.optimizers import MuonSGD
from lit_project.schedulers import WarmupCosine


def linear() -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 10))


def trainer(tmp_path: Path, **options: object) -> L.Trainer:
    defaults = {
        "max_epochs": 2,
        **QUIET,
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


def test_a_plateau_scheduler_without_validation_is_refused_before_the_first_epoch(tmp_path: Path) -> None:
    plateau = partial(ReduceLROnPlateau, monitor="val/loss")
    model = ImageClassifier(linear(), partial(torch.optim.SGD, lr=0.1), plateau)
    for options in ({"limit_val_batches": 0}, {"check_val_every_n_epoch": 3}):
        fit = trainer(tmp_path, callbacks=[MonitorCheck()], **options)
        with pytest.raises(InputError, match="scheduler monitors 'val/loss', but this run has no validation"):
            fit.fit(model, datamodule=ten_batches())
        assert fit.global_step == 0


@pytest.mark.parametrize(
    ("monitor", "validation", "steps"),
    [
        ("val/loss", {"check_val_every_n_epoch": 2}, 2),
        ("train/loss", {"check_val_every_n_epoch": 2}, 4),
        ("val/loss", {"check_val_every_n_epoch": None, "val_check_interval": 15}, 3),  # from the second epoch on
    ],
)
def test_a_plateau_scheduler_steps_after_validations(
    tmp_path: Path, monitor: str, validation: dict[str, Any], steps: int
) -> None:
    model = ImageClassifier(linear(), partial(torch.optim.SGD, lr=0.1), partial(ReduceLROnPlateau, monitor=monitor))
    fit = trainer(tmp_path, max_epochs=4, **validation)
    fit.fit(model, datamodule=ten_batches())
    assert fit.lr_scheduler_configs[0].scheduler.last_epoch == steps


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


# ---- what a resumed run may change


@pytest.mark.parametrize(
    "scheduler",
    [
        None,
        partial(WarmupCosine, total_steps=-1),
        partial(CosineAnnealingLR, T_max=-1),
        partial(StepLR, step_size=1, gamma=0.5),
        partial(OneCycleLR, max_lr=0.1, total_steps=-1, cycle_momentum=False),
    ],
)
def test_a_changed_learning_rate_keeps_its_place_in_the_schedule(
    tmp_path: Path, scheduler: partial[LRScheduler] | None
) -> None:
    """Stopped in mid-epoch and resumed with half the rate: from there on, it is as if it had been half all along."""

    class Save(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 13:
                trainer.save_checkpoint(tmp_path / "13.ckpt")

    def rates(rate: float, checkpoint: Path | None = None) -> list[float]:
        steps = Steps()
        model = ImageClassifier(linear(), partial(torch.optim.SGD, lr=rate), scheduler)
        # as from the command line
        model.save_hyperparameters({"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": rate}}})
        callbacks = [steps] if checkpoint or rate == 0.05 else [Save()]
        trainer(tmp_path, callbacks=callbacks).fit(model, datamodule=ten_batches(), ckpt_path=checkpoint)
        return steps.rates

    straight = rates(0.05)
    rates(0.1)
    resumed = rates(0.05, tmp_path / "13.ckpt")
    assert len(resumed) == 7
    assert resumed == pytest.approx(straight[13:])


def test_a_changed_argument_reaches_only_the_groups_it_is_meant_for(tmp_path: Path) -> None:
    """MuonSGD has a group of filters and one of the rest; `sgd_lr` is the rate of the latter."""
    before = {"lr": 0.1, "momentum": 0.6, "sgd_lr": 2.0, "sgd_momentum": 0.9, "sgd_weight_decay": 0.0}

    def fit(arguments: dict[str, float], checkpoint: Path | None = None) -> L.Trainer:
        network = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.Flatten(), nn.Linear(64, 10))
        model = ImageClassifier(network, partial(MuonSGD, **arguments), partial(WarmupCosine, total_steps=-1))
        model.save_hyperparameters({"optimizer": {"class_path": "MuonSGD", "init_args": arguments}})
        done = trainer(tmp_path, max_epochs=2 if checkpoint else 1)
        done.fit(model, datamodule=ten_batches(), ckpt_path=checkpoint)
        return done

    fit(before).save_checkpoint(tmp_path / "1.ckpt")
    resumed = fit(before | {"sgd_lr": 1.0, "momentum": 0.7}, tmp_path / "1.ckpt").optimizers[0]
    filters, rest = resumed.param_groups
    assert (filters["initial_lr"], filters["momentum"]) == (0.1, 0.7)
    assert (rest["initial_lr"], rest["momentum"]) == (1.0, 0.9)


# ---- averaged weights


def with_batch_norm() -> nn.Module:
    layers = [nn.Conv2d(3, 10, 3, 2, bias=False), nn.BatchNorm2d(10), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(10, 10))


def test_averaged_weights_are_those_of_the_formula_and_go_into_checkpoints(tmp_path: Path) -> None:
    """Also with class weights, which are known only after the average was set up."""
    seen: list[dict[str, torch.Tensor]] = []

    class Weights(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            seen.append({key: value.clone() for key, value in pl_module.state_dict().items()})

        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trainer.save_checkpoint(tmp_path / "model.ckpt")

    model = ImageClassifier(
        with_batch_norm(), partial(torch.optim.SGD, lr=0.1), class_weights=[float(k + 1) for k in range(10)]
    )
    callbacks = [Weights(), EMAWeightAveraging(decay=0.9)]
    trainer(tmp_path, max_epochs=1, callbacks=callbacks).fit(model, datamodule=ten_batches())
    average = dict(seen[0])
    for weights in seen[1:]:
        for key in (key for key, value in weights.items() if value.is_floating_point()):
            average[key] = 0.9 * average[key] + 0.1 * weights[key]
    saved = torch.load(tmp_path / "model.ckpt", weights_only=True)["state_dict"]
    for key in (key for key, value in average.items() if value.is_floating_point()):
        torch.testing.assert_close(saved[key], average[key])
        torch.testing.assert_close(model.state_dict()[key], average[key])
        assert not torch.allclose(average[key], seen[-1][key])
    assert model.loss_weight is not None
    assert model.loss_weight.tolist() == [float(k + 1) for k in range(10)]


# ---- compiled networks


def test_a_compiled_run_has_the_weights_names_and_checkpoints_of_a_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[dict[str, Any]] = []
    original = torch.compile

    def compile(function: Any, **options: Any) -> Any:  # without the C++ compiler, which takes a minute
        compiled.append(options)
        return original(function, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", compile)

    def run(name: str, mode: bool | str, checkpoint: Path | None = None, epochs: int = 1) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = ImageClassifier(with_batch_norm(), partial(torch.optim.SGD, lr=0.1), compile=mode)
        fit = trainer(tmp_path, max_epochs=epochs, callbacks=[EMAWeightAveraging(decay=0.9)])
        fit.fit(model, datamodule=ten_batches(), ckpt_path=checkpoint)
        fit.save_checkpoint(tmp_path / name)
        return torch.load(tmp_path / name, weights_only=True)["state_dict"]

    plain = run("plain.ckpt", False)
    assert compiled == []
    torch.testing.assert_close(run("compiled.ckpt", True), plain)
    assert compiled == [{"mode": None}]
    plain_twice = run("2.ckpt", False, tmp_path / "plain.ckpt", 2)
    torch.testing.assert_close(run("3.ckpt", False, tmp_path / "compiled.ckpt", 2), plain_twice)
    torch.testing.assert_close(run("4.ckpt", "reduce-overhead", tmp_path / "plain.ckpt", 2), plain_twice)
    assert compiled[1:] == [{"mode": "reduce-overhead"}]
    # as code that wraps the network writes it: both the average and the weights of the training
    wrapped = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    for part in ("state_dict", "current_model_state"):
        wrapped[part] = {key.replace("network.", "network._orig_mod."): value for key, value in wrapped[part].items()}
    torch.save(wrapped, tmp_path / "wrapped.ckpt")
    torch.testing.assert_close(run("5.ckpt", False, tmp_path / "wrapped.ckpt", 2), plain_twice)


@pytest.mark.slow
def test_the_default_compiler_trains_the_same(tmp_path: Path) -> None:
    values = []
    for compile in (False, True):
        torch.manual_seed(0)
        model = ImageClassifier(with_batch_norm(), partial(torch.optim.SGD, lr=0.1), compile=compile)
        fit = trainer(tmp_path, max_epochs=1)
        fit.fit(model, datamodule=ten_batches())
        values.append(fit.callback_metrics["val/loss"].item())
    assert values[1] == pytest.approx(values[0], rel=1e-4)


# ---- several views, mixed targets, networks that begin from the data


def views(images: torch.Tensor, number: int) -> list[torch.Tensor]:
    """What the network should see, pixel by pixel: beyond the border an image is mirrored."""
    height, width = images.shape[2:]
    shifts = [0] if number == 2 else [0, -1, 1]
    found = []
    for shift in shifts:
        rows = [abs(i + shift) if i + shift < height else 2 * (height - 1) - i - shift for i in range(height)]
        columns = [abs(i + shift) if i + shift < width else 2 * (width - 1) - i - shift for i in range(width)]
        moved = images[:, :, rows][:, :, :, columns]
        found += [moved, moved[:, :, :, list(range(width))[::-1]]]
    return found


@pytest.mark.parametrize(("augmentation", "number"), [("none", 1), ("flip", 2), ("flip_shift", 6)])
def test_test_and_prediction_average_the_logits_over_views(augmentation: Any, number: int) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 6 * 8, 10))
    model = ImageClassifier(network, test_time_augmentation=augmentation).eval()
    images, targets = torch.randn(5, 3, 6, 8), torch.arange(5)
    seen = [images] if number == 1 else views(images, number)
    assert len(seen) == number
    logits = torch.stack([network(view) for view in seen]).mean(dim=0)
    with torch.no_grad():
        model.test_step((images, targets), 0)
        model.validation_step((images, targets), 0)
        torch.testing.assert_close(model.predict_step((images,), 0), logits.softmax(dim=1))
    torch.testing.assert_close(model.test_metrics.compute()["test/loss"], nn.functional.cross_entropy(logits, targets))
    expected = nn.functional.cross_entropy(network(images), targets)
    torch.testing.assert_close(model.val_metrics.compute()["val/loss"], expected)  # validation has one view


def test_mixed_targets_give_the_loss_of_the_shares_and_the_accuracy_of_the_larger(tmp_path: Path) -> None:
    model = ImageClassifier(linear(), label_smoothing=0.1)
    trainer(tmp_path, max_epochs=1).fit(model, datamodule=ten_batches())
    images, shares = torch.randn(4, 3, 32, 32), torch.tensor([0.7, 0.6, 0.8, 1.0])
    logits = model(images)
    largest = logits.argmax(1)
    right = torch.tensor([True, True, True, False])
    main = torch.where(right, largest, (largest + 1) % 10)
    targets = torch.zeros(4, 10)
    targets[range(4), main] = shares
    targets[range(4), (main + 5) % 10] += 1 - shares
    model.train_metrics.reset()
    loss = model.training_step((images, targets), 0)
    smoothed = 0.9 * targets + 0.1 / 10
    torch.testing.assert_close(loss, -(smoothed * logits.log_softmax(1)).sum(1).mean())
    values = model.train_metrics.compute()
    assert values["train/acc"] == 0.75
    torch.testing.assert_close(values["train/loss"], loss.detach())


class Whitened(nn.Module):
    """Begins from the data, and counts it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = linear()
        self.given: list[torch.Tensor] = []

    def init_from_data(self, images: torch.Tensor) -> None:
        self.given.append(images)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(images)


def test_a_network_may_begin_from_the_training_images_once(tmp_path: Path) -> None:
    network = Whitened()
    fit = trainer(tmp_path, max_epochs=1)
    fit.fit(ImageClassifier(network), datamodule=ten_batches())
    fit.save_checkpoint(tmp_path / "1.ckpt")
    (images,) = network.given
    assert images.dtype == torch.float32
    assert images.shape == (160, 3, 32, 32)
    torch.testing.assert_close(images.mean(dim=(0, 2, 3)), torch.zeros(3), atol=0.02, rtol=0)
    torch.testing.assert_close(images.std(dim=(0, 2, 3)), torch.ones(3), atol=0.02, rtol=0)
    assert images.device == next(network.parameters()).device
    resumed = Whitened()
    trainer(tmp_path, max_epochs=2).fit(
        ImageClassifier(resumed), datamodule=ten_batches(), ckpt_path=tmp_path / "1.ckpt"
    )
    assert resumed.given == []


def test_a_copy_of_a_module_shares_its_factories() -> None:
    """What jsonargparse makes of a config holds its parser, which cannot be copied."""

    class Uncopied:
        def __call__(self, parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=0.1)

        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot be copied")

    model = ImageClassifier(linear(), Uncopied(), Uncopied())  # type: ignore[arg-type]
    twin = copy.deepcopy(model)
    assert twin.optimizer is model.optimizer
    assert twin.scheduler is model.scheduler
    assert twin.network is not model.network
