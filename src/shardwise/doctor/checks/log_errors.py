"""Errors in the log that no other check takes, first of all those of InfiniBand and of hanging collectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity
from shardwise.doctor.nccl_log.records import LogWarning, NcclLog, NoticeKind, Result
from shardwise.doctor.scene import Scene


@dataclass(frozen=True, kw_only=True)
class _Meaning:
    """What a line says, and what to do about it."""

    severity: Severity = Severity.FAULT
    headline: str
    fix: str
    reference: str = ""
    certainty: Certainty = Certainty.READ


_MEANINGS: Mapping[NoticeKind, _Meaning] = {
    "ib_completion_timeout": _Meaning(
        headline="an InfiniBand or RoCE transfer timed out (status 12): the peer or the path is gone",
        fix=(
            "RoCE: check NCCL_IB_GID_INDEX (NCCL before 2.21) and flow control; InfiniBand: cable, switch, the "
            "peer's log."
        ),
        reference="NVIDIA/nccl#426, NVIDIA/nccl#769",
    ),
    "ib_completion_protection": _Meaning(
        headline="an adapter was refused access to memory (status 4): often ACS or the IOMMU with GPUDirect RDMA",
        fix="Switch ACS off on the path between card and adapter, or test with NCCL_NET_GDR_LEVEL=LOC.",
        reference="NVIDIA/nccl#304",
    ),
    "ib_completion_error": _Meaning(
        headline="an InfiniBand or RoCE transfer failed",
        fix="Look at the peer's log and at the port's counters.",
    ),
    "ib_qp_timeout": _Meaning(
        headline="two adapters could not connect (ibv_modify_qp)",
        fix=("On a fabric of separate rails set NCCL_CROSS_NIC=0; else check routing and GID index between the two."),
        reference="NVIDIA/nccl#2013",
    ),
    "ib_setup_failed": _Meaning(
        headline="an adapter could not be set up: most often the limit of locked memory",
        fix=(
            "Raise the limit where the job starts (ulimit -l unlimited, docker --ulimit memlock=-1); else look at "
            "the adapter's driver."
        ),
        reference="NVIDIA/nccl#380, NVIDIA/nccl#562",
    ),
    "ib_async_event": _Meaning(
        severity=Severity.RISK,
        headline="an adapter reported an event",
        fix="Look at the port's state and counters.",
    ),
    "stray_connection": _Meaning(
        severity=Severity.RISK,
        headline="something else spoke to NCCL's port: a port scan, or a rank of another job",
        fix="Keep scanners away from the job's ports, and give every job a rendezvous of its own.",
        reference="NVIDIA/nccl#1808, NVIDIA/nccl-tests#188",
    ),
    "switch_ignored": _Meaning(
        severity=Severity.RISK,
        headline="NCCL cannot do what a switch asks for, and ignored it",
        fix="Unset the switch.",
        reference="NVIDIA/nccl-tests#133",
    ),
    "out_of_memory": _Meaning(
        headline="a card had no memory left for NCCL",
        fix="Leave NCCL some GiB on every card: a smaller micro-batch, or fewer process groups.",
    ),
    "cuda_failure": _Meaning(
        headline="a CUDA call failed inside NCCL",
        fix="Look for the first error in all ranks' logs.",
    ),
}
_SECONDARY: Mapping[NoticeKind, _Meaning] = {
    "connection_closed": _Meaning(
        headline="a peer closed the connection: another rank died first",
        fix="Look for the first error in the other ranks' logs.",
    ),
    "knock_on": _Meaning(
        headline="an operation failed because of an error elsewhere",
        fix="Look for the first error in all ranks' logs.",
    ),
}
"""What follows from another fault: a note where that is in the log, a finding where nothing else is."""
_RESULTS: Mapping[Result, _Meaning] = {
    "cuda": _Meaning(
        headline="a CUDA call failed (ncclUnhandledCudaError)",
        fix="Look for the first CUDA error in all ranks' logs.",
    ),
    "system": _Meaning(
        headline="a call to the system or to a library failed (ncclSystemError)",
        fix=(
            "Record a log with NCCL_DEBUG=INFO: the warning before this names the call. Without one it is mostly a "
            "socket that could not be connected."
        ),
    ),
    "internal": _Meaning(
        headline="NCCL failed inside (ncclInternalError)",
        fix="Record a log with NCCL_DEBUG=INFO and look for the warning before this.",
    ),
    "argument": _Meaning(
        headline="NCCL was called with a wrong argument (ncclInvalidArgument)",
        fix="Look at the call in the program.",
    ),
    "usage": _Meaning(
        headline="NCCL was called in a wrong way (ncclInvalidUsage)",
        fix="Look for one card that two ranks use, and for groups that ranks enter in different orders.",
    ),
    "remote": _Meaning(
        headline="another rank failed (ncclRemoteError)",
        fix="Look for the first error in the other ranks' logs.",
    ),
}
_TOLD_ELSEWHERE: tuple[NoticeKind, ...] = (
    "shm_full",
    "verbs_open_failed",
    "memlock",
    "p2p_refused_nvlink",
    "nvls_failure",
    "fabric_not_ready",
    "no_route",
    "connection_refused",
    "connection_timeout",
    "no_socket_interface",
)
"""Faults that other checks tell."""
_MAX_UNKNOWN = 5


def look(scene: Scene) -> Iterator[Answer]:
    """Known errors, collectives that hang, then what only says that something went wrong."""
    log = scene.log
    if log is None:
        return
    primary = [
        *(_finding(notice.host, _MEANINGS[notice.kind], notice.text) for notice in log.notices_of(*_MEANINGS)),
        *_hanging(log),
    ]
    yield from primary
    explained = bool(primary or log.notices_of(*_TOLD_ELSEWHERE))
    for notice in log.notices_of(*_SECONDARY):
        meaning = _SECONDARY[notice.kind]
        yield _finding(notice.host, replace(meaning, severity=Severity.NOTE) if explained else meaning, notice.text)
    unknown = [warning for warning in log.warnings if not warning.known]
    for warning in unknown[:_MAX_UNKNOWN]:
        yield _unknown(warning)
    if not explained and not unknown and not log.notices_of(*_SECONDARY):
        for result in log.results:
            yield _finding(result.host, _RESULTS[result.result], result.where)


def _unknown(warning: LogWarning) -> Finding:
    times = f" ({warning.calls:,} times)" if warning.calls > 1 else ""
    meaning = _Meaning(
        severity=Severity.RISK,
        headline=f"NCCL warned{times}: {warning.message.strip()[:100]}",
        fix="Not a warning that this doctor knows; look it up with its file and line.",
        certainty=Certainty.POSSIBLE,
    )
    return _finding(warning.host, meaning, f"{warning.origin} {warning.message}".strip())


def _hanging(log: NcclLog) -> Iterator[Finding]:
    """Collectives that torch gave up, and whether the program or the wire is to blame: who had called them."""
    if not log.timeouts:
        return
    first = min(log.timeouts, key=lambda found: found.sequence or 0)
    called = {found.rank: found.enqueued for found in log.timeouts if found.enqueued is not None}
    behind = sorted(rank for rank, last in called.items() if first.sequence is not None and last < first.sequence)
    what = f"{first.op or 'a collective'} number {'?' if first.sequence is None else first.sequence}"
    seconds = "" if first.seconds is None else f" after {first.seconds:,.0f} s"
    ranks = sorted({found.rank for found in log.timeouts})
    if behind:
        headline = f"torch gave up {what}{seconds}: rank {', '.join(map(str, behind[:8]))} never called it"
        fix = "A fault of the program: look at what those ranks did instead (an exception, uneven data, a branch)."
    else:
        headline = f"torch gave up {what}{seconds}: {len(ranks)} rank(s) waited in it"
        fix = (
            "If every rank had called it, the wire is at fault; a rank that is not in this log may never have. Set "
            "TORCH_FR_BUFFER_SIZE=20000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1 and read the dumps with torchfrtrace."
        )
    told = ", ".join(f"rank {rank} had called {last}" for rank, last in sorted(called.items())[:8])
    yield _finding("", _Meaning(headline=headline, fix=fix), told or f"ranks {', '.join(map(str, ranks[:8]))}")


def _finding(host: str, meaning: _Meaning, text: str) -> Finding:
    return Finding(
        check=CHECK.id,
        subject=host or "a host",
        severity=meaning.severity,
        certainty=meaning.certainty,
        headline=meaning.headline,
        evidence=(Evidence(what="log", value=text[:300], source=f"log of {host or 'a host'}"),),
        fix=meaning.fix,
        proof=AbTest(
            a="the job as it is, with NCCL_DEBUG=INFO", b="the same after the fix", expect="no such line in the log"
        ),
        reference=meaning.reference,
    )


CHECK = Check(id="log-errors", title="Errors in the log", reads=("log",), look=look, of_log=True)
