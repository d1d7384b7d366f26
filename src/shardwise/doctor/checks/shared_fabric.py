"""Others on the same cards, and times that wander."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity
from shardwise.doctor.scene import Scene
from shardwise.doctor.thresholds import limit, min_bytes
from shardwise.facts.machine.record import Unreadable
from shardwise.vocabulary.units import format_bytes, format_seconds


def look(scene: Scene) -> Iterator[Answer]:
    """Notes other processes on the cards; reports large collectives whose slow calls stand out."""
    asked = {process.pid for process in scene.machine.processes}
    for card in scene.cards:
        others = () if isinstance(card.processes, Unreadable) else tuple(p for p in card.processes if p not in asked)
        if others:
            yield _finding(
                f"GPU {card.index}",
                Severity.NOTE,
                Certainty.READ,
                "other processes use the card; what is measured now is not the wire alone",
                Evidence(what="processes", value=", ".join(map(str, others[:6])), source="NVML"),
            )
    for found in scene.measurements:
        large = found.num_bytes >= min_bytes("pcie_p2p_all_reduce")
        if found.kind == "all_reduce" and found.is_good and large and found.seconds_p50 > 0:
            drift = found.seconds_p95 / found.seconds_p50
            if drift > limit("drift_p95_over_p50"):
                yield _finding(
                    f"all_reduce ({found.variant})",
                    Severity.LOSS,
                    Certainty.MEASURED,
                    f"slow calls take {drift:.1f} times the median: somebody else is on the wire, or a link retrains",
                    Evidence(
                        what=f"all_reduce of {format_bytes(found.num_bytes)}",
                        value=f"median {format_seconds(found.seconds_p50)}, p95 {format_seconds(found.seconds_p95)}",
                        source="experiment",
                    ),
                )


def _finding(subject: str, severity: Severity, certainty: Certainty, headline: str, evidence: Evidence) -> Finding:
    return Finding(
        check=CHECK.id,
        subject=subject,
        severity=severity,
        certainty=certainty,
        headline=headline,
        evidence=(evidence,),
        fix="Measure again while the cards and the fabric are yours alone.",
        proof=AbTest(a="shardwise doctor --run", b="the same on an idle machine", expect="p95 near the median"),
    )


CHECK = Check(
    id="shared-fabric", title="Other users and drift", reads=("NVML processes", "experiments (--run)"), look=look
)
