"""Gradients: every trained parameter gets one that is not zero, and no frozen one gets any.

[Note: zero for a reason] An adapter's A gets nothing but zeros until its B has moved, and queries and keys get zeros
from documents of two tokens, in which nobody has a choice whom to look at. So what is zero in the first step is looked
for again in the next ones, and only what stays zero is a fault. Zeros everywhere are one at once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _python_dispatch

from shardwise.errors import TrainingError
from shardwise.levers.adapters.apply import is_adapter
from shardwise.trainer.checkpoint.state import clean_name
from shardwise.trainer.sentinels.words import some

PATIENCE = 3
"""Looks at which a parameter's gradient may be zero; an adapter's A: after its B has moved."""
# One kernel for a list of tensors; torch exports no public name for it.
_foreach_norm: Any = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
# The meter counts the training's messages, and may count in a step at which gradients are looked at.
_uncounted: Any = _python_dispatch._disable_current_modes  # pyright: ignore[reportPrivateUsage]


def check_gradients(model: nn.Module) -> None:
    """After the first backward: every trained parameter has a gradient, and no frozen one has.

    Raises:
        TrainingError: Otherwise; names the parameters.
    """
    named = [(clean_name(name), parameter) for name, parameter in model.named_parameters()]
    dead = [name for name, parameter in named if parameter.requires_grad and parameter.grad is None]
    leaking = [name for name, parameter in named if not parameter.requires_grad and parameter.grad is not None]
    problems: list[str] = []
    if dead:
        problems.append(f"{len(dead)} trained parameters got no gradient in the first step: {some(dead)}.")
    if leaking:
        problems.append(f"{len(leaking)} frozen parameters got a gradient in the first step: {some(leaking)}.")
    if problems:
        raise TrainingError(*problems)


class GradientWatch:
    """Looks at gradients until every trained parameter has had one that is not zero ([Note: zero for a reason]).

    Args:
        model: The model as it is split.
        group: All ranks, over gloo.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._model, self._group = model, group
        self._waiting: set[str] = set()
        self._num_looks = 0
        self._num_looks_moved = 0

    @property
    def is_done(self) -> bool:
        """Whether every trained parameter, of this rank and of the others, has had a gradient."""
        return self._num_looks > 0 and not self._waiting

    def look(self, *, moved: bool) -> None:
        """After a backward, before the update; every rank must call it at the same steps.

        Args:
            moved: Whether an earlier update has moved the weights.

        Raises:
            TrainingError: Gradients are missing, or zero for too long; names the parameters.
        """
        if self._num_looks == 0:
            check_gradients(self._model)
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        with _uncounted():
            dist.all_gather_object(everyone, (_trained(self._model), _alive(self._model)), group=self._group)
        alive = set[str]().union(*(living for _, living in everyone))
        if self._num_looks == 0:
            self._waiting = set[str]().union(*(trained for trained, _ in everyone))
        self._num_looks += 1
        self._num_looks_moved += moved
        if not alive:
            raise TrainingError(
                f"The gradients of all {len(self._waiting)} trained parameters are exactly zero: "
                "nothing would be learned. The reduction over the ranks loses them: try reduce_dtype: fp32, and "
                "report the torch and NCCL versions."
            )
        self._waiting -= alive
        late = sorted(name for name in self._waiting if self._is_late(name))
        if late:
            raise TrainingError(
                f"{len(late)} trained parameters had a gradient of exactly zero in {PATIENCE} steps: {some(late)}. "
                "They are not part of what the loss is computed from; freeze them or leave them out of the adapters' "
                "targets."
            )

    def _is_late(self, name: str) -> bool:
        waits_for_b = is_adapter(name) and ".lora_A." in name
        return (self._num_looks_moved if waits_for_b else self._num_looks) >= PATIENCE


def _trained(model: nn.Module) -> set[str]:
    return {clean_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def _alive(model: nn.Module) -> set[str]:
    """Trained parameters of which this rank holds a gradient that is not zero. Waits for the card."""
    named = {clean_name(name): _local(parameter.grad) for name, parameter in model.named_parameters()
             if parameter.requires_grad and parameter.grad is not None}  # fmt: skip
    held = {name: gradient for name, gradient in named.items() if gradient.numel()}
    if not held:
        return set()
    largest = torch.stack([norm.float() for norm in _foreach_norm(list(held.values()), float("inf"))]).tolist()
    return {name for name, value in zip(held, largest, strict=True) if value != 0}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
