"""Errors in the log that no other check takes, first of all those of InfiniBand and of hanging collectives."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.findings import AbTest, Answer, Certainty, Check, Evidence, Finding, Severity
from shardwise.doctor.log_records import NoticeKind
from shardwise.doctor.scene import Scene

_MEANINGS: dict[NoticeKind, tuple[Severity, str, str, str]] = {
    "ib_completion_timeout": (
        Severity.FAULT,
        "an InfiniBand or RoCE transfer timed out (status 12): the peer or the path is gone",
        "RoCE: check NCCL_IB_GID_INDEX (NCCL before 2.21) and flow control; InfiniBand: cable, switch, the peer's log.",
        "NVIDIA/nccl#426, NVIDIA/nccl#769",
    ),
    "ib_completion_protection": (
        Severity.FAULT,
        "an adapter was refused access to memory (status 4): often ACS or the IOMMU with GPUDirect RDMA",
        "Switch ACS off on the path between card and adapter, or test with NCCL_NET_GDR_LEVEL=LOC.",
        "NVIDIA/nccl#304",
    ),
    "ib_completion_error": (
        Severity.FAULT,
        "an InfiniBand or RoCE transfer failed",
        "Look at the peer's log and at the port's counters.",
        "",
    ),
    "ib_qp_timeout": (
        Severity.FAULT,
        "two adapters could not connect (ibv_modify_qp)",
        "On a fabric of separate rails set NCCL_CROSS_NIC=0; else check routing and GID index between the two.",
        "NVIDIA/nccl#2013",
    ),
    "ib_async_event": (Severity.RISK, "an adapter reported an event", "Look at the port's state and counters.", ""),
    "collective_timeout": (
        Severity.FAULT,
        "torch gave up on a collective",
        "Set TORCH_FR_BUFFER_SIZE=20000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1 and read the dumps with torchfrtrace: one "
        "rank that never called it is a fault of the program, all called and none finished is a fault of the wire.",
        "",
    ),
    "cuda_failure": (
        Severity.FAULT,
        "a CUDA call failed inside NCCL",
        "Look for the first error in all ranks' logs.",
        "",
    ),
    "connection_closed": (
        Severity.NOTE,
        "a peer closed the connection: another rank died first",
        "Look for the first error in the other ranks' logs.",
        "",
    ),
}
_MAX_UNKNOWN = 5


def look(scene: Scene) -> Iterator[Answer]:
    """Known errors, then warnings that nobody knows, as notes."""
    log = scene.log
    if log is None:
        return
    for notice in log.notices_of(*_MEANINGS):
        severity, headline, fix, reference = _MEANINGS[notice.kind]
        yield _finding(notice.host, severity, headline, notice.text, fix, reference)
    known = {notice.text for notice in log.notices}
    unknown = [warning for warning in log.warnings if warning.message not in known and warning.message.strip()]
    for warning in unknown[:_MAX_UNKNOWN]:
        times = f" ({warning.calls} times)" if warning.calls > 1 else ""
        yield _finding(
            warning.host,
            Severity.NOTE,
            f"NCCL warned{times}",
            f"{warning.origin} {warning.message}".strip(),
            "Not a warning that this doctor knows; look it up with its file and line.",
            "",
        )


def _finding(host: str, severity: Severity, headline: str, text: str, fix: str, reference: str) -> Finding:
    return Finding(
        check=CHECK.id,
        subject=host or "a host",
        severity=severity,
        certainty=Certainty.READ,
        headline=headline,
        evidence=(Evidence(what="log", value=text[:300], source=f"log of {host or 'a host'}"),),
        fix=fix,
        proof=AbTest(
            a="the job as it is, with NCCL_DEBUG=INFO", b="the same after the fix", expect="no such line in the log"
        ),
        reference=reference,
    )


CHECK = Check(id="log-errors", title="Errors in the log", reads=("log",), look=look, of_log=True)
