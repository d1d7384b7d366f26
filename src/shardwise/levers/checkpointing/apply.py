"""Activation checkpointing of the blocks: keep less in forward, compute again in backward.

full        a block keeps its input alone
selective   a block keeps the outputs of attention and of every second matrix product as well, which are the dear ones
            to compute again; everything else (norms, rotations, activations) is cheap
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from shardwise.vocabulary.strategy import Checkpointing


def apply(blocks: nn.ModuleList, kind: Checkpointing) -> None:
    """Wraps every block in place, without reentrant autograd (which would lose gradients of frozen inputs)."""
    if kind == "none":
        return
    options: dict[str, Any] = {"context_fn": _selective_contexts} if kind == "selective" else {}
    for index, block in enumerate(blocks):
        blocks[index] = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT, **options)


def _attention_ops() -> frozenset[Any]:
    """Every attention kernel that this torch has."""
    names = (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    found = [getattr(torch.ops.aten, name, None) for name in names]
    with contextlib.suppress(ImportError):
        importlib.import_module("torch.nn.attention.varlen")  # which makes the kernel for documents in one row known
        found.append(getattr(torch.ops.torch_attn, "_varlen_attn", None))
    return frozenset(packet.default for packet in found if packet is not None)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_selective_policy())


def _selective_policy() -> Callable[..., CheckpointPolicy]:
    """A new policy for one forward of one block; it counts the products, apart in forward and recomputation."""
    attention = _attention_ops()
    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default}
    seen = {False: 0, True: 0}

    def decide(context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if op in attention:
            return CheckpointPolicy.MUST_SAVE
        if op in products:
            seen[context.is_recompute] += 1
            if seen[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return decide
