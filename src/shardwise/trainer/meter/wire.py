"""Messages: every collective of one step, its group and size, by the definitions of nccl-tests.

Sizes: for all_reduce and broadcast the bytes of one rank's tensor; for all_gather, reduce_scatter and all_to_all the
bytes of the whole, all ranks' parts together. A send is between two ranks, whatever the size of the group that it is
ordered in.

[Note: counting compiled steps] A dispatch mode sees every collective, but the compiler gives a block up for good when
it meets one. Steps with compiled blocks are therefore counted at the calls of `torch.distributed`, which `fully_shard`
makes outside the blocks, and a pipeline's sends where they are ordered; collectives inside a compiled block (tensor
parallel) are not seen there.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator
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


_WHOLE: tuple[CollectiveOp, ...] = ("all_gather", "reduce_scatter", "all_to_all")
_CALLS: dict[str, CollectiveOp] = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast": "broadcast",
    "all_to_all_single": "all_to_all",
}


class Tally:
    """How many messages of each op, group and size. Groups of one rank send nothing and are not counted."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[CollectiveOp, int, int]] = Counter()

    def add(self, op: CollectiveOp, ranks: int, num_bytes: int) -> None:
        """One message."""
        if ranks > 1:
            self._seen[op, ranks, num_bytes] += 1

    def counts(self) -> tuple[CountedCollective, ...]:
        """What was counted, largest first."""
        found = [
            CountedCollective(op=op, ranks=ranks, bytes=size, count=count)
            for (op, ranks, size), count in self._seen.items()
        ]
        return tuple(sorted(found, key=lambda one: (-one.bytes * one.count, one.op)))


class WireCount(TorchDispatchMode):
    """Counts the collectives that run inside it, as operations.

    Args:
        tally: Where they are added.
    """

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation; counts it if it is a collective."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the collectives of its local parts follow
        op = _OPS.get(func.name().split(".")[0])
        result = func(*args, **(kwargs or {}))
        if op is not None:
            group = _group(args)
            if group is not None:
                self._tally.add(op, 2 if op == "send" else group.size(), _size(op, args, result))
        return result


@contextlib.contextmanager
def counting_calls(tally: Tally) -> Generator[None]:
    """Counts the collectives that are called inside it ([Note: counting compiled steps])."""
    own = {name: getattr(dist, name) for name in _CALLS}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            group = next((value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)), None)
            sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
            whole = _CALLS[name] in _WHOLE
            tally.add(_CALLS[name], dist.get_world_size(group), max(sizes) if whole else sizes[0])
            return own[name](*args, **kwargs)

        return call

    made = dist.P2POp.__init__

    def counted_send(self: Any, op: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        made(self, op, tensor, *args, **kwargs)
        if op is dist.isend:
            tally.add("send", 2, tensor.numel() * tensor.element_size())

    for name in _CALLS:
        setattr(dist, name, counted(name))
    dist.P2POp.__init__ = counted_send
    try:
        yield
    finally:
        dist.P2POp.__init__ = made
        for name, function in own.items():
            setattr(dist, name, function)


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
    if op in _WHOLE:
        return max(sizes)  # the larger of input and output is the whole
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors[:1])
