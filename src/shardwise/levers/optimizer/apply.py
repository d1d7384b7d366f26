"""The optimizer over the trained parameters, grouped as transformers groups them: no decay on biases and norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.vocabulary.job import OptimizerName


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """What decides an update, in transformers' words."""

    name: OptimizerName = "adamw"
    learning_rate: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    fused: bool = True
    """One kernel for all parameters; otherwise one small kernel after another."""


def apply(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Builds the optimizer over every parameter that requires a gradient.

    Raises:
        ConfigError: The optimizer is not available in this engine.
    """
    groups = parameter_groups(model, settings.weight_decay)
    if settings.name == "adamw":
        return torch.optim.AdamW(
            groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon, fused=settings.fused
        )
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=settings.learning_rate, fused=settings.fused)
    raise ConfigError(
        f"optim: {settings.name} is not available in this version's engine. Use adamw_torch_fused or sgd."
    )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: with and without decay. Vectors (norms, biases) have none."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decayed, others = _split(trained)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _split(trained: Mapping[str, nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    decayed = [parameter for parameter in trained.values() if parameter.ndim >= 2]
    others = [parameter for parameter in trained.values() if parameter.ndim < 2]
    return decayed, others
