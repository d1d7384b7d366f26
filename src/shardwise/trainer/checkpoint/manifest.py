"""`manifest.json`: what a checkpoint holds, in which file, how long each file is and what it hashes to.

    {"sha256": "<of the bytes of the body>",
    "body": {"format": "shardwise-checkpoint", "version": 1, "step": 10, "files": {...}, "tensors": {...}, ...}
    }

The file is JSON as it stands, and its first line protects the rest: a flipped bit in the body no longer matches the
hash, and one in the frame no longer matches the frame. A manifest is written last, so a folder without one is
unfinished. The hash guards against damage, not against a forger; what a forger can write is bounded by the allow-list
in `values.py` and by the checks here: every name is a plain file name, every chunk lies inside its tensor, and the
chunks of a tensor cover it once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any, Final, cast

from shardwise.errors import CheckpointError
from shardwise.trainer.checkpoint.tensorfile import (
    DTYPE_NAMES,
    DTYPES,
    FileRecord,
    HeaderError,
    is_sizes,
    parse_json,
    write_bytes,
)

MANIFEST: Final = "manifest.json"
FORMAT: Final = "shardwise-checkpoint"
VERSION: Final = 1
_MAX_BYTES: Final = 512 * 2**20
_MAX_CHUNKS_COMPARED: Final = 64
"""Above this many chunks of one tensor only their total volume is compared: pairs grow with the square."""
_FRAME: Final = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n"body": (.*)\n\}\n', re.DOTALL)
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class StoredChunk:
    """A box of a tensor, and where it lies."""

    offsets: tuple[int, ...]
    """Where the box starts inside the whole tensor, in elements."""
    shape: tuple[int, ...]
    """Its extent, in elements."""
    file: str
    """The safetensors file."""
    key: str
    """Its name inside the file."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A whole tensor, stored as boxes."""

    dtype: str
    """Element type, in the spelling of safetensors."""
    shape: tuple[int, ...]
    """Shape of the whole."""
    chunks: tuple[StoredChunk, ...]
    """The boxes; together they cover the tensor once."""


@dataclass(frozen=True, kw_only=True)
class ValueEntry:
    """Something that is not a tensor."""

    file: str
    """The JSON file."""
    tensors: tuple[tuple[str, str], ...] = ()
    """File and key of each tensor inside the value."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint folder."""

    step: int
    """Optimizer steps done when it was saved."""
    files: Mapping[str, FileRecord] = field(repr=False)
    """Every file of the folder but the manifest."""
    tensors: Mapping[str, TensorEntry] = field(repr=False)
    """Every tensor by its name in the state dict."""
    values: Mapping[str, ValueEntry] = field(repr=False)
    """Everything else by its name in the state dict."""
    paths: Mapping[str, tuple[str | int, ...]] | None = field(default=None, repr=False)
    """DCP's flattening: the path in the nested state dict behind each name; None if the state dict was flat."""
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """World size, mesh, strategy, versions: plain JSON."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(record.num_bytes for record in self.files.values())


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as the bytes of its file."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "about": dict(manifest.about),
        "files": {
            name: {"bytes": record.num_bytes, "sha256": record.sha256} for name, record in manifest.files.items()
        },
        "tensors": {
            name: {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "chunks": [[list(c.offsets), list(c.shape), c.file, c.key] for c in entry.chunks],
            }
            for name, entry in manifest.tensors.items()
        },
        "values": {
            name: {"file": entry.file, "tensors": [list(where) for where in entry.tensors]}
            for name, entry in manifest.values.items()
        },
        "paths": None if manifest.paths is None else {name: list(path) for name, path in manifest.paths.items()},
    }
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    digest = hashlib.sha256(text).hexdigest()
    return b'{"sha256": "' + digest.encode() + b'",\n"body": ' + text + b"\n}\n"


def write_manifest(folder: Path, manifest: Manifest) -> FileRecord:
    """Write `manifest.json` durably.

    Raises:
        OSError: The disk is full or refuses.
    """
    return write_bytes(folder / MANIFEST, encode_manifest(manifest))


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint folder; the files themselves are checked by `verify.py`.

    Raises:
        CheckpointError: There is none, or it is damaged, or of another format or version, or makes impossible claims.
    """
    path = folder / MANIFEST
    try:
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path} is missing, so {folder} is unfinished or no shardwise checkpoint.")
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_BYTES} bytes, so it is no manifest.")
        return decode_manifest(path.read_bytes())
    except HeaderError as error:
        raise CheckpointError(f"{path} is damaged: {error}. Resume from another checkpoint.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error


def decode_manifest(raw: bytes) -> Manifest:
    """The opposite of `encode_manifest`.

    Raises:
        HeaderError: Anything that `encode_manifest` would not have written.
    """
    frame = _FRAME.fullmatch(raw)
    if frame is None:
        raise HeaderError("it does not start with its hash or does not end where it should")
    if hashlib.sha256(frame[2]).hexdigest().encode() != frame[1]:
        raise HeaderError("its contents do not match the hash in its first line")
    body = _fields(parse_json(frame[2]), "the manifest", {"format", "version", "step", "about", *_TABLES})
    if body["format"] != FORMAT or body["version"] != VERSION:
        raise HeaderError(f"it has the format {body['format']!r} version {body['version']!r}, not {FORMAT} {VERSION}")
    if type(body["step"]) is not int or body["step"] < 0:
        raise HeaderError("its step is not a whole number from 0")
    files = {name: _decode_file(name, entry) for name, entry in _table(body["files"], "files").items()}
    tensors = {name: _decode_tensor(name, entry, files) for name, entry in _table(body["tensors"], "tensors").items()}
    values = {name: _decode_value(name, entry, files) for name, entry in _table(body["values"], "values").items()}
    _check_keys_once(tensors, values)
    return Manifest(
        step=body["step"],
        files=files,
        tensors=tensors,
        values=values,
        paths=_decode_paths(body["paths"]),
        about=_table(body["about"], "about"),
    )


_TABLES: Final = ("files", "tensors", "values", "paths")


def _table(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise HeaderError(f"{name} is not an object")
    return cast(dict[str, Any], value)


def _fields(value: Any, name: str, fields: set[str]) -> dict[str, Any]:
    table = _table(value, name)
    if set(table) != fields:
        raise HeaderError(f"{name} needs exactly {', '.join(sorted(fields))}")
    return table


def is_file_name(name: str) -> bool:
    """Whether a name can only mean a file directly inside the folder: no separators, no `..`, nothing hidden."""
    return _FILE_NAME.fullmatch(name) is not None and name != MANIFEST


def _decode_file(name: str, entry: Any) -> FileRecord:
    if not is_file_name(name):
        raise HeaderError(f"{name[:80]!r} is not a plain file name")
    table = _fields(entry, f"file {name}", {"bytes", "sha256"})
    num_bytes, sha256 = table["bytes"], table["sha256"]
    if type(num_bytes) is not int or num_bytes < 0 or not isinstance(sha256, str) or not _HASH.fullmatch(sha256):
        raise HeaderError(f"file {name} has no sound size and hash")
    return FileRecord(name=name, num_bytes=num_bytes, sha256=sha256)


def _decode_tensor(name: str, entry: Any, files: Mapping[str, FileRecord]) -> TensorEntry:
    table = _fields(entry, f"tensor {name}", {"dtype", "shape", "chunks"})
    dtype, shape, chunks = table["dtype"], table["shape"], table["chunks"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise HeaderError(f"tensor {name} has an unknown dtype")
    if not is_sizes(shape) or not isinstance(chunks, list):
        raise HeaderError(f"tensor {name} has no sound shape and chunks")
    decoded = tuple(_decode_chunk(name, chunk, tuple(shape), files) for chunk in cast(list[Any], chunks))
    _check_cover(name, tuple(shape), decoded)
    return TensorEntry(dtype=dtype, shape=tuple(shape), chunks=decoded)


def _decode_chunk(name: str, chunk: Any, whole: tuple[int, ...], files: Mapping[str, FileRecord]) -> StoredChunk:
    if not isinstance(chunk, list) or len(cast(list[Any], chunk)) != 4:
        raise HeaderError(f"tensor {name} has a chunk that is not offsets, shape, file and key")
    offsets, shape, file, key = cast(list[Any], chunk)
    if not is_sizes(offsets) or not is_sizes(shape) or not len(offsets) == len(shape) == len(whole):
        raise HeaderError(f"tensor {name} has a chunk with unsound offsets or shape")
    if any(start + extent > size for start, extent, size in zip(offsets, shape, whole, strict=True)):
        raise HeaderError(f"tensor {name} has a chunk that reaches beyond its shape")
    if not isinstance(key, str) or not _is_listed(file, ".safetensors", files):
        raise HeaderError(f"tensor {name} has a chunk in a file that is not listed or cannot hold it")
    return StoredChunk(offsets=tuple(offsets), shape=tuple(shape), file=file, key=key)


def _check_cover(name: str, shape: tuple[int, ...], chunks: tuple[StoredChunk, ...]) -> None:
    """Uncovered elements would keep whatever the memory held; covered twice, the last one read would win."""
    if sum(prod(chunk.shape) for chunk in chunks) != prod(shape):
        raise HeaderError(f"the chunks of tensor {name} do not add up to its shape")
    filled = [chunk for chunk in chunks if prod(chunk.shape)]
    if len(filled) <= _MAX_CHUNKS_COMPARED and any(_overlap(one, two) for one, two in combinations(filled, 2)):
        raise HeaderError(f"two chunks of tensor {name} overlap")


def _overlap(one: StoredChunk, two: StoredChunk) -> bool:
    return all(
        max(a, b) < min(a + a_extent, b + b_extent)
        for a, a_extent, b, b_extent in zip(one.offsets, one.shape, two.offsets, two.shape, strict=True)
    )


def _is_listed(file: Any, suffix: str, files: Mapping[str, FileRecord]) -> bool:
    return isinstance(file, str) and file.endswith(suffix) and file in files


def _decode_value(name: str, entry: Any, files: Mapping[str, FileRecord]) -> ValueEntry:
    table = _fields(entry, f"value {name}", {"file", "tensors"})
    file, tensors = table["file"], table["tensors"]
    if not _is_listed(file, ".json", files) or not isinstance(tensors, list):
        raise HeaderError(f"value {name} lies in a file that is not listed or cannot hold it")
    places: list[tuple[str, str]] = []
    for place in cast(list[Any], tensors):
        if (
            not isinstance(place, list)
            or len(cast(list[Any], place)) != 2
            or not _is_listed(place[0], ".safetensors", files)
        ):
            raise HeaderError(f"value {name} has a tensor in a file that is not listed or cannot hold it")
        places.append((place[0], str(place[1])))
    return ValueEntry(file=file, tensors=tuple(places))


def _check_keys_once(tensors: Mapping[str, TensorEntry], values: Mapping[str, ValueEntry]) -> None:
    places = [(chunk.file, chunk.key) for entry in tensors.values() for chunk in entry.chunks]
    places += [place for value in values.values() for place in value.tensors]
    if len(set(places)) != len(places):
        raise HeaderError("two entries claim the same tensor of a file")
    if both := sorted(set(tensors) & set(values)):
        raise HeaderError(f"{both[0]} is both a tensor and a value")


def _decode_paths(paths: Any) -> dict[str, tuple[str | int, ...]] | None:
    if paths is None:
        return None
    decoded: dict[str, tuple[str | int, ...]] = {}
    for name, path in _table(paths, "paths").items():
        if not isinstance(path, list) or not all(type(part) in (str, int) for part in cast(list[Any], path)):
            raise HeaderError(f"the path of {name} is not made of names and numbers")
        decoded[name] = tuple(cast(list[str | int], path))
    return decoded


def dtype_name(dtype: Any) -> str:
    """The spelling of safetensors for a torch dtype."""
    return DTYPE_NAMES[dtype]
