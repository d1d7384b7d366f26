"""Copies of what a rank will write, so that training may go on while the disk is slow.

On a GPU the copies run on a stream of their own into pinned memory, beside the next forward and backward pass: neither
changes a parameter or an optimizer state. Only `optimizer.step` does, so a hook before it makes the GPU (not the host)
wait for the copies. On the CPU there is nothing to overlap and the copy is made at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.optim import Optimizer

from shardwise.trainer.checkpoint.storage import ItemSource, plain_tensor


class Stager:
    """Host memory that holds one checkpoint's part of this rank; used again by the next one.

    The memory needed is what this rank writes: weights and optimizer states over the number of ranks.
    """

    def __init__(self) -> None:
        self._buffers: dict[MetadataIndex, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._hooked: dict[int, Any] = {}

    def stage(self, plan: SavePlan, source: ItemSource) -> StagedItems:
        """Start copying the tensors of a plan.

        Args:
            plan: What this rank writes.
            source: Finds the tensors and values.

        Returns:
            A source that hands out the copies. Call `wait` before the first tensor is taken from it.
        """
        values: dict[MetadataIndex, Any] = {}
        copies: dict[MetadataIndex, torch.Tensor] = {}
        sources: list[tuple[WriteItem, torch.Tensor]] = []
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                values[item.index] = _detached(source.resolve_value(item))
            else:
                sources.append((item, plain_tensor(item, source)))
        self._buffers = {item.index: self._buffer(item.index, tensor) for item, tensor in sources}
        with torch.cuda.stream(self._side_stream(sources)):
            for item, tensor in sources:
                copies[item.index] = self._buffers[item.index].copy_(tensor, non_blocking=True)
            if self._stream is not None:
                self._copied = torch.cuda.Event()
                self._copied.record(self._stream)
        return StagedItems(copies, values)

    def _buffer(self, index: MetadataIndex, like: torch.Tensor) -> torch.Tensor:
        held = self._buffers.get(index)
        if held is not None and held.shape == like.shape and held.dtype == like.dtype:
            return held
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)

    def _side_stream(self, sources: Sequence[tuple[WriteItem, torch.Tensor]]) -> torch.cuda.Stream | None:
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
        self._buffers.clear()


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
