"""Whether P2P that is granted also works: right bytes, no hang, and faster than the way through host memory."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Cost, Evidence, Finding, Severity
from shardwise.doctor.measurements import Measurement
from shardwise.doctor.scene import Scene, best_rate
from shardwise.doctor.thresholds import limit, min_bytes
from shardwise.facts.machine.record import GpuPair
from shardwise.vocabulary.units import format_bandwidth, format_bytes


def look(scene: Scene) -> Iterator[Answer]:
    """Judges peer copies and collectives over P2P; says nothing without measurements."""
    for found in scene.measurements:
        if not found.data_is_right:
            yield _finding(
                found,
                Severity.FAULT,
                f"wrong bytes after {_what(found)}: stop using P2P here",
                "Set NCCL_P2P_DISABLE=1 at once, then look at ACS, the IOMMU and the driver.",
            )
        elif found.problem and found.transport in ("P2P", "") and found.variant in ("as_set", "forced_p2p"):
            others = [other for other in scene.measurements if other.kind == found.kind and other.variant == "p2p_off"]
            if any(other.is_good for other in others):
                yield _finding(
                    found,
                    Severity.FAULT,
                    f"{_what(found)} does not finish over P2P, but does without it",
                    "Set NCCL_P2P_DISABLE=1 until ACS and the IOMMU are off (see those checks).",
                )
    yield from _slow_copies(scene)
    p2p, shm = best_rate(scene.measurements, "P2P"), best_rate(scene.measurements, "SHM")
    if p2p is not None and shm is not None and p2p < shm:
        first = next(m for m in scene.measurements if m.kind == "all_reduce" and m.transport == "P2P")
        yield _finding(
            first,
            Severity.LOSS,
            "all_reduce over P2P is slower than through host memory",
            "Set NCCL_P2P_LEVEL=PXB (or NCCL_P2P_DISABLE=1), or find what slows P2P: ACS, the IOMMU, a narrow slot.",
            Cost(actual_bytes_per_s=p2p, expected_bytes_per_s=shm, basis="measured"),
        )


def _slow_copies(scene: Scene) -> Iterator[Finding]:
    rule = "p2p_against_host"
    host = [
        m.bytes_per_s
        for m in scene.measurements
        if m.kind in ("host_to_device", "device_to_host") and m.variant == "alone" and m.is_good
    ]
    if not host:
        return
    for found in scene.measurements:
        pair = _pair(scene, found)
        large = found.kind == "peer_copy" and found.variant == "alone" and found.num_bytes >= min_bytes("pcie_p2p_copy")
        direct = any(p.pair == pair and p.p2p_possible for p in scene.known_predictions)
        if large and direct and found.is_good and found.bytes_per_s < limit(rule) * min(host):
            yield _finding(
                found,
                Severity.LOSS,
                f"a copy between the cards reaches {found.bytes_per_s / min(host):.0%} of a copy from host memory",
                "Look at ACS and the IOMMU first, then at the slots.",
                Cost(actual_bytes_per_s=found.bytes_per_s, expected_bytes_per_s=min(host), basis="measured"),
            )


def _pair(scene: Scene, found: Measurement) -> GpuPair | None:
    return next((pair for pair in scene.machine.pairs if {pair.a, pair.b} == set(found.gpus)), None)


def _what(found: Measurement) -> str:
    return f"{found.kind} of {format_bytes(found.num_bytes)} ({found.variant})"


def _finding(found: Measurement, severity: Severity, headline: str, fix: str, cost: Cost | None = None) -> Finding:
    value = found.problem or format_bandwidth(found.bytes_per_s)
    return Finding(
        check=CHECK.id,
        subject=" - ".join(f"GPU {gpu}" for gpu in found.gpus),
        severity=severity,
        certainty=Certainty.MEASURED,
        headline=headline,
        evidence=(Evidence(what=_what(found), value=value, source="experiment"),),
        fix=fix,
        proof=AbTest(
            a="shardwise doctor --run --risky",
            b="NCCL_P2P_DISABLE=1 shardwise doctor --run",
            expect="b finishes with right data",
        ),
        cost=cost,
        reference="NVIDIA/nccl#2079, NVIDIA/nccl-tests#117, NVIDIA/nccl#1817",
    )


CHECK = Check(id="p2p-works", title="P2P is correct and fast", reads=("experiments (--run)",), look=look)
