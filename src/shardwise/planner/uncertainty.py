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
STATIC = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER)


def usable_bytes(cluster: Cluster) -> int:
    """What a program may use of one card."""
    total = cluster.gpu.cuda_memory_bytes or cluster.gpu.memory_bytes
    return total - (HEADROOM_BYTES if total >= 16 * GB and cluster.gpu.architecture != "cpu" else 0)


def needed_bytes(memory: MemoryBreakdown) -> int:
    """Device memory that cannot be given back."""
    return memory.needed_bytes


def memory_spread(memory: MemoryBreakdown) -> float:
    """One standard deviation of the memory that is needed, bytes."""
    by_category = memory.by_category()
    return spread_of(memory.needed_bytes, sum(by_category[category] for category in STATIC))


def spread_of(needed: int, static: int) -> float:
    """One standard deviation of needed memory, of which `static` bytes are weights, gradients and moments."""
    return STATIC_SPREAD * static + MOVING_SPREAD * (needed - static)


def probability_of_oom(memory: MemoryBreakdown, cluster: Cluster) -> float:
    """Chance that the memory that is needed exceeds the whole card."""
    return chance_above_card(memory.needed_bytes, memory_spread(memory), cluster)


def chance_above_card(needed: int, spread: float, cluster: Cluster) -> float:
    """Chance that a normal value around `needed` exceeds the whole card."""
    total = cluster.gpu.cuda_memory_bytes or cluster.gpu.memory_bytes
    if spread <= 0:
        return float(needed > total)
    return 0.5 * math.erfc((total - needed) / (spread * math.sqrt(2)))


def fits(memory: MemoryBreakdown, cluster: Cluster) -> bool:
    """Within the card less its headroom, and unlikely to run out; cached blocks do not count."""
    by_category = memory.by_category()
    return room_for(memory.needed_bytes, sum(by_category[category] for category in STATIC), cluster)


def room_for(needed: int, static: int, cluster: Cluster) -> bool:
    """The same for `needed` bytes, of which `static` are weights, gradients and moments."""
    if needed > usable_bytes(cluster):
        return False
    return chance_above_card(needed, spread_of(needed, static), cluster) <= ACCEPTED_PROBABILITY


def time_spread(cluster: Cluster) -> float:
    """One standard deviation of the step time, relative."""
    return TIME_SPREAD_MEASURED if cluster.measurements.matmul_flops else TIME_SPREAD_DATASHEET


def interval(value: float, spread: float) -> tuple[float, float]:
    """The 5th and 95th percentile."""
    return max(0.0, value - 1.645 * spread), value + 1.645 * spread
