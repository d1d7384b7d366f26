"""Reads a log of any size in one pass and flat memory.

[Note: speed]
Large logs repeat themselves, so origins and messages are remembered in bounded tables: a line seen before costs two
look-ups and no regular expression. Messages that differ in numbers only (addresses, counters) have one skeleton: once
that has said nothing a thousand times it is passed over, and of a warning only the number is kept from then on. Text
that cannot be a log's is passed over by the megabyte.
"""

from __future__ import annotations

import codecs
import gzip
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, cast

from shardwise.doctor.nccl_log.collector import MAX_CACHED, Collector, Origin
from shardwise.doctor.nccl_log.notices import find_notice, keep_warning
from shardwise.doctor.nccl_log.origin import glue_start, message_text, read_origin
from shardwise.doctor.nccl_log.records import NcclLog
from shardwise.doctor.nccl_log.shapes import shapes_of
from shardwise.doctor.nccl_log.torch_lines import MAX_LINE_BYTES, is_binary, read_foreign_line
from shardwise.errors import UsageError

CHUNK_BYTES = 1 << 20
_MARK = re.compile(rb"NCCL (?:INFO|WARN) ")
_BARE_VERSION = re.compile(rb"[NR]CCL version\s*:?\s*(\d+\.\d+(?:\.\d+)?[\w.+\-]*)")
_ESCAPES = re.compile(rb"\x1b\[[0-9;:?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_CHOICE = re.compile(rb"(?:(\w+): )?(\d+) Bytes -> Algo (\w+) proto (\w+)")
ENOUGH = 1000
_NUMERALS = b"0123456789abcdef"
_TELLING = (b"CCL", b"nccl", b"atchdog", b"Last error:")
"""Parts of every line that means something; a chunk without them is passed over."""
_WIDE = ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


def read_nccl_log(path: Path | str) -> NcclLog:
    """Parses a log file in one pass: plain or gzip, UTF-8 or what PowerShell makes of it (UTF-16).

    Args:
        path: The file.

    Returns:
        What the log says; empty (zero NCCL lines) for a file that is no NCCL log.

    Raises:
        UsageError: If the file cannot be read.
    """
    collector = Collector()
    if Path(path).is_char_device() or Path(path).is_block_device():
        raise UsageError(f"The log {str(path)!r} is a device, which may never end. Give a file, or a pipe.")
    try:
        with Path(path).open("rb") as raw:
            gzipped = raw.peek(2)[:2] == b"\x1f\x8b"
            stream = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if gzipped else raw
            _read_chunks(collector, _in_utf8(iter(lambda: stream.read(CHUNK_BYTES), b""), collector))
    except (OSError, EOFError) as error:
        if collector.num_lines == 0:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"The log {str(path)!r} cannot be read: {reason}. Give a file that NCCL_DEBUG_FILE or a "
                             "launcher wrote, and check that this user may read it.") from error  # fmt: skip
        collector.ends_mid_line = True  # a compressed log that is still being written
    return collector.finish(str(path))


def parse_nccl_log(text: str | bytes, source: str = "text") -> NcclLog:
    """Parses a log that is already in memory."""
    data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    collector = Collector()
    _read_chunks(collector, _in_utf8(iter((data,)), collector))
    return collector.finish(source)


def _in_utf8(chunks: Iterator[bytes], collector: Collector) -> Iterator[bytes]:
    """The chunks in UTF-8; counts their bytes."""
    decoder: codecs.IncrementalDecoder | None = None
    for number, chunk in enumerate(chunks):
        collector.num_bytes += len(chunk)
        if number == 0 and (encoding := _encoding(chunk)):
            decoder = codecs.getincrementaldecoder(encoding)("replace")
        yield chunk if decoder is None else decoder.decode(chunk).encode("utf-8", "replace")


def _encoding(start: bytes) -> str:
    """UTF-16 by its mark, or because every other byte is zero; empty for everything else."""
    for mark, name in _WIDE:
        if start.startswith(mark):
            return name
    sample = start[:512]
    if len(sample) >= 64 and not any(sample[1::2]) and all(sample[0::2]):
        return "utf-16-le"
    return ""


def _read_chunks(collector: Collector, chunks: Iterator[bytes]) -> None:
    carry = b""
    for chunk in chunks:
        chunk = carry + chunk
        end = chunk.rfind(b"\n") + 1
        whole, carry = chunk[:end], chunk[end:]
        if not collector.last_error_follows and not any(part in whole for part in _TELLING) and not is_binary(whole):
            collector.num_lines += whole.count(b"\n")
        else:
            _read_lines(collector, whole.split(b"\n")[:-1])
        if len(carry) > MAX_LINE_BYTES:
            _read_lines(collector, (carry,))
            carry = b""
    if carry:
        collector.ends_mid_line = True
        _read_lines(collector, (carry,))


def _read_lines(collector: Collector, lines: Iterable[bytes]) -> None:
    """The hot loop: everything that can be decided by a byte search is decided here."""
    seen, skeletons = collector.seen, collector.skeletons
    for line in lines:
        collector.num_lines += 1
        at = line.find(b"NCCL ")
        if at < 0 or line.startswith(b"NCCL CALL", at):
            read_foreign_line(collector, line)
            continue
        kind = line[at + 5 : at + 10]
        odd = line.find(b"NCCL ", at + 10) >= 0 or len(line) > MAX_LINE_BYTES or b"\x1b" in line
        if odd or kind not in (b"INFO ", b"WARN "):
            _read_odd_line(collector, line)
            continue
        collector.num_nccl_lines += 1
        message = line[at + 10 :]
        if b" Bytes -> Algo" in message and (match := _CHOICE.match(message)):
            collector.keep_choice(match[1] or b"", int(match[2]), match[3], match[4])
            continue
        origin = read_origin(collector, line[:at])
        if (message, origin.host) in seen:
            continue
        skeleton = skeletons.get((message.translate(None, _NUMERALS), origin))
        if skeleton is not None and skeleton.times >= ENOUGH:
            skeleton.passed += 1
        else:
            _read_message(collector, message, origin, warn=kind == b"WARN ")


def _read_odd_line(collector: Collector, line: bytes) -> None:
    """A line with a warning, a bare version, escapes, or several lines glued together."""
    if len(line) > MAX_LINE_BYTES:
        collector.num_unreadable += 1
        line = line[:MAX_LINE_BYTES]
    if b"\x1b" in line:
        line = _ESCAPES.sub(b"", line)
    marks = list(_MARK.finditer(line))
    if not marks:
        if match := _BARE_VERSION.search(line):
            collector.num_nccl_lines += 1
            host = read_origin(collector, line[: match.start()]).host
            collector.keep("versions", (host, match[1].decode("ascii", "replace")))
        else:
            read_foreign_line(collector, line)
        return
    start = 0
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        collector.num_nccl_lines += 1
        origin = read_origin(collector, line[start : mark.start()])
        end = len(line) if following is None else glue_start(collector, line, mark.end(), following.start(), origin)
        warn = line.startswith(b"NCCL WARN", mark.start())
        _read_message(collector, line[mark.end() : end], origin, warn=warn)
        start = end


def _read_message(collector: Collector, message: bytes, origin: Origin, *, warn: bool) -> None:
    text = message_text(message)
    shaped = text.lstrip()
    found = repeats = False
    for shape in shapes_of(shaped):
        if match := shape.pattern.search(shaped) if shape.part else shape.pattern.match(shaped):
            shape.keep(collector, match, origin)
            found, repeats = True, shape.repeats
            break
    known = find_notice(collector, text, origin)
    warning = keep_warning(collector, text, origin, known=known) if warn else None
    if not warn and not repeats and not known:
        if len(collector.seen) >= MAX_CACHED:
            collector.seen.clear()
        collector.seen[(message, origin.host)] = None
    if warn or (not found and not known and b" -> " not in message):
        skeleton = collector.skeleton((message.translate(None, _NUMERALS), origin))
        skeleton.times += 1
        skeleton.warning = warning
