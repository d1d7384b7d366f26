"""Measured: what a run's meter writes to `measured.json`, for `verify` to lay beside the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwise.vocabulary.cluster import CollectiveOp
from shardwise.vocabulary.memory import Category
from shardwise.vocabulary.strategy import Strategy
from shardwise.vocabulary.timeline import StepTimeline


@dataclass(frozen=True, kw_only=True)
class CountedCollective:
    """Equal messages of one optimizer step, as they were really issued."""

    op: CollectiveOp
    ranks: int
    bytes: int
    """Of one message, as nccl-tests defines the size."""
    count: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One greedy answer before and after training."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run as its meter saw it; None where nothing was measured."""

    strategy: Strategy | None = None
    peak_by_category: Mapping[Category, int] | None = None
    """Bytes of each category at the instant of the peak, on the fullest rank."""
    peak_phase: Literal["forward", "loss", "backward", "optimizer"] | None = None
    """The part of the step in which that peak was."""
    stored_by_category: Mapping[Category, int] | None = None
    """Bytes of parameters, gradients and optimizer states that one rank holds, counted tensor by tensor."""
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    device_bytes: int | None = None
    memory_note: str = ""
    """How memory was measured: torch.cuda's statistics, or a tracker of storages on CPU."""
    step: StepTimeline | None = None
    """Median step after warm-up; its parts from one profiled step."""
    tokens_per_s: float | None = None
    """Over all ranks, padding included."""
    real_tokens_per_s: float | None = None
    """Over all ranks, padding not counted."""
    collectives: tuple[CountedCollective, ...] = ()
    samples: tuple[Sample, ...] = ()
    held_out_loss_before: float | None = None
    held_out_loss_after: float | None = None
    num_steps: int = 0
    command: str = ""
    """What started the run."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
