"""Offload by `fully_shard`: what it manages waits in pinned host memory, and is updated there.

| offload    | weights on the card                        | gradients               | masters, moments, update |
|------------|--------------------------------------------|-------------------------|--------------------------|
| optimizer  | whole, in compute dtype, for a step or     | down as they are        | on the host              |
|            | (stage 2) a micro-batch                    | reduced                 |                          |
| parameters | one block at a time                        | down as they are        | on the host              |
|            |                                            | reduced                 |                          |

Both are torch's one policy; they differ in when a gathered block is given back. Frozen weights that each card keeps
whole (adapters, below stage 3) are not managed and stay on the card. On processors the host is the device: the same
code runs, and nothing is copied.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from shardwise.vocabulary.strategy import Strategy


def policy(strategy: Strategy, device: torch.device) -> OffloadPolicy:
    """What `fully_shard` is told. Pinned only where there is a card to copy to."""
    if strategy.offload == "none":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device.type == "cuda")


def home(parameter: torch.Tensor, strategy: Strategy, device: torch.device) -> torch.device:
    """Where a parameter lies between steps: on the host if `fully_shard` manages it and it is offloaded."""
    waits = strategy.offload != "none" and isinstance(parameter, DTensor)
    return torch.device("cpu") if waits else device


def problems(strategy: Strategy) -> list[str]:
    """What cannot be offloaded."""
    found: list[str] = []
    if strategy.offload == "parameters" and strategy.zero_stage < 3 and strategy.data_parallel > 1:
        found.append(
            f"offload: parameters takes up one block at a time, but stage {strategy.zero_stage} on "
            f"{strategy.data_parallel} ranks keeps weights whole on each card. Use stage 3, or offload: optimizer."
        )
    if strategy.offload == "optimizer" and strategy.zero_stage == 3:
        found.append(
            "offload: optimizer keeps the weights on the card, which stage 3 gives back after each block. Use offload: "
            "parameters, or a lower stage."
        )
    return found
