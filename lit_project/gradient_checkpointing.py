"""Gradient checkpointing: trade a second forward pass for the memory of the first one's activations."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from lit_project.errors import InputError


def checkpoint_blocks(network: nn.Module) -> int:
    """Have each block of a network keep only its input while training, and compute the rest again in the backward pass.

    Blocks are the members of the outermost ``nn.Sequential`` and ``nn.ModuleList`` that have blocks of several layers;
    a network of another form brings timm's method ``set_grad_checkpointing``. Results, also running statistics, are
    the same as without. Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016
    (https://arxiv.org/abs/1604.06174).

    Returns:
        The number of blocks.

    Raises:
        InputError: the network has no such blocks.
    """
    if callable(enable := getattr(network, "set_grad_checkpointing", None)):
        enable()
        return 1
    blocks = list(_blocks(network))
    if not blocks:
        raise InputError(
            f"model.gradient_checkpointing: {type(network).__name__} has no blocks in a Sequential or ModuleList, and "
            "no method set_grad_checkpointing."
        )
    for block in blocks:
        original = block.forward
        block.forward = partial(_forward, block, original)
    return len(blocks)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        members = [member for member in child.children() if any(True for _ in member.children())]
        if isinstance(child, nn.Sequential | nn.ModuleList) and members:
            yield from members
        else:
            yield from _blocks(child)


def _forward(block: nn.Module, original: Any, *inputs: Any) -> Any:
    if not block.training:
        return original(*inputs)
    return checkpoint(original, *inputs, use_reentrant=False, context_fn=partial(_contexts, block))


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _without_running_statistics(block)


@contextmanager
def _without_running_statistics(block: nn.Module) -> Iterator[None]:
    """The second pass must not count the batch a second time."""
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True
