"""Micro-batches of the next step, made while the card computes this one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.levers.precision.apply import compute_dtype
from shardwise.trainer.attention import takes_bounds
from shardwise.trainer.data.batches import BatchOptions, BatchPlan
from shardwise.trainer.data.collate import Batch, CollateOptions, Layout, collate
from shardwise.trainer.data.store import TokenizedSet
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class BatchForm:
    """How a run's micro-batches look, whatever their size."""

    layout: Layout
    is_static: bool
    """Whether shapes take few values, because each new one makes the compiler start again."""
    parts: int = 1
    """Into how many equal parts a row must be cut: tp under sequence parallel."""


def batch_form(run: RunFile, model: Any, strategy: Strategy, device: torch.device) -> BatchForm:
    """Packed documents are told apart by their bounds where the attention takes them, otherwise by a mask."""
    layout: Layout = "padded"
    if run.packing:
        flat = run.attn_implementation == "flash" or takes_bounds(model, device, compute_dtype(strategy))
        layout = "flat" if flat else "packed"
    parts = strategy.tp if strategy.sequence_parallel else 1
    return BatchForm(layout=layout, is_static=strategy.compile_blocks, parts=parts)


def collate_options(form: BatchForm, cut: BatchOptions, pad_token_id: int) -> CollateOptions:
    """The options of a set that is cut into micro-batches so; a last, smaller one is filled up if shapes are static."""
    plain = CollateOptions(pad_token_id=pad_token_id, layout=form.layout, pad_to_multiple_of=math.lcm(8, form.parts))
    if not form.is_static:
        return plain
    if form.layout == "flat":
        assert cut.max_length is not None, "packing without a budget"
        return replace(plain, row_length=_up(cut.micro_batch * cut.max_length, form.parts), pad_documents=True)
    row_length = _up(cut.max_length, form.parts) if form.layout == "packed" and cut.max_length is not None else None
    return replace(plain, num_rows=cut.micro_batch, row_length=row_length)


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


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
