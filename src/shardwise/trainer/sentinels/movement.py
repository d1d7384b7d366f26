"""Whether the learning rate moves the weights: the share of them that an update leaves exactly as they were.

A weight w in bf16 changes only if the update is larger than about w / 256; with small learning rates and without fp32
masters most weights then never change, and the loss hardly falls. Looked at on a sample of elements whose gradient is
not zero, at the first update and now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.errors import TrainingError
from shardwise.vocabulary.units import format_percent

SAMPLE_PER_TENSOR = 1024
"""Elements of each tensor that are compared."""
WARN_SHARE = 0.5
"""Unchanged elements from which a sentence is said."""


class MovementWatch:
    """Compares a sample of the weights before and after an update.

    Args:
        optimizer: Whose updates are looked at.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._armed = False
        self._before: list[tuple[Tensor, Tensor]] = []
        self._found: Tensor | None = None
        self._hooks = (
            optimizer.register_step_pre_hook(self._note),
            optimizer.register_step_post_hook(self._compare),
        )

    def arm(self) -> None:
        """Look at the next update."""
        self._armed = True

    def take(self) -> Tensor | None:
        """Elements unchanged and elements compared in the last update, on the device; None if it was not looked at."""
        self._armed = False  # an update that was skipped altogether tells nothing
        found, self._found = self._found, None
        return found

    def close(self) -> None:
        """Leaves the optimizer alone."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _note(self, *_: Any) -> None:
        if self._armed:
            self._before = [
                (_sample(parameter).clone(), _sample(parameter.grad) != 0)
                for parameter in _parameters(self._optimizer)
                if parameter.grad is not None
            ]

    @torch.no_grad()
    def _compare(self, *_: Any) -> None:
        if not self._armed:
            return
        self._armed = False
        after = [_sample(parameter) for parameter in _parameters(self._optimizer) if parameter.grad is not None]
        pairs = zip(self._before, after, strict=True)
        counts = [torch.stack([(alive & (old == new)).sum(), alive.sum()]) for (old, alive), new in pairs]
        self._before = []
        self._found = torch.stack(counts).sum(dim=0).double() if counts else None


def _parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _sample(tensor: Tensor) -> Tensor:
    """Every n-th element of what this rank holds: [at most SAMPLE_PER_TENSOR]."""
    flat = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLE_PER_TENSOR))]


def judge_movement(step: int, counts: Sequence[float], learning_rate: float, *, pure: bool) -> str | None:
    """What an update has moved.

    Args:
        step: The optimizer step, from 0.
        counts: Elements unchanged and elements compared, over all ranks.
        learning_rate: Of that step.
        pure: Whether weights are bf16 without fp32 masters.

    Returns:
        A sentence if much stands still.

    Raises:
        TrainingError: Nothing at all has moved.
    """
    unchanged, compared = counts
    if not compared or learning_rate == 0:
        return None
    way_out = "train with fp32 masters (bf16_pure: false) or raise learning_rate" if pure else "raise learning_rate"
    if unchanged == compared:
        raise TrainingError(
            f"Step {step + 1} at learning_rate {learning_rate:g} has left all {compared:.0f} weights that were looked "
            "at exactly as they were, although their gradients are not zero: nothing is learned. The update is lost in "
            f"rounding, or the optimizer updates other tensors than the model computes with; {way_out}."
        )
    share = unchanged / compared
    if share < WARN_SHARE:
        return None
    return (
        f"Step {step + 1}: {format_percent(share)} of the weights that have a gradient did not change at learning_rate "
        f"{learning_rate:g}, because the update is smaller than their rounding; {way_out}."
    )
