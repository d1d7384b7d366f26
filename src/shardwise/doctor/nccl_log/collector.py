"""What one pass over a log has gathered; every table has a limit, so that memory stays flat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.doctor.nccl_log.records import (
    LogChoice,
    LogCommunicator,
    LogNotice,
    LogResult,
    LogTimeout,
    LogWarning,
    NcclLog,
    Result,
)

MAX_CACHED = 20_000
"""Entries of each table of what repeats itself: origins, messages, warnings."""
MAX_RECORDS = 100_000
"""Distinct records kept of each kind; a 512-rank job prints about 20,000 edges a host."""
_ALGORITHMS = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Who printed a line."""

    host: str = ""
    pid: int | None = None
    tid: int | None = None
    source: str = ""
    """File and line in NCCL, which warnings name."""


WarningKey = tuple[str, str, str]
"""(host, source, message without its numbers)"""


@dataclass(slots=True, kw_only=True)
class Skeleton:
    """A message without its numbers that has said nothing so far, or is a warning."""

    times: int = 0
    """How often it was read in full."""
    passed: int = 0
    """How often it has come since, and was only counted."""
    warning: WarningKey | None = None


@dataclass(kw_only=True)
class Collector:
    """Records in the order in which they first appear."""

    num_bytes: int = 0
    num_lines: int = 0
    num_nccl_lines: int = 0
    num_unreadable: int = 0
    num_dropped: int = 0
    ends_mid_line: bool = False
    num_multicast_groups: int = 0
    last_error_follows: bool = False
    """Whether torch's `Last error:` was the line before."""
    prefixes: dict[bytes, Origin] = field(default_factory=dict[bytes, Origin])
    """Origins by all that stands in front of a message."""
    origins: dict[bytes, Origin] = field(default_factory=dict[bytes, Origin])
    """The same by the words that decide them."""
    hosts: set[str] = field(default_factory=set[str])
    seen: dict[tuple[bytes, str], None] = field(default_factory=dict[tuple[bytes, str], None])
    """INFO messages (with host) that say nothing new the second time."""
    skeletons: dict[tuple[bytes, Origin], Skeleton] = field(default_factory=dict[tuple[bytes, Origin], Skeleton])
    _unique: dict[str, dict[Any, int]] = field(default_factory=dict[str, dict[Any, int]])
    _communicators: dict[tuple[str, int | None, str, int], LogCommunicator] = field(
        default_factory=dict[tuple[str, int | None, str, int], LogCommunicator]
    )
    _warnings: dict[WarningKey, LogWarning] = field(default_factory=dict[WarningKey, LogWarning])
    _notices: dict[tuple[str, str, tuple[tuple[str, str], ...]], LogNotice] = field(
        default_factory=dict[tuple[str, str, tuple[tuple[str, str], ...]], LogNotice]
    )
    _results: dict[tuple[str, Result], LogResult] = field(default_factory=dict[tuple[str, Result], LogResult])
    _timeouts: dict[tuple[int, int | None], LogTimeout] = field(
        default_factory=dict[tuple[int, int | None], LogTimeout]
    )
    _choices: dict[tuple[bytes, int, bytes, bytes], int] = field(
        default_factory=dict[tuple[bytes, int, bytes, bytes], int]
    )

    def keep(self, kind: str, record: Any) -> None:
        """Keeps a hashable record once, up to the limit."""
        table = self._unique.setdefault(kind, {})
        if record in table:
            table[record] += 1
        elif len(table) < MAX_RECORDS:
            table[record] = 1
        else:
            self.num_dropped += 1

    def keep_choice(self, op: bytes, num_bytes: int, algorithm: bytes, protocol: bytes) -> None:
        """Counts a choice of algorithm; once there are many sizes, by the power of two below."""
        if len(self._choices) >= MAX_CACHED:
            num_bytes = 1 << max(num_bytes.bit_length() - 1, 0)
        key = (op, num_bytes, algorithm, protocol)
        self._choices[key] = self._choices.get(key, 0) + 1

    def keep_communicator(self, found: LogCommunicator) -> None:
        """Keeps one rank's word on one communicator, and fills in what an earlier line of the same said."""
        key = (found.host, found.pid, found.address, found.rank)
        known = self._communicators.get(key)
        if known is None and len(self._communicators) >= MAX_RECORDS:
            self.num_dropped += 1
            return
        self._communicators[key] = found if known is None else _merged(known, found)

    def keep_warning(self, found: LogWarning, pattern: str) -> WarningKey:
        """Keeps a warning once for every pattern: warnings that differ in numbers only are the same."""
        key = (found.host, found.origin, pattern)
        known = self._warnings.get(key)
        if known is not None:
            self._warnings[key] = replace(known, calls=known.calls + 1, known=known.known or found.known)
        elif len(self._warnings) < MAX_CACHED:
            self._warnings[key] = found
        else:
            self.num_dropped += 1
        return key

    def skeleton(self, key: tuple[bytes, Origin]) -> Skeleton:
        """The skeleton of that key; a new one if there is none."""
        found = self.skeletons.get(key)
        if found is None:
            if len(self.skeletons) >= MAX_CACHED:
                self.forget_skeletons()
            found = self.skeletons[key] = Skeleton()
        return found

    def forget_skeletons(self) -> None:
        """Adds what was only counted to the warnings."""
        for found in self.skeletons.values():
            known = None if found.warning is None else self._warnings.get(found.warning)
            if found.warning is not None and known is not None:
                self._warnings[found.warning] = replace(known, calls=known.calls + found.passed)
        self.skeletons.clear()

    def keep_notice(self, notice: LogNotice) -> None:
        """Keeps a notice once for every host and set of values."""
        key = (notice.kind, notice.host, notice.values)
        known = self._notices.get(key)
        if known is not None:
            self._notices[key] = replace(known, calls=known.calls + 1)
        elif len(self._notices) < MAX_CACHED:
            self._notices[key] = replace(notice, first_line=self.num_lines)
        else:
            self.num_dropped += 1

    def keep_result(self, found: LogResult) -> None:
        """Keeps the first place at which a host came back with an error."""
        key = (found.host, found.result)
        known = self._results.get(key)
        if known is not None:
            self._results[key] = replace(known, calls=known.calls + 1)
        elif len(self._results) < MAX_CACHED:
            self._results[key] = found
        else:
            self.num_dropped += 1

    def keep_timeout(self, found: LogTimeout) -> None:
        """Keeps what one rank says of a collective that it gave up; torch tells it in two lines."""
        key = (found.rank, found.sequence)
        known = self._timeouts.get(key)
        if known is None and len(self._timeouts) >= MAX_CACHED:
            self.num_dropped += 1
            return
        self._timeouts[key] = found if known is None else LogTimeout(
            rank=found.rank,
            sequence=found.sequence,
            op=found.op or known.op,
            seconds=known.seconds if found.seconds is None else found.seconds,
            enqueued=known.enqueued if found.enqueued is None else found.enqueued,
            completed=known.completed if found.completed is None else found.completed,
        )  # fmt: skip

    def finish(self, source: str) -> NcclLog:
        """Everything, as records."""
        self.forget_skeletons()
        return NcclLog(
            source=source,
            num_bytes=self.num_bytes,
            num_lines=self.num_lines,
            num_nccl_lines=self.num_nccl_lines,
            communicators=tuple(self._communicators.values()),
            choices=tuple(self._named_choices()),
            nvls_groups=self.num_multicast_groups,
            warnings=tuple(self._warnings.values()),
            notices=tuple(self._notices.values()),
            results=tuple(self._results.values()),
            timeouts=tuple(self._timeouts.values()),
            ends_mid_line=self.ends_mid_line,
            num_unreadable_lines=self.num_unreadable,
            num_dropped=self.num_dropped,
            **{kind: tuple(records) for kind, records in self._unique.items()},
        )

    def _named_choices(self) -> Iterator[LogChoice]:
        for (op, num_bytes, algorithm, protocol), calls in self._choices.items():
            yield LogChoice(
                op=op.decode(),
                num_bytes=num_bytes,
                algorithm=_name(algorithm.decode(), _ALGORITHMS),
                protocol=_name(protocol.decode(), _PROTOCOLS),
                calls=calls,
            )


def _merged(known: LogCommunicator, found: LogCommunicator) -> LogCommunicator:
    """Both lines' words; the later one wins where both speak."""

    def number(before: int | None, after: int | None) -> int | None:
        return before if after is None else after

    return replace(
        found,
        num_nodes=number(known.num_nodes, found.num_nodes),
        local_ranks=number(known.local_ranks, found.local_ranks),
        cuda_device=number(known.cuda_device, found.cuda_device),
        nvml_device=number(known.nvml_device, found.nvml_device),
        bus_id=found.bus_id or known.bus_id,
        comm_id=found.comm_id or known.comm_id,
        complete=found.complete or known.complete,
    )


def _name(text: str, numbered: tuple[str, ...]) -> str:
    """NCCL's own name for an algorithm or protocol that older versions print as a number and newer ones in capitals."""
    if text.isdigit():
        return numbered[int(text)] if int(text) < len(numbered) else text
    return next((name for name in numbered if name.casefold() == text.casefold().replace("_", "")), text)
