"""Bytes: what is stored between steps, exactly; and every storage's birth and death within one step.

[Note: watching storages] A dispatch mode sees every operation of a step. Each new storage is written down with its
size and the moment of its birth, and struck out when it dies; `fully_shard` frees and fills storages by resizing them,
which is seen too. At the largest sum the living are kept and sorted into categories:

    parameter, optimizer   lived before the step
    activation             born in forward, or in a recomputation, with gradients recorded
    gradient               born in backward and still alive when it ends
    temporary              everything else: gathered copies, reduction buffers, logits and their gradients

What no operation makes (libraries' workspaces, the allocator's rounding) is not counted here.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shardwise.axes.pipeline.apply import chunks_of
from shardwise.vocabulary.memory import Category

Phase = Literal["forward", "loss", "backward", "optimizer"]


@dataclass(frozen=True, kw_only=True)
class StoredBytes:
    """What one rank keeps, padding of uneven shards included."""

    parameters: int
    """Trained weights."""
    frozen: int
    """Weights that do not train."""
    gradients: int
    optimizer: int
    buffers: int


def stored_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> StoredBytes:
    """Exact bytes that this rank keeps for a model and its optimizer now."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    states = optimizer.state.values() if optimizer is not None else ()
    return StoredBytes(
        parameters=_sum_bytes(trained),
        frozen=_sum_bytes(frozen),
        gradients=_sum_bytes(gradients),
        optimizer=_sum_bytes(value for state in states for value in state.values() if isinstance(value, Tensor)),
        buffers=_sum_bytes(model.buffers()),
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sum_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {storage.data_ptr() or id(storage): storage.nbytes() for storage in map(_storage, tensors)}
    return sum(storages.values())


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return _local(tensor.detach()).untyped_storage()


def _identity(storage: torch.UntypedStorage) -> int:
    """The address of the storage itself, not of its bytes, which resizing moves."""
    return storage._cdata  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The largest instant of one step."""

    peak_bytes: int
    phase: Phase
    """When it was."""
    by_category: Mapping[Category, int]
    """The living at that instant."""
    peak_by_phase: Mapping[Phase, int]
    """Largest sum within each part of the step."""


@dataclass(eq=False)
class _Life:
    """One storage."""

    num_bytes: int
    category: Category | None
    """None: born in backward; a gradient if it outlives it, otherwise temporary."""


class MemoryWatch(TorchDispatchMode):
    """Watches one step ([Note: watching storages]).

    Args:
        model: The model whose step it is.
        optimizer: Its optimizer.
        device: Storages on other devices are not counted.
    """

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        super().__init__()
        self._model, self._optimizer, self._device = model, optimizer, device
        self._phase: Phase = "forward"
        self._living: dict[int, _Life] = {}
        self._deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sum = 0
        self._peak = 0
        self._peak_phase: Phase = "forward"
        self._at_peak: list[tuple[_Life, int]] = []
        self._dead: list[int] = []
        self._peaks: dict[Phase, int] = {}

    def result(self) -> StepMemory:
        """What was seen; after the step."""
        totals = dict.fromkeys(Category, 0)
        for life, num_bytes in self._at_peak:
            totals[life.category or Category.TEMPORARY] += num_bytes
        return StepMemory(
            peak_bytes=self._peak, phase=self._peak_phase, by_category=totals, peak_by_phase=dict(self._peaks)
        )  # fmt: skip

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Watches what happens inside."""
        self._register_stored()
        hooks = self._hooks()
        resize = torch.UntypedStorage.resize_

        def watched_resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._see(storage)
            return result

        torch.UntypedStorage.resize_ = watched_resize  # pyright: ignore[reportAttributeAccessIssue]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize
            for hook in hooks:
                hook.remove()
            self._deaths.clear()

    def _register_stored(self) -> None:
        for parameter in (*self._model.parameters(), *self._model.buffers()):
            self._see(_storage(parameter), Category.PARAMETER)
        for state in self._optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self._see(_storage(value), Category.OPTIMIZER)

    def _hooks(self) -> list[Any]:
        def entering(phase: Phase) -> Callable[..., None]:
            def hook(*_: object) -> None:
                self._enter(phase)

            return hook

        def entering_head(*_: object) -> None:
            if self._phase == "forward":  # not where a chunk of the loss is computed again
                self._enter("loss")

        hooks: list[Any] = [self._optimizer.register_step_pre_hook(entering("optimizer"))]
        for chunk in chunks_of(self._model):
            hooks.append(chunk.register_forward_pre_hook(entering("forward"), prepend=True))
            hooks.append(chunk.register_forward_hook(entering("backward")))
            head: Any = cast(Any, chunk).get_output_embeddings()
            if head is not None:  # not on stages of a pipeline that end with hidden states
                hooks.append(head.register_forward_pre_hook(entering_head))
        return hooks

    def _enter(self, phase: Phase) -> None:
        if self._phase == "backward":  # it is over: what it made and left alive is gradients
            for life in self._living.values():
                life.category = life.category or Category.GRADIENT
        self._phase = phase

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and looks at what it made."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operations on the local parts follow
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.device == self._device:
                self._see(value.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage, category: Category | None = None) -> None:
        if storage.device != self._device:
            return
        self._sweep()
        key, size = _identity(storage), storage.nbytes()
        life = self._living.get(key)
        if life is None:
            life = self._living[key] = _Life(num_bytes=0, category=category or self._category())
            self._deaths[key] = weakref.ref(storage, lambda _, key=key: self._bury(key))
        if size != life.num_bytes:
            self._sum += size - life.num_bytes
            life.num_bytes = size
            self._compare()

    def _category(self) -> Category | None:
        if self._phase == "loss":
            return Category.TEMPORARY
        if torch.is_grad_enabled() and self._phase in ("forward", "backward"):
            return Category.ACTIVATION
        return None if self._phase == "backward" else Category.TEMPORARY

    def _bury(self, key: int) -> None:
        """Called by the garbage collector, at any moment: only notes the death."""
        self._dead.append(key)

    def _sweep(self) -> None:
        """Strikes out what has died since the last look. An address may have been given to a new storage since."""
        while self._dead:
            key = self._dead.pop()
            if self._deaths[key]() is None:
                del self._deaths[key]
                self._sum -= self._living.pop(key).num_bytes

    def _compare(self) -> None:
        self._peaks[self._phase] = max(self._peaks.get(self._phase, 0), self._sum)
        if self._sum > self._peak:
            self._peak, self._peak_phase = self._sum, self._phase
            self._at_peak = [(life, life.num_bytes) for life in self._living.values()]
