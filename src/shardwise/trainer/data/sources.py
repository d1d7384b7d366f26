"""Rows out of files, folders and hub ids, with the line that each came from.

A line that cannot be read is noted with its number and the reading goes on, so that a user sees all problems at once.
The standard library reads JSONL, JSON, CSV and TSV; pyarrow reads Parquet and Arrow; `datasets` reads folders and the
hub.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import gzip
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from shardwise.errors import DataError, MissingExtraError
from shardwise.trainer.data.options import DataOptions
from shardwise.vocabulary.units import MIB, format_bytes

MAX_LINE_BYTES = 64 * MIB
"""A longer line is a problem, not a row: it is skipped without being held in memory."""
NUM_SHOWN_PROBLEMS = 10
"""Bad rows that an error message shows; the others are counted."""
_LIMIT = re.compile(r"(.+?)(?:#(\d+)|\[:(\d+)\])")
_READ_BYTES = MIB


@dataclass(frozen=True, kw_only=True)
class Place:
    """Between two rows of a source."""

    number: int = 0
    """The row or line before it; 0 at the start."""
    byte: int | None = None
    """Where the next line starts in the file, if it can be jumped to."""
    num_rows: int = 0
    """Rows before it that could be read, for a limit."""


START = Place()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a source."""

    number: int
    """Line number in a text file, otherwise the number of the row; from 1."""
    columns: Mapping[str, object]
    """Column -> value."""
    end: int | None = None
    """Byte behind it, in a file of lines that is not compressed."""


class Problems:
    """Bad rows, collected while the reading goes on: the first few in words, all of them counted."""

    def __init__(self, source: str, unit: str) -> None:
        self.source = source
        self.unit = unit
        self.shown: dict[int, list[str]] = {}
        self.num_rows = 0
        self._last = -1

    def add(self, number: int, text: str) -> None:
        """Notes a problem of a row; several of one row are shown together and count once."""
        if number != self._last:
            self.num_rows += 1
            self._last = number
        if number in self.shown or len(self.shown) < NUM_SHOWN_PROBLEMS:
            self.shown.setdefault(number, []).append(text)

    def forget(self) -> None:
        """Begins anew, for the next part of the same source."""
        self.shown.clear()
        self.num_rows, self._last = 0, -1

    def lines(self) -> tuple[str, ...]:
        """One line for each bad row that is shown."""
        return tuple(f"{self.unit} {number}: {'; '.join(texts)}" for number, texts in sorted(self.shown.items()))

    def error(self) -> DataError:
        """The error that names the file and its bad rows, or says that it has no rows at all."""
        lines = self.lines()
        if not lines:
            return DataError(f"{self.source} has no row to train on.")
        way_out = "Correct it, or leave it out with skip_bad_rows: true."
        if self.num_rows == 1:
            return DataError(f"{self.source}, {lines[0]}. {way_out}")
        first = f" (the first {len(lines)} are shown)" if self.num_rows > len(lines) else ""
        body = "".join(f"\n  {line}" for line in lines)
        return DataError(
            f"{self.source}: {self.num_rows:,} {self.unit}s cannot be used{first}:{body}\n"
            "Correct them, or leave them out with skip_bad_rows: true."
        )


@dataclass(frozen=True, kw_only=True)
class Source:
    """A place that rows come from; opened by `open_source`."""

    name: str
    """As the user wrote it."""
    unit: str
    """What a row's number counts: `line` or `row`."""
    read: Callable[[Problems, Place], Iterator[Row]]
    """Reads the rows behind a place; bad ones go to the problems."""
    content_hash: Callable[[], str]
    """Equal if and only if the content is equal. Reads the whole file."""
    limit: int | None
    """Rows to read at most, lines that cannot be read not counted."""

    def rows(self, problems: Problems, after: Place = START) -> Iterator[Row]:
        """All rows behind a place, up to the limit; lines that cannot be read go to the problems."""
        left = None if self.limit is None else max(0, self.limit - after.num_rows)
        return itertools.islice(self.read(problems, after), left)


def open_source(options: DataOptions) -> Source:
    """Finds out what `options.source` is.

    Raises:
        DataError: No such file, an ending that nobody reads, or a hub data set that cannot be loaded.
        MissingExtraError: pyarrow or datasets is needed and not installed.
    """
    name, limit = _split_limit(options.source)
    path = Path(name).expanduser()
    if path.is_file():
        return _open_file(options.source, path, limit)
    if not name.strip():
        raise DataError("The name of the data set is empty; give a file, a folder or a hub id.")
    if path.is_dir() or _looks_like_hub_id(name):
        return _open_dataset(options, name, limit)
    raise DataError(_no_such_file(path))


def refuse_split(source: str, split: str) -> None:
    """A split that was asked for must be one that the source can have.

    Raises:
        DataError: The source is a file, or a folder with one set: it has no splits, and all of it would be read.
    """
    path = Path(_split_limit(source)[0]).expanduser()
    if path.is_file() or (path / "state.json").is_file():
        raise DataError(
            f"{source} is {'a file' if path.is_file() else 'a folder with one set'} and has no split {split!r}: all of "
            "it would be read. Leave the split away, or name the file of that split."
        )


def _split_limit(source: str) -> tuple[str, int | None]:
    if Path(source).exists():
        return source, None
    match = _LIMIT.fullmatch(source)
    return (match[1], int(match[2] or match[3])) if match else (source, None)


def _looks_like_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None and _ending(Path(name)) not in _READERS


def _no_such_file(path: Path) -> str:
    text = f"No such data file: {path}."
    if not path.parent.is_dir():
        return f"{text} The folder {path.parent} does not exist either."
    near = difflib.get_close_matches(path.name, [one.name for one in path.parent.iterdir()], n=3, cutoff=0.5)
    return text + (f" Did you mean {' or '.join(near)} in {path.parent}?" if near else "")


def _ending(path: Path) -> str:
    """The ending that says what is inside: `.jsonl` for `a.jsonl.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return suffixes[-2] if len(suffixes) > 1 and suffixes[-1] == ".gz" else suffixes[-1] if suffixes else ""


# ---------------------------------------------------------------------------------------------------------- files


def _open_file(name: str, path: Path, limit: int | None) -> Source:
    ending = _ending(path)
    if ending not in _READERS:
        raise DataError(
            f"{path} ends in {ending or 'nothing'}; known are {', '.join(sorted(_READERS))}, "
            "the text formats also with .gz behind. Rename or convert the file."
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty: no row to train on.")
    if ending == ".json" and _is_json_lines(path):
        ending = ".jsonl"
    reader, unit = _READERS[ending]
    return Source(
        name=name,
        unit=unit,
        read=lambda problems, after: reader(path, problems, after),
        content_hash=lambda: f"{_hash_file(path)}{ending}#{limit}",
        limit=limit,
    )


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open_bytes(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.suffix.lower() == ".gz" else path.open("rb")


@dataclass(frozen=True, kw_only=True)
class _Line:
    """One line of a file."""

    number: int
    content: bytes
    end: int
    """Byte behind it."""


def _numbered_lines(path: Path, problems: Problems, after: Place = START) -> Iterator[_Line]:
    """Lines with their numbers, without a byte order mark; never holds more than MAX_LINE_BYTES of one."""
    with _open_bytes(path) as file:
        end = file.seek(after.byte or 0)
        for number in itertools.count(1 if after.byte is None else after.number + 1):
            try:
                line = file.readline(MAX_LINE_BYTES + 1)
                end += len(line)
                if len(line) > MAX_LINE_BYTES:
                    skipped = _skip_line(file, line)
                    end += skipped
                    length = format_bytes(len(line) + skipped)
                    problems.add(
                        number, f"is {length} long, more than the limit of {format_bytes(MAX_LINE_BYTES)} a line"
                    )
                    continue
            except (OSError, EOFError) as error:  # a damaged gzip member, a disk that fails
                problems.add(number, f"cannot be read: {error}")
                return
            if not line:
                return
            if number > after.number:
                content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                yield _Line(number=number, content=content, end=end)


def _skip_line(file: IO[bytes], line: bytes) -> int:
    """Skips the rest of a line; returns how many bytes that were."""
    length = 0
    while line and not line.endswith(b"\n"):
        line = file.readline(_READ_BYTES)
        length += len(line)
    return length


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"is not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start + 1}"


def _parse_json(text: bytes | str) -> tuple[object, str]:
    """The value, or None and what is wrong."""
    try:
        return json.loads(text), ""
    except json.JSONDecodeError as error:
        return None, f"is not valid JSON: {error.msg} at column {error.colno}"
    except UnicodeDecodeError as error:
        return None, _not_utf8(error)
    except RecursionError:
        return None, "is not usable JSON: nested too deeply"
    except ValueError as error:  # an integer with more digits than Python will convert
        return None, f"is not usable JSON: {error}"


def _as_row(number: int, value: object, problems: Problems, end: int | None = None) -> Iterator[Row]:
    if isinstance(value, dict):
        yield Row(number=number, columns=cast("dict[str, object]", value), end=end)
    else:
        problems.add(number, f"is a JSON {_json_type(value)}, not an object with columns")


def _json_type(value: object) -> str:
    names: dict[type, str] = {
        type(None): "null", bool: "true or false", int: "number", float: "number", str: "string", list: "list",
    }  # fmt: skip
    return names.get(type(value), "value")


def _read_jsonl(path: Path, problems: Problems, after: Place) -> Iterator[Row]:
    can_jump = path.suffix.lower() != ".gz"
    for line in _numbered_lines(path, problems, after):
        number = line.number
        if not line.content.strip():
            continue
        try:
            text = line.content.decode()  # json.loads would guess UTF-16 from zero bytes and give a confusing message
        except UnicodeDecodeError as error:
            problems.add(number, _not_utf8(error))
            continue
        value, problem = _parse_json(text.rstrip("\r\n"))
        if problem:
            problems.add(number, problem)
        else:
            yield from _as_row(number, value, problems, line.end if can_jump else None)


def _is_json_lines(path: Path) -> bool:
    """True if a .json file is JSON lines in truth: its first line is an object, and there is a second line."""
    with _open_bytes(path) as file:
        first = file.readline(MAX_LINE_BYTES)
        second = file.readline(_READ_BYTES)
    value, problem = _parse_json(first.removeprefix(codecs.BOM_UTF8))
    return not problem and isinstance(value, dict) and bool(second.strip())


def _read_json(path: Path, problems: Problems, after: Place) -> Iterator[Row]:
    with _open_bytes(path) as file:
        content = file.read().removeprefix(codecs.BOM_UTF8)
    try:
        value = json.loads(content.decode())
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}.") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: {_not_utf8(error)}. Save the file as UTF-8.") from error
    except (RecursionError, ValueError) as error:
        raise DataError(f"{path} is not usable JSON: {error}.") from error
    if isinstance(value, dict):
        table = cast("dict[str, object]", value)
        lists = [column for column in table.values() if isinstance(column, list)]
        value = lists[0] if len(table) == 1 and lists and "messages" not in table else [table]
    if not isinstance(value, list):
        raise DataError(f"{path} holds a JSON {_json_type(value)}; expected a list of objects.")
    for number, item in enumerate(cast("list[object]", value)[after.number :], after.number + 1):
        yield from _as_row(number, item, problems)


def _read_csv(path: Path, problems: Problems, after: Place, delimiter: str = ",") -> Iterator[Row]:
    bad_lines: set[int] = set()

    def decoded() -> Iterator[str]:
        for line in _numbered_lines(path, problems):
            try:
                yield line.content.decode()
            except UnicodeDecodeError as error:
                if line.number > after.number:
                    problems.add(line.number, _not_utf8(error))
                bad_lines.add(line.number)
                yield line.content.decode(errors="replace")

    limit_before = csv.field_size_limit(MAX_LINE_BYTES)
    try:
        rows = _csv_records(csv.reader(decoded(), delimiter=delimiter), problems, bad_lines, after)
        yield from (row for row in rows if row.number > after.number)
    finally:
        csv.field_size_limit(limit_before)


def _csv_records(reader: Any, problems: Problems, bad_lines: set[int], after: Place) -> Iterator[Row]:
    """Records by the first record's names. `reader` is a csv reader, whose type has no public name."""
    header: list[str] | None = None
    while True:
        first_line = int(reader.line_num) + 1
        try:
            record: list[str] = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            problems.add(first_line, f"is not valid CSV: {error}; nothing behind it was read")
            return
        if not record:
            continue
        if header is None:
            header = record
        elif first_line <= after.number:
            continue
        elif len(record) != len(header):
            problems.add(first_line, f"has {len(record)} columns, the header has {len(header)} ({', '.join(header)})")
        elif bad_lines.isdisjoint(range(first_line, int(reader.line_num) + 1)):
            yield Row(number=first_line, columns=dict(zip(header, record, strict=True)))


def _read_tsv(path: Path, problems: Problems, after: Place) -> Iterator[Row]:
    return _read_csv(path, problems, after, delimiter="\t")


def _arrow_rows(path: Path, batches: Callable[[], Iterable[Any]], after: Place) -> Iterator[Row]:
    """Rows of pyarrow record batches, numbered through. `Any`: pyarrow ships no types."""
    import pyarrow as pa

    number = 0
    try:
        for batch in batches():
            known = min(max(0, after.number - number), batch.num_rows)
            number += known
            for columns in batch.slice(known).to_pylist():
                number += 1
                yield Row(number=number, columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read after row {number}: {error}") from error


def _read_parquet(path: Path, problems: Problems, after: Place) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingExtraError("Reading Parquet", "train", "pyarrow") from error
    library: Any = parquet  # ships no types
    return _arrow_rows(path, lambda: library.ParquetFile(path).iter_batches(batch_size=1024), after)


def _read_arrow(path: Path, problems: Problems, after: Place) -> Iterator[Row]:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise MissingExtraError("Reading Arrow", "train", "pyarrow") from error

    def batches() -> Iterator[Any]:
        with pa.memory_map(str(path)) as file:
            try:
                yield from pa.ipc.open_stream(file)  # what `datasets` writes
                return
            except pa.ArrowInvalid:
                file.seek(0)
            opened = pa.ipc.open_file(file)  # Feather version 2
            for index in range(opened.num_record_batches):
                yield opened.get_batch(index)

    return _arrow_rows(path, batches, after)


_READERS: dict[str, tuple[Callable[[Path, Problems, Place], Iterator[Row]], str]] = {
    ".jsonl": (_read_jsonl, "line"),
    ".ndjson": (_read_jsonl, "line"),
    ".json": (_read_json, "row"),
    ".csv": (_read_csv, "line"),
    ".tsv": (_read_tsv, "line"),
    ".parquet": (_read_parquet, "row"),
    ".arrow": (_read_arrow, "row"),
}

# --------------------------------------------------------------------------------------- folders and the hub


def _open_dataset(options: DataOptions, name: str, limit: int | None) -> Source:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("Reading a hub data set", "train", "datasets") from error
    library: Any = datasets  # partial types
    try:
        if (Path(name) / "state.json").exists() or (Path(name) / "dataset_dict.json").exists():
            loaded = library.load_from_disk(name)
            if isinstance(loaded, library.DatasetDict):
                loaded = loaded[options.split]
        else:
            part = "" if limit is None or options.streaming else f"[:{limit}]"
            loaded = library.load_dataset(
                name, name=options.subset, split=options.split + part, streaming=options.streaming
            )
    except Exception as error:  # the library raises a dozen unrelated classes for a wrong name, split or no network
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"The data set {name!r} (split {options.split!r}) cannot be loaded: {reason}. It is neither a file nor a "
            "folder here; check the spelling, the split, the network, and HF_TOKEN if it is private."
        ) from error
    return Source(
        name=options.source,
        unit="row",
        read=lambda _, after: (
            Row(number=number, columns=columns)
            for number, columns in enumerate(loaded.skip(after.number) if after.number else loaded, after.number + 1)
        ),
        content_hash=lambda: f"{loaded._fingerprint}#{limit}",
        limit=limit,
    )
