"""NCCL's newer host buffers (cuMem) that do not work on this machine or in this container."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity
from shardwise.doctor.scene import Scene
from shardwise.facts.machine.record import Unreadable

_WITHOUT_FALLBACK = ((2, 24, 0), (2, 26, 3))
"""Versions that use cuMem host buffers by default and cannot fall back."""


def look(scene: Scene) -> Iterator[Answer]:
    """The log's word; without it memory nodes without processors under a version that cannot fall back."""
    if scene.log is not None:
        for notice in scene.log.notices_of("cumem_host_fallback"):
            yield _finding(
                Severity.NOTE,
                Certainty.READ,
                "cuMem host buffers do not work here; NCCL uses /dev/shm instead",
                Evidence(what="NCCL", value=notice.text, source=f"log of {notice.host}"),
            )
    version = scene.nccl_version
    empty = scene.machine.cpu.nodes_without_cpus
    if isinstance(version, Unreadable) or not empty or not scene.machine.container:
        return
    if scene.switches.value("NCCL_CUMEM_HOST_ENABLE") == "0":
        return
    through_host = any(found.transport == "SHM" for found in scene.known_predictions)
    if through_host and _WITHOUT_FALLBACK[0] <= version < _WITHOUT_FALLBACK[1]:
        yield _finding(
            Severity.RISK,
            Certainty.POSSIBLE,
            "cuMem host buffers may fail in this container, and this NCCL cannot fall back",
            Evidence(
                what="memory nodes without processors",
                value=", ".join(map(str, empty)),
                source="/sys/devices/system/node",
            ),
        )


def _finding(severity: Severity, certainty: Certainty, headline: str, evidence: Evidence) -> Finding:
    return Finding(
        check=CHECK.id,
        subject="host buffers",
        severity=severity,
        certainty=certainty,
        headline=headline,
        evidence=(evidence,),
        fix="Set NCCL_CUMEM_HOST_ENABLE=0, or start the container with --cap-add SYS_NICE.",
        proof=AbTest(
            a="shardwise doctor --run",
            b="NCCL_CUMEM_HOST_ENABLE=0 shardwise doctor --run",
            expect="the collective passes in b",
        ),
        reference="NVIDIA/nccl#2190, NVIDIA/nccl#2106",
    )


CHECK = Check(
    id="cumem-host",
    title="cuMem host buffers",
    reads=("log", "/sys/devices/system/node", "NCCL version"),
    look=look,
    of_log=True,
)
