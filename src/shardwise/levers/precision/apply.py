"""Dtypes: what is stored, what is computed in, what crosses the wire.

| precision | trained weights | frozen weights | compute | gradients on the wire |
|-----------|-----------------|----------------|---------|-----------------------|
| bf16      | fp32 (masters)  | bf16           | bf16    | reduce_dtype          |
| bf16_pure | bf16            | bf16           | bf16    | reduce_dtype          |
| fp32      | fp32            | fp32           | fp32    | fp32                  |
| fp8       | as bf16; the blocks' matrix products in fp8 (`apply_fp8.py`)             |
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise.vocabulary.strategy import Strategy


def compute_dtype(strategy: Strategy) -> torch.dtype:
    """Dtype of products and of the residual stream."""
    return torch.float32 if strategy.precision == "fp32" else torch.bfloat16


def master_dtype(strategy: Strategy) -> torch.dtype:
    """Dtype in which a trained parameter is stored and updated."""
    return torch.bfloat16 if strategy.precision == "bf16_pure" else torch.float32


def reduce_dtype(strategy: Strategy) -> torch.dtype:
    """Dtype in which gradients are summed over ranks and micro-batches."""
    bf16 = strategy.reduce_dtype == "bf16" and strategy.precision != "fp32"
    return torch.bfloat16 if bf16 else torch.float32


def policy(strategy: Strategy) -> MixedPrecisionPolicy:
    """The same in the words of `fully_shard`; empty where nothing is mixed."""
    if strategy.precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=compute_dtype(strategy), reduce_dtype=reduce_dtype(strategy))


def apply(model: nn.Module, strategy: Strategy) -> None:
    """Casts every parameter to the dtype in which it is stored. Tied parameters stay tied."""
    for parameter in model.parameters():
        wanted = master_dtype(strategy) if parameter.requires_grad else compute_dtype(strategy)
        if parameter.is_floating_point() and parameter.dtype != wanted:
            parameter.data = parameter.data.to(wanted)
