"""Resource limits of the ranks: locked memory, open files, stack."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.checks.common import network_severity
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity, gap
from shardwise.doctor.scene import Scene
from shardwise.doctor.thresholds import value
from shardwise.facts.machine.record import Limits, Unreadable
from shardwise.vocabulary.units import format_bytes

_STACK_FIXED = (2, 28, 0)


def look(scene: Scene) -> Iterator[Answer]:
    """The limits of the ranks that were asked for, else of this process."""
    if scene.log is not None:
        for notice in scene.log.notices_of("memlock"):
            evidence = Evidence(what="NCCL", value=notice.text, source=f"log of {notice.host}")
            yield _finding("locked memory", Severity.FAULT, "an adapter could not lock memory", _MEMLOCK_FIX, evidence)
    owners = [(f"process {process.pid}", process.limits) for process in scene.machine.processes]
    for owner, limits in owners or [("this process", scene.machine.limits)]:
        yield from _look_at(scene, owner, limits)


_MEMLOCK_FIX = (
    "Raise it to unlimited where the job starts: ulimit -l unlimited, docker --ulimit memlock=-1, "
    "LimitMEMLOCK=infinity for slurmd and containerd."
)


def _look_at(scene: Scene, owner: str, limits: Limits) -> Iterator[Answer]:
    uses_adapters = any(port.active for port in scene.ib_ports)
    privileged = scene.machine.user_is_root and not scene.machine.container
    if uses_adapters and not privileged:
        if isinstance(limits.memlock_bytes, Unreadable):
            yield gap(CHECK.id, f"the limit of locked memory of {owner}", limits.memlock_bytes)
        elif limits.memlock_bytes is not None:
            seen = Evidence(what=owner, value=format_bytes(limits.memlock_bytes), source="RLIMIT_MEMLOCK")
            yield _finding(
                "locked memory",
                network_severity(scene),
                f"only {format_bytes(limits.memlock_bytes)} may be locked; adapters need it unlimited",
                _MEMLOCK_FIX,
                seen,
            )
    files = limits.open_files
    if scene.several_nodes and isinstance(files, int) and files < value("open_files_comfortable"):
        yield _finding(
            "open files",
            Severity.NOTE,
            f"only {files:,} files may be open; large jobs need more sockets",
            "Raise it: ulimit -n 65536.",
            Evidence(what=owner, value=f"{files:,}", source="RLIMIT_NOFILE"),
        )
    version = scene.nccl_version
    old = not isinstance(version, Unreadable) and version < _STACK_FIXED
    if limits.stack_bytes is None and old and len(scene.cards) > 1:
        seen = Evidence(what=owner, value="unlimited", source="RLIMIT_STACK")
        yield _finding(
            "stack",
            Severity.RISK,
            "an unlimited stack makes NCCL before 2.28 fall back to tiny thread stacks",
            "Set a stack limit: ulimit -s 8192.",
            seen,
        )


def _finding(subject: str, severity: Severity, headline: str, fix: str, evidence: Evidence) -> Finding:
    return Finding(
        check=CHECK.id,
        subject=subject,
        severity=severity,
        certainty=Certainty.READ,
        headline=headline,
        evidence=(evidence,),
        fix=fix,
        proof=AbTest(
            a="cat /proc/PID/limits (of a rank)", b="the same after the fix", expect="unlimited, or the new value"
        ),
        reference="NVIDIA/nccl-tests#206",
    )


CHECK = Check(
    id="limits",
    title="Resource limits",
    reads=("getrlimit", "/proc/PID/limits (--pid)", "log"),
    look=look,
    of_log=True,
)
