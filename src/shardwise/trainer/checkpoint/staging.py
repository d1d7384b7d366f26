"""Copies of what a rank will write, so that training may go on while the disk is slow.

On a GPU the copies run on a stream of their own into pinned memory, beside the next forward and backward pass: neither
changes a parameter or an optimizer state. Only `optimizer.step` does, so a hook before it makes the GPU (not the host)
wait for the copies. On the CPU there is nothing to overlap and the copy is made at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.optim import Optimizer

from shardwise.errors import ResourceError
from shardwise.trainer.checkpoint.storage import ItemSource, plain_tensor
from shardwise.vocabulary.units import format_bytes

_SLAB_BYTES: Final = 2**30
"""Pinned memory is asked for in pieces of this size: torch rounds every pinned allocation up to a power of two."""
_ALIGNMENT: Final = 64
_SHARE_OF_FREE_MEMORY: Final = 0.9

Source = tuple[MetadataIndex, torch.Tensor]


class Stager:
    """Host memory that holds one checkpoint's part of this rank; used again by the next one.

    The memory needed is what this rank writes: weights and optimizer states over the number of ranks.
    """

    def __init__(self) -> None:
        self._layout: object = None
        self._buffers: dict[MetadataIndex, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._hooked: dict[int, Any] = {}

    def allot(self, sources: Sequence[Source]) -> None:
        """Find host memory for the tensors, pinned for those on a GPU. Does nothing if they are laid out as before.

        Pinning takes some tenths of a second per GB, so `Checkpointer.prepare` does it ahead of the first save.

        Raises:
            ResourceError: The host has not enough free memory.
        """
        layout = [(index, tensor.shape, tensor.dtype, tensor.is_cuda) for index, tensor in sources]
        if layout == self._layout:
            return
        self._buffers, self._layout = {}, None
        check_memory(sum(_padded(tensor) for _, tensor in sources))
        for slab in _slabs(sources):
            memory = torch.empty(
                sum(_padded(tensor) for _, tensor in slab), dtype=torch.uint8, pin_memory=slab[0][1].is_cuda
            )
            start = 0
            for index, tensor in slab:
                piece = memory[start : start + tensor.numel() * tensor.element_size()]
                self._buffers[index] = piece.view(tensor.dtype).reshape(tensor.shape)
                start += _padded(tensor)
        self._layout = layout

    def stage(self, plan: SavePlan, source: ItemSource) -> StagedItems:
        """Start copying the tensors of a plan.

        Args:
            plan: What this rank writes.
            source: Finds the tensors and values.

        Returns:
            A source that hands out the copies. Call `wait` before the first tensor is taken from it.

        Raises:
            ResourceError: The host has not enough free memory.
        """
        values = {
            item.index: _detached(source.resolve_value(item))
            for item in plan.items
            if item.type == WriteItemType.BYTE_IO
        }
        sources = tensors_of(plan, source)
        self.allot(sources)
        with torch.cuda.stream(self._side_stream(sources)):
            copies = {index: self._buffers[index].copy_(tensor, non_blocking=True) for index, tensor in sources}
            if self._stream is not None:
                self._copied = torch.cuda.Event()
                self._copied.record(self._stream)
        return StagedItems(copies, values)

    def _side_stream(self, sources: Sequence[Source]) -> torch.cuda.Stream | None:
        """The stream for the copies; None if there is no GPU tensor among them."""
        if not any(tensor.is_cuda for _, tensor in sources):
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())  # after the optimizer step that made these values
        return self._stream

    def guard(self, optimizers: Sequence[Optimizer]) -> None:
        """Let every later step of these optimizers wait, on the GPU, until the copies have been made."""
        for optimizer in optimizers:
            if id(optimizer) not in self._hooked:
                self._hooked[id(optimizer)] = optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, *_: object) -> None:
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Wait on the host until the copies have been made."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def close(self) -> None:
        """Take the hooks off the optimizers and let go of the memory."""
        for hook in self._hooked.values():
            hook.remove()
        self._hooked.clear()
        self._buffers, self._layout = {}, None


def tensors_of(plan: SavePlan, source: ItemSource) -> list[Source]:
    """The tensors of a plan, on whatever device they are."""
    return [(item.index, plain_tensor(item, source)) for item in plan.items if item.type != WriteItemType.BYTE_IO]


def _padded(tensor: torch.Tensor) -> int:
    num_bytes = tensor.numel() * tensor.element_size()
    return num_bytes + -num_bytes % _ALIGNMENT


def _slabs(sources: Sequence[Source]) -> list[list[Source]]:
    """Tensors that share an allocation: of one kind of memory, and together below the size of a slab."""
    slabs: list[list[Source]] = []
    room, pinned = 0, False
    for index, tensor in sorted(sources, key=lambda source: source[1].is_cuda):
        if _padded(tensor) > room or tensor.is_cuda != pinned or not slabs:
            slabs.append([])
            room, pinned = _SLAB_BYTES, tensor.is_cuda
        slabs[-1].append((index, tensor))
        room -= _padded(tensor)
    return slabs


def check_memory(num_bytes: int) -> None:
    """Whether the host has room for the copies of all ranks of this machine.

    Args:
        num_bytes: Bytes of this rank's copies; the other ranks of the machine are taken to need as much.

    Raises:
        ResourceError: It has not; with needed and free bytes. Without /proc/meminfo nothing is known, or said.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return
    if num_bytes * ranks > free * _SHARE_OF_FREE_MEMORY:
        raise ResourceError(
            f"Saving in the background needs {format_bytes(num_bytes * ranks)} of host memory for {ranks} ranks, "
            f"{format_bytes(free)} are free. Give the machine more, or use more machines."
        )


def _detached(value: Any) -> Any:
    """A copy of a value that later steps cannot change: containers, and the tensors inside them on the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_detached(item) for item in value]
    if type(value) is tuple:
        return tuple(_detached(item) for item in value)
    return value


class StagedItems:
    """Hands out the copies of a `Stager` as a planner would hand out the originals."""

    def __init__(self, tensors: dict[MetadataIndex, torch.Tensor], values: dict[MetadataIndex, Any]) -> None:
        self._tensors = tensors
        self._values = values

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The copy of a tensor."""
        return self._tensors[write_item.index]

    def resolve_value(self, write_item: WriteItem) -> Any:
        """The copy of a value."""
        return self._values[write_item.index]
