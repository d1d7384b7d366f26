"""All memory of one strategy on one rank: the terms of every axis and lever, and what torch and CUDA add."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.axes.replicate import cost as replicate
from shardwise.axes.shard import cost as shard
from shardwise.levers.adapters import cost as adapters
from shardwise.levers.checkpointing import cost as checkpointing
from shardwise.levers.loss import cost as loss
from shardwise.levers.offload import cost as offload
from shardwise.levers.optimizer import cost as optimizer
from shardwise.planner.uncertainty import CACHED, usable_bytes
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.memory import ALWAYS, STEP, Category, MemoryBreakdown, Term
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.strategy import Axis, Strategy
from shardwise.vocabulary.units import GIB, MIB

CONTEXT_BYTES = int(0.6 * GIB)
"""CUDA context with torch's kernels loaded lazily, and cuBLAS workspaces; assumed where `probe` did not measure it."""
COMMUNICATOR_BYTES = 400 * MIB
"""One NCCL communicator inside a node after its first collectives; assumed where `probe` did not measure it."""
SLACK_SHARE = 0.05
"""What torch's caching allocator cannot use or give back (fragments), as a share of activations and temporaries."""
CACHED_SHARE = 0.15
"""Freed blocks that it keeps beyond that, by the same measure, as long as the card has room. It gives them back before
it runs out of memory, so they never decide whether a plan fits, but `nvidia-smi` shows them."""
CACHED_BYTES = 1200 * MIB
LIBRARY_BYTES = 40 * MIB
"""Workspaces that cuBLAS and attention kernels take from torch's allocator."""

_MOVING = (Category.ACTIVATION, Category.TEMPORARY)


def memory(job: Job, cluster: Cluster, strategy: Strategy) -> MemoryBreakdown:
    """The breakdown of the fullest rank."""
    stages = {0, strategy.pp - 1}
    breakdowns = [breakdown(Placement(job=job, strategy=strategy, stage=stage), cluster) for stage in sorted(stages)]
    return max(breakdowns, key=lambda each: each.device_bytes)


def breakdown(place: Placement, cluster: Cluster) -> MemoryBreakdown:
    """The breakdown of one rank."""
    modules = (replicate, shard, offload, optimizer, checkpointing, adapters, loss)
    terms = tuple(term for module in modules for term in module.stores(place) if term.bytes)
    return MemoryBreakdown(terms=terms + runtime(place, cluster, terms))


def runtime(place: Placement, cluster: Cluster, terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """What is not a tensor: the allocator's slack, the context, the communicators."""
    if cluster.gpu.architecture == "cpu":
        return ()
    moving = _peak(term for term in terms if term.category in _MOVING)
    slack = round(SLACK_SHARE * moving) + LIBRARY_BYTES
    cached = round(CACHED_SHARE * moving) + CACHED_BYTES
    context = cluster.measurements.context_bytes
    communicator = cluster.measurements.communicator_bytes
    groups = sum(place.strategy.degree(axis) > 1 for axis in Axis)
    measured = "measured by probe"
    fixed = (
        Term(
            category=Category.RUNTIME,
            name="allocator slack",
            bytes=slack,
            alive=ALWAYS,
            formula=f"{SLACK_SHARE:.0%} of activations and temporaries, and workspaces",
            source="assumed; see docs/accuracy.md",
            level="reserved",
        ),
        Term(
            category=Category.RUNTIME,
            name="CUDA context",
            bytes=context if context is not None else CONTEXT_BYTES,
            alive=ALWAYS,
            formula="one process on one card",
            source=measured if context is not None else "assumed",
            level="device",
        ),
        Term(
            category=Category.RUNTIME,
            name="communicators",
            bytes=groups * (communicator if communicator is not None else COMMUNICATOR_BYTES),
            alive=ALWAYS,
            formula=f"{groups} groups",
            source=measured if communicator is not None else "assumed",
            level="device",
        ),
    )
    needed = _peak(terms) + sum(term.bytes for term in fixed)
    room = max(0, usable_bytes(cluster) - needed)
    return (
        *fixed,
        Term(
            category=Category.RUNTIME,
            name=CACHED,
            bytes=min(cached, room),
            alive=ALWAYS,
            formula=f"{CACHED_SHARE:.0%} of activations and temporaries, given back when the card is full",
            source="assumed; see docs/accuracy.md",
            level="reserved",
        ),
    )


def _peak(terms: Iterable[Term]) -> int:
    """The most that these terms hold at any instant of a step."""
    held = dict.fromkeys(STEP, 0)
    for term in terms:
        for instant in term.alive:
            if instant in held:
                held[instant] += term.bytes
    return max(held.values())
