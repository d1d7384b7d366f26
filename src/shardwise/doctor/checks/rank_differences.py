"""Ranks of one job that do not have the same switches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity
from shardwise.doctor.scene import Scene
from shardwise.doctor.switches import is_nccl_like, variables
from shardwise.facts.machine.record import Unreadable

_MAY_DIFFER = {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_HOSTID", "NCCL_DEBUG_FILE", "NCCL_TOPO_FILE"}
"""Names that a host, or a rank, may have for itself."""


def look(scene: Scene) -> Iterator[Answer]:
    """A finding for every variable whose value, or presence, differs between ranks."""
    processes = {
        f"process {process.pid}": {name: value for name, value in process.environment if is_nccl_like(name)}
        for process in scene.machine.processes
        if not isinstance(process.environment, Unreadable)
    }
    yield from _compare(processes, "/proc/PID/environ")
    if scene.log is not None:
        logged: dict[str, dict[str, str]] = {}
        for switch in scene.log.switches:
            if switch.pid is not None:
                logged.setdefault(f"{switch.host}:{switch.pid}", {})[switch.name] = switch.value
        yield from _compare(logged, "log")


def _compare(ranks: Mapping[str, Mapping[str, str]], source: str) -> Iterator[Finding]:
    names = dict.fromkeys(name for values in ranks.values() for name in values)
    for name in names:
        variable = variables().get(name)
        if name in _MAY_DIFFER or (variable is not None and variable.scope == "quiet"):
            continue
        by_value: dict[str, list[str]] = {}
        for rank, values in ranks.items():
            by_value.setdefault(values.get(name, "not set"), []).append(rank)
        # In a log a missing line may also have been filtered out; in an environment it is not there.
        only_missing = source == "log" and len(by_value.keys() - {"not set"}) == 1
        if len(by_value) > 1:
            yield Finding(
                check=CHECK.id,
                subject=name,
                severity=Severity.RISK if only_missing else Severity.FAULT,
                certainty=Certainty.POSSIBLE if only_missing else Certainty.READ,
                headline=f"{name} differs between ranks: {', '.join(by_value)}",
                evidence=tuple(
                    Evidence(what=f"{name}={value}", value=_some(found), source=source)
                    for value, found in by_value.items()
                ),
                fix=f"Set {name} alike on all ranks; ranks that choose differently hang or fall back to the slowest.",
                proof=AbTest(
                    a="the job as it is",
                    b=f"the job with {name} exported by the launcher to every rank",
                    expect="the same transports on every rank in the log",
                ),
            )


def _some(ranks: list[str]) -> str:
    return ", ".join(ranks[:4]) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


CHECK = Check(
    id="rank-differences",
    title="Switches that differ between ranks",
    reads=("/proc/PID/environ", "log"),
    look=look,
    of_log=True,
)
