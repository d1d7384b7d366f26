"""Safetensors files: written as a stream, read with distrust.

The file format is the one of https://github.com/huggingface/safetensors: eight bytes of header length (little endian),
a JSON header, then the tensors' bytes without holes. It is written here rather than by the safetensors package because
a stream needs one tensor in host memory at a time, and because the hash must be taken of the bytes in memory: a hash
taken of what was read back blesses whatever the disk did to it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, Final, NoReturn, cast

import torch

from shardwise.errors import CheckpointError

DTYPES: Final[dict[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Every element type that a safetensors header may name here, and torch's name for it."""

DTYPE_NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in DTYPES.items()}

_BLOCK_BYTES: Final = 16 * 2**20
"""Bytes written and hashed at a time, so that the hash still finds them in the cache."""

_MAX_HEADER_BYTES: Final = 100_000_000
"""The limit that the safetensors package sets itself."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of a file, before its bytes are known."""

    key: str
    """Its name inside the file."""
    dtype: torch.dtype
    """Its element type."""
    shape: tuple[int, ...]
    """Its shape, in elements."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's elements."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What was written, as it was in memory."""

    name: str
    """File name inside its folder."""
    num_bytes: int
    """Length of the file."""
    sha256: str
    """Hash of the file, in hexadecimal; `sha256sum` prints the same."""


def unsupported_dtype(key: str, dtype: torch.dtype) -> CheckpointError:
    """The error for an element type that a safetensors file cannot hold."""
    return CheckpointError(
        f"{key} has the type {dtype}, which a safetensors file cannot hold. "
        f"Convert it to one of {', '.join(str(known) for known in DTYPE_NAMES)} first."
    )


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor in host memory, row by row, as bytes. A CUDA tensor is copied to the host first."""
    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return memoryview(cast(Any, flat.numpy()))


class HashingFile:
    """A new file that is hashed while it is written, and durable once it is closed by `finish`.

    Args:
        path: The file; it must not exist.

    Raises:
        FileExistsError: The file exists.
        OSError: The disk is full or refuses.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = hashlib.sha256()
        self._num_bytes = 0
        self._file: IO[bytes] = path.open("xb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        view = memoryview(data)
        for start in range(0, len(view), _BLOCK_BYTES):
            block = view[start : start + _BLOCK_BYTES]
            self._hash.update(block)
            self._num_bytes += len(block)
            while len(block):
                written = self._file.write(block)  # an unbuffered file may take less than it is given
                block = block[written:]

    def finish(self) -> FileRecord:
        """Wait until the disk has the bytes, and close the file."""
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(name=self._path.name, num_bytes=self._num_bytes, sha256=self._hash.hexdigest())

    def abandon(self) -> None:
        """Close the file as it is."""
        self._file.close()


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """Write a small file durably.

    Raises:
        OSError: The file exists, or the disk is full or refuses.
    """
    file = HashingFile(path)
    try:
        file.write(data)
        return file.finish()
    finally:
        file.abandon()


def fsync_file(path: Path) -> None:
    """Make a file that somebody else has written durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable, not only the bytes behind them."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """The order in which the tensors lie in the file: wide elements first, so that each is aligned; then by name."""
    return sorted(specs, key=lambda spec: (-spec.dtype.itemsize, spec.key))


def encode_header(specs: Sequence[TensorSpec], metadata: dict[str, str] | None = None) -> bytes:
    """The length and header of a file that holds `specs` in this order, padded to eight bytes."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for spec in specs:
        if spec.dtype not in DTYPE_NAMES:
            raise unsupported_dtype(spec.key, spec.dtype)
        start, end = end, end + spec.num_bytes
        header[spec.key] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class TensorFileWriter:
    """Writes one safetensors file, tensor by tensor, in `file_order`.

    Args:
        path: The file; it must not exist.
        specs: Every tensor that the file will hold. `order` says in which order to hand them over.
        metadata: Free text for the header, such as `{"format": "pt"}`.

    Raises:
        CheckpointError: An element type that the format cannot hold.
        OSError: The disk is full or refuses.
    """

    def __init__(self, path: Path, specs: Iterable[TensorSpec], metadata: dict[str, str] | None = None) -> None:
        self.order: tuple[TensorSpec, ...] = tuple(file_order(specs))
        header = encode_header(self.order, metadata)
        self._next = 0
        self._file = HashingFile(path)
        self._file.write(header)

    def add(self, tensor: torch.Tensor) -> None:
        """Append the next tensor of `order`."""
        spec = self.order[self._next]
        assert tensor.dtype == spec.dtype, f"{spec.key} is {tensor.dtype}, announced as {spec.dtype}"
        assert tuple(tensor.shape) == spec.shape, f"{spec.key} is {tuple(tensor.shape)}, announced as {spec.shape}"
        self._next += 1
        if tensor.numel():
            self._file.write(raw_bytes(tensor))

    def finish(self) -> FileRecord:
        """Make the file durable."""
        assert self._next == len(self.order), "the file is not complete"
        return self._file.finish()

    def abandon(self) -> None:
        """Close the file as it is."""
        self._file.abandon()


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a file on disk, as its header describes it."""

    dtype: torch.dtype
    """Element type."""
    shape: tuple[int, ...]
    """Shape, in elements."""


class HeaderError(ValueError):
    """A header that is not what a safetensors header has to be. The text says what is wrong."""


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, after every claim of its header was checked against the file.

    Raises:
        HeaderError: The header is longer than the file, is no JSON, names a tensor twice, lies about a size, leaves a
            hole or lets two tensors overlap.
        OSError: The file cannot be read.
    """
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if num_bytes < 8 or length > min(num_bytes - 8, _MAX_HEADER_BYTES):
            raise HeaderError(f"the header says it is {length} bytes long, the file has {num_bytes}")
        text = file.read(length)
    header = parse_json(text)
    if not isinstance(header, dict):
        raise HeaderError("the header is not a JSON object")
    spans: list[tuple[int, int]] = []
    tensors: dict[str, StoredTensor] = {}
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        tensors[key], span = _decode_entry(key, entry)
        spans.append(span)
    _check_cover(spans, num_bytes - 8 - length)
    return tensors


def _decode_entry(key: str, entry: Any) -> tuple[StoredTensor, tuple[int, int]]:
    if not isinstance(entry, dict) or set(cast(dict[str, Any], entry)) != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"the entry of {key!r} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise HeaderError(f"{key!r} has an unknown dtype")
    if not is_sizes(shape) or not is_sizes(offsets) or len(offsets) != 2:
        raise HeaderError(f"{key!r} has a shape or offsets that are not whole numbers from 0")
    if prod(shape) * DTYPES[dtype].itemsize != offsets[1] - offsets[0]:
        raise HeaderError(f"{key!r} is {offsets[1] - offsets[0]} bytes long, which its dtype and shape contradict")
    return StoredTensor(dtype=DTYPES[dtype], shape=tuple(shape)), (offsets[0], offsets[1])


def _check_cover(spans: list[tuple[int, int]], num_bytes: int) -> None:
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise HeaderError(f"two tensors overlap, or leave a hole, at byte {min(start, end)}")
        end = stop
    if end != num_bytes:
        raise HeaderError(f"the tensors end at byte {end}, the file's data at {num_bytes}")


def is_sizes(value: Any) -> bool:
    """Whether a decoded JSON value is a list of whole numbers from 0 (`True` is no number)."""
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in cast(list[Any], value))


def parse_json(text: bytes | str) -> Any:
    """JSON without the freedoms that hostile files use: no key twice, no NaN, no nesting without end.

    Raises:
        HeaderError: It is not such JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except HeaderError:
        raise
    except RecursionError:
        raise HeaderError("the JSON is nested too deeply") from None
    except ValueError as error:
        raise HeaderError(f"it is not JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise HeaderError("a key appears twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise HeaderError(f"{name} is not JSON")


def iter_blocks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, block by block."""
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            yield block


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    for block in iter_blocks(path):
        digest.update(block)
    return digest.hexdigest()
