"""Micro-batches of the next step, made while the card computes this one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from shardwise.trainer.data.batches import BatchPlan
from shardwise.trainer.data.collate import Batch, CollateOptions, collate
from shardwise.trainer.data.store import TokenizedSet


@dataclass(frozen=True, kw_only=True, eq=False)
class DataSource:
    """A tokenized set, cut into steps, for one rank."""

    tokenized: TokenizedSet
    """The set, or the first window of a stream."""
    plan: BatchPlan
    collate: CollateOptions
    data_rank: int
    device: torch.device

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of one step, on the host; pinned if they go to a card."""
        tokenized = self.plan.set_at(step)
        made = [collate(tokenized, micro, self.collate) for micro in self.plan.for_rank(step, self.data_rank)]
        return [batch.pin_memory() for batch in made] if self.device.type == "cuda" else made


class Feeder:
    """Gives the micro-batches of a step and begins with those of the next.

    Args:
        source: Where they come from.
    """

    def __init__(self, source: DataSource) -> None:
        self._source = source
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shardwise-batches")
        self._next: tuple[int, Future[list[Batch]]] | None = None

    def take(self, step: int) -> list[Batch]:
        """The micro-batches of a step, on the host."""
        if self._next is not None and self._next[0] == step:
            ready = self._next[1].result()
        else:
            ready = self._source.batches(step)
        self._next = None
        if step + 1 < self._source.plan.num_steps:
            self._next = (step + 1, self._thread.submit(self._source.batches, step + 1))
        return ready

    def on_device(self, batches: list[Batch]) -> Iterator[Batch]:
        """The same on the device, each copied as it is needed."""
        for batch in batches:
            yield batch.to(self._source.device)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
