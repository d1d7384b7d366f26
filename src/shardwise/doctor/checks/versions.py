"""Different NCCL versions in one job."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity
from shardwise.doctor.scene import Scene


def look(scene: Scene) -> Iterator[Answer]:
    """Compares the hosts of a log, and the libraries of running ranks."""
    logged: dict[str, list[str]] = {}
    versions = () if scene.log is None else scene.log.versions
    for host, version in versions:
        if not any(other.startswith(f"{version}+") for _, other in versions):  # torch says it without CUDA's part
            logged.setdefault(version, []).append(host or "an unnamed host")
    yield from _compare(logged, "log")
    mapped: dict[str, list[str]] = {}
    for process in scene.machine.processes:
        if isinstance(process.nccl_library, str) and process.nccl_library:
            mapped.setdefault(process.nccl_library, []).append(f"process {process.pid}")
    yield from _compare(mapped, "/proc/PID/maps")


def _compare(found: dict[str, list[str]], source: str) -> Iterator[Finding]:
    if len(found) < 2:
        return
    yield Finding(
        check=CHECK.id,
        subject="NCCL",
        severity=Severity.FAULT,
        certainty=Certainty.READ,
        headline=f"ranks use different NCCL libraries: {', '.join(found)}",
        evidence=tuple(Evidence(what=name, value=", ".join(users[:4]), source=source) for name, users in found.items()),
        fix="Use one image, or one environment, on all hosts.",
        proof=AbTest(
            a="python -c 'import torch; print(torch.cuda.nccl.version())' on every host",
            b="the same after the fix",
            expect="one version",
        ),
    )


CHECK = Check(id="versions", title="One NCCL version", reads=("log", "/proc/PID/maps (--pid)"), look=look, of_log=True)
