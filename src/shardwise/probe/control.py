"""What ranks agree on while they measure: barriers, the slowest rank, and whether time is left.

Travels over a gloo group of its own on CPU tensors, so that it neither opens NCCL communicators nor waits in a stream.
Every decision that changes how many messages are sent must come from here, or the ranks would wait for each other
forever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.probe.budget import END_SECONDS, Budget


class Control:
    """The ranks' common mind.

    Args:
        budget: When to stop measuring, from the probe's start.
        seconds_spent: What the start has cost already.
        say: Takes a line of progress; called on rank 0 only.
    """

    def __init__(self, budget: Budget, seconds_spent: float, say: Callable[[str], None]) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._group: Any = dist.new_group(backend="gloo")
        self._started = time.monotonic() - seconds_spent
        self._budget = budget
        self._say = say

    @property
    def seconds(self) -> float:
        """This rank's time since the start of the probe."""
        return time.monotonic() - self._started

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier(group=self._group)

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The maximum over the ranks of each value; every rank gives equally many."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def fastest(self, values: Sequence[float]) -> list[float]:
        """The minimum over the ranks of each value."""
        return self._reduce(values, dist.ReduceOp.MIN)

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum over the ranks of each value."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def seconds_left(self, share: float = 1.0) -> float:
        """Agreed: what is left of `share` of the aim on the rank that has least; never below 0."""
        return max(0.0, self._budget.aim_seconds * share - self.slowest([self.seconds])[0])

    def seconds_to_limit(self) -> float:
        """Agreed: until the limit of the whole command, less its end; below 0 once it is over."""
        return self._budget.limit_seconds - END_SECONDS - self.slowest([self.seconds])[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def say(self, text: str) -> None:
        """Show progress."""
        if self.rank == 0:
            self._say(text)

    def _reduce(self, values: Sequence[float], op: Any) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor, op=op, group=self._group)
        return tensor.tolist()
