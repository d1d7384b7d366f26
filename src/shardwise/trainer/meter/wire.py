"""Messages: every collective of one step, its group and size, by the definitions of nccl-tests.

Sizes: for all_reduce and broadcast the bytes of one rank's tensor; for all_gather, reduce_scatter and all_to_all the
bytes of the whole, all ranks' parts together.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shardwise.vocabulary.cluster import CollectiveOp
from shardwise.vocabulary.measured import CountedCollective

_OPS: dict[str, CollectiveOp] = {
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::broadcast_": "broadcast",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::send": "send",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::broadcast": "broadcast",
    "_c10d_functional::all_to_all_single": "all_to_all",
}


class WireCount(TorchDispatchMode):
    """Counts the collectives that run inside it. Groups of one rank send nothing and are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: Counter[tuple[CollectiveOp, int, int]] = Counter()

    def counts(self) -> tuple[CountedCollective, ...]:
        """What was counted, largest first."""
        found = [
            CountedCollective(op=op, ranks=ranks, bytes=size, count=count)
            for (op, ranks, size), count in self._seen.items()
        ]
        return tuple(sorted(found, key=lambda one: (-one.bytes * one.count, one.op)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation; counts it if it is a collective."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the collectives of its local parts follow
        op = _OPS.get(func.name().split(".")[0])
        result = func(*args, **(kwargs or {}))
        if op is not None:
            group = _group(args)
            if group is not None and group.size() > 1:
                self._seen[op, group.size(), _size(op, args, result)] += 1
        return result


def _group(args: Any) -> Any:
    """The process group among an operation's arguments: as an object, or by name as the functional ones have it."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except RuntimeError:  # it was the ReduceOp
                continue
    names = [value for value in args if isinstance(value, str)]
    return _by_name(names[-1]) if names else None


def _by_name(name: str) -> Any:
    from torch._C import _distributed_c10d as c10d

    resolve: Any = c10d._resolve_process_group  # pyright: ignore[reportPrivateUsage]
    return resolve(name)


def _size(op: CollectiveOp, args: Any, result: Any) -> int:
    tensors = [value for value in tree_iter(args) if isinstance(value, Tensor)]
    made = [value for value in tree_iter(result) if isinstance(value, Tensor)]
    sizes = [tensor.numel() * tensor.element_size() for tensor in (*tensors, *made)]
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return max(sizes)  # the larger of input and output is the whole
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors[:1])
