"""Who writes what: tensors are packed into files, files dealt out among the ranks, gathered and written in step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from shardwise.errors import CheckpointError
from shardwise.trainer.checkpoint.ranks import Ranks
from shardwise.trainer.checkpoint.tensorfile import FileRecord, TensorFileWriter, TensorSpec, file_order
from shardwise.trainer.export.pieces import Piece
from shardwise.trainer.weights import SINGLE

ADAPTER: Final = "adapter_model.safetensors"
_MAX_PENDING: Final = 2
"""Tensors that wait for the disk on each rank."""


@dataclass(frozen=True, kw_only=True)
class OutFile:
    """One file of the export."""

    specs: tuple[TensorSpec, ...]
    owner: int
    """The rank that writes it."""
    senders: Mapping[str, int] = field(default_factory=dict[str, int])
    """Who sends a tensor of which the owner holds nothing: adapters of other pipeline stages, all in one file."""


def gather_specs(pieces: Mapping[str, Piece], ranks: Ranks) -> dict[tuple[int, ...], list[TensorSpec]]:
    """Every rank's tensors, grouped by the ranks that hold them: pipeline stages differ."""
    holders: dict[str, list[int]] = {}
    specs: dict[str, TensorSpec] = {}
    for rank, several in enumerate(ranks.all_gather([piece.spec for piece in pieces.values()])):
        for spec in several:
            holders.setdefault(spec.key, []).append(rank)
            specs[spec.key] = spec
    groups: dict[tuple[int, ...], list[TensorSpec]] = {}
    for name, spec in specs.items():
        groups.setdefault(tuple(holders[name]), []).append(spec)
    return groups


def deal(groups: Mapping[tuple[int, ...], list[TensorSpec]], limit: int, *, single: bool) -> list[OutFile]:
    """Pack each group into files below the limit, and deal the files out among the group's ranks."""
    if single and groups:
        owner = min(rank for holders in groups for rank in holders)
        elsewhere = {holders: specs for holders, specs in groups.items() if owner not in holders}
        senders = {spec.key: holders[0] for holders, specs in elsewhere.items() for spec in specs}
        everything = tuple(spec for specs in groups.values() for spec in specs)
        return [OutFile(specs=everything, owner=owner, senders=senders)]
    files: list[OutFile] = []
    for holders, specs in groups.items():
        packed: list[list[TensorSpec]] = []
        room = 0
        for spec in specs:
            if not packed or spec.num_bytes > room:
                packed.append([])
                room = limit
            packed[-1].append(spec)
            room -= spec.num_bytes
        files += [OutFile(specs=tuple(several), owner=holders[i % len(holders)]) for i, several in enumerate(packed)]
    if not files:
        raise CheckpointError("The model has no tensor to export.")
    return files


def file_names(num_files: int, *, adapter: bool) -> list[str]:
    """What Hugging Face calls so many files."""
    if adapter:
        return [ADAPTER]
    if num_files == 1:
        return [SINGLE]
    return [f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]


def write_files(
    folder: Path, files: Sequence[OutFile], names: Sequence[str], pieces: Mapping[str, Piece], ranks: Ranks
) -> list[FileRecord]:
    """Gather every tensor and write the files that belong to this rank. All ranks walk the same tensors in step."""
    outputs: dict[int, _Output] = {}
    failures: list[Exception] = []
    with ThreadPoolExecutor(1) as disk:
        for i, spec in _walk(files, ranks.size):
            tensor = _gathered(spec, files[i], pieces, ranks)
            if tensor is None:
                continue  # of another pipeline stage
            if files[i].owner != ranks.rank or failures:
                continue  # a rank whose disk has failed still takes part in the gathering, or the others would hang
            try:
                if i not in outputs:
                    outputs[i] = _Output(TensorFileWriter(folder / names[i], files[i].specs, {"format": "pt"}), disk)
                outputs[i].put(tensor.to(spec.dtype))
            except (OSError, CheckpointError) as error:
                failures.append(error)

        def finish() -> list[FileRecord]:
            if failures:
                raise failures[0]
            return [output.finish() for output in outputs.values()]

        try:
            return ranks.agree(finish)
        finally:
            for output in outputs.values():
                output.writer.abandon()


def _gathered(spec: TensorSpec, file: OutFile, pieces: Mapping[str, Piece], ranks: Ranks) -> torch.Tensor | None:
    """One tensor, on the ranks that hold it and on the one that writes it; None on others."""
    tensor = pieces[spec.key].produce() if spec.key in pieces else None
    sender = file.senders.get(spec.key)
    if sender is None or ranks.group is None:
        return tensor
    if ranks.rank == sender and tensor is not None:
        receiver = dist.get_global_rank(ranks.group, file.owner)
        dist.send(tensor.to(spec.dtype).cpu().contiguous(), receiver, group=ranks.group)
    elif ranks.rank == file.owner:
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        dist.recv(tensor, dist.get_global_rank(ranks.group, sender), group=ranks.group)
    return tensor


class _Output:
    """One file on its way to the disk, a few tensors behind the gathering."""

    def __init__(self, writer: TensorFileWriter, disk: ThreadPoolExecutor) -> None:
        self.writer = writer
        self._disk = disk
        self._pending: deque[Future[None]] = deque()

    def put(self, tensor: torch.Tensor) -> None:
        """Hand over a tensor; waits while too many are pending."""
        on_host = tensor.cpu()
        while len(self._pending) >= _MAX_PENDING:
            self._pending.popleft().result()
        self._pending.append(self._disk.submit(self.writer.add, on_host))

    def finish(self) -> FileRecord:
        """Wait for the rest."""
        while self._pending:
            self._pending.popleft().result()
        return self.writer.finish()


def _walk(files: Sequence[OutFile], num_ranks: int) -> Iterator[tuple[int, TensorSpec]]:
    """The order of gathering: as many files at a time as there are ranks, a tensor of each in turn; so all write."""
    for start in range(0, len(files), num_ranks):
        wave = range(start, min(start + num_ranks, len(files)))
        for row in zip_longest(*(file_order(files[i].specs) for i in wave)):
            yield from ((i, spec) for i, spec in zip(wave, row, strict=True) if spec is not None)
