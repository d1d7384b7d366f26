"""The optimizer over the trained parameters, grouped as transformers groups them: no decay on biases and norms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.levers.optimizer.apply_8bit import AdamW8bit
from shardwise.levers.optimizer.apply_bf16 import AdamWBf16States
from shardwise.levers.optimizer.apply_lamb import Lamb
from shardwise.levers.optimizer.apply_sgd import Sgd
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
    """AdamW by one kernel for all parameters; otherwise by one small kernel after another."""


def apply(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Builds the optimizer over every parameter that requires a gradient.

    Raises:
        MissingExtraError: bitsandbytes, which the 8-bit optimizers need, is not installed.
    """
    groups = parameter_groups(model, settings.weight_decay)
    rate, betas, epsilon = settings.learning_rate, settings.betas, settings.epsilon
    match settings.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=epsilon, fused=settings.fused)
        case "adamw_bf16_states":
            return AdamWBf16States(groups, rate, betas, epsilon)
        case "adamw_8bit" | "paged_adamw_8bit":
            paged = settings.name == "paged_adamw_8bit"
            return AdamW8bit(_without_tables(groups, model), rate, betas, epsilon, paged=paged)
        case "lamb":
            return Lamb(groups, rate, betas, epsilon)
        case "sgd":
            return Sgd(groups, rate)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """With and without decay: vectors (norms, biases) have none. A group each for parameters on different meshes.

    Under tensor parallel split matrices lie on another mesh than norms, and one fused kernel takes one mesh.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decayed, others = _split(trained)
    kinds = ((decayed, weight_decay), (others, 0.0))
    return [{"params": part, "weight_decay": decay} for members, decay in kinds for part in _by_mesh(members)]


def _by_mesh(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    found: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(found.values())


def _split(trained: Mapping[str, nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    decayed = [parameter for parameter in trained.values() if parameter.ndim >= 2]
    others = [parameter for parameter in trained.values() if parameter.ndim < 2]
    return decayed, others


def _without_tables(groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """The groups with embedding and head in groups of their own, which say that they are kept out of 8 bits."""
    kept_out = {id(table) for table in _tables(model)}
    parts: list[dict[str, Any]] = []
    for group in groups:
        for eight_bit in (True, False):
            members = [each for each in group["params"] if (id(each) not in kept_out) == eight_bit]
            if members:
                parts.append({**group, "params": members, "eight_bit": eight_bit})
    return parts


def _tables(model: nn.Module) -> Iterator[Tensor]:
    """The weights of embeddings and heads. A pipeline's rank may hold several chunks, each with ends of its own."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield module.weight
        get_head: Any = getattr(module, "get_output_embeddings", None)
        if callable(get_head) and (head := cast(Any, get_head())) is not None:
            yield head.weight
