"""Ranks of one machine with different mounts of /dev/shm: neither P2P nor host memory, only the network is left."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity, gap
from shardwise.doctor.scene import Scene
from shardwise.facts.machine.record import Unreadable


def look(scene: Scene) -> Iterator[Answer]:
    """Compares the mounts of the running ranks that were asked for."""
    mounts: dict[str, list[int]] = {}
    for process in scene.machine.processes:
        if isinstance(process.shm_device, Unreadable):
            yield gap(CHECK.id, f"the /dev/shm mount of process {process.pid}", process.shm_device)
        else:
            mounts.setdefault(process.shm_device, []).append(process.pid)
    if len(mounts) < 2:
        return
    pair = next(iter(scene.machine.pairs), None)
    yield Finding(
        check=CHECK.id,
        subject="/dev/shm",
        severity=Severity.LOSS,
        certainty=Certainty.READ,
        headline="ranks of this machine have different /dev/shm mounts; NCCL drops P2P and host memory and uses the "
        "network between them",
        evidence=tuple(
            Evidence(what=f"mount {device}", value=", ".join(map(str, pids)), source="/proc/PID/mountinfo")
            for device, pids in mounts.items()
        ),
        fix="Put the ranks of one machine into one container, or give all containers --ipc=host.",
        proof=AbTest(
            a="the job as it is, with NCCL_DEBUG=INFO",
            b="the same with --ipc=host on every container",
            expect="edges turn from NET to P2P or SHM",
        ),
        cost=None if pair is None else scene.cost(pair, "NET/Socket", "P2P"),
        reference="shmDev in NCCL's src/transport/shm.cc and src/graph/paths.cc",
    )


CHECK = Check(id="shm-mounts", title="One /dev/shm for all ranks", reads=("/proc/PID/mountinfo (--pid)",), look=look)
