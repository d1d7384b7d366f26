"""The probe's time: a limit for the whole command, an aim for the measuring, and a slice for each part.

[Note: slices]
A part gets its share of the time that is left when it begins, so what one leaves the next may use, and a slow start
shortens all of them alike. Within its slice a part measures its most telling size first, in any case, since a Cluster
without a matmul or without a wire is no use; then larger and smaller ones, as long as they fit at the speed that has
been seen. Past the limit nothing is measured but that. What is left out is listed in the report and in the Cluster.

What it costs on cards, estimated from what is launched (not yet measured as a whole; docs/probe.md has the figures):
starting the ranks 5 s, the least that is measured in any case 4 s, the end 2 s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Seconds from the start of the command."""

    aim_seconds: float
    """When the last measurement should have ended."""
    limit_seconds: float
    """When the command should have ended, with what overran and with the ranks' end."""


QUICK = Budget(aim_seconds=13.0, limit_seconds=20.0)
FULL = Budget(aim_seconds=95.0, limit_seconds=120.0)
END_SECONDS = 3.0
"""For the end of the ranks: process groups, contexts, interpreters."""
SHARES: Mapping[str, float] = {
    "copy": 0.02,
    "compute": 0.40,
    "host_copies": 0.04,
    "disk": 0.08,
    "wire": 0.90,
    "together": 0.10,
    "pairs": 0.50,
}
"""Of the time that is left when a part begins. The wire is the last but for the two that follow it."""
WIRE_FLOOR_SECONDS = 4.0
"""The wire gets this much even if starting the ranks has used up the aim, as far as the limit allows."""
WIRE_LEAST_SECONDS = 1.0
NO_TIME = "did not fit into the time budget"


def budget_for(*, quick: bool, aim_seconds: float | None) -> Budget:
    """The budget that was asked for: a usual one, or one with another aim and the same leeway."""
    usual = QUICK if quick else FULL
    if aim_seconds is None:
        return usual
    return Budget(aim_seconds=aim_seconds, limit_seconds=aim_seconds * usual.limit_seconds / usual.aim_seconds)


def wire_seconds(left: float, to_limit: float) -> float:
    """What the wire may take: the time left, but at least the floor, as far as the limit allows.

    Args:
        left: Of the aim.
        to_limit: Until the limit, less the end.
    """
    floor = max(WIRE_LEAST_SECONDS, min(WIRE_FLOOR_SECONDS, to_limit))
    return max(floor, left)
