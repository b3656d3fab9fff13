"""Stops a run at the first loss that is not finite, before the optimiser uses it, and says where it arose."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lit_project.callbacks.keyed_randomness import seed_step
from lit_project.checkpoints import AtomicCheckpointIO, SaveError
from lit_project.errors import InputError

# Reading every gradient would cost as much as clipping does. A value that is not finite spreads on its way back, and
# reaches a bias or a normalisation nearly always; if not, the weights it spoils make the next loss not finite.
_SMALL = 4096


class NonFinite(Callback):
    """Ends the run when the training loss is NaN or infinite, and saves what is needed to look into it.

    The error names the step, the batch and the images in it, the learning rate, the gradient norm, and the first layer
    whose output is not finite; it is found by running the batch through the model again. The folder ``nonfinite`` of
    the run gets ``state.ckpt``, a checkpoint of the state before this batch, and ``batch.pt``, the batch as the model
    got it. With several processes, those of rank 1 and higher have the rank in their names. With sharded weights there
    is only the batch, since one rank alone can run no forward.

    On a CPU a gradient that is not finite stops the run, too. Not so where float16 is scaled: there, gradients overflow
    now and then, and the step is skipped. A validation loss that is not finite is only a warning.

    What it costs: on a CPU some 0.03 ms a step, mostly Lightning's calls of the hooks. On a GPU the loss is copied to
    the host behind the forward pass, and waited for when the backward pass has been queued: the device has work to do
    meanwhile. Waiting for the gradients would leave it idle, so there they are not looked at; a step with one that is
    not finite is taken, and the next loss shows it.

    Raises:
        InputError: the loss or a gradient is not finite.
    """

    def __init__(self) -> None:
        self._batch: tuple[Any, int] | None = None
        self._loss: Tensor | None = None
        self._copy: _AsyncCopy | None = None
        # the forward pass has changed the statistics of batch normalisation when the loss is seen
        self._buffers: list[Tensor] = []
        self._before: list[Tensor] = []
        self._first_batch = True
        self._small: list[nn.Parameter] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._buffers = list(pl_module.buffers())
        self._before = [buffer.clone() for buffer in self._buffers]
        self._first_batch = True
        self._folder = Path(trainer.strategy.broadcast(trainer.default_root_dir)) / "nonfinite"  # rank 0 has made it
        if pl_module.device.type == "cpu" and _scaler(trainer) is None:
            self._small = [parameter for parameter in pl_module.parameters() if parameter.numel() <= _SMALL]
        self._copy = _AsyncCopy() if pl_module.device.type == "cuda" else None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch = batch, batch_idx
        if self._before:
            torch._foreach_copy_(self._before, self._buffers)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        self._loss = loss.detach()
        if self._copy:
            self._copy.start(self._loss)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._check(trainer, pl_module)
        gradients = [parameter.grad.flatten() for parameter in self._small if parameter.grad is not None]
        if gradients and not math.isfinite(torch.cat(gradients).sum().item()):
            self._stop(trainer, pl_module, "A gradient is not finite, though the loss is")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._check(trainer, pl_module)  # a batch that was only accumulated has had no optimiser step
        self._batch = None
        if self._first_batch:  # now it is known which buffers a batch changes; the others need no copy
            pairs = [pair for pair in zip(self._buffers, self._before, strict=True) if not torch.equal(*pair)]
            self._buffers, self._before = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            self._first_batch = False

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, value in trainer.callback_metrics.items():
            if name.startswith("val") and "loss" in name and not math.isfinite(value):
                rank_zero_warn(f"{name} is {value.item()} after epoch {trainer.current_epoch}. The training goes on.")

    # ---- internals

    def _check(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loss, self._loss = self._loss, None
        if loss is None:
            return
        value = self._copy.wait() if self._copy else loss.item()
        if not math.isfinite(value):
            # what comes here is multiplied by the scale of float16, and that product may overflow, too
            if math.isinf(value) and _scaler(trainer) and self._rerun(trainer, pl_module) is None:
                return
            self._stop(trainer, pl_module, f"The loss is {value}")

    def _stop(self, trainer: L.Trainer, pl_module: L.LightningModule, what: str) -> None:
        assert self._batch is not None
        gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients).item() if gradients else math.nan
        rates = sorted({group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups})
        indices = getattr(trainer.datamodule, "batch_indices", None)  # type: ignore[attr-defined]
        lines = [
            f"{what}, at step {trainer.global_step} (epoch {trainer.current_epoch}, batch {self._batch[1]} of "
            f"{trainer.num_training_batches}, rank {trainer.global_rank}). The optimiser has not used it.",
            self._where(trainer, pl_module, indices),
            f"learning rate {', '.join(f'{rate:g}' for rate in rates)}, gradient norm {norm:g}",
        ]
        if isinstance(indices, Tensor):
            shown = ", ".join(str(index) for index in indices[:16].tolist())
            lines.append(f"images, by position in the training data: {shown}{', …' if len(indices) > 16 else ''}")
        lines.append(self._save(trainer, indices))
        lines.append(
            "If the loss had grown before, lower the learning rate (--model.optimizer.lr). --config "
            "configs/trainer/debug.yaml names the operation whose gradient is not finite."
        )
        raise InputError("\n  ".join(lines))

    def _restore_buffers(self) -> None:
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(before)

    def _where(self, trainer: L.Trainer, pl_module: L.LightningModule, indices: Tensor | None) -> str:
        assert self._batch is not None
        for tensor in _floats(self._batch[0]):
            bad = (~tensor.isfinite()).flatten(1).any(1) if tensor.ndim > 1 else ~tensor.isfinite()
            if bad.any():
                rows = bad.nonzero().flatten().tolist()
                images = [int(indices[row]) for row in rows] if isinstance(indices, Tensor) else rows
                of = "of the training data" if isinstance(indices, Tensor) else "of the batch"
                return (
                    f"the model was given images that are not finite: {len(rows)}, such as number {images[0]} {of}. "
                    "Look at the data, and at your own transforms in data.augment."
                )
        spoilt = [name for name, weight in pl_module.named_parameters() if not weight.isfinite().all()]
        note = f"; not finite before this batch: {', '.join(spoilt[:3])}{', …' if spoilt[3:] else ''}" if spoilt else ""
        if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
            return f"the weights are sharded, so the layer was not looked for{note}"
        elsewhere = ", on another rank," if trainer.world_size > 1 else ""
        finite = f"running the batch again gave finite values: it arises in the backward pass{elsewhere} or by chance"
        return (self._rerun(trainer, pl_module) or finite) + note

    def _rerun(self, trainer: L.Trainer, pl_module: L.LightningModule) -> str | None:
        """Where the forward pass first gives a value that is not finite, in words; None if it gives none."""
        assert self._batch is not None
        self._restore_buffers()
        seed_step(trainer, self._batch[1])  # for the dropout that the step had
        with torch.no_grad(), trainer.precision_plugin.train_step_context(), torch.compiler.set_stance("force_eager"):
            try:
                with _watched(pl_module):
                    # not through the strategy: that of DDP would wait for the other ranks
                    output = pl_module.training_step(*self._batch)
            except _FoundError as found:
                return str(found)
        loss: Any = output["loss"] if isinstance(output, dict) else output
        return None if math.isfinite(loss) else "the output of every layer is finite: it arises in the loss itself"

    def _save(self, trainer: L.Trainer, indices: Tensor | None) -> str:
        assert self._batch is not None
        suffix = f"-rank{trainer.global_rank}" if trainer.global_rank else ""
        self._restore_buffers()
        batch, batch_idx = move_data_to_device(self._batch, torch.device("cpu"))
        record = {"batch": batch, "batch_idx": batch_idx, "indices": indices}
        files = {f"batch{suffix}.pt": record | {"epoch": trainer.current_epoch, "step": trainer.global_step}}
        if isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
            # Trainer.save_checkpoint writes on rank 0 only, and waits for the other ranks
            files[f"state{suffix}.ckpt"] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        try:
            for name, content in files.items():
                AtomicCheckpointIO().save_checkpoint(content, self._folder / name)
        except SaveError as error:
            return f"the batch and the state before it could not be saved: {error.strerror}"
        return f"saved in {self._folder}: {' and '.join(files)} (before this batch)"


class _AsyncCopy:
    """Brings a scalar from the GPU without waiting for what is queued after it."""

    def __init__(self) -> None:
        self.host = torch.empty((), pin_memory=True)
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def start(self, scalar: Tensor) -> None:
        self.host.copy_(scalar.float().reshape(()), non_blocking=True)
        self.done.record()

    def wait(self) -> float:
        self.done.synchronize()
        return self.host.item()


class _FoundError(Exception):
    """Ends a forward pass; the message says where it has become infinite or NaN."""


@contextmanager
def _watched(model: nn.Module) -> Iterator[None]:
    """Raise ``_FoundError`` as soon as a submodule is given or returns a value that is not finite."""
    running: list[str] = []
    done = "the beginning"

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not _finite((args, kwargs)):
            within = running[-1] if running else type(model).__name__
            raise _FoundError(f"it arises in the forward of {within}, between {done} and {name}")
        running.append(name)

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        nonlocal done
        if not _finite(output):
            raise _FoundError(f"the first layer whose output is not finite: {name} ({type(module).__name__})")
        running.pop()
        done = name

    handles = []
    for name, module in model.named_modules():
        if module is not model:
            first: Callable[..., None] = partial(before, name)
            handles.append(module.register_forward_pre_hook(first, with_kwargs=True))
            handles.append(module.register_forward_hook(partial(after, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _floats(values: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield leaf


def _finite(values: Any) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in _floats(values))


def _scaler(trainer: L.Trainer) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)
