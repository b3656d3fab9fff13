"""Gradient checkpointing: trade a second forward pass for the memory of the first one's activations."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from lit_project.errors import InputError


def checkpoint_blocks(network: nn.Module) -> int:
    """Have each block of a network keep only its input while training, and compute the rest again in the backward pass.

    Blocks are the members of ``nn.Sequential`` and ``nn.ModuleList`` that have layers of their own and are not again
    such a sequence of blocks. Results, also running statistics, are the same as without. A network without any brings
    timm's method ``set_grad_checkpointing``, by which running statistics count each batch twice. Source: Chen et al.,
    "Training Deep Nets with Sublinear Memory Cost", 2016 (https://arxiv.org/abs/1604.06174).

    Returns:
        The number of blocks.

    Raises:
        InputError: the network has no such blocks.
    """
    blocks = list(_blocks(network))
    if not blocks:
        if callable(enable := getattr(network, "set_grad_checkpointing", None)):
            enable()
            return 1
        raise InputError(
            f"model.gradient_checkpointing: {type(network).__name__} has no blocks of several layers in a Sequential "
            "or ModuleList, and no method set_grad_checkpointing. Leave it false, or gather the layers in blocks."
        )
    for block in blocks:
        block.forward = partial(_forward, block, block.forward)
    return len(blocks)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, nn.Sequential | nn.ModuleList) and _has_layers(child) and not _holds_blocks(child):
            yield child
        else:
            yield from _blocks(child)


def _holds_blocks(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList) and any(map(_has_layers, module.children()))


def _has_layers(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _forward(block: nn.Module, original: Any, *inputs: Any, **named: Any) -> Any:
    if not block.training:
        return original(*inputs, **named)
    if torch.compiler.is_compiling():  # the compiler takes no such contexts, and writes each buffer once anyway
        return checkpoint(original, *inputs, use_reentrant=False, **named)
    return checkpoint(original, *inputs, use_reentrant=False, context_fn=partial(_contexts, block), **named)


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _frozen_running_statistics(block)


@contextmanager
def _frozen_running_statistics(block: nn.Module) -> Iterator[None]:
    """The second pass must not count the batch a second time, but save the same tensors for the gradient."""
    norms = [module for module in block.modules() if isinstance(module, _NormBase)]
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
