"""How busy others keep this machine while something of ours runs; Linux only, elsewhere nothing is said."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")


@dataclass(frozen=True, kw_only=True)
class CpuTimes:
    """CPU seconds since some start."""

    everyone: float
    """Of all programs, on all cores."""
    ours: float
    """Of this process and its children that have ended."""
    whole: float
    """Idle time included: cores times the clock."""


def read_cpu_times() -> CpuTimes | None:
    """As they stand now; None where this system does not say."""
    try:
        words = STAT.read_text(encoding="ascii").split("\n", 1)[0].split()
        ticks = [int(word) for word in words[1:9]]  # guest time, behind them, is in user time already
    except (OSError, ValueError):
        return None
    unit = os.sysconf("SC_CLK_TCK")
    idle = sum(ticks[3:5])
    times = os.times()
    ours = times.user + times.system + times.children_user + times.children_system
    return CpuTimes(everyone=(sum(ticks) - idle) / unit, ours=ours, whole=sum(ticks) / unit)


def share_of_others(before: CpuTimes | None, after: CpuTimes | None) -> float | None:
    """Share of all cores that other programs took in between, 0 to 1; None if it is not known."""
    if before is None or after is None or after.whole <= before.whole:
        return None
    others = (after.everyone - before.everyone) - (after.ours - before.ours)
    return min(1.0, max(0.0, others / (after.whole - before.whole)))
