"""Collective, Span and StepTimeline: what crosses the wire, and when things happen in one optimizer step.

The planner predicts the timeline, the meter measures it, the report draws it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.vocabulary.cluster import CollectiveOp
from shardwise.vocabulary.limits import Degree, Predicted
from shardwise.vocabulary.strategy import Axis

Pass = Literal["forward", "backward", "optimizer"]
Site = Literal["embedding", "block", "root", "step"]
Every = Literal["micro_batch", "step"]
SpanKind = Literal["compute", "wire", "bubble", "optimizer", "host"]
COMPUTE_LANE = "compute"


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One kind of message: the same op, size and place, `count` times an optimizer step.

    The size is nccl-tests': for all_reduce and broadcast the bytes of one rank's tensor; for all_gather and
    reduce_scatter the bytes of the whole (all ranks' parts together).
    """

    op: CollectiveOp
    axis: Axis
    ranks: Degree
    """Members of the group."""
    bytes: Predicted
    """Of one message."""
    count: Predicted
    """Messages an optimizer step."""
    site: Site
    """embedding: its own group (untied models); block: one for each block; root: what is left, mostly norm and head;
    step: once, after all else."""
    during: Pass
    every: Every = "micro_batch"
    """step: only with the last micro-batch (backward) or the first (forward)."""
    hides_behind: Literal["compute", "nothing"] = "compute"
    """Whether it may overlap with the compute of neighboring blocks."""
    name: str = ""
    formula: str = ""
    source: str = ""

    @property
    def wire_bytes(self) -> int:
        """Bytes that one rank sends (and receives) for all messages of a step, by a ring."""
        return round(self.count * self.bytes * bus_factor(self.op, self.ranks))


def bus_factor(op: CollectiveOp, ranks: int) -> float:
    """Bytes each rank must send for one byte of message size, by a ring; nccl-tests' factor from algbw to busbw.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    if ranks <= 1:
        return 0.0
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that takes time on a lane."""

    lane: str
    """`compute`, or the axis whose group carries the message."""
    kind: SpanKind
    name: str
    start_seconds: float
    seconds: float

    @property
    def end_seconds(self) -> float:
        """When it is over."""
        return self.start_seconds + self.seconds


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """One optimizer step of one rank. The four parts add up to the step."""

    seconds: float
    """From the first forward to the end of the optimizer's step."""
    compute_seconds: float
    """Blocks, loss and optimizer on the compute lane."""
    exposed_wire_seconds: float
    """Compute lane waiting for a message."""
    bubble_seconds: float = 0.0
    """Compute lane idle because another pipeline stage is not ready."""
    host_seconds: float = 0.0
    """Compute lane waiting for the host: launches, data, logging."""
    wire_seconds: float = 0.0
    """All messages, hidden ones included."""
    optimizer_seconds: float = 0.0
    """The part of compute_seconds that is the optimizer's step."""
    spans: tuple[Span, ...] = ()
    """The lanes, if they were kept."""
