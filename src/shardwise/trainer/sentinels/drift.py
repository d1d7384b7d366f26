"""Replicas stay equal: what several ranks hold of the same parameter is the same to the last bit.

A checksum of each tensor's bits is the sum of its 32-bit words as integers: exact, in any order, one pass over memory.
Parts are compared under the name of the parameter and the place of the part, so it does not matter why two ranks hold
the same: replicas, frozen weights kept whole, norms under tensor parallel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from shardwise.errors import TrainingError
from shardwise.trainer.checkpoint.state import clean_name
from shardwise.trainer.sentinels.words import name_ranks, some

Place = tuple[str, tuple[int, ...]]
"""A parameter's name, and where along its mesh's sharded axes the part lies."""


@torch.no_grad()
def checksums(model: nn.Module) -> dict[Place, int]:
    """Of everything that this rank holds, buffers included. Waits for the card once."""
    held: dict[Place, Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        held[(clean_name(name), _place(tensor))] = _local(tensor)
    sums = [_sum_of_bits(tensor) for tensor in held.values()]
    return dict(zip(held, torch.stack(sums).tolist(), strict=True)) if sums else {}


def _place(tensor: Tensor) -> tuple[int, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return tuple(
        -1 if isinstance(placement, Replicate) else number
        for number, placement in zip(coordinate, tensor.placements, strict=True)
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Sum of the 32-bit words, or of the elements of another size; the rest of odd lengths is taken in: []."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 4:
        flat = flat.clone()  # words must start where words start
    flat = flat.view(torch.uint8)
    whole = flat.numel() // 4 * 4
    words, rest = flat[:whole].view(torch.int32), flat[whole:]
    return words.sum(dtype=torch.int64) + rest.sum(dtype=torch.int64)


def check_drift(model: nn.Module, group: dist.ProcessGroup, step: int) -> None:
    """Compares the checksums of all ranks; every rank must call it at the same steps.

    Args:
        model: The model as it is split.
        group: All ranks, over gloo.
        step: Optimizer steps done, for the message.

    Raises:
        TrainingError: Two ranks hold different values of the same part; names parameters and ranks.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, checksums(model), group=group)
    differing: dict[str, set[int]] = {}
    first: dict[Place, int] = {}
    for rank, sums in enumerate(everyone):
        for place, value in sums.items():
            if first.setdefault(place, value) != value:
                differing.setdefault(place[0], set()).add(rank)
    if differing:
        ranks = set[int]().union(*differing.values())
        raise TrainingError(
            f"After step {step} the replicas are not equal: {len(differing)} tensors of {name_ranks(ranks)} differ "
            f"from those of the first rank that holds them: {some(sorted(differing))}. A card or the wire has made a "
            "mistake, or something has written into the weights. Go on from an earlier checkpoint with --resume; if "
            "it happens again, leave that rank's card out."
        )
