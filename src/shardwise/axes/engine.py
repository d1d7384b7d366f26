"""What this version's engine runs of what the planner prices: asked in one place, so that no sentence goes stale.

An axis is run where an `apply.py` stands beside its `cost.py`; the files are the answer, and nothing is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from shardwise.vocabulary.strategy import Axis, Strategy

_ROOMS = {Axis.PP: "pipeline", Axis.DP_REPLICATE: "replicate", Axis.DP_SHARD: "shard", Axis.TP: "tensor"}
_NAMES = {
    Axis.PP: "pipeline parallel",
    Axis.DP_REPLICATE: "replicas",
    Axis.DP_SHARD: "sharding",
    Axis.TP: "tensor parallel",
}


@functools.cache
def runs_axis(axis: Axis) -> bool:
    """Whether the engine can split along an axis."""
    return (Path(__file__).parent / _ROOMS[axis] / "apply.py").is_file()


def not_run(strategy: Strategy) -> Iterator[str]:
    """What this version's engine does not run of a strategy, one sentence each; nothing if it runs."""
    for axis in Axis:
        if strategy.degree(axis) > 1 and not runs_axis(axis):
            yield (
                f"{_NAMES[axis]} ({axis.value} {strategy.degree(axis)}) is planned here, but not run by this version's "
                "engine"
            )


def runs(strategy: Strategy) -> bool:
    """Whether this version's engine runs a strategy."""
    return not any(not_run(strategy))
