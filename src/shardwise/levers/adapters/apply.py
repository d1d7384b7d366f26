"""LoRA by PEFT: adapters beside the matrices, everything else frozen.

PEFT puts the adapters into the model itself: `model.layers.0.self_attn.q_proj.base_layer.weight` beside
`...q_proj.lora_A.default.weight`. Training goes on with that model; PEFT's wrapper around it is for saving only.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigError
from shardwise.levers.adapters.apply_nf4 import Nf4Linear
from shardwise.vocabulary.job import LoraSettings


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
        use_dora=settings.use_dora,
        use_rslora=settings.use_rslora,
        bias="none",
    )


def apply(model: nn.Module, settings: LoraSettings) -> Any:
    """Adds adapters in place and freezes the rest. Values come later, by `initialize`.

    Returns:
        The PeftModel around the model, which knows how to save them.

    Raises:
        ConfigError: No module bears one of the target names, or one is tied to another.
    """
    from peft import get_peft_model

    untyped: Any = model
    try:
        adapted = get_peft_model(untyped, peft_config(settings), low_cpu_mem_usage=True, autocast_adapter_dtype=False)
    except ValueError as error:
        names = sorted({name.rsplit(".", 1)[-1] for name, part in model.named_modules() if isinstance(part, nn.Linear)})
        raise ConfigError(
            f"lora_target_modules {list(settings.target_modules)} fits no module of this model. "
            f"Its linear modules are {', '.join(names)}; or write all-linear."
        ) from error
    _refuse_tied(untyped, settings)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    return adapted


def _refuse_tied(model: Any, settings: LoraSettings) -> None:
    """An adapter on a head that is also the embedding would be merged into both.

    Raises:
        ConfigError: There is one.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if model.config.tie_word_embeddings and any(hasattr(end, "base_layer") for end in ends):
        raise ConfigError(
            f"lora_target_modules {list(settings.target_modules)} names the embedding or the head, which are one tied "
            "weight in this model: merged, the adapter of one would change the other too. Leave them out."
        )


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is one of an adapter."""
    return ".lora_" in name


def is_magnitude(name: str) -> bool:
    """Whether a parameter's name is that of DoRA's lengths of rows."""
    return ".lora_magnitude_vector." in name


def adapted_layer(name: str) -> str:
    """The adapted layer that an adapter's parameter belongs to."""
    return name.split(".lora_")[0]


@torch.no_grad()
def row_lengths(layer: nn.Module) -> torch.Tensor:
    """The lengths that DoRA starts with: those of the rows of the frozen matrix, as B is 0. [out], fp32.

    On every rank: a sharded matrix's lengths are gathered.
    """
    base = layer.get_submodule("base_layer")
    if isinstance(base, Nf4Linear):
        packed = base.packed_weight
        whole = packed.full_tensor() if isinstance(packed, DTensor) else packed
        return torch.linalg.vector_norm(base.unpacked(whole, torch.float32).weight, dim=1)
    weight = base.get_parameter("weight")
    lengths = torch.linalg.vector_norm(weight.float(), dim=1)
    return lengths.full_tensor() if isinstance(lengths, DTensor) else lengths


def initialize(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """PEFT's values for a new adapter: A is Kaiming uniform, B zero, so that the first step sees the base model."""
    if ".lora_A." in name:
        nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
    else:
        nn.init.zeros_(tensor)
