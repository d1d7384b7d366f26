"""Lines that are not NCCL's: torch's watchdog and its words on an error, RCCL's bare version."""

from __future__ import annotations

import re

from shardwise.doctor.nccl_log.collector import Collector, Origin
from shardwise.doctor.nccl_log.notices import find_notice
from shardwise.doctor.nccl_log.origin import NOWHERE, decoded, read_origin
from shardwise.doctor.nccl_log.records import LogResult, LogTimeout, Result

_GAVE_UP = re.compile(
    r"\[[Rr]ank ?(?P<rank>\d+)\] Watchdog caught collective operation timeout: WorkNCCL\("
    r"(?:SeqNum=(?P<sequence>\d+), )?OpType=(?P<op>\w+).*?ran for (?P<ms>\d+) m"
)
"""torch 1.10 to 2.11."""
_STATUS = re.compile(
    r"Rank (?P<rank>\d+)\] .*?(?:watchdog at work(?: sequence id)?|Timeout at NCCL work): (?P<sequence>\d+).*?"
    r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), last completed (?:NCCL )?work: (?P<completed>-?\d+)"
)
"""torch 2.2 to 2.11."""
_ERROR = re.compile(
    r"\bnccl(?P<name>UnhandledCuda|System|Internal|Invalid|Remote)(?P<rest>Error|Argument|Usage): ?(?P<words>.*)"
)
_RESULTS: dict[str, Result] = {
    "UnhandledCudaError": "cuda",
    "SystemError": "system",
    "InternalError": "internal",
    "InvalidArgument": "argument",
    "InvalidUsage": "usage",
    "RemoteError": "remote",
}
_RCCL_VERSION = re.compile(rb"RCCL version\s*:?\s*(\d+\.\d+(?:\.\d+)?[\w.+\-]*)")
_JUNK = bytes(range(32, 127)) + b"\t\n\r\x0b\x0c\x1b\x08" + bytes(range(128, 256))
MAX_LINE_BYTES = 1 << 16
"""A longer line is no log line; NCCL cuts its own at 1,024 characters."""


def read_foreign_line(collector: Collector, line: bytes) -> None:
    """A line without NCCL's mark; counts it as unreadable if it is binary."""
    if collector.last_error_follows:
        collector.last_error_follows = False
        find_notice(collector, decoded(line), NOWHERE)
    if b"operation timeout" in line or b"last enqueued" in line:
        _read_watchdog(collector, decoded(line))
    elif b"nccl" in line and (match := _ERROR.search(decoded(line))):
        result = _RESULTS.get(match["name"] + match["rest"])
        if result is not None:
            collector.keep_result(LogResult(host="", result=result, where=match[0][:200]))
    elif b"RCCL version" in line and (version := _RCCL_VERSION.search(line)):
        collector.num_nccl_lines += 1
        origin: Origin = read_origin(collector, line[: version.start()])
        collector.keep("versions", (origin.host, version[1].decode("ascii", "replace")))
    elif b"Last error:" in line:
        collector.last_error_follows = True
    if len(line) > MAX_LINE_BYTES or is_binary(line):
        collector.num_unreadable += 1


def is_binary(data: bytes) -> bool:
    """Whether there are bytes that no text has."""
    return bool(data.translate(None, _JUNK))


def _read_watchdog(collector: Collector, text: str) -> None:
    if match := _GAVE_UP.search(text):
        sequence = match["sequence"]
        collector.keep_timeout(LogTimeout(
            rank=int(match["rank"]),
            sequence=int(sequence) if sequence else None,
            op=match["op"],
            seconds=int(match["ms"]) / 1e3,
        ))  # fmt: skip
    elif match := _STATUS.search(text):
        collector.keep_timeout(LogTimeout(
            rank=int(match["rank"]),
            sequence=int(match["sequence"]),
            enqueued=int(match["enqueued"]),
            completed=int(match["completed"]),
        ))  # fmt: skip
