"""LoRA by PEFT: adapters beside the matrices, everything else frozen.

The adapters are put into the model itself (`inject_adapter_in_model`), so the model keeps its class and its names:
`model.layers.0.self_attn.q_proj.base_layer.weight` beside `...q_proj.lora_A.default.weight`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.vocabulary.job import LoraSettings

ADAPTER = "default"
"""The name that PEFT gives to an adapter when nobody names it."""


def peft_config(settings: LoraSettings) -> Any:
    """The same settings as PEFT's LoraConfig."""
    from peft import LoraConfig, TaskType

    targets: Any = "all-linear" if settings.target_modules == ("all-linear",) else list(settings.target_modules)
    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets,
        bias="none",
    )


def apply(model: nn.Module, settings: LoraSettings) -> None:
    """Adds adapters in place and freezes the rest. Values come later, by `initialize`.

    Raises:
        ConfigError: No module bears one of the target names.
    """
    from peft import inject_adapter_in_model

    try:
        inject_adapter_in_model(peft_config(settings), _as_pretrained(model), ADAPTER, low_cpu_mem_usage=True)
    except ValueError as error:
        names = sorted({name.rsplit(".", 1)[-1] for name, part in model.named_modules() if isinstance(part, nn.Linear)})
        raise ConfigError(
            f"lora_target_modules {list(settings.target_modules)} fits no module of this model. "
            f"Its linear modules are {', '.join(names)}; or write all-linear."
        ) from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is one of an adapter."""
    return ".lora_" in name


def initialize(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """PEFT's values for a new adapter: A is Kaiming uniform, B zero, so that the first step sees the base model."""
    if ".lora_A." in name:
        nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
    else:
        nn.init.zeros_(tensor)


def _as_pretrained(model: nn.Module) -> Any:
    return model
