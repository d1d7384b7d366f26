"""Host memory too slow for the way through it, by the numbers of an experiment."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Cost, Evidence, Finding, Severity
from shardwise.doctor.scene import Scene
from shardwise.doctor.thresholds import judge, min_bytes, pcie_headline
from shardwise.facts.machine.record import Unreadable
from shardwise.vocabulary.units import format_bandwidth, format_bytes


def look(scene: Scene) -> Iterator[Answer]:
    """Judges host copies of single cards; says nothing without measurements."""
    nodes = scene.machine.cpu.num_numa_nodes
    for found in scene.measurements:
        if found.kind not in ("host_to_device", "device_to_host") or found.variant != "alone" or not found.is_good:
            continue
        card = next((card for card in scene.cards if (card.index,) == found.gpus), None)
        headline = None if card is None else pcie_headline(card, scene.machine)
        if headline is None or found.num_bytes < min_bytes("host_copy"):
            continue
        verdict = judge("host_copy", found.bytes_per_s / headline)
        if verdict != "good":
            one_node = nodes == 1 and scene.machine.cpu.num_cpus >= 64
            hint = " Set NPS4 in the BIOS of an EPYC (now one NUMA node)." if one_node else ""
            yield Finding(
                check=CHECK.id,
                subject=f"GPU {found.gpus[0]}",
                severity=Severity.LOSS,
                certainty=Certainty.MEASURED,
                headline=f"{found.kind.replace('_', ' ')} copies reach {found.bytes_per_s / headline:.0%} of the link",
                evidence=(
                    Evidence(
                        what=f"copy of {format_bytes(found.num_bytes)}",
                        value=format_bandwidth(found.bytes_per_s),
                        source="experiment",
                    ),
                    Evidence(
                        what="NUMA nodes",
                        value="?" if isinstance(nodes, Unreadable) else str(nodes),
                        source="/sys/devices/system/node",
                    ),
                ),
                fix=f"Look at the link under load first, then at the IOMMU and at memory channels.{hint}",
                proof=AbTest(a="shardwise doctor --run", b="the same after the change", expect="a higher copy rate"),
                cost=Cost(actual_bytes_per_s=found.bytes_per_s, expected_bytes_per_s=0.85 * headline, basis="measured"),
                reference="NVIDIA/nccl#1285",
            )


CHECK = Check(id="host-memory", title="Host memory keeps up", reads=("experiments (--run)",), look=look)
