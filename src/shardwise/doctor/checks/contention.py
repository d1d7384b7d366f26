"""Cards that share an uplink: fast alone, slow together."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Cost, Evidence, Finding, Severity
from shardwise.doctor.scene import Scene
from shardwise.doctor.thresholds import judge, limit
from shardwise.facts.machine.record import PathType
from shardwise.vocabulary.units import format_bandwidth


def look(scene: Scene) -> Iterator[Answer]:
    """Compares copies at once with the same copies alone; without them points at cards below one switch without P2P."""
    for kind in ("host_to_device", "device_to_host", "peer_copy"):
        alone = {
            m.gpus: m.bytes_per_s for m in scene.measurements if m.kind == kind and m.variant == "alone" and m.is_good
        }
        at_once = {
            m.gpus: m.bytes_per_s for m in scene.measurements if m.kind == kind and m.variant == "at_once" and m.is_good
        }
        both = alone.keys() & at_once.keys()
        if len(both) < 2:
            continue
        apart, together = sum(alone[gpus] for gpus in both), sum(at_once[gpus] for gpus in both)
        verdict = judge("contention", together / apart)
        if verdict != "good":
            yield Finding(
                check=CHECK.id,
                subject=kind.replace("_", " "),
                severity=Severity.LOSS,
                certainty=Certainty.MEASURED,
                headline=f"copies at once reach {together / apart:.0%} of what they reach alone: a shared uplink",
                evidence=(
                    Evidence(what="alone, sum", value=format_bandwidth(apart), source="experiment"),
                    Evidence(what="at once, sum", value=format_bandwidth(together), source="experiment"),
                ),
                fix="Spread the cards over root ports; keep heavy groups of the mesh below one switch.",
                proof=AbTest(
                    a="shardwise doctor --run",
                    b="the same with the cards in other slots",
                    expect=f"at least {limit('contention'):.0%} of the sum alone",
                ),
                cost=Cost(
                    actual_bytes_per_s=together / len(both), expected_bytes_per_s=apart / len(both), basis="measured"
                ),
            )
    for found in scene.known_predictions:
        path = found.pair.path
        if found.reason == "driver" and found.transport == "SHM" and path in (PathType.PIX, PathType.PXB):
            yield Finding(
                check=CHECK.id,
                subject=scene.pair_name(found.pair),
                severity=Severity.NOTE,
                certainty=Certainty.INFERRED,
                headline="without P2P the traffic of these two crosses their switch's uplink twice each way",
                evidence=(Evidence(what="path", value=PathType(path).name, source="NVML and sysfs"),),
                fix="Put the cards below different root ports, if P2P stays off.",
                proof=AbTest(
                    a="shardwise doctor --run",
                    b="the same with the cards in other slots",
                    expect="a higher all_reduce bus bandwidth",
                ),
                reference="NVIDIA/nccl#1086",
            )


CHECK = Check(id="contention", title="Shared uplinks", reads=("experiments (--run)", "PCI tree"), look=look)
