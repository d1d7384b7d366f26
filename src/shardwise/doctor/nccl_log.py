"""Reads NCCL logs of versions 2.4 to 2.30 (and RCCL's), of any size, in one pass and flat memory.

[Note: how a line is read]
A line is `host:pid:tid [cudaDev] NCCL INFO message`, or `... file.cc:12 NCCL WARN message`. Launchers put text in front
of it (`[rank3]:`, `[1,0]<stdout>:`, time stamps, Kubernetes and Ray prefixes), so nothing is anchored: `NCCL INFO` is
searched for, the origin is read backwards from it and the message forwards. Several ranks that write to one terminal
glue lines together; a line with a second `NCCL INFO` is cut where the second origin starts. A message is dispatched on
its first word to one pattern; the patterns of edges end where their grammar ends, so that glue behind them is harmless.

Large logs repeat themselves, so parsed origins and messages are remembered in bounded tables: a line seen before costs
two look-ups and no regular expression.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, cast

from shardwise.doctor.log_records import (
    Direction,
    LogChannels,
    LogChoice,
    LogCommunicator,
    LogDevice,
    LogDevices,
    LogEdge,
    LogGraph,
    LogNotice,
    LogRing,
    LogRingLink,
    LogSwitch,
    LogTopologyLink,
    LogTree,
    LogWarning,
    NcclLog,
    NoticeKind,
    Transport,
)
from shardwise.errors import UsageError

_CHUNK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 16
"""A longer line is no log line; NCCL cuts its own at 1,024 characters."""
_MAX_CACHED = 20_000
_MAX_RECORDS = 100_000
"""Distinct records kept of each kind; a 512-rank job prints about 20,000 edges a host."""

_ORIGIN = re.compile(
    r"(?:(?P<host>[A-Za-z0-9_.\-]+):(?P<pid>\d+)(?::(?P<tid>\d+))?\s+)?"
    r"(?:\[(?P<device>-?\d+)\]\s+)?(?:(?P<source>[^\s\[\]]+:\d+)\s+)?$"
)
_MARK = re.compile(rb"NCCL (?:INFO|WARN) ")
_ESCAPES = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")
_JUNK = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")

_EDGE = re.compile(
    r"(?:Channel|Ring) (?P<channel>\d+)(?:/(?P<connection>\d+))?\s*:\s*(?P<a>\d+)(?:\[(?P<a_id>[^\]]*)\])?\s*->\s*"
    r"(?P<b>\d+)(?:\[(?P<b_id>[^\]]*)\])?(?:\s+\[(?P<direction>send|receive)\])?\s+via\s+(?P<via>\S.*)"
)
_COLLNET_EDGE = re.compile(
    r"CollNet (?P<channel>\d+)(?:/(?P<connection>\d+))?\s*:\s*(?P<a>\d+)\s+\[(?P<direction>send|receive)\]\s+via\s+"
    r"(?P<via>COLLNET/.*)"
)
_VIA_P2P = re.compile(r"P2P/(?P<method>direct pointer|IPC|CUMEM|MNNVL|[A-Za-z_]+)(?P<flags>(?:/read|/CE)*)")
_VIA_INDIRECT = re.compile(r"P2P/indirect/(?P<through>\d+)\[(?P<id>[^\]]*)\](?P<flags>(?:/read|/CE)*)")
_VIA_SHM = re.compile(r"SHM/(?P<method>(?:direct|CE)(?:/(?:direct|CE))?|[A-Za-z]+)|(?P<old>direct shared memory)")
_VIA_NET = re.compile(
    r"(?P<transport>NET|COLLNET)/(?P<plugin>[^/]+?)/(?P<device>-?\d+)(?:\((?P<proxy>\d+)\))?"
    r"(?P<flags>(?:/GDRDMA(?:\([A-Za-z0-9]+\))?|/Shared)*)"
)
_RING = re.compile(r"(?:Channel|Ring) (?P<channel>\d+)(?:/(?P<count>\d+))?\s*:(?P<ranks>(?:\s+\d+)+)(?!\s*->|\d|\[)")
_RING_LINK = re.compile(r"Ring (?P<channel>\d+)\s*:\s*(?P<previous>\d+)\s*->\s*(?P<rank>\d+)\s*->\s*(?P<next>\d+)")
_TREE = re.compile(r"\[(\d+)\]\s+((?:-?\d+/){0,2}-?\d+)->(-?\d+)->((?:-?\d+/){0,2}-?\d+)")
_TREE_GRAPH = re.compile(r"Tree (\d+)\s*:\s*(-?\d+)\s*->\s*(-?\d+)\s*->\s*(-?\d+)/(-?\d+)/(-?\d+)")
_CHANNELS = re.compile(
    r"(?P<coll>\d+) coll channels,(?: (?P<collnet>\d+) collnet channels,)?(?: (?P<nvls>\d+) nvls channels,)?"
    r" (?P<p2p>\d+) p2p channels, (?P<per>\d+) p2p channels per peer"
)
_DEVICES = re.compile(r"NET/(?P<network>[^:\s]+)\s*: Using (?P<devices>\[\d+\].*)")
_DEVICE = re.compile(r"\[(?P<index>\d+)\](?P<rest>[^\s;]+)")
_VERBS_DEVICE = re.compile(r"(?P<name>[^:]+):(?P<port>\d+)/(?P<layer>\w+(?:/SHARP)?)")
_OUT_OF_BAND = re.compile(r"; OOB (?P<interface>[^:\s]+):")
_BOOTSTRAP = re.compile(r"Bootstrap\s*: Using (?:\[\d+\])?(?P<interface>[^:\s]+):")
_USING_NETWORK = re.compile(r"Using network (?P<network>.+?)\s*$")
_ASSIGNED = re.compile(r"(?:Assigned|Initialized) (?P<kind>\w+) plugin (?P<name>.+?)(?: to comm)?\s*$")
_SWITCH = re.compile(r"(?P<name>(?:NCCL|RCCL)_\w+) set (?:by environment )?to (?P<value>.*?)\s*$")
_BAD_SWITCH = re.compile(r"Invalid value (?P<value>.*?) for (?P<name>NCCL_\w+), using default (?P<default>.+?)\.?\s*$")
_COMM = re.compile(
    r"\bcomm (?P<address>0x[0-9a-fA-F]+|0x\.\.\.) rank (?P<rank>\d+) n[rR]anks (?P<ranks>\d+)"
    r"(?: nNodes (?P<nodes>\d+) localRanks (?P<local>\d+) localRank \d+)?"
    r"(?: cudaDev (?P<cuda>-?\d+))?(?: nvmlDev (?P<nvml>-?\d+))?(?: busId (?P<bus>\w+))?(?: commId (?P<id>0x\w+))?"
)
_CHOICE = re.compile(rb"(?:(\w+): )?(\d+) Bytes -> Algo (\w+) proto (\w+)")
_GRAPH = re.compile(
    r"Pattern (\d+), crossNic \d+, nChannels (\d+), (?:bw|speed) ([\d.]+)/([\d.]+),(?: nvls? \w+,)? type (\w+)/(\w+)"
)
_TOPOLOGY = re.compile(r"[\s+]*\+ (?P<kind>[A-Z0-9]+)\[(?P<rate>[\d.]+)\] - (?P<target>\S+)")
_NVLS_AVAILABLE = re.compile(r"NVLS multicast support is (?P<no>not )?available on dev (?P<device>\d+)")
_NVLS_HEAD = re.compile(r"NVLS Head\s+\d+:(?P<ranks>(?:\s+\d+)+)")
_P2P_SUMMARY = re.compile(r"\b(intraNodeP2pSupport|isAllDirectP2p|isAllCudaP2p|directMode) (\d+)")
_VERSION = re.compile(rb"[NR]CCL version\s*:?\s*(\d+\.\d+(?:\.\d+)?\S*)")
_WATCHDOG = re.compile(r"collective operation timeout: (?P<work>.*?ran for (?P<ms>\d+) milliseconds)")

_NOTICES: tuple[tuple[NoticeKind, re.Pattern[str]], ...] = tuple(
    (cast("NoticeKind", kind), re.compile(pattern))
    for kind, pattern in (
        ("shm_full", r"failed to extend (?P<file>/dev/shm/\S+) to (?P<bytes>\d+) bytes|"
                     r"posix_fallocate failed : No space left|/dev/shm.*No space left on device"),
        ("verbs_missing", r"Failed to open libibverbs\.so"),
        ("verbs_open_failed", r"(?:Call to )?ibv_open_device failed|ibv_get_device_list failed|No verbs"),
        ("memlock", r"ibv_(?:reg|create)\w+ failed.*Cannot allocate memory|ibv_reg_mr\w* failed with error Cannot"),
        ("p2p_refused_nvlink", r"P2P is disabled between NVLINK connected GPUs (?P<a>\d+) and (?P<b>\d+)"),
        ("p2p_refused_by_driver", r"P2P is disabled between connected GPUs (?P<a>\d+) and (?P<b>\d+)"),
        ("p2p_refused_by_cuda", r"Could not enable P2P between dev (?P<a>\d+)\(=\w+\) and dev (?P<b>\d+)"),
        ("legacy_ipc_unsupported", r"Legacy IPC not supported"),
        ("cumem_host_fallback", r"cuMem host allocations do not appear to be working"),
        ("gdr_disabled_for_hca", r"GPU Direct RDMA Disabled for HCA (?P<index>\d+)(?: '(?P<name>[^']*)')?"),
        ("gdr_disabled", r"GPU Direct RDMA Disabled for (?P<pair>GPU.*?)(?:\(?distance (?P<distance>\d+) > )"),
        ("gdr_enabled", r"GPU Direct RDMA Enabled for "),
        ("dmabuf_available", r"DMA-BUF is available on GPU device (?P<device>-?\d+)"),
        ("ib_completion_timeout", r"Got completion from peer.*?(?:error |status=)(?:\w+\()?(?P<status>12)\b"),
        ("ib_completion_protection", r"Got completion from peer.*?(?:error |status=)(?:\w+\()?(?P<status>4)\b"),
        ("ib_completion_error", r"Got completion from peer.*?(?:error |status=)(?:\w+\()?(?P<status>\d+)"),
        ("ib_qp_timeout", r"ibv_modify_qp failed with (?:error )?(?P<error>.*?)(?:,|$)"),
        ("ib_async_event", r"NET/IB : (?P<device>\S+) (?:Got async event|async fatal event) ?:? ?(?P<event>.*)"),
        ("fabric_not_ready", r"system not yet initialized|system driver mismatch|fabric state"),
        ("no_route", r"No route to host"),
        ("connection_refused", r"[Cc]onnection refused"),
        ("no_socket_interface", r"no socket interface found|No interface found"),
        ("connection_timeout", r"(?:[Cc]onnect\w*|socket\w*|polling).*(?:timed out|Connection timed out)"),
        ("connection_closed", r"[Cc]onnection closed by remote peer|[Cc]onnection reset by peer|"
                              r"Net : Connection closed"),
        ("iommu_not_passthrough", r'Missing "?iommu=pt"?'),
        ("no_ib_device", r"NET/IB : No device found"),
        ("net_plugin_missing", r"No plugin found|Could not find: ?libnccl-net"),
        ("affinity", r"Setting affinity for GPU (?P<device>\d+) to (?P<mask>[0-9a-fA-F,\-]+)"),
        ("cuda_failure", r"Cuda failure (?:'|(?P<code>\d+) ')(?P<text>[^']*)"),
    )
)  # fmt: skip
_NOTICE_HINT = re.compile(
    r"/dev/shm|posix_fallocate|ibv|P2P is dis|Could not|Legacy IPC|cuMem host|GPU Direct|DMA-BUF|Got completion|"
    r"Missing|No (?:route|plugin|device|verbs|interface)|onnect|system |fabric state|timed out|affinity for GPU|"
    r"Cuda failure|async|no socket|Net :"
)

_Parse = Callable[["_Collector", str, "_Origin"], None]


@dataclass(frozen=True, kw_only=True)
class _Origin:
    host: str
    pid: int | None
    tid: int | None
    source: str


_NOWHERE = _Origin(host="", pid=None, tid=None, source="")


@dataclass(kw_only=True)
class _Collector:
    """Gathers records in the order in which they first appear; every table has a limit."""

    num_bytes: int = 0
    num_lines: int = 0
    num_nccl_lines: int = 0
    num_unreadable: int = 0
    num_dropped: int = 0
    ends_mid_line: bool = False
    num_multicast_groups: int = 0
    unique: dict[str, dict[Any, int]] = field(default_factory=dict[str, dict[Any, int]])
    """Records by kind, with how often each was seen."""
    communicators: dict[tuple[str, int | None, str, int], LogCommunicator] = field(
        default_factory=dict[tuple[str, int | None, str, int], LogCommunicator]
    )
    warned: dict[tuple[str, str, str], LogWarning] = field(default_factory=dict[tuple[str, str, str], LogWarning])
    noticed: dict[tuple[str, str, tuple[tuple[str, str], ...]], LogNotice] = field(
        default_factory=dict[tuple[str, str, tuple[tuple[str, str], ...]], LogNotice]
    )
    choices: dict[tuple[bytes, int, bytes, bytes], int] = field(
        default_factory=dict[tuple[bytes, int, bytes, bytes], int]
    )
    origins: dict[bytes, _Origin] = field(default_factory=dict[bytes, _Origin])
    hosts: set[str] = field(default_factory=set[str])
    seen: dict[tuple[bytes, str], None] = field(default_factory=dict[tuple[bytes, str], None])
    """INFO messages (with host) whose records are idempotent, so that a repeat can be skipped."""

    def keep(self, kind: str, record: Any) -> None:
        """Keeps a hashable record once, up to the limit."""
        table = self.unique.setdefault(kind, {})
        if record in table:
            table[record] += 1
        elif len(table) < _MAX_RECORDS:
            table[record] = 1
        else:
            self.num_dropped += 1

    def kept(self, kind: str) -> tuple[Any, ...]:
        """The records of a kind, in the order of the log."""
        return tuple(self.unique.get(kind, ()))


def read_nccl_log(path: Path | str) -> NcclLog:
    """Parses a log file, plain or gzip, in one pass.

    Args:
        path: The file.

    Returns:
        What the log says; empty (zero NCCL lines) for a file that is no NCCL log.

    Raises:
        UsageError: If the file cannot be read.
    """
    collector = _Collector()
    if Path(path).is_char_device() or Path(path).is_block_device():
        raise UsageError(f"The log {str(path)!r} is a device, which may never end. Give a file, or a pipe.")
    try:
        with Path(path).open("rb") as raw:
            gzipped = raw.peek(2)[:2] == b"\x1f\x8b"
            stream = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if gzipped else raw
            _read_stream(collector, stream)
    except (OSError, EOFError) as error:
        if collector.num_lines == 0:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"The log {str(path)!r} cannot be read: {reason}. Give a file that NCCL_DEBUG_FILE or a "
                             "launcher wrote, and check that this user may read it.") from error  # fmt: skip
        collector.ends_mid_line = True  # a compressed log that is still being written
    return _finish(collector, str(path))


def parse_nccl_log(text: str | bytes, source: str = "text") -> NcclLog:
    """Parses a log that is already in memory."""
    data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    collector = _Collector()
    collector.num_bytes = len(data)
    collector.ends_mid_line = bool(data) and not data.endswith(b"\n")
    _read_lines(collector, data.splitlines())
    return _finish(collector, source)


def _read_stream(collector: _Collector, stream: IO[bytes]) -> None:
    carry = b""
    while chunk := stream.read(_CHUNK_BYTES):
        collector.num_bytes += len(chunk)
        lines = (carry + chunk).split(b"\n")
        carry = lines.pop()
        _read_lines(collector, lines)
        if len(carry) > _MAX_LINE_BYTES:
            _read_lines(collector, (carry,))
            carry = b""
    if carry:
        collector.ends_mid_line = True
        _read_lines(collector, (carry,))


def _read_lines(collector: _Collector, lines: Iterable[bytes]) -> None:
    """The hot loop: everything that can be decided by a byte search is decided here."""
    choices, seen, origins = collector.choices, collector.seen, collector.origins
    for line in lines:
        collector.num_lines += 1
        at = line.find(b"NCCL ")
        if at < 0 or line.startswith(b"NCCL CALL", at):
            _read_foreign_line(collector, line)
            continue
        kind = line[at + 5 : at + 10]
        if kind != b"INFO " or line.find(b"NCCL ", at + 10) >= 0 or len(line) > _MAX_LINE_BYTES or b"\x1b" in line:
            _read_odd_line(collector, line)
            continue
        collector.num_nccl_lines += 1
        message = line[at + 10 :]
        if b" Bytes -> Algo" in message and (match := _CHOICE.match(message)):
            key = (match[1] or b"", _bucket(int(match[2]), len(choices)), match[3], match[4])
            choices[key] = choices.get(key, 0) + 1
            continue
        prefix = line[:at]
        origin = origins.get(prefix) or _origin(collector, prefix)
        if (message, origin.host) in seen:
            continue
        _read_message(collector, message, origin, warn=False)


def _bucket(num_bytes: int, num_known: int) -> int:
    """The size itself while the table is small, else the power of two below it."""
    return num_bytes if num_known < _MAX_CACHED else 1 << max(num_bytes.bit_length() - 1, 0)


def _read_foreign_line(collector: _Collector, line: bytes) -> None:
    """A line without NCCL's mark: RCCL's version, torch's watchdog, somebody else's output, junk."""
    if (at := line.find(b"RCCL version")) >= 0 and (match := _VERSION.match(line, at)):
        collector.num_nccl_lines += 1
        origin = _origin(collector, line[:at])
        collector.keep("versions", (origin.host, match[1].decode("ascii", "replace")))
    elif b"collective operation timeout" in line:
        text = _text(line)
        if match := _WATCHDOG.search(text):
            _notice(collector, _NOWHERE, LogNotice(kind="collective_timeout", host="", text=match["work"]))
    elif len(line) > _MAX_LINE_BYTES or _JUNK.search(line):
        collector.num_unreadable += 1


def _read_odd_line(collector: _Collector, line: bytes) -> None:
    """A line with a warning, a bare version, escapes, or several lines glued together."""
    if len(line) > _MAX_LINE_BYTES:
        collector.num_unreadable += 1
        line = line[:_MAX_LINE_BYTES]
    if b"\x1b" in line:
        line = _ESCAPES.sub(b"", line)
    marks = list(_MARK.finditer(line))
    if not marks:
        if match := _VERSION.search(line):
            collector.num_nccl_lines += 1
            host = _origin(collector, line[: match.start()]).host
            collector.keep("versions", (host, match[1].decode("ascii", "replace")))
        elif b"collective operation timeout" in line:
            _read_foreign_line(collector, line.replace(b"NCCL ", b""))
        elif _JUNK.search(line):
            collector.num_unreadable += 1
        return
    start = 0
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        collector.num_nccl_lines += 1
        origin = _origin(collector, line[start : mark.start()])
        end = len(line) if following is None else _glue_start(collector, line, mark.end(), following.start(), origin)
        warn = line.startswith(b"NCCL WARN", mark.start())
        _read_message(collector, line[mark.end() : end], origin, warn=warn)
        start = end


def _glue_start(collector: _Collector, line: bytes, low: int, high: int, origin: _Origin) -> int:
    """Where the origin of a glued line starts: at a host name already known, else at its longest possible reading."""
    between = line[low:high].decode("utf-8", "replace")
    match = re.search(
        r"\[\d{4}-\d\d-\d\d [\d:]+\] [A-Za-z0-9_.\-]+:\d+(?::\d+)?\s+(?:\[-?\d+\]\s+)?(?:\S+\s+)?$", between
    )
    if match:
        return low + len(between[: match.start()].encode("utf-8"))
    match = re.search(r"(?P<host>[A-Za-z0-9_.\-]+):\d+(?::\d+)?\s+(?:\[-?\d+\]\s+)?(?:[^\s\[\]]+:\d+\s+)?$", between)
    if match is None:
        return high
    known = [host for host in {*collector.hosts, origin.host} if host and match["host"].endswith(host)]
    host = max(known, key=len, default=match["host"])
    return low + len(between[: match.end("host") - len(host)].encode("utf-8"))


def _origin(collector: _Collector, prefix: bytes) -> _Origin:
    cached = collector.origins.get(prefix)
    if cached is not None:
        return cached
    match = _ORIGIN.search(_text(prefix))
    if match is None:
        return _NOWHERE
    host, pid, tid = match["host"] or "", match["pid"], match["tid"]
    origin = _Origin(
        host=host, pid=int(pid) if pid else None, tid=int(tid) if tid else None, source=match["source"] or ""
    )
    if len(collector.origins) >= _MAX_CACHED:
        collector.origins.clear()
    collector.origins[prefix] = origin
    if host and len(collector.hosts) < _MAX_CACHED:
        collector.hosts.add(host)
    return origin


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r\n")


def _read_message(collector: _Collector, message: bytes, origin: _Origin, *, warn: bool) -> None:
    text = _text(message)
    if (cut := text.find('\\n"')) >= 0:  # a line inside a container engine's JSON log
        text = text[:cut]
    if warn:
        _warn(collector, text, origin)
    first = text.split(" ", 1)[0]
    handler = _HANDLERS.get(first.rstrip(":")) or (_read_switch if first.startswith(("NCCL_", "RCCL_")) else None)
    if handler is not None:
        handler(collector, text, origin)
    elif first.isdigit() and (match := _CHANNELS.match(text)):
        _read_channels(collector, match, origin)
    elif "comm 0x" in text and (match := _COMM.search(text)):
        _read_comm(collector, text, match, origin)
    if _NOTICE_HINT.search(text):
        _find_notice(collector, text, origin)
    elif " Bytes -> Algo " in text and (choice := _CHOICE.match(text.encode())):
        key = (choice[1] or b"", int(choice[2]), choice[3], choice[4])
        collector.choices[key] = collector.choices.get(key, 0) + 1
    elif text.lstrip(" ").startswith("+ ") and (match := _TOPOLOGY.match(text)):
        link = LogTopologyLink(kind=match["kind"], gb_per_s=float(match["rate"]), target=match["target"])
        collector.keep("topology", link)
    elif not warn and "comm 0x" not in text and "Multicast" not in text and handler is not _read_switch:
        if len(collector.seen) >= _MAX_CACHED:
            collector.seen.clear()
        collector.seen[(message, origin.host)] = None


def _read_channel_line(collector: _Collector, text: str, origin: _Origin) -> None:
    if match := _EDGE.match(text):
        edge = _edge(match, origin)
        if edge is not None:
            collector.keep("edges", edge)
    elif match := _RING_LINK.match(text):
        collector.keep("ring_links", LogRingLink(channel=int(match["channel"]), previous_rank=int(match["previous"]),
                                                 rank=int(match["rank"]), next_rank=int(match["next"])))  # fmt: skip
    elif match := _RING.match(text):
        count = match["count"]
        ranks = tuple(int(rank) for rank in match["ranks"].split())
        ring = LogRing(channel=int(match["channel"]), num_channels=int(count) if count else None, ranks=ranks)
        collector.keep("rings", ring)


def _edge(match: re.Match[str], origin: _Origin) -> LogEdge | None:
    parsed = _via(match["via"])
    if parsed is None:
        return None
    transport, via, parts = parsed
    connection = match["connection"]
    names = match.groupdict()
    target = names.get("b") or match["a"]
    through, proxy, device = parts.get("through"), parts.get("proxy"), parts.get("device")
    return LogEdge(
        channel=int(match["channel"]),
        connection=int(connection) if connection else None,
        source_rank=int(match["a"]),
        source_id=names.get("a_id") or "",
        target_rank=int(target),
        target_id=names.get("b_id") or "",
        transport=transport,
        method=parts.get("method") or "indirect",
        device=int(device) if device else None,
        proxy_rank=int(proxy) if proxy else None,
        direction=cast("Direction | None", names.get("direction")),
        flags=tuple(flag for flag in (parts.get("flags") or "").split("/") if flag),
        through_rank=int(through) if through else None,
        host=origin.host,
        via=via,
    )


def _via(text: str) -> tuple[Transport, str, Mapping[str, str | None]] | None:
    """(transport, the text that belongs to it, its parts); None for a transport that is unknown or cut off."""
    if match := _VIA_INDIRECT.match(text) or _VIA_P2P.match(text):
        return "P2P", match[0], match.groupdict()
    if match := _VIA_SHM.match(text):
        return "SHM", match[0], {"method": match["method"] or match["old"]}
    if match := _VIA_NET.match(text):
        parts = match.groupdict()
        return cast("Transport", parts["transport"]), match[0], {**parts, "method": parts["plugin"]}


def _read_collnet(collector: _Collector, text: str, origin: _Origin) -> None:
    if (match := _COLLNET_EDGE.match(text)) and (edge := _edge(match, origin)):
        collector.keep("edges", edge)


def _read_trees(collector: _Collector, text: str, origin: _Origin) -> None:
    for channel, left, rank, right in _TREE.findall(text):
        # NCCL 2.8 and later print down/down/down->rank->up; before that up->rank->down/down/down.
        down, up = (left, right) if "/" in left else (right, left)
        _keep_tree(collector, int(channel), int(rank), up=int(up), down=[int(child) for child in down.split("/")])


def _read_tree_graph(collector: _Collector, text: str, origin: _Origin) -> None:
    if match := _TREE_GRAPH.match(text):
        channel, up, rank, *down = (int(group) for group in match.groups())
        _keep_tree(collector, channel, rank, up=up, down=down)


def _keep_tree(collector: _Collector, channel: int, rank: int, *, up: int, down: list[int]) -> None:
    children = tuple(child for child in down if child >= 0)
    collector.keep("trees", LogTree(channel=channel, rank=rank, up=up if up >= 0 else None, down=children))


def _read_channels(collector: _Collector, match: re.Match[str], origin: _Origin) -> None:
    nvls, collnet = match["nvls"], match["collnet"]
    record = LogChannels(
        host=origin.host,
        coll=int(match["coll"]),
        p2p=int(match["p2p"]),
        p2p_per_peer=int(match["per"]),
        nvls=int(nvls) if nvls else None,
        collnet=int(collnet) if collnet else None,
    )
    collector.keep("channels", record)


def _read_net(collector: _Collector, text: str, origin: _Origin) -> None:
    match = _DEVICES.match(text)
    if match is None:
        return
    listed, _, _ = match["devices"].partition("; OOB")
    devices: list[LogDevice] = []
    for entry in _DEVICE.finditer(listed):
        verbs = _VERBS_DEVICE.fullmatch(entry["rest"])
        if verbs:
            devices.append(LogDevice(index=int(entry["index"]), name=verbs["name"], port=int(verbs["port"]),
                                     layer=verbs["layer"]))  # fmt: skip
        else:
            name, _, address = entry["rest"].partition(":")
            devices.append(LogDevice(index=int(entry["index"]), name=name, address=re.sub(r"<\d*>$", "", address)))
    out_of_band = _OUT_OF_BAND.search(match["devices"])
    record = LogDevices(
        host=origin.host,
        network=match["network"],
        devices=tuple(devices),
        relaxed_ordering="[RO]" in match["devices"],
        out_of_band=out_of_band["interface"] if out_of_band else "",
    )
    collector.keep("devices", record)


def _read_bootstrap(collector: _Collector, text: str, origin: _Origin) -> None:
    if match := _BOOTSTRAP.match(text):
        collector.keep("bootstrap", (origin.host, match["interface"]))


def _read_using(collector: _Collector, text: str, origin: _Origin) -> None:
    if match := _USING_NETWORK.match(text):
        collector.keep("networks", (origin.host, match["network"]))


def _read_assigned(collector: _Collector, text: str, origin: _Origin) -> None:
    if match := _ASSIGNED.match(text):
        if match["kind"] != "NET":
            collector.keep("plugins", (origin.host, match["name"]))
        elif text.startswith("Assigned"):
            collector.keep("networks", (origin.host, match["name"]))


def _read_p2p(collector: _Collector, text: str, origin: _Origin) -> None:
    if text.startswith("P2P plugin "):
        collector.keep("plugins", (origin.host, text.removeprefix("P2P plugin ").strip()))


def _read_check(collector: _Collector, text: str, origin: _Origin) -> None:
    for name, value in _P2P_SUMMARY.findall(text):
        collector.keep("p2p_summary", (name, value))


def _read_switch(collector: _Collector, text: str, origin: _Origin) -> None:
    if match := _SWITCH.match(text):
        value = match["value"]
        if re.fullmatch(r"-?\d+\.", value):  # NCCL ends the sentence after a number
            value = value[:-1]
        collector.keep("switches", LogSwitch(host=origin.host, pid=origin.pid, name=match["name"], value=value))


def _read_invalid(collector: _Collector, text: str, origin: _Origin) -> None:
    if match := _BAD_SWITCH.match(text):
        values = tuple(match.groupdict().items())
        _notice(collector, origin, LogNotice(kind="invalid_switch_value", host=origin.host, text=text, values=values))


def _read_pattern(collector: _Collector, text: str, origin: _Origin) -> None:
    if match := _GRAPH.match(text):
        collector.keep(
            "graphs",
            LogGraph(
                pattern=int(match[1]),
                num_channels=int(match[2]),
                intra_gb_per_s=float(match[3]),
                inter_gb_per_s=float(match[4]),
                intra_path=match[5],
                inter_path=match[6],
            ),
        )


def _read_nvls(collector: _Collector, text: str, origin: _Origin) -> None:
    if match := _NVLS_AVAILABLE.match(text):
        collector.keep("nvls_available", (origin.host, int(match["device"]), match["no"] is None))
    elif match := _NVLS_HEAD.match(text):
        collector.keep("nvls_heads", tuple(int(rank) for rank in match["ranks"].split()))
    elif text.startswith(("NVLS Created Multicast group", "NVLS Creating Multicast group")):
        collector.num_multicast_groups += text.startswith("NVLS Created")


def _read_version(collector: _Collector, text: str, origin: _Origin) -> None:
    match = _VERSION.match(text.encode("utf-8", "replace"))
    if match:
        collector.keep("versions", (origin.host, match[1].decode("ascii", "replace")))


_HANDLERS: Mapping[str, _Parse] = {
    "Channel": _read_channel_line,
    "Ring": _read_channel_line,
    "CollNet": _read_collnet,
    "Trees": _read_trees,
    "Tree": _read_tree_graph,
    **{f"NET/{name}": _read_net for name in ("IB", "Socket", "FastSocket", "IBext", "OFI", "UCX")},
    "Bootstrap": _read_bootstrap,
    "Using": _read_using,
    "Assigned": _read_assigned,
    "Initialized": _read_assigned,
    "P2P": _read_p2p,
    "Check": _read_check,
    "Invalid": _read_invalid,
    "Pattern": _read_pattern,
    "NVLS": _read_nvls,
    "NCCL": _read_version,
    "RCCL": _read_version,
}


def _read_comm(collector: _Collector, text: str, match: re.Match[str], origin: _Origin) -> None:
    key = (origin.host, origin.pid, match["address"], int(match["rank"]))
    known = collector.communicators.get(key)
    if known is None:
        if len(collector.communicators) >= _MAX_RECORDS:
            collector.num_dropped += 1
            return
        known = LogCommunicator(
            host=origin.host,
            pid=origin.pid,
            address=match["address"],
            rank=int(match["rank"]),
            num_ranks=int(match["ranks"]),
        )

    def number(name: str, before: int | None) -> int | None:
        return int(match[name]) if match[name] else before

    collector.communicators[key] = replace(
        known,
        num_nodes=number("nodes", known.num_nodes),
        local_ranks=number("local", known.local_ranks),
        cuda_device=number("cuda", known.cuda_device),
        nvml_device=number("nvml", known.nvml_device),
        bus_id=match["bus"] or known.bus_id,
        comm_id=match["id"] or known.comm_id,
        complete=known.complete or "Init COMPLETE" in text,
    )


def _warn(collector: _Collector, text: str, origin: _Origin) -> None:
    pattern = re.sub(r"0x[0-9a-fA-F]+|\d+", "#", text)
    key = (origin.host, origin.source, pattern)
    known = collector.warned.get(key)
    if known is not None:
        collector.warned[key] = replace(known, calls=known.calls + 1)
    elif len(collector.warned) < _MAX_CACHED:
        collector.warned[key] = LogWarning(
            host=origin.host, origin=origin.source, message=text, calls=1, first_line=collector.num_lines
        )
    else:
        collector.num_dropped += 1


def _find_notice(collector: _Collector, text: str, origin: _Origin) -> None:
    for kind, pattern in _NOTICES:
        match = pattern.search(text)
        if match is None:
            continue
        if kind == "cuda_failure" and ("nvls" in origin.source or "NVLS" in text):
            kind = "nvls_failure"
        values = tuple((name, value) for name, value in match.groupdict().items() if value is not None)
        _notice(collector, origin, LogNotice(kind=kind, host=origin.host, text=text, values=values))
        return


def _notice(collector: _Collector, origin: _Origin, notice: LogNotice) -> None:
    key = (notice.kind, origin.host, notice.values)
    known = collector.noticed.get(key)
    if known is not None:
        collector.noticed[key] = replace(known, calls=known.calls + 1)
    elif len(collector.noticed) < _MAX_CACHED:
        collector.noticed[key] = replace(notice, first_line=collector.num_lines)
    else:
        collector.num_dropped += 1


_ALGORITHMS = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")


def _name(text: str, numbered: tuple[str, ...]) -> str:
    """NCCL's own name for an algorithm or protocol that older versions print as a number and newer ones in capitals."""
    if text.isdigit():
        return numbered[int(text)] if int(text) < len(numbered) else text
    return next((name for name in numbered if name.casefold() == text.casefold().replace("_", "")), text)


def _choices(collector: _Collector) -> Iterator[LogChoice]:
    for (op, num_bytes, algorithm, protocol), calls in collector.choices.items():
        yield LogChoice(
            op=op.decode(),
            num_bytes=num_bytes,
            algorithm=_name(algorithm.decode(), _ALGORITHMS),
            protocol=_name(protocol.decode(), _PROTOCOLS),
            calls=calls,
        )


def _finish(collector: _Collector, source: str) -> NcclLog:
    kept = collector.kept
    return NcclLog(
        source=source,
        num_bytes=collector.num_bytes,
        num_lines=collector.num_lines,
        num_nccl_lines=collector.num_nccl_lines,
        versions=kept("versions"),
        edges=kept("edges"),
        rings=kept("rings"),
        ring_links=kept("ring_links"),
        trees=kept("trees"),
        channels=kept("channels"),
        networks=kept("networks"),
        plugins=kept("plugins"),
        devices=kept("devices"),
        bootstrap=kept("bootstrap"),
        switches=kept("switches"),
        communicators=tuple(collector.communicators.values()),
        choices=tuple(_choices(collector)),
        graphs=kept("graphs"),
        topology=kept("topology"),
        nvls_available=kept("nvls_available"),
        nvls_heads=kept("nvls_heads"),
        nvls_groups=collector.num_multicast_groups,
        p2p_summary=kept("p2p_summary"),
        warnings=tuple(collector.warned.values()),
        notices=tuple(collector.noticed.values()),
        ends_mid_line=collector.ends_mid_line,
        num_unreadable_lines=collector.num_unreadable,
        num_dropped=collector.num_dropped,
    )
