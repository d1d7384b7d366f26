"""How wrong a prediction may be, and what that means for fitting.

[Note: spread]
Errors of past predictions (docs/accuracy.md) are taken as normal around the prediction. Memory: what is counted from
shapes (weights, gradients, moments) is nearly exact; activations, temporaries and the runtime are not. Time: less sure
from data sheets than from a measured cluster file.
"""

from __future__ import annotations

import math

from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.memory import Category, MemoryBreakdown
from shardwise.vocabulary.units import GB

STATIC_SPREAD, MOVING_SPREAD = 0.01, 0.13
"""One standard deviation, relative: of counted states, and of everything else (nine of ten cases of docs/accuracy.md
lie within 22 % of what moves)."""
TIME_SPREAD_MEASURED, TIME_SPREAD_DATASHEET = 0.08, 0.12
"""Of the step. Data sheets: the root mean square error of docs/accuracy.md is 11 %. Measured cluster files: assumed."""
HEADROOM_BYTES = 2 * GB
"""Kept free on a card of 16 GB or more, as practice advises (2 to 3 GB)."""
ACCEPTED_PROBABILITY = 0.05
"""A plan that runs out of memory more often than this is no plan."""
CACHED = "cached blocks"
"""Name of the term that the allocator gives back before it runs out."""
_STATIC = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER)


def usable_bytes(cluster: Cluster) -> int:
    """What a program may use of one card."""
    total = cluster.gpu.cuda_memory_bytes or cluster.gpu.memory_bytes
    return total - (HEADROOM_BYTES if total >= 16 * GB and cluster.gpu.architecture != "cpu" else 0)


def needed_bytes(memory: MemoryBreakdown) -> int:
    """Device memory without what the allocator would give back."""
    return memory.device_bytes - sum(term.bytes for term in memory.terms if term.name == CACHED)


def memory_spread(memory: MemoryBreakdown) -> float:
    """One standard deviation of device memory, bytes."""
    by_category = memory.by_category()
    static = sum(by_category[category] for category in _STATIC)
    return STATIC_SPREAD * static + MOVING_SPREAD * (needed_bytes(memory) - static)


def probability_of_oom(memory: MemoryBreakdown, cluster: Cluster) -> float:
    """Chance that the memory that is needed exceeds the whole card."""
    total = cluster.gpu.cuda_memory_bytes or cluster.gpu.memory_bytes
    spread, needed = memory_spread(memory), needed_bytes(memory)
    if spread <= 0:
        return float(needed > total)
    return 0.5 * math.erfc((total - needed) / (spread * math.sqrt(2)))


def fits(memory: MemoryBreakdown, cluster: Cluster) -> bool:
    """Within the card less its headroom, and unlikely to run out."""
    within = memory.device_bytes <= usable_bytes(cluster)
    return within and probability_of_oom(memory, cluster) <= ACCEPTED_PROBABILITY


def time_spread(cluster: Cluster) -> float:
    """One standard deviation of the step time, relative."""
    return TIME_SPREAD_MEASURED if cluster.measurements.matmul_flops else TIME_SPREAD_DATASHEET


def interval(value: float, spread: float) -> tuple[float, float]:
    """The 5th and 95th percentile."""
    return max(0.0, value - 1.645 * spread), value + 1.645 * spread
