"""Where a line comes from: the origin in front of `NCCL INFO`, read backwards, and where a glued line begins.

[Note: what stands around a line]
Launchers, container engines and terminals put text in front of a line (`[rank3]:`, `[1,0]<stdout>:`, time stamps,
`(Worker pid=4)`), behind it (the end of a JSON object, the rest of a progress bar) or into it (escape sequences).
So nothing is anchored: the mark `NCCL INFO ` is searched for, the origin ends right before it, and the message ends
where JSON or a carriage return cuts it. Ranks that share a terminal glue lines together; a line with a second mark is
cut where the second origin begins.
"""

from __future__ import annotations

import re

from shardwise.doctor.nccl_log.collector import MAX_CACHED, Collector, Origin

NOWHERE = Origin()
_ORIGIN = re.compile(
    r"(?:(?P<host>[A-Za-z0-9_.\-<>]*):(?P<pid>\d+)(?::(?P<tid>\d+))?\s+)?"
    r"(?:\[(?P<device>-?\d+)\]\s+)?(?:(?P<source>[^\s\[\]]+:\d+)\s+)?$"
)
_CLOCK = re.compile(r"\d\d:\d\d:\d\d\s")
"""A time stamp looks like host, process and thread."""
_SAMPLE = re.compile(r"(?P<host>[A-Za-z0-9_.\-]+):\d+:\d+ +\[-?\d+\]")
"""An origin that something else follows, such as a source file that a web page has made a link of."""
_STAMPED = re.compile(r"\[\d{4}-\d\d-\d\d [\d:]+\] [A-Za-z0-9_.\-]+:\d+(?::\d+)?\s+(?:\[-?\d+\]\s+)?(?:\S+\s+)?$")
_BARE = re.compile(r"(?P<host>[A-Za-z0-9_.\-]+):\d+(?::\d+)?\s+(?:\[-?\d+\]\s+)?(?:[^\s\[\]]+:\d+\s+)?$")
_LAUNCHER = re.compile(r"(?:\[(?:rank|default)?\d+(?:,\d+)?\](?:<\w+>)?:?\s*|\d+:\s+)$")
"""What mpirun, torchrun and srun put in front of the origin."""
_JSON_TAIL = re.compile(r'(?:\\n)?"(?:,\s*"\w+":.*|\s*})$|\\n$')


def read_origin(collector: Collector, prefix: bytes) -> Origin:
    """The origin at the end of a prefix; remembered, since a job has few and prints each many times."""
    cached = collector.prefixes.get(prefix)
    if cached is not None:
        return cached
    key = _last_words(prefix)
    origin = collector.origins.get(key)
    if origin is None:
        if len(collector.origins) >= MAX_CACHED:
            collector.origins.clear()
        origin = collector.origins[key] = _parsed(prefix)
        if origin.host and len(collector.hosts) < MAX_CACHED:
            collector.hosts.add(origin.host)
    if len(collector.prefixes) >= MAX_CACHED:
        collector.prefixes.clear()
    collector.prefixes[prefix] = origin
    return origin


def _parsed(prefix: bytes) -> Origin:
    text = decoded(prefix)
    match = _ORIGIN.search(text)
    if match is None:
        return NOWHERE
    host = match["host"] or ""
    if match["pid"] and _CLOCK.match(text, match.start()):
        return Origin(source=match["source"] or "")
    if not match["pid"] and (sample := _SAMPLE.search(text)):
        return Origin(host=sample["host"], source=text[sample.end() :].strip()[:200])
    pid, tid = match["pid"], match["tid"]
    return Origin(
        host=host.strip("<>"),
        pid=int(pid) if pid else None,
        tid=int(tid) if tid else None,
        source=match["source"] or "",
    )


def _last_words(prefix: bytes) -> bytes:
    """What decides the origin: without a launcher's time stamps, which differ from line to line."""
    words = prefix.split()
    if len(words) >= 2 and words[-1].endswith(b"]") and words[-2].count(b":") >= 2:
        return b" ".join(words[-2:])
    if len(words) >= 3 and words[-2].endswith(b"]") and words[-3].count(b":") >= 2:
        return b" ".join(words[-3:])
    return prefix


def glue_start(collector: Collector, line: bytes, low: int, high: int, origin: Origin) -> int:
    """Where the origin of a glued line starts: at a host name already known, else at its longest possible reading.

    Args:
        collector: Knows the hosts so far.
        line: The whole line.
        low: Where the message before it starts.
        high: Where the mark of the glued line stands.
        origin: Of the line before it.
    """
    between = line[low:high].decode("utf-8", "replace")
    at = len(between)
    if match := _STAMPED.search(between):
        at = match.start()
    elif match := _BARE.search(between):
        known = [host for host in {*collector.hosts, origin.host} if host and match["host"].endswith(host)]
        at = match.end("host") - len(max(known, key=len, default=match["host"]))
    if match := _LAUNCHER.search(between, 0, at):
        at = match.start()
    return low + len(between[:at].encode("utf-8"))


def message_text(message: bytes) -> str:
    """A message without what a progress bar or a JSON log has put behind it."""
    text = decoded(message)
    if "\r" in text:
        text = text[: text.index("\r")]
    if text.endswith(("}", "\\n", '"')) and (match := _JSON_TAIL.search(text)):
        text = text[: match.start()]
    if "\\u003" in text:
        text = text.replace("\\u003c", "<").replace("\\u003e", ">")
    return text


def decoded(line: bytes) -> str:
    """Text without the end of the line."""
    return line.decode("utf-8", "replace").rstrip("\r\n")
