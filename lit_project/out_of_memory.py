"""Says where the memory went when it ran out, and what to do about it."""

import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lit_project.errors import InputError

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "EiB": 2**60}
_ASKED = re.compile(rf"allocate ([\d.]+) ({'|'.join(_UNITS)})")
# how CPUs, GPUs, cuBLAS and cuDNN put it; PyTorch has an exception type for some of these only
_SAID = re.compile(r"out of memory|can't allocate memory|not enough memory|_ALLOC_FAILED", re.IGNORECASE)


def explain_out_of_memory(error: BaseException, trainer: L.Trainer) -> InputError | None:
    """The message for an error that memory ran out, of the CPU or a GPU; None if it is another error.

    Weights, gradients and optimiser state are counted as they are; activations are the rest of the peak.
    """
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not (
        isinstance(error, RuntimeError) and _SAID.search(str(error))
    ):
        return None
    batch = _local(error, "batch")
    shapes = ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in _tensors(batch))
    asked = _ASKED.search(str(error))
    request = f" (it asked for another {_mib(float(asked[1]) * _UNITS[asked[2]])})" if asked else ""
    lines = [
        f"Out of memory in {trainer.state.fn.value if trainer.state.fn else 'the run'}"
        f"{f', with a batch of {shapes}' if shapes else ''}{request}.",
        _memory(trainer),
        "Try, one after the other:",
        *(f"  {option}  ({why})" for option, why in list(_remedies(trainer))[:3]),
    ]
    return InputError("\n  ".join(lines))


def _memory(trainer: L.Trainer) -> str:
    model = trainer.lightning_module
    parts = {
        "weights": _size([*model.parameters(), *model.buffers()]),
        "gradients": _size(p.grad for p in model.parameters() if p.grad is not None),
        "optimiser state": _size(
            t for optimizer in trainer.optimizers for t in _tensors(list(optimizer.state.values()))
        ),
    }
    device = trainer.strategy.root_device
    others = ""
    if device.type == "cuda":
        where, peak, rest = torch.cuda.get_device_name(device), torch.cuda.max_memory_allocated(device), "activations"
        free, total = torch.cuda.mem_get_info(device)
        foreign = total - free - torch.cuda.memory_reserved(device)
        others = f"; of {_mib(total)}, {_mib(foreign)} are taken by other processes and the driver"
    else:
        where, peak, rest = device.type.upper(), _peak_of_process(), "activations, images and the program"
    parts[rest] = max(0, peak - sum(parts.values()))
    return f"{where}, at most: {', '.join(f'{name} {_mib(size)}' for name, size in parts.items())}{others}"


def _remedies(trainer: L.Trainer) -> Iterator[tuple[str, str]]:
    """Options, the best first, each with what it does."""
    model, fitting = trainer.lightning_module, trainer.state.fn == "fit"
    batch_size = getattr(trainer.datamodule, "batch_size", None) or 1  # type: ignore[attr-defined]
    if batch_size > 1:
        accumulate = f" --trainer.accumulate_grad_batches={2 * trainer.accumulate_grad_batches}" if fitting else ""
        yield (
            f"--data.batch_size={batch_size // 2}{accumulate}",
            "the same images an optimiser step, half the activations",
        )
    if "32" in str(trainer.precision):
        yield "--trainer.precision=bf16-mixed", "activations of half the size"
    if fitting and model.hparams.get("gradient_checkpointing") is False:
        yield "--model.gradient_checkpointing=true", "a third more time, far fewer activations"
    if fitting and torch.cuda.device_count() > 1:
        yield "--config configs/trainer/fsdp.yaml", "weights, gradients and optimiser state spread over the GPUs"
    yield "--model.network=… with a smaller one", "less of everything"
    yield "--data.image_size=… with a smaller one, where the data has it", "activations shrink with the area"


def _local(error: BaseException, name: str) -> Any:
    """The innermost local variable of this name on the way to where ``error`` was raised."""
    found, traceback = None, error.__traceback__
    while traceback is not None:
        found = traceback.tb_frame.f_locals.get(name, found)
        traceback = traceback.tb_next
    return found


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _peak_of_process() -> int:
    """The most bytes this process has had in memory; 0 on Windows, where it cannot be told."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
