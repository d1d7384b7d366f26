"""Gradients: every trained parameter has one, and no frozen one does."""

from __future__ import annotations

from torch import nn

from shardwise.errors import TrainingError
from shardwise.trainer.checkpoint.state import clean_name
from shardwise.trainer.sentinels.words import some


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
