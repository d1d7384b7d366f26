"""Cards whose clocks are held down by hardware: then the wire is not to blame."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity
from shardwise.doctor.scene import Scene
from shardwise.facts.machine.record import Unreadable

_GRAVE = ("hardware slowdown", "thermal (hardware)", "power brake")


def look(scene: Scene) -> Iterator[Answer]:
    """Reasons now, and reasons seen during experiments."""
    for card in scene.cards:
        now = () if isinstance(card.slowdown_reasons, Unreadable) else card.slowdown_reasons
        during = tuple(reason for found in scene.measurements for gpu, reason in found.slowdowns if gpu == card.index)
        for reason in dict.fromkeys((*now, *during)):
            if reason in _GRAVE:
                yield Finding(
                    check=CHECK.id,
                    subject=f"GPU {card.index}",
                    severity=Severity.RISK,
                    certainty=Certainty.MEASURED if reason in during else Certainty.READ,
                    headline=f"clocks are held down: {reason}",
                    evidence=(Evidence(what="reason", value=reason, source="NVML clocks event reasons"),),
                    fix="Look at cooling and at the power supply before the wire.",
                    proof=AbTest(a="nvidia-smi -q -d PERFORMANCE", b="the same after the fix", expect="Not Active"),
                )


CHECK = Check(id="throttling", title="Clocks held down by hardware", reads=("NVML clocks event reasons",), look=look)
