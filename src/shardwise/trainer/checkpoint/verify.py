"""Is a checkpoint folder exactly what its manifest says? Asked before anything of it is loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, cast

import torch

from shardwise.errors import CheckpointError
from shardwise.trainer.checkpoint.manifest import MANIFEST, Manifest, ValueEntry, read_manifest
from shardwise.trainer.checkpoint.ranks import Ranks
from shardwise.trainer.checkpoint.tensorfile import (
    DTYPES,
    FileRecord,
    HeaderError,
    StoredTensor,
    hash_file,
    parse_json,
    read_header,
)
from shardwise.trainer.checkpoint.values import decode_value

_WAY_OUT: Final = "Resume from another checkpoint, or copy this one again from where it came from."
_STEP: Final = re.compile(r"checkpoint-(\d{1,18})(\.|$)")
_HASH_THREADS: Final = 4
"""Hashing lets go of the interpreter; more threads than this and the disk is the limit."""


def verify_folder(folder: Path, ranks: Ranks | None = None) -> Manifest:
    """Check names, sizes, hashes and headers of a checkpoint; with `ranks`, each rank hashes its share of the files.

    Args:
        folder: The checkpoint folder.
        ranks: Every rank of it must call this. None checks everything in this process.

    Returns:
        The manifest, which the files have been found to match.

    Raises:
        CheckpointError: Every file that is damaged, missing or not listed, by name.
    """
    ranks = ranks or Ranks(None)
    manifest = ranks.by_coordinator(lambda: _listed(folder))
    ranks.together(lambda: _check_files(folder, manifest, _share(manifest, ranks)))
    return manifest


def _listed(folder: Path) -> Manifest:
    """The manifest, once the names in the folder are exactly the ones that it lists."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder; name a checkpoint's, or say --resume for the newest good one of the run."
        )
    manifest = read_manifest(folder)
    named = _STEP.match(folder.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(
            f"{folder / MANIFEST} is of step {manifest.step}, its folder of step {named[1]}: one of them was "
            f"renamed or copied. {_WAY_OUT}"
        )
    found = {path.name for path in folder.iterdir()}
    problems = [f"{folder / name} is missing. {_WAY_OUT}" for name in sorted(set(manifest.files) - found)]
    problems += [
        f"{folder / name} does not belong to it: {MANIFEST} does not list it. Remove it first."
        for name in sorted(found - set(manifest.files) - {MANIFEST})
    ]
    if problems:
        raise CheckpointError(*problems)
    return manifest


def _share(manifest: Manifest, ranks: Ranks) -> list[FileRecord]:
    """The files that this rank hashes: the large ones are dealt out first, so that shares are alike."""
    by_size = sorted(manifest.files.values(), key=lambda record: (-record.num_bytes, record.name))
    return by_size[ranks.rank :: ranks.size]


def _check_files(folder: Path, manifest: Manifest, records: Sequence[FileRecord]) -> None:
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        found = pool.map(_check_file, [folder / record.name for record in records], records)
        problems = [problem for problem in found if problem]
    if not problems:
        names = {record.name for record in records}
        problems = _check_headers(folder, manifest, names) + _check_values(folder, manifest, names)
    if problems:
        raise CheckpointError(*problems)


def _check_file(path: Path, record: FileRecord) -> str | None:
    try:
        if path.is_symlink() or not path.is_file():
            return f"{path} is not a plain file. {_WAY_OUT}"
        if (size := path.stat().st_size) != record.num_bytes:
            return f"{path} is damaged: {size} bytes long, {MANIFEST} says {record.num_bytes}. {_WAY_OUT}"
        if (digest := hash_file(path)) != record.sha256:
            return f"{path} is damaged: SHA-256 {digest[:16]}..., {MANIFEST} says {record.sha256[:16]}.... {_WAY_OUT}"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}. {_WAY_OUT}"
    return None


def _check_headers(folder: Path, manifest: Manifest, names: set[str]) -> list[str]:
    """Whether the safetensors files hold the very tensors that the manifest places in them."""
    expected: dict[str, dict[str, StoredTensor | None]] = {name: {} for name in names}
    for entry in manifest.tensors.values():
        for chunk in entry.chunks:
            if chunk.file in expected:
                expected[chunk.file][chunk.key] = StoredTensor(dtype=DTYPES[entry.dtype], shape=chunk.shape)
    for value in manifest.values.values():
        for file, key in value.tensors:
            if file in expected:
                expected[file][key] = None  # a tensor inside a value: its type and shape stand in the header only
    problems: list[str] = []
    for name, tensors in expected.items():
        if tensors and (problem := _check_header(folder / name, tensors)):
            problems.append(f"{folder / name} is damaged: {problem}. {_WAY_OUT}")
    return problems


def _check_header(path: Path, expected: dict[str, StoredTensor | None]) -> str | None:
    try:
        stored = read_header(path)
    except (HeaderError, OSError) as error:
        return str(error)
    if odd := sorted(set(stored) ^ set(expected)):
        return f"it and {MANIFEST} disagree about {odd[0]!r}"
    for key, tensor in expected.items():
        if tensor is not None and stored[key] != tensor:
            return f"{key!r} is {stored[key].dtype} {stored[key].shape}, {MANIFEST} says {tensor.dtype} {tensor.shape}"
    return None


def _check_values(folder: Path, manifest: Manifest, names: set[str]) -> list[str]:
    """Whether every value can be decoded by the allow-list, before any of them is."""
    problems: list[str] = []
    files: dict[str, dict[str, ValueEntry]] = {}
    for name, entry in manifest.values.items():
        if entry.file in names:
            files.setdefault(entry.file, {})[name] = entry
    for file, entries in files.items():
        try:
            values = parse_json((folder / file).read_bytes())
            if not isinstance(values, dict) or set(cast(dict[str, Any], values)) != set(entries):
                raise HeaderError("its values are not the ones that the manifest lists")
            for name, entry in entries.items():
                decode_value(values[name], [torch.empty(0)] * len(entry.tensors))
        except (HeaderError, OSError) as error:
            problems.append(f"{folder / file} is damaged: {error}. {_WAY_OUT}")
    return problems
