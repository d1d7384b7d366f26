"""All memory of one strategy on one rank: the terms of every axis and lever, and what torch and CUDA add.

[Note: streams and fragments]
torch's allocator keeps the memory of each stream apart: a block that was allocated on one is never handed to another.
`fully_shard` uses three: all_gathers put their outputs on one, reductions their results, which are the gradients, on
another, and all else is on the compute stream. Each pool grows to its own peak and stays there, though the peaks are at
different instants: the room of the gradients lies idle while activations peak. That is the larger part of the cached
blocks; they are free as a whole, so the allocator gives them back before it runs out of memory.

Within the compute stream blocks above 1 MiB are cut from segments of 20 MiB or of their own size, rounded up to 2 MiB,
and what is left of a cut block fits only what is smaller. The first optimizer step cuts up the blocks of the first
backward for its moments; logits in bf16 and in fp32 do not fit each other's blocks. How much that is depends on the
sizes and on their order: on two H200s it was 5 to 19 % of what moves on that stream, in one run with little of that
47 % (`docs/accuracy.md`, our own engine). A third of it is counted as fragments that cannot be given back, the rest as
cached. The engine does not set `expandable_segments`, which would leave the pools and take away most fragments.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.axes import fully_shard
from shardwise.axes.pipeline import cost as pipeline
from shardwise.axes.replicate import cost as replicate
from shardwise.axes.shard import cost as shard
from shardwise.levers.adapters import cost as adapters
from shardwise.levers.checkpointing import cost as checkpointing
from shardwise.levers.loss import cost as loss
from shardwise.levers.offload import cost as offload
from shardwise.levers.optimizer import cost as optimizer
from shardwise.planner.uncertainty import STATIC, room_for, usable_bytes
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.memory import ALWAYS, CACHED, STEP, Category, Instant, Level, MemoryBreakdown, Term
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.strategy import Strategy
from shardwise.vocabulary.units import GIB, MIB, some

CONTEXT_BYTES = int(0.6 * GIB)
"""CUDA context with torch's kernels loaded lazily, and cuBLAS workspaces; assumed where `probe` did not measure it."""
COMMUNICATOR_BYTES = 400 * MIB
"""One NCCL communicator inside a node after its first collectives; assumed where `probe` did not measure it."""
FRAGMENT_SHARE = 0.05
"""What torch's caching allocator can neither use nor give back, as a share of what moves on the compute stream."""
CACHED_SHARE = 0.10
"""Freed blocks of the compute stream that it keeps beyond that, by the same measure; see [Note: streams and fragments].
It gives them back before it runs out of memory, so they never decide whether a plan fits, but `nvidia-smi` shows them.
"""
LIBRARY_BYTES = 40 * MIB
"""Workspaces that cuBLAS and attention kernels take from torch's allocator."""
_SHARED = (replicate, shard, optimizer)
"""Costs of a split whose variants (micro-batch, checkpointing, loss) store the same."""
_VARIED = (offload, checkpointing, adapters, loss, pipeline)


def memory(job: Job, cluster: Cluster, strategy: Strategy) -> MemoryBreakdown:
    """The breakdown of the fullest rank."""
    stages = {0, strategy.pp - 1}
    breakdowns = [breakdown(Placement(job=job, strategy=strategy, stage=stage), cluster) for stage in sorted(stages)]
    return max(breakdowns, key=lambda each: each.needed_bytes)


def breakdown(place: Placement, cluster: Cluster) -> MemoryBreakdown:
    """The breakdown of one rank."""
    terms = tuple(term for module in (*_SHARED, *_VARIED) for term in module.stores(place) if term.bytes)
    return MemoryBreakdown(terms=terms + runtime(place, cluster, terms))


def runtime(
    place: Placement, cluster: Cluster, terms: Iterable[Term], *, side_streams: bool = True
) -> tuple[Term, ...]:
    """What is not a tensor: the allocator's fragments and cached blocks, the context, the communicators.

    Args:
        place: The rank.
        cluster: Its card, and what `probe` found out about it.
        terms: All tensors.
        side_streams: Whether gathers and reductions allocate on streams of their own, as `fully_shard` does.
    """
    if cluster.gpu.architecture == "cpu":
        return ()
    held = Held()
    held.add(terms)
    around = _Around.of(place, cluster)
    fragments = held.fragments()
    idle = held.idle(fully_shard.gather_pool_bytes(place)) if side_streams else 0
    cached = idle + round(CACHED_SHARE * max(held.moving))
    room = max(0, usable_bytes(cluster) - max(held.all) - fragments - around.context - around.communicators)
    measured = "measured by probe"
    share = f"{FRAGMENT_SHARE:.0%} of what moves on the compute stream, and workspaces"
    kept = f"idle streams' pools {idle:,} B, {CACHED_SHARE:.0%} of what moves; given back when the card is full"
    note = "planner/memory.py, [Note: streams and fragments]"
    return (
        _runtime("allocator slack", fragments, share, note, "reserved"),
        _runtime("CUDA context", around.context, "one process on one card",
                 measured if cluster.measurements.context_bytes is not None else "assumed", "device"),
        _runtime("communicators", around.communicators, some(around.groups, "group"),
                 measured if cluster.measurements.communicator_bytes is not None else "assumed", "device"),
        _runtime(CACHED, min(cached, room), kept, note, "reserved"),
    )  # fmt: skip


def _runtime(name: str, num_bytes: int, formula: str, source: str, level: Level) -> Term:
    return Term(
        category=Category.RUNTIME, name=name, bytes=num_bytes, alive=ALWAYS, formula=formula, source=source, level=level
    )


@dataclass(frozen=True, kw_only=True)
class _Around:
    """Device memory outside torch's allocator."""

    context: int
    groups: int
    communicators: int

    @classmethod
    def of(cls, place: Placement, cluster: Cluster) -> _Around:
        seen, strategy = cluster.measurements, place.strategy
        groups = sum(degree > 1 for degree in (strategy.pp, strategy.dp_replicate, strategy.dp_shard, strategy.tp))
        each = seen.communicator_bytes if seen.communicator_bytes is not None else COMMUNICATOR_BYTES
        context = seen.context_bytes if seen.context_bytes is not None else CONTEXT_BYTES
        return cls(context=context, groups=groups, communicators=groups * each)


@functools.cache
def _numbers(alive: tuple[Instant, ...]) -> tuple[int, ...]:
    """Which instants of a step these are."""
    return tuple(number for number, instant in enumerate(STEP) if instant in alive)


class Footprint:
    """Memory of the variants of one split, counted quickly: what they share is counted once, and no term is kept.

    Args:
        job: What is trained.
        cluster: On which cards.
    """

    def __init__(self, job: Job, cluster: Cluster) -> None:
        self._job, self._cluster = job, cluster
        self._places: dict[int, Placement] = {}
        self._shared: dict[tuple[int, bool], Held] = {}
        self._around: int | None = None

    def look(self, strategy: Strategy) -> tuple[bool, int]:
        """Whether a variant fits, and the bytes that its fullest rank needs: as `memory` and `uncertainty.fits` say."""
        needed, fits = 0, True
        for stage in sorted({0, strategy.pp - 1}):
            place = self._place(stage, strategy)
            held = Held(self._of_the_split(place))
            for module in _VARIED:
                held.add(module.stores(place))
            verdict = held.verdict(self._outside(place), self._cluster)
            fits, needed = fits and verdict[0], max(needed, verdict[1])
        return fits, needed

    def _outside(self, place: Placement) -> int:
        """Device memory outside the allocator, the same for all variants."""
        if self._around is None:
            around = _Around.of(place, self._cluster)
            self._around = around.context + around.communicators
        return self._around

    def _place(self, stage: int, strategy: Strategy) -> Placement:
        first = self._places.get(stage)
        if first is None:
            self._places[stage] = Placement(job=self._job, strategy=strategy, stage=stage)
            return self._places[stage]
        return first.variant(strategy)

    def _of_the_split(self, place: Placement) -> Held:
        """What all variants hold that accumulate, or all that do not."""
        key = (place.stage, place.strategy.accumulation > 1)
        if key not in self._shared:
            held = self._shared[key] = Held()
            for module in _SHARED:
                held.add(module.stores(place))
        return self._shared[key]


class Held:
    """Bytes that terms hold at each instant of a step: what the allocator's share and the verdict follow from.

    Args:
        like: Start from what another one holds.
    """

    __slots__ = ("all", "gathers", "moving", "reduced", "static")

    def __init__(self, like: Held | None = None) -> None:
        self.all = [0] * len(STEP) if like is None else like.all.copy()
        self.static = [0] * len(STEP) if like is None else like.static.copy()
        self.moving = [0] * len(STEP) if like is None else like.moving.copy()
        """Activations, temporaries and whole gradients: what comes and goes on the compute stream."""
        self.reduced = [0] * len(STEP) if like is None else like.reduced.copy()
        """Gradients on the reductions' stream."""
        self.gathers = [0] * len(STEP) if like is None else like.gathers.copy()
        """Outputs of all_gathers on theirs."""

    def add(self, terms: Iterable[Term]) -> None:
        """Count these as well."""
        for term in terms:
            category, size = term.category, term.bytes
            pool = None
            if category is Category.GRADIENT and term.name != fully_shard.WHOLE_GRADIENTS:
                pool = self.reduced
            elif category in _MOVING:
                pool = self.gathers if term.name in fully_shard.GATHER_OUTPUTS else self.moving
            counted = category in STATIC
            for number in _numbers(term.alive):
                self.all[number] += size
                if counted:
                    self.static[number] += size
                if pool is not None:
                    pool[number] += size

    def fragments(self) -> int:
        """What the allocator can neither use nor give back."""
        return round(FRAGMENT_SHARE * max(self.moving)) + LIBRARY_BYTES

    def idle(self, gather_pool: int) -> int:
        """What each stream's pool has grown to and does not hold at the peak of all together."""
        peak = max(self.all)
        now = self.all.index(peak)
        pools = (max(self.reduced) - self.reduced[now], max(self.moving) - self.moving[now])
        return sum(pools) + max(gather_pool - self.gathers[now], 0)

    def verdict(self, outside: int, cluster: Cluster) -> tuple[bool, int]:
        """Whether there is room for them, and what is needed; as `uncertainty.fits` of a breakdown of the same terms.

        Args:
            outside: Device memory that does not belong to the allocator.
            cluster: The cards.
        """
        needed = peak = max(self.all)
        if cluster.gpu.architecture != "cpu":
            needed += outside + self.fragments()
        return room_for(needed, self.static[self.all.index(peak)], cluster), needed


_MOVING = (Category.ACTIVATION, Category.TEMPORARY, Category.GRADIENT)
