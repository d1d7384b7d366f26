"""Refusal, Candidate and Plan: the answer, with why and why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.memory import MemoryBreakdown
from shardwise.vocabulary.strategy import Strategy
from shardwise.vocabulary.timeline import Collective, StepTimeline


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a strategy is not taken: why not is data too."""

    strategy: Strategy | None
    """None if the refusal concerns the whole job."""
    rule: str
    """A short fixed name, such as `heads_divide_by_tp` or `does_not_fit`."""
    message: str
    """The numbers, and the way out."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A legal strategy with its price."""

    strategy: Strategy
    memory: MemoryBreakdown
    step: StepTimeline
    collectives: tuple[Collective, ...]
    tokens_per_s: float
    """Over all cards, padding included."""
    model_flops_utilization: float
    """MFU: model FLOPs (6 x matmul parameters + 6 x layers x query width x sequence, a token; recomputation not
    counted) over the card's dense peak."""
    fits: bool
    probability_of_oom: float
    """Chance that the memory which is needed exceeds the card, from the spread of past predictions."""
    memory_interval_bytes: tuple[int, int]
    """Of the same quantity, `memory.needed_bytes`: 5th and 95th percentile. Cached blocks come on top of it."""
    step_interval_seconds: tuple[float, float]
    """Step time: 5th and 95th percentile."""
    host_bytes: int = 0
    """Host memory of one machine: its ranks' processes, what they offload, and the staging of a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A sentence that helps, its rule, and the command that does it."""

    rule: str
    message: str
    command: str = ""
    price: str = ""
    """What it costs in time or memory."""


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The arithmetic on the back of an envelope: headline bandwidth, no latency, bytes counted once."""

    name: str
    value: float
    unit: str
    formula: str
    calibrated: float | None = None
    """The same quantity as the planner counts it for the recommended strategy, in the same unit."""


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A figure the plan rests on."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything needed to run a job and to judge it later."""

    job: Job
    cluster: Cluster
    recommended: Candidate | None
    """None if nothing fits; the advice then says what would."""
    reason: str
    """Why this one, in plain words."""
    rules: tuple[str, ...] = ()
    """The decision rules that spoke, in order."""
    candidates: tuple[Candidate, ...] = ()
    """Best first; those that do not fit come last."""
    refusals: tuple[Refusal, ...] = ()
    advice: tuple[Advice, ...] = ()
    headline: tuple[Headline, ...] = ()
    facts: tuple[Fact, ...] = ()
    version: str = ""
    """Of shardwise."""

    def contradictions(self) -> Iterator[str]:
        """A strategy that does not belong to the job and the cards beside it, as in a plan edited by hand."""
        if self.recommended is None:
            return
        strategy = self.recommended.strategy
        if strategy.num_ranks != self.cluster.num_gpus:
            yield (
                f"recommended.strategy has {strategy.num_ranks} ranks, and the cluster {self.cluster.num_gpus} cards; "
                "plan again instead of editing"
            )
        if strategy.global_batch_size != self.job.global_batch_size:
            yield (
                f"recommended.strategy gives {strategy.global_batch_size:,} sequences a step, and the job asks for "
                f"{self.job.global_batch_size:,}; plan again instead of editing"
            )
