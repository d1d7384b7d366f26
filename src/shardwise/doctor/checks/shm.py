"""Too little room in /dev/shm for the buffers of the way through host memory."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity, gap
from shardwise.doctor.scene import Scene
from shardwise.doctor.thresholds import value
from shardwise.facts.machine.record import Unreadable
from shardwise.vocabulary.units import format_bytes

_DEFAULT_CHANNELS = 2


def look(scene: Scene) -> Iterator[Answer]:
    """Compares free space with what NCCL will ask for; also reports segments that dead processes left."""
    for notice in () if scene.log is None else scene.log.notices_of("shm_full"):
        evidence = Evidence(what="NCCL", value=notice.text, source=f"log of {notice.host}")
        yield _finding(Severity.FAULT, Certainty.READ, "/dev/shm was too small for NCCL's buffers", (evidence,))
    if len(scene.cards) < 2:
        return
    shm = scene.machine.shm
    if isinstance(shm.free_bytes, Unreadable):
        yield gap(CHECK.id, "the free space of /dev/shm", shm.free_bytes)
        return
    need = _needed_bytes(scene)
    evidence = (
        Evidence(what="free", value=format_bytes(shm.free_bytes), source="statvfs /dev/shm"),
        Evidence(
            what="needed by NCCL through host memory",
            value=format_bytes(need),
            source="ranks, channels and NCCL's buffer size",
        ),
    )
    if need and shm.free_bytes < need:
        yield _finding(
            Severity.FAULT,
            Certainty.INFERRED,
            "/dev/shm is too small for NCCL's buffers; the first collective will fail",
            evidence,
        )
    elif shm.free_bytes < value("shm_comfortable_bytes"):
        yield _finding(
            Severity.RISK if need else Severity.NOTE,
            Certainty.READ,
            f"only {format_bytes(shm.free_bytes)} free in /dev/shm; data loaders and communicators will fill it",
            evidence,
        )
    if shm.num_stale and shm.stale_bytes > 0.1 * shm.free_bytes:
        stale = Evidence(
            what="segments that no visible process maps",
            value=f"{shm.num_stale}, {format_bytes(shm.stale_bytes)}",
            source="/dev/shm/nccl-*",
        )
        yield _finding(Severity.NOTE, Certainty.INFERRED, "dead jobs left NCCL segments in /dev/shm", (stale,))


def _needed_bytes(scene: Scene) -> float:
    """Room for a ring over all cards that go through host memory; 0 if none does."""
    through_host = {
        index for found in scene.known_predictions if found.transport == "SHM" for index in (found.pair.a, found.pair.b)
    }
    if not through_host:
        return 0.0
    channels = _DEFAULT_CHANNELS
    if scene.log is not None and scene.log.channels:
        channels = max(found.coll for found in scene.log.channels)
    return value("shm_bytes_per_edge_and_channel") * len(through_host) * channels


def _finding(severity: Severity, certainty: Certainty, headline: str, evidence: tuple[Evidence, ...]) -> Finding:
    return Finding(
        check=CHECK.id,
        subject="/dev/shm",
        severity=severity,
        certainty=certainty,
        headline=headline,
        evidence=evidence,
        fix="Remove /dev/shm/nccl-* while no job runs."
        if severity is Severity.NOTE
        else "Start the container with --ipc=host or --shm-size=1g (Kubernetes: an emptyDir in Memory at /dev/shm).",
        proof=AbTest(
            a="docker run <image> df -h /dev/shm",
            b="docker run --shm-size=1g <image> df -h /dev/shm",
            expect="1 GB in b, and the first collective passes",
        ),
        reference="NVIDIA/nccl#290, NVIDIA/nccl#342, pytorch/torchtitan#853",
    )


CHECK = Check(
    id="shm",
    title="Room in /dev/shm",
    reads=("statvfs /dev/shm", "/dev/shm/nccl-*", "log"),
    look=look,
    of_log=True,
)
