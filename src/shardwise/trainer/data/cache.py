"""Tokenized sets on disk.

An entry is a folder named by its key: the hash of the source's content, of the tokenizer with its template, and of the
settings. It is written under another name, flushed, and renamed, so a killed process leaves nothing that looks like an
entry; every file's length and checksum are kept, so a damaged one is noticed and made anew. A lock lets one process
of a machine tokenize while the others wait and then read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ResourceError
from shardwise.trainer.data.options import DataOptions
from shardwise.trainer.data.store import TokenizedSet, TokenizeReport
from shardwise.vocabulary.units import format_bytes

FORMAT_VERSION = 1
"""Raised whenever the same inputs would give other tokens or another layout of the files."""
_ARRAYS = {"input_ids": "<i4", "supervised": "<u1", "offsets": "<i8", "supervised_counts": "<i4", "rows": "<i8"}
_MANIFEST = "set.json"
_CHUNK_BYTES = 1 << 24
_log = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """`$SHARDWISE_CACHE`, or `shardwise` under the user's cache folder; tokenized sets lie in `tokenized` below."""
    base = os.environ.get("SHARDWISE_CACHE")
    if base:
        return Path(base) / "tokenized"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise" / "tokenized"


def cache_key(content_hash: str, tokenizer: Any, options: DataOptions, template: str | None) -> str:
    """The name of an entry: equal if the source, the tokenizer and all settings that decide tokens are equal.

    Args:
        content_hash: Hash of the source.
        tokenizer: A Hugging Face tokenizer.
        options: The settings.
        template: The text of the template that overrides the tokenizer's, if any.
    """
    settings = {
        "version": FORMAT_VERSION,
        "content": content_hash,
        "tokenizer": tokenizer_hash(tokenizer),
        "template": template,
        "libraries": [importlib.metadata.version(name) for name in ("transformers", "tokenizers")],
        "max_length": options.max_length,
        "assistant_only_loss": options.assistant_only_loss,
        "completion_only_loss": options.completion_only_loss,
        "skip_bad_rows": options.skip_bad_rows,
        "column_map": dict(options.column_map),
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of everything in a tokenizer that decides tokens: vocabulary, rules, special tokens, chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules: dict[str, Any] = json.loads(backend.to_str())
        rules.pop("truncation", None)  # set and reset by calls, never used by ours
        rules.pop("padding", None)
    else:
        rules = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    content = json.dumps([rules, special, tokenizer.chat_template], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def load(folder: Path) -> TokenizedSet | None:
    """The entry in a folder, memory-mapped; None if it is not there or damaged (which is logged)."""
    if not folder.is_dir():
        return None
    try:
        manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["version"] != FORMAT_VERSION:
            return None
        arrays = {name: _load_array(folder / f"{name}.bin", name, manifest["files"][name]) for name in _ARRAYS}
        report: dict[str, Any] = {**manifest["report"], "notes": tuple(manifest["report"]["notes"])}
        return TokenizedSet(fingerprint=manifest["fingerprint"], report=TokenizeReport(**report), **arrays)
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("The tokenized set in %s is damaged (%s); it is made anew.", folder, error)
        return None


def _load_array(path: Path, name: str, entry: dict[str, Any]) -> NDArray[Any]:
    if path.stat().st_size != entry["bytes"]:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes instead of {entry['bytes']}")
    if _checksum(path) != entry["crc32"]:
        raise ValueError(f"{path.name} does not match its checksum")
    if not entry["bytes"]:
        return np.empty(0, dtype=_ARRAYS[name])
    return np.memmap(path, dtype=_ARRAYS[name], mode="r")


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def save(tokenized: TokenizedSet, folder: Path) -> None:
    """Writes an entry beside its final place and renames it; an entry that is in the way is replaced.

    Raises:
        ResourceError: The disk is full, or the folder cannot be written.
    """
    needed = sum(getattr(tokenized, name).nbytes for name in _ARRAYS)
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
        files = {name: _save_array(temporary / f"{name}.bin", getattr(tokenized, name), name) for name in _ARRAYS}
        manifest = {
            "version": FORMAT_VERSION,
            "fingerprint": tokenized.fingerprint,
            "files": files,
            "report": dataclasses.asdict(tokenized.report),
        }
        _write_through(temporary / _MANIFEST, json.dumps(manifest, indent=1).encode())
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    except OSError as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if folder.is_dir():
            return  # another process was quicker; its entry has the same content
        raise ResourceError(
            f"The tokenized set ({format_bytes(needed)}) cannot be kept in {folder.parent}: {error.strerror or error}. "
            "Free some space, or point SHARDWISE_CACHE to another disk."
        ) from error


def _save_array(path: Path, array: NDArray[Any], name: str) -> dict[str, int]:
    content = np.ascontiguousarray(array, dtype=_ARRAYS[name])
    _write_through(path, cast("bytes", content.data))
    return {"bytes": content.nbytes, "crc32": zlib.crc32(cast("bytes", content.data))}


def _write_through(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def lock(folder: Path) -> Generator[None]:
    """Held by the one process of a machine that makes the entry; the system lets go of it if that process dies.

    File systems without locks let everybody through: then each makes the same entry, and the renames are harmless.
    """
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = (folder.parent / f".{folder.name}.lock").open("w")
    except OSError as error:
        raise ResourceError(
            f"The cache folder {folder.parent} cannot be written: {error.strerror or error}. "
            "Point SHARDWISE_CACHE to a folder that can."
        ) from error
    with file:
        exclusive = _acquire(fcntl, file.fileno(), folder)
        if exclusive:
            for left in folder.parent.glob(f".{folder.name}.*.tmp"):  # from a process that was killed
                shutil.rmtree(left, ignore_errors=True)
        yield


def _acquire(fcntl: Any, descriptor: int, folder: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.info("Another process is tokenizing this set; waiting for %s.", folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return False
    return True
