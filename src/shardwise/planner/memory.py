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

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.axes import fully_shard
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
from shardwise.vocabulary.memory import ALWAYS, CACHED, STEP, Category, Level, MemoryBreakdown, Term
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.strategy import Strategy
from shardwise.vocabulary.units import GIB, MIB

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
_VARIED = (offload, checkpointing, adapters, loss)
_AT = {instant: number for number, instant in enumerate(STEP)}


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
        _runtime("communicators", around.communicators, f"{around.groups} groups",
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
            pools = [self.all]
            if term.category in STATIC:
                pools.append(self.static)
            if term.category is Category.GRADIENT and term.name != fully_shard.WHOLE_GRADIENTS:
                pools.append(self.reduced)
            elif term.name in fully_shard.GATHER_OUTPUTS:
                pools.append(self.gathers)
            elif term.category in _MOVING:
                pools.append(self.moving)
            size = term.bytes
            for instant in term.alive:
                number = _AT.get(instant)
                if number is not None:
                    for pool in pools:
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

    def fits(self, place: Placement, cluster: Cluster) -> bool:
        """Whether there is room for them; `uncertainty.fits` of the same terms, without a breakdown."""
        peak = max(self.all)
        outside, fragments = 0, 0
        if cluster.gpu.architecture != "cpu":
            around = _Around.of(place, cluster)
            outside, fragments = around.context + around.communicators, self.fragments()
        return room_for(peak + outside + fragments, self.static[self.all.index(peak)], cluster)


_MOVING = (Category.ACTIVATION, Category.TEMPORARY, Category.GRADIENT)
