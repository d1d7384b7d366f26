"""torch.distributed.checkpoint on safetensors files and JSON: its planners, resharding and all, without its pickles.

DCP's own storage unpickles `.metadata` and runs `torch.load(weights_only=False)` on every entry that is not a tensor.
Here tensors go to safetensors files, everything else to JSON by the allow-list of `values.py`, and the metadata to
`manifest.json`. DCP's default planners pickle inside `resolve_data` and unpickle inside `load_bytes`, so the two
planners below hand the values over as they are; a planner that cannot is refused.

Files of rank 3: `rank-00003-00000.safetensors`, `rank-00003-00001.safetensors`, ..., `rank-00003.json`.
"""

from __future__ import annotations

import io
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol, cast, runtime_checkable

import torch
from safetensors import safe_open
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardwise.errors import CheckpointError
from shardwise.trainer.checkpoint.manifest import (
    Manifest,
    StoredChunk,
    TensorEntry,
    ValueEntry,
    read_manifest,
    write_manifest,
)
from shardwise.trainer.checkpoint.tensorfile import (
    DTYPE_NAMES,
    DTYPES,
    FileRecord,
    HeaderError,
    TensorFileWriter,
    TensorSpec,
    parse_json,
    unsupported_dtype,
    write_bytes,
)
from shardwise.trainer.checkpoint.values import decode_value, encode_value

MAX_FILE_BYTES: Final = 4 * 2**30
"""A rank starts another file beyond this, so that checking can be shared out among ranks and threads."""


@runtime_checkable
class ItemSource(Protocol):
    """What a save plan is resolved by: a planner, or copies made before. Values come as they are, not pickled."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The tensor behind an item."""
        ...

    def resolve_value(self, write_item: WriteItem) -> Any:
        """The object behind a BYTE_IO item."""
        ...


@runtime_checkable
class TakesValues(Protocol):
    """A load planner that takes what is not a tensor as it is."""

    def load_value(self, read_item: ReadItem, value: Any) -> None:
        """Put the object of a BYTE_IO item where it belongs."""
        ...


class ValueSavePlanner(DefaultSavePlanner):
    """DCP's default planner, without the pickling of values."""

    def resolve_value(self, write_item: WriteItem) -> Any:
        """The object behind a BYTE_IO item."""
        return self.lookup_object(write_item.index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Tensors only.

        Raises:
            CheckpointError: A storage that would pickle the value was given this planner.
        """
        if write_item.type == WriteItemType.BYTE_IO:
            raise CheckpointError(f"{write_item.index.fqn} would be pickled. Save with shardwise's StorageWriter.")
        return super().transform_object(write_item, object)


class ValueLoadPlanner(DefaultLoadPlanner):
    """DCP's default planner, without the unpickling of values."""

    def load_value(self, read_item: ReadItem, value: Any) -> None:
        """Put the object of a BYTE_IO item where it belongs in the caller's state dict."""
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], value)
        else:
            self.original_state_dict[name] = value  # `self.state_dict` is a copy that nobody looks at again

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse.

        Raises:
            CheckpointError: A storage that hands out pickles was given this planner.
        """
        raise CheckpointError(f"{read_item.dest_index.fqn} would be unpickled. Load with shardwise's StorageReader.")


@dataclass(frozen=True, kw_only=True)
class WrittenItem:
    """Where one item of a rank's plan went; crosses from each rank to the coordinator."""

    records: tuple[FileRecord, ...]
    """The files that the item touched."""
    file: str
    """The file that holds it."""
    key: str = ""
    """The name inside a safetensors file; empty for a value."""
    tensors: tuple[tuple[str, str], ...] = ()
    """File and key of each tensor inside a value."""


@dataclass
class _Piece:
    """A tensor that a rank will write: of an item, or inside a value."""

    spec: TensorSpec
    resolve: Callable[[], torch.Tensor]
    file: str = ""


class SafetensorsWriter(StorageWriter):
    """DCP storage that writes safetensors files and a manifest.

    Works under `torch.distributed.checkpoint.save(..., storage_writer=SafetensorsWriter(path),
    planner=ValueSavePlanner())` on torch 2.11 and later.

    Args:
        path: A fresh folder; it is made if it does not exist. The same on every rank, on storage that all ranks see.
        step: Optimizer steps done.
        about: Plain JSON for the manifest.
        max_file_bytes: A rank starts another file beyond this many bytes.
        finisher: What the coordinator does with the finished manifest; None writes it into the folder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int = 0,
        about: Mapping[str, Any] | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
        finisher: Callable[[Manifest], None] | None = None,
    ) -> None:
        self.path = Path(path)
        self.step = step
        self.about: Mapping[str, Any] = about or {}
        self.max_file_bytes = max_file_bytes
        self.finisher = finisher

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Called by DCP before a save that names its own folder."""
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the folder."""
        self.path.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add before the ranks are known."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell each plan its rank, which names its files."""
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of this rank, durably.

        Raises:
            CheckpointError: An item of a type that a checkpoint does not store.
            OSError: The disk is full or refuses.
        """
        if not isinstance(planner, ItemSource):
            raise CheckpointError(
                f"{type(planner).__name__} would pickle what is not a tensor, and nothing pickled is written. "
                "Use ValueSavePlanner, or a planner with a method resolve_value(write_item)."
            )
        future: Future[list[WriteResult]] = Future()
        future.set_result(self.write_items(plan, planner))
        return future

    def write_items(self, plan: SavePlan, source: ItemSource) -> list[WriteResult]:
        """`write_data` from any source, without the future.

        Raises:
            CheckpointError: An item of a type that a checkpoint does not store.
            OSError: The disk is full or refuses.
        """
        prefix = f"rank-{plan.storage_data:05d}"
        tensor_items = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        value_items = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        values: dict[str, Any] = {}
        pieces = {item.index: _piece_of(item, source) for item in tensor_items}
        inner: dict[dcp.MetadataIndex, list[_Piece]] = {}
        for item in value_items:
            values[item.index.fqn], inner[item.index] = _encode_item(item, source)
        every = [*pieces.values(), *(piece for several in inner.values() for piece in several)]
        records = {record.name: record for record in self._write_tensors(prefix, every)}
        results = [
            WriteResult(
                index,
                piece.spec.num_bytes,
                WrittenItem(records=(records[piece.file],), file=piece.file, key=piece.spec.key),
            )
            for index, piece in pieces.items()
        ]
        if not values:
            return results
        record = write_bytes(self.path / f"{prefix}.json", json.dumps(values, allow_nan=False).encode())
        for index, several in inner.items():
            touched = (record, *(records[piece.file] for piece in several))
            places = tuple((piece.file, piece.spec.key) for piece in several)
            results.append(WriteResult(index, 0, WrittenItem(records=touched, file=record.name, tensors=places)))
        return results

    def _write_tensors(self, prefix: str, pieces: Sequence[_Piece]) -> list[FileRecord]:
        """Write the tensors into as few files as the limit allows, one tensor in host memory at a time."""
        files: list[list[_Piece]] = []
        room = 0
        for piece in pieces:
            if not files or piece.spec.num_bytes > room:
                files.append([])
                room = self.max_file_bytes
            files[-1].append(piece)
            room -= piece.spec.num_bytes
        return [self._write_file(f"{prefix}-{i:05d}.safetensors", several) for i, several in enumerate(files)]

    def _write_file(self, name: str, pieces: Sequence[_Piece]) -> FileRecord:
        by_key = {piece.spec.key: piece for piece in pieces}
        writer = TensorFileWriter(self.path / name, [piece.spec for piece in pieces])
        try:
            for spec in writer.order:
                by_key[spec.key].file = name
                writer.add(by_key[spec.key].resolve())
            return writer.finish()
        finally:
            writer.abandon()

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: make the manifest of what every rank has written.

        Raises:
            CheckpointError: A file of another rank cannot be seen from here.
            OSError: The disk is full or refuses.
        """
        manifest = make_manifest(metadata, results, step=self.step, about=self.about)
        check_visible(self.path, manifest)
        if self.finisher is not None:
            self.finisher(manifest)
        else:
            write_manifest(self.path, manifest)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this storage can write there: anything that is a path."""
        return "://" not in str(checkpoint_id)


def _piece_of(item: WriteItem, source: ItemSource) -> _Piece:
    assert item.tensor_data is not None
    offsets = "x".join(str(offset) for offset in item.tensor_data.chunk.offsets)
    spec = TensorSpec(
        key=f"{item.index.fqn}@{offsets}" if offsets else item.index.fqn,
        dtype=item.tensor_data.properties.dtype,
        shape=tuple(item.tensor_data.chunk.sizes),
    )
    if spec.dtype not in DTYPE_NAMES:
        raise unsupported_dtype(item.index.fqn, spec.dtype)
    return _Piece(spec=spec, resolve=lambda: plain_tensor(item, source))


def plain_tensor(item: WriteItem, source: ItemSource) -> torch.Tensor:
    """The tensor behind an item, on whatever device it is.

    Raises:
        CheckpointError: A tensor subclass, such as a quantized optimizer state.
    """
    tensor = source.resolve_data(item)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise CheckpointError(
            f"{item.index.fqn} is a {type(tensor).__qualname__}, whose inner layout a checkpoint cannot hold. "
            "Use an optimizer with plain tensors (adamw, or bitsandbytes' 8-bit AdamW on replicated weights)."
        )
    return cast(torch.Tensor, tensor).detach()


def _encode_item(item: WriteItem, source: ItemSource) -> tuple[Any, list[_Piece]]:
    encoded, tensors = encode_value(item.index.fqn, source.resolve_value(item))
    return encoded, [
        _Piece(
            spec=TensorSpec(key=f"{item.index.fqn}#{i}", dtype=tensor.dtype, shape=tuple(tensor.shape)),
            resolve=lambda tensor=tensor: tensor.detach(),
        )
        for i, tensor in enumerate(tensors)
    ]


def make_manifest(
    metadata: dcp.Metadata, results: list[list[WriteResult]], *, step: int, about: Mapping[str, Any]
) -> Manifest:
    """DCP's metadata and every rank's results as a manifest."""
    written: dict[str, list[tuple[dcp.MetadataIndex, WrittenItem]]] = defaultdict(list)
    files: dict[str, FileRecord] = {}
    for result in (result for several in results for result in several):
        item = cast(WrittenItem, result.storage_data)
        written[result.index.fqn].append((result.index, item))
        files.update((record.name, record) for record in item.records)
    tensors: dict[str, TensorEntry] = {}
    values: dict[str, ValueEntry] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, dcp.TensorStorageMetadata):
            tensors[name] = _tensor_entry(entry, written[name])
        else:
            item = written[name][0][1]
            values[name] = ValueEntry(file=item.file, tensors=item.tensors)
    paths = None if metadata.planner_data is None else dict(metadata.planner_data)
    return Manifest(step=step, files=files, tensors=tensors, values=values, paths=paths, about=about)


def _tensor_entry(
    entry: dcp.TensorStorageMetadata, written: Sequence[tuple[dcp.MetadataIndex, WrittenItem]]
) -> TensorEntry:
    places = {tuple(index.offset or ()): item for index, item in written}
    return TensorEntry(
        dtype=DTYPE_NAMES[entry.properties.dtype],
        shape=tuple(entry.size),
        chunks=tuple(
            StoredChunk(
                offsets=tuple(chunk.offsets),
                shape=tuple(chunk.sizes),
                file=places[tuple(chunk.offsets)].file,
                key=places[tuple(chunk.offsets)].key,
            )
            for chunk in entry.chunks
        ),
    )


def check_visible(folder: Path, manifest: Manifest) -> None:
    """Whether the coordinator sees the files of all ranks.

    Raises:
        CheckpointError: It does not: the folder is not shared between the machines.
    """
    problems: list[str] = []
    for record in manifest.files.values():
        path = folder / record.name
        size = path.stat().st_size if path.exists() else None
        if size != record.num_bytes:
            seen = "not seen" if size is None else f"seen with {size} bytes"
            problems.append(
                f"{path} was written with {record.num_bytes} bytes but is {seen} from rank 0. "
                "Give an output_dir on storage that all machines share."
            )
    if problems:
        raise CheckpointError(*problems[:8])


def to_dcp_metadata(manifest: Manifest) -> dcp.Metadata:
    """The manifest as DCP's planners want it; `storage_data` maps an index to its chunk or value."""
    entries: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
    places: dict[dcp.MetadataIndex, StoredChunk | ValueEntry] = {}
    for name, tensor in manifest.tensors.items():
        entries[name] = dcp.TensorStorageMetadata(
            properties=dcp.TensorProperties(dtype=DTYPES[tensor.dtype]),
            size=torch.Size(tensor.shape),
            chunks=[
                dcp.ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.shape))
                for chunk in tensor.chunks
            ],
        )
        places.update((dcp.MetadataIndex(name, torch.Size(chunk.offsets)), chunk) for chunk in tensor.chunks)
    for name, value in manifest.values.items():
        entries[name] = dcp.BytesStorageMetadata()
        places[dcp.MetadataIndex(name)] = value
    paths = None if manifest.paths is None else dict(manifest.paths)
    return dcp.Metadata(state_dict_metadata=entries, planner_data=paths, storage_data=places)


class SafetensorsReader(StorageReader):
    """DCP storage that reads what `SafetensorsWriter` has written.

    It trusts the folder to match its manifest: call `verify_folder` first, as `load` does. Works under
    `torch.distributed.checkpoint.load(..., storage_reader=SafetensorsReader(path), planner=ValueLoadPlanner())`.

    Args:
        path: The checkpoint folder.
        manifest: The manifest if it was read before, as by `verify_folder`.
    """

    def __init__(self, path: str | os.PathLike[str], manifest: Manifest | None = None) -> None:
        self.path = Path(path)
        self.manifest = manifest
        self._places: dict[dcp.MetadataIndex, StoredChunk | ValueEntry] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Called by DCP before a load that names its own folder."""
        if checkpoint_id is not None:
            self.path, self.manifest = Path(checkpoint_id), None

    def read_metadata(self) -> dcp.Metadata:
        """The manifest in DCP's terms.

        Raises:
            CheckpointError: There is none, or it is damaged.
        """
        self.manifest = self.manifest or read_manifest(self.path)
        return to_dcp_metadata(self.manifest)

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool) -> None:
        """Remember where everything lies."""
        self._places = cast(dict[dcp.MetadataIndex, StoredChunk | ValueEntry], metadata.storage_data)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to change."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to change."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read exactly the boxes that the plan asks for, file by file.

        Raises:
            CheckpointError: The planner would unpickle, or a value is malformed.
            OSError: A file cannot be read.
        """
        tensors: dict[str, list[ReadItem]] = defaultdict(list)
        values: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            kind = values if item.type == LoadItemType.BYTE_IO else tensors
            kind[self._places[item.storage_index].file].append(item)
        for file, items in tensors.items():
            self._read_tensors(file, items, planner)
        for file, items in values.items():
            self._read_values(file, items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_tensors(self, file: str, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        with safe_open(str(self.path / file), framework="pt") as opened:
            for item in items:
                place = self._places[item.storage_index]
                assert isinstance(place, StoredChunk)
                box = tuple(
                    slice(start, start + extent)
                    for start, extent in zip(item.storage_offsets, item.lengths, strict=True)
                )
                source = opened.get_slice(place.key)[box] if box else opened.get_tensor(place.key)
                target = planner.resolve_tensor(item).detach()
                if target.shape != source.shape or target.dtype != source.dtype:
                    raise CheckpointError(
                        f"{item.dest_index.fqn} is {source.dtype} {tuple(source.shape)} in {self.path / file}, but "
                        f"{target.dtype} {tuple(target.shape)} in this run. "
                        "Resume with the same precision and optimizer."
                    )
                target.copy_(source)
                planner.commit_tensor(item, target)

    def _read_values(self, file: str, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        if not isinstance(planner, TakesValues):
            raise CheckpointError(
                f"{type(planner).__name__} would unpickle {items[0].dest_index.fqn}, and nothing is unpickled. "
                "Use ValueLoadPlanner, or a planner with a method load_value(read_item, value)."
            )
        values = read_values(self.path, file)
        for item in items:
            place = self._places[item.storage_index]
            assert isinstance(place, ValueEntry)
            planner.load_value(item, value_of(self.path, item.storage_index.fqn, place, values))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this storage can read there: anything that is a path."""
        return "://" not in str(checkpoint_id)


def read_values(folder: Path, file: str) -> dict[str, Any]:
    """The values of one rank's JSON file, still encoded.

    Raises:
        CheckpointError: The file is not such JSON.
    """
    path = folder / file
    try:
        values = parse_json(path.read_bytes())
    except HeaderError as error:
        raise CheckpointError(f"{path} is damaged: {error}. Resume from another checkpoint.") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is damaged: it is not an object. Resume from another checkpoint.")
    return cast(dict[str, Any], values)


def value_of(folder: Path, name: str, entry: ValueEntry, values: Mapping[str, Any]) -> Any:
    """One decoded value with the tensors inside it.

    Raises:
        CheckpointError: It is missing, or has a form that is never written.
    """
    with ExitStack() as stack:
        tensors: list[torch.Tensor] = []
        for file, key in entry.tensors:
            opened = stack.enter_context(safe_open(str(folder / file), framework="pt"))
            tensors.append(opened.get_tensor(key))
        try:
            return decode_value(values[name], tensors)
        except (HeaderError, KeyError) as error:
            raise CheckpointError(
                f"{folder / entry.file} is damaged: {name}: {error}. Resume from another checkpoint."
            ) from None
