"""Cards that may reach each other, kept apart by NCCL's default P2P level.

NCCL 2.23 lowered the default from SYS to PXB for everyone except AMD processors with at most two cards. Four PCIe cards
on an EPYC fell from P2P to host memory when torch 2.6 became 2.7.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity, gap
from shardwise.doctor.scene import Scene
from shardwise.doctor.transport import Prediction
from shardwise.facts.machine.record import PathType, Unreadable


def look(scene: Scene) -> Iterator[Answer]:
    """A finding where the rule costs P2P on an AMD processor; a note on others, where it often is the better choice."""
    if isinstance(scene.predictions, Unreadable):
        if len(scene.cards) > 1 and not any(isinstance(pair.path, Unreadable) for pair in scene.machine.pairs):
            yield gap(CHECK.id, "which transport NCCL takes", scene.predictions)
        return
    kept = [found for found in scene.predictions if found.reason == "level_rule" and found.p2p_possible]
    logged_p2p = {(pair.a, pair.b) for edge, pair in scene.edges_here() if edge.transport == "P2P"}
    for found in kept:
        if (found.pair.a, found.pair.b) not in logged_p2p:
            yield _finding(scene, found)


def _finding(scene: Scene, found: Prediction) -> Finding:
    amd = scene.machine.cpu.vendor == "AuthenticAMD"
    logged = [edge.via for edge, pair in scene.edges_here() if pair == found.pair and edge.transport == "SHM"]
    version = scene.nccl_version
    shown = "unknown" if isinstance(version, Unreadable) else ".".join(map(str, version))
    wanted = "SYS" if found.pair.path == PathType.SYS else "PHB"
    evidence = [
        Evidence(what="path", value=_path(found), source="NVML and sysfs"),
        Evidence(what="P2P allowed by the driver", value="OK", source="NVML P2P status"),
        Evidence(
            what="NCCL",
            value=f"{shown}, {len(scene.cards)} GPUs, {scene.machine.cpu.vendor}: level {found.level}",
            source="rule of NCCL's ncclTopoCheckP2p",
        ),
    ]
    if logged:
        evidence.append(Evidence(what="edges", value=logged[0], source="log"))
    return Finding(
        check=CHECK.id,
        subject=scene.pair_name(found.pair),
        severity=Severity.LOSS if amd else Severity.NOTE,
        certainty=Certainty.READ if logged else Certainty.INFERRED,
        headline=f"NCCL {shown} keeps these cards from P2P by default (level {found.level}): host memory instead",
        evidence=tuple(evidence),
        fix=f"Set NCCL_P2P_LEVEL={wanted}, after `shardwise doctor --run --risky` has shown that P2P is correct, does "
        "not hang and is faster here.",
        proof=AbTest(
            a="shardwise doctor --run",
            b=f"NCCL_P2P_LEVEL={wanted} shardwise doctor --run",
            expect="edges turn from SHM to P2P, with a higher all_reduce bus bandwidth",
        ),
        cost=scene.cost(found.pair, "SHM", "P2P") if amd else None,
        reference="NVIDIA/nccl#1829, NVIDIA/nccl PR#2080",
    )


def _path(found: Prediction) -> str:
    return found.pair.path.why if isinstance(found.pair.path, Unreadable) else found.pair.path.name


CHECK = Check(
    id="p2p-level",
    title="NCCL's default P2P level",
    reads=("NCCL version", "/proc/cpuinfo", "NVML topology and P2P status", "log"),
    look=look,
)
