"""Every way to split a job over a cluster, and the variants of each: enumerated, legal or not."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job, Tuning
from shardwise.vocabulary.strategy import Checkpointing, LossKind, Strategy, ZeroStage

if TYPE_CHECKING:
    from shardwise.planner.search import Wishes

MOST_SEQUENCES = 64
"""Of the micro-batches that are tried unasked."""


@dataclass(frozen=True, kw_only=True)
class Lever:
    """What a variant chooses besides its batch."""

    checkpointing: Checkpointing
    loss: LossKind

    def saves_no_more_than(self, other: Lever) -> bool:
        """True if it computes nothing again that the other does not: for one batch it is as fast, and as simple."""
        return _CHECKPOINTING.index(self.checkpointing) <= _CHECKPOINTING.index(other.checkpointing) and (
            self.loss in (other.loss, "plain")
        )

    def as_wished(self, wishes: Wishes) -> Lever:
        """The same with what the user asks for."""
        return Lever(checkpointing=wishes.checkpointing or self.checkpointing, loss=wishes.loss or self.loss)


_CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
_APART = (Lever(checkpointing="none", loss="plain"),)
"""Zero bubble takes every backward apart, so nothing may be computed again or in one piece with its forward."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences of a micro-batch, and micro-batches of a step."""

    micro_batch_size: int
    accumulation: int


@dataclass(frozen=True, kw_only=True)
class Split:
    """A mesh with stage and tuning, and what is open for it. Strategies are made as they are needed."""

    base: Strategy
    """With the first batch and the first lever."""
    batches: tuple[Batch, ...]
    """Smallest micro-batch first."""
    levers: tuple[Lever, ...]
    """The one that takes least time for equal batches first: it computes nothing again."""

    def variant(self, batch: Batch, lever: Lever) -> Strategy:
        """One strategy of this split.

        A search makes thousands, and `dataclasses.replace` takes a quarter of the time that is spent on each.
        """
        made = object.__new__(Strategy)
        made.__dict__.update(
            self.base.__dict__, micro_batch_size=batch.micro_batch_size, accumulation=batch.accumulation,
            checkpointing=lever.checkpointing, loss=lever.loss,
        )  # fmt: skip
        return made

    def variants(self) -> Iterator[Strategy]:
        """All of them."""
        for batch, lever in itertools.product(self.batches, self.levers):
            yield self.variant(batch, lever)


def splits(job: Job, cluster: Cluster, wishes: Wishes) -> Iterator[Split]:
    """Every combination of tuning, mesh and stage that the wishes leave open, legal or not."""
    tunings: tuple[Tuning, ...] = ("full", "lora", "qlora") if job.tuning == "any" else (job.tuning,)
    for tuning, (pp, dp_replicate, dp_shard, tp) in itertools.product(tunings, meshes(cluster.num_gpus, wishes)):
        is_apart = pp > 1 and wishes.pipeline_schedule == "zero_bubble"
        is_compiled = _compiles(cluster, wishes, is_apart=is_apart)
        levers = _APART if is_apart else tuple(_levers(_losses(tp, is_compiled=is_compiled)))
        levers = tuple(dict.fromkeys(lever.as_wished(wishes) for lever in levers))
        batches = tuple(
            Batch(micro_batch_size=size, accumulation=steps)
            for size, steps in possible_batches(job, dp_replicate * dp_shard, wishes)
        )
        if not batches:
            continue
        for stage in _stages(dp_shard, wishes):
            base = Strategy(
                pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp, zero_stage=stage, tuning=tuning,
                precision=job.precision, reduce_dtype=job.reduce_dtype, optimizer=job.optimizer, offload=wishes.offload,
                compile_blocks=is_compiled, keep_unsharded=wishes.keep_unsharded and stage >= 2,
                sequence_parallel=tp > 1 if wishes.sequence_parallel is None else wishes.sequence_parallel,
                pipeline_schedule=wishes.pipeline_schedule or "1f1b",
                virtual_stages=wishes.virtual_stages if pp > 1 else 1, checkpointing=levers[0].checkpointing,
                loss=levers[0].loss, micro_batch_size=batches[0].micro_batch_size, accumulation=batches[0].accumulation,
            )  # fmt: skip
            yield Split(base=base, batches=batches, levers=levers)


def strategies(job: Job, cluster: Cluster, wishes: Wishes) -> Iterator[Strategy]:
    """Every variant of every split."""
    for split in splits(job, cluster, wishes):
        yield from split.variants()


def meshes(num_gpus: int, wishes: Wishes) -> Iterator[tuple[int, int, int, int]]:
    """All (pp, dp_replicate, dp_shard, tp) whose product is the number of cards and that the wishes allow.

    Tensor and pipeline degrees other than 1 are tried where they are asked for, where all other degrees are given (the
    last one is then solved), and with `every_axis`: the engine runs them, but their times were not measured on cards.
    """
    given = [degree is not None for degree in (wishes.pp, wishes.dp_replicate, wishes.dp_shard, wishes.tp)]
    usual = None if sum(given) == 3 or wishes.every_axis else 1
    for pp in _degrees(num_gpus, wishes.pp or usual):
        for tp in _degrees(num_gpus // pp, wishes.tp or usual):
            rest = num_gpus // (pp * tp)
            for dp_shard in _degrees(rest, wishes.dp_shard):
                dp_replicate = rest // dp_shard
                if wishes.dp_replicate in (None, dp_replicate):
                    yield pp, dp_replicate, dp_shard, tp


def possible_batches(job: Job, data_parallel: int, wishes: Wishes) -> Iterator[tuple[int, int]]:
    """(micro-batch, accumulation) pairs that give the global batch; what does not divide is yielded to be refused."""
    share, rest = divmod(job.global_batch_size, data_parallel)
    wished = wishes.micro_batch_size
    if rest or share == 0 or (wished is not None and share % wished):
        micro_batch = wished or 1
        yield micro_batch, wishes.accumulation or max(1, share // micro_batch)
        return
    sizes = [wished] if wished else [size for size in range(1, min(share, MOST_SEQUENCES) + 1) if share % size == 0]
    for size in sizes:
        if wishes.accumulation in (None, share // size):
            yield size, share // size
    if wished and wishes.accumulation not in (None, share // wished):
        yield wished, wishes.accumulation or 1


def _degrees(limit: int, wished: int | None) -> Iterable[int]:
    if wished is not None:
        return (wished,) if limit % wished == 0 else ()
    return (degree for degree in range(1, limit + 1) if limit % degree == 0)


def _stages(dp_shard: int, wishes: Wishes) -> tuple[ZeroStage, ...]:
    open_stages: tuple[ZeroStage, ...] = (0,) if dp_shard == 1 else (1, 2, 3)
    if wishes.zero_stage is None:
        return open_stages
    return tuple(stage for stage in open_stages if stage == wishes.zero_stage)


def _losses(tp: int, *, is_compiled: bool) -> tuple[LossKind, ...]:
    """Compiled, the fused loss takes less time and less memory than the others; it needs a head that is not split."""
    if tp > 1:
        return ("plain", "chunked")
    return ("fused",) if is_compiled else ("plain", "fused")


def _levers(losses: tuple[LossKind, ...]) -> Iterator[Lever]:
    for checkpointing in _CHECKPOINTING:
        for loss in losses:
            yield Lever(checkpointing=checkpointing, loss=loss)


def _compiles(cluster: Cluster, wishes: Wishes, *, is_apart: bool) -> bool:
    """As wished; else where the card gains by it and backwards stay in one piece."""
    if wishes.compile_blocks is not None:
        return wishes.compile_blocks
    return not is_apart and cluster.gpu.architecture in ("ampere", "ada", "hopper", "blackwell")
