"""The LightningModule: a network, its loss, its metrics, and the factories of its optimiser and scheduler."""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from lit_project.checkpoints import match_keys
from lit_project.errors import InputError
from lit_project.gradient_checkpointing import checkpoint_blocks
from lit_project.metrics import EpochMetrics

#: Scheduler arguments that count its steps; -1 (or OneCycleLR's own default, null) stands for the whole training.
_LENGTH_ARGUMENTS = ("T_max", "total_steps", "total_iters")
#: Images that a network may be initialised from.
_SAMPLE_SIZE = 5000


class _Factory(partial[Any]):
    """What makes an optimiser or scheduler; copies of the module, such as an average of its weights, share it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Factory":
        return self  # what jsonargparse makes cannot be copied


class ImageClassifier(L.LightningModule):
    """Trains any network that maps images ``[B, C, H, W]`` to logits ``[B, num_classes]``.

    From the command line ``num_classes`` and ``class_names`` are filled in from the data, here and in the network.

    Args:
        network: the network; it knows nothing of Lightning.
        optimizer: called with the parameters, returns the optimiser.
        scheduler: called with the optimiser, returns the scheduler; ``null`` keeps the learning rate constant.
            ``T_max``, ``total_steps`` or ``total_iters`` of -1 stand for the number of optimiser steps of the run.
        scheduler_interval: when the scheduler steps. ``auto``: each optimiser step if its length is counted in steps
            (a length of -1, OneCycleLR, CyclicLR), otherwise each epoch.
        label_smoothing: share of the target spread over all classes, 0 to 1. Training only.
        class_weights: weight of each class in the training loss: ``none``, ``balanced`` (inversely proportional to its
            number of training images), or one number a class.
        num_classes: number of classes.
        class_names: their names, in index order; kept in the checkpoint.
        gradient_checkpointing: compute each block's activations again in the backward pass instead of keeping them:
            about a third slower, and memory for a batch several times as large.
        compile: compile the network with ``torch.compile``: false, true, or its ``mode``, such as ``max-autotune``.
        test_time_augmentation: average the logits over several views of each image in test and prediction, which takes
            as many times as long: ``none``; ``flip``: 2 views, as it is and mirrored; ``flip_shift``: 6 views, both
            also shifted one pixel up left and down right.

    Raises:
        InputError: class weights or names that do not fit ``num_classes``; data with other classes than the model's.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        scheduler: LRSchedulerCallable | None = None,
        scheduler_interval: Literal["auto", "step", "epoch"] = "auto",
        label_smoothing: float = 0.0,
        class_weights: Literal["none", "balanced"] | list[float] = "none",
        num_classes: int = 10,
        class_names: list[str] | None = None,
        gradient_checkpointing: bool = False,
        compile: bool | str = False,
        test_time_augmentation: Literal["none", "flip", "flip_shift"] = "none",
    ) -> None:
        super().__init__()
        # From the command line Lightning substitutes the plain config for the arguments, and the checkpoint can rebuild
        # everything. From Python they are live objects, and a checkpoint is data, not code: leave them out.
        live = [] if _given_hyperparameters.get() else ["network", "optimizer", "scheduler"]
        self.save_hyperparameters(ignore=live)
        if not 0.0 <= label_smoothing <= 1.0:
            raise InputError(f"model.label_smoothing is {label_smoothing}: it must lie between 0 and 1.")
        for name, values in (("class_weights", class_weights), ("class_names", class_names)):
            if isinstance(values, list) and len(values) != num_classes:
                raise InputError(f"model.{name} has {len(values)} entries, but there are {num_classes} classes.")
        # channels last is the layout convolutions are fastest in, and the one batches arrive in
        self.network = network.to(memory_format=torch.channels_last)
        self.optimizer = _Factory(optimizer)
        self.scheduler = _Factory(scheduler) if scheduler is not None else None
        self.scheduler_interval = scheduler_interval
        self.label_smoothing = label_smoothing
        self.class_weights = class_weights
        self.num_classes = num_classes
        self.class_names = class_names
        self.compile_mode = compile
        self.test_time_augmentation = test_time_augmentation
        if gradient_checkpointing:
            checkpoint_blocks(self.network)
        # one object a stage, so that a validation in mid-epoch leaves the training metrics alone
        self.train_metrics = self.make_metrics("train")
        self.val_metrics = self.make_metrics("val")
        self.test_metrics = self.make_metrics("test")
        # not a buffer: an average of the weights pairs its buffers with those that there were before the data was known
        self.loss_weight: Tensor | None = None
        # the lengths, in a resumed checkpoint, of a schedule that spans the whole run
        self._saved_lengths: dict[str, int] = {}

    def forward(self, images: Tensor) -> Tensor:
        """Float images ``[B, C, H, W]`` to float32 logits ``[B, num_classes]``.

        Raises:
            InputError: the network has another number of outputs.
        """
        logits: Tensor = self.network(images)
        if logits.ndim != 2 or logits.shape[1] != self.num_classes:
            raise InputError(
                f"{type(self.network).__name__} returns {list(logits.shape)} for {len(images)} images and "
                f"{self.num_classes} classes; expected {[len(images), self.num_classes]}."
            )
        return logits.float()

    def setup(self, stage: str) -> None:
        """Check that the data has the classes the model was made for; compile the network."""
        data_names = getattr(self._datamodule, "class_names", None)
        if self.class_names and data_names and list(data_names) != list(self.class_names):
            raise InputError(
                f"The model has {_listing(self.class_names)}, but the data has {_listing(data_names)}. "
                "Point --data at data with the model's classes, or train a new model on this data."
            )
        if self.compile_mode:
            # in place, so that the names in checkpoints stay those of the plain network
            self.network.compile(mode=None if self.compile_mode is True else self.compile_mode)

    # ---- what another task overrides; see docs/another_task.md

    def loss(self, logits: Tensor, targets: Tensor, training: bool) -> Tensor:
        """The mean loss of a batch, a scalar.

        Args:
            logits: float32 ``[B, num_classes]``.
            targets: int64 ``[B]``, or float32 ``[B, num_classes]`` when mixed.
            training: whether it is what is minimised, or a score in validation and test.
        """
        if not training:  # neither smoothed nor weighted, so that it compares across runs with other losses
            return F.cross_entropy(logits, targets)
        return F.cross_entropy(logits, targets, weight=self.loss_weight, label_smoothing=self.label_smoothing)

    def make_metrics(self, stage: str) -> EpochMetrics:
        """The metrics of a stage: ``train``, ``val`` or ``test``. Called while the module is made."""
        return EpochMetrics(self.num_classes, stage)

    # ---- steps: a batch is (images float32 [B, C, H, W], targets int64 [B], or float32 [B, num_classes] when mixed)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        logits = self(images)
        loss = self.loss(logits, targets, training=True)
        self.train_metrics.update(logits, targets, loss)
        if self._logs_this_step():
            self.log("train/loss_step", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Logits ``[B, num_classes]``, float32, for callbacks; the same in test."""
        return self._evaluate(self(batch[0]), batch[1], self.val_metrics)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self._evaluate(self._logits_over_views(batch[0]), batch[1], self.test_metrics)

    def predict_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """Class probabilities ``[B, num_classes]``, float32."""
        return self._logits_over_views(batch[0]).softmax(dim=1)

    def _evaluate(self, logits: Tensor, targets: Tensor, metrics: EpochMetrics) -> Tensor:
        metrics.update(logits, targets, self.loss(logits, targets, training=False))
        return logits

    def _logits_over_views(self, images: Tensor) -> Tensor:
        if self.test_time_augmentation == "none":
            return self(images)
        views = [images]
        if self.test_time_augmentation == "flip_shift":
            height, width = images.shape[2:]
            padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
            views += [padded[..., :height, :width], padded[..., 2:, 2:]]
        return torch.stack([self(view) for plain in views for view in (plain, plain.flip(-1))]).mean(dim=0)

    # ---- epochs

    def on_train_epoch_start(self) -> None:
        self.train_metrics.reset()

    def on_validation_epoch_start(self) -> None:
        self.val_metrics.reset()

    def on_test_epoch_start(self) -> None:
        self.test_metrics.reset()

    def on_train_epoch_end(self) -> None:
        self._log_epoch(self.train_metrics)

    def on_validation_epoch_end(self) -> None:
        self._log_epoch(self.val_metrics)

    def on_test_epoch_end(self) -> None:
        if self.test_metrics.confusion is not None:
            #: int64 [num_classes, num_classes], rows true, columns predicted
            self.confusion_matrix = self.test_metrics.confusion_matrix()
        self._log_epoch(self.test_metrics)

    def _log_epoch(self, metrics: EpochMetrics) -> None:
        values = metrics.compute()
        shown = f"{metrics.stage}/acc"
        for name, value in values.items():
            # every rank has the same value already; Lightning warns without sync_dist, and once an epoch it is cheap
            self.log(name, value, prog_bar=name == shown, sync_dist=True)

    # ---- optimisation

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the norm of all gradients, before clipping."""
        # under FSDP a rank sees only its shards of them
        if self._logs_this_step() and not isinstance(self.trainer.strategy, FSDPStrategy):
            gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            self.log("train/grad_norm", nn.utils.get_total_norm(gradients))

    def configure_optimizers(self) -> Any:
        """Build the optimiser and its scheduler, the latter with its length and interval filled in."""
        optimizer = _built("optimizer", self.optimizer, (p for p in self.parameters() if p.requires_grad))
        if self.scheduler is None:
            return optimizer
        lengths: dict[str, int] = {}
        if self._open_lengths:
            total_steps = self.trainer.estimated_stepping_batches
            if not math.isfinite(total_steps):
                rank_zero_warn(
                    "The run has no planned end (max_epochs=-1 without max_steps), so the scheduler's length cannot be "
                    "derived: the learning rate stays constant. Set trainer.max_epochs or trainer.max_steps to "
                    "have it scheduled."
                )
                return optimizer
            lengths = dict.fromkeys(self._open_lengths, max(1, int(total_steps)))
        if lengths and self.scheduler_interval == "epoch":
            raise InputError(
                "model.scheduler_interval is 'epoch', but the scheduler's length of -1 stands for optimiser steps. "
                "Give the length in epochs, or leave the interval at 'auto'."
            )
        scheduler = _built("scheduler", self.scheduler, optimizer, **lengths)
        interval = self.scheduler_interval
        if interval == "auto":
            interval = "step" if lengths or isinstance(scheduler, OneCycleLR | CyclicLR) else "epoch"
        config: dict[str, Any] = {"scheduler": scheduler, "interval": interval}
        if isinstance(scheduler, ReduceLROnPlateau):  # Lightning's names what it monitors, torch's own does not
            config["monitor"] = getattr(scheduler, "monitor", "val/loss")
            every = self.trainer.check_val_every_n_epoch
            if every is None:  # validations go by steps: there may be none before the first epoch is over
                config["strict"] = False
            elif interval == "epoch" and not config["monitor"].startswith("train/"):
                config["frequency"] = every
        return {"optimizer": optimizer, "lr_scheduler": config}

    @property
    def _open_lengths(self) -> list[str]:
        """The scheduler arguments that stand for the whole run."""
        arguments = self.scheduler.keywords if self.scheduler is not None else {}
        if arguments.get("epochs") is not None:  # OneCycleLR(epochs=..., steps_per_epoch=...) gives its length itself
            return []
        return [name for name in _LENGTH_ARGUMENTS if arguments.get(name, 0) in (-1, None)]

    def on_fit_start(self) -> None:
        """Weigh the classes; let a network that begins from the data, such as by whitening it, see some images."""
        if self.class_weights != "none":
            self.loss_weight = self._loss_weight()
        initialise = getattr(self.network, "init_from_data", None)
        images = getattr(self._datamodule, "sample_images", None)
        # a resumed run, or one that starts from given weights, has them already
        if initialise is not None and images is not None and not self.trainer.ckpt_path:
            initialise(images(_SAMPLE_SIZE).to(self.device))

    def on_train_start(self) -> None:
        """Put a resumed run's learning rate on the schedule of its present length.

        The schedulers of torch derive a rate from the one before, so after a run of two epochs has ended at rate 0, a
        third epoch would stay there.
        """
        lengths = {
            name: getattr(config.scheduler, name, None)
            for config in self.trainer.lr_scheduler_configs
            for name in self._saved_lengths
        }
        if lengths == self._saved_lengths:  # computing a rate anew would change its last digits
            return
        for config in self.trainer.lr_scheduler_configs:
            scheduler: Any = config.scheduler
            with warnings.catch_warnings():  # get_lr expects to be called by step
                warnings.simplefilter("ignore")
                closed_form = getattr(scheduler, "_get_closed_form_lr", scheduler.get_lr)
                scheduler._last_lr = closed_form()
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
                group["lr"] = rate

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what the metrics of a half-finished epoch have seen."""
        snapshots = [self.train_metrics.snapshot()]
        if self.trainer.world_size > 1:  # each rank has seen batches of its own, and one file is written
            snapshots *= self.trainer.world_size
            torch.distributed.all_gather_object(snapshots, snapshots[0])
        checkpoint["train_metrics"] = snapshots

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse weights of another network, with the difference in words; give a schedule this run's length.

        Raises:
            InputError: missing, unexpected or differently shaped weights.
        """
        for state in checkpoint.get("lr_schedulers", []) if self._open_lengths else []:
            self._saved_lengths = {name: state.pop(name) for name in self._open_lengths if name in state}
            state.pop("_schedule_phases", None)  # of OneCycleLR: they have the same length
        snapshots = checkpoint.get("train_metrics", [])
        if self._trainer is not None and len(snapshots) == self.trainer.world_size:
            self.train_metrics.restore(snapshots[self.trainer.global_rank])
        self._apply_changed_optimizer_arguments(checkpoint)
        if "state_dict" not in checkpoint:  # FSDP has loaded and checked it already
            return
        own = self.state_dict()
        given = checkpoint["state_dict"] = match_keys(checkpoint["state_dict"], own)
        if "current_model_state" in checkpoint:  # beside an average of the weights, which WeightAveraging loads
            checkpoint["current_model_state"] = match_keys(checkpoint["current_model_state"], own)
        problems = [f"missing here: {key}" for key in own.keys() - given.keys()]
        problems += [f"not in this model: {key}" for key in given.keys() - own.keys()]
        problems += [
            f"{key}: {list(given[key].shape)} in the checkpoint, {list(own[key].shape)} in the model"
            for key in own.keys() & given.keys()
            if own[key].shape != given[key].shape
        ]
        if problems:
            shown = "\n  ".join(sorted(problems)[:8])
            more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise InputError(
                f"The checkpoint's weights do not fit {type(self.network).__name__} with {self.num_classes} classes:"
                f"\n  {shown}{more}\nUse the config of the run that wrote it, or choose another checkpoint."
            )

    def _apply_changed_optimizer_arguments(self, checkpoint: dict[str, Any]) -> None:
        """Let a learning rate or the like that was changed for a resumed run win over the optimiser's saved state.

        What an argument means to each parameter group is the optimiser's own affair: one made from the old arguments is
        compared with one made from the new.
        """
        before, now = (h.get("optimizer") for h in (checkpoint.get("hyper_parameters", {}), self.hparams))
        if not isinstance(before, dict) or not isinstance(now, dict) or before["class_path"] != now["class_path"]:
            return
        saved = before.get("init_args", {})
        if all(saved.get(name) == value for name, value in now.get("init_args", {}).items()):
            return
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        known = {name: saved[name] for name in now["init_args"] if name in saved}  # a newer class may have others
        old, new = self.optimizer(trained, **known).param_groups, self.optimizer(trained).param_groups
        for state in checkpoint.get("optimizer_states", []):
            for group, was, is_now in zip(state["param_groups"], old, new, strict=False):
                changed = {name: value for name, value in is_now.items() if name != "params" and was[name] != value}
                rate, first = group["lr"], group.get("initial_lr")
                group.update(changed)
                if "lr" in changed and first is not None and self.scheduler is not None:
                    # as far down as the schedule has come; OneCycleLR and CyclicLR have rates of their own
                    scale = changed["lr"] / first if first and first == was["lr"] else 1.0
                    group["lr"], group["initial_lr"] = rate * scale, first * scale
        for state in checkpoint.get("lr_schedulers", []):
            state["base_lrs"] = [
                is_now["lr"] if rate == was["lr"] else rate
                for rate, was, is_now in zip(state.get("base_lrs", []), old, new, strict=False)
            ]

    # ---- internals

    def _logs_this_step(self) -> bool:
        trainer: Any = self.trainer
        every = trainer.log_every_n_steps
        return every > 0 and (trainer.global_step + 1) % every == 0

    @property
    def _datamodule(self) -> Any:
        return getattr(self.trainer, "datamodule", None)  # None when loaders were given to the trainer

    def _loss_weight(self) -> Tensor:
        if isinstance(self.class_weights, list):
            return torch.tensor(self.class_weights, device=self.device)
        counts = getattr(self._datamodule, "class_counts", None)
        if counts is None:
            raise InputError(
                "model.class_weights is 'balanced', but the data does not say how many images each class has."
            )
        # as in scikit-learn's class_weight="balanced"; a class without images has no loss to weigh
        weight = counts.sum() / (self.num_classes * counts.clamp(min=1))
        return weight.float().to(self.device)


def _built(name: str, factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return factory(*args, **kwargs)
    except ValueError as error:  # an argument out of its range
        raise InputError(f"model.{name}: {error}") from error


def _listing(names: list[str]) -> str:
    shown = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
    return f"{len(names)} classes ({shown})"
