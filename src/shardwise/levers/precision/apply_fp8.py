"""fp8: the blocks' matrix products in 8 bits with one scale a tensor, found anew for each product, by torchao.

Masters, the residual stream, norms, attention, head and loss stay as under bf16, and so does what crosses the wire.
Adapters keep bf16 products: theirs are small, and the rank would have to divide by 16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError, MissingExtraError
from shardwise.levers.adapters.apply import is_adapter

LEAST_CAPABILITY = (8, 9)
"""Compute capability of the first cards (Ada) that multiply in fp8."""
MULTIPLE = 16
"""Both sides of a matrix must divide by this, as cuBLAS wants it."""
_MAX_NAMED = 4


def load_float8() -> Any:
    """torchao's module for training in fp8.

    Raises:
        MissingExtraError: It is not installed.
    """  # noqa: D403
    try:
        import torchao.float8 as float8  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError("fp8", "fp8", "torchao") from error
    return float8


def problems(device: torch.device) -> list[str]:
    """Why this device cannot multiply in fp8; empty if it can."""
    if device.type != "cuda":
        return [f"fp8 needs a card of compute capability 8.9 or later; this run is on {device.type}. Use bf16."]
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        shown = ".".join(map(str, capability))
        return [f"fp8 needs compute capability 8.9, {torch.cuda.get_device_name(device)} has {shown}. Use bf16."]
    return []


def apply(blocks: nn.ModuleList, config: Any = None) -> None:
    """Swaps the linear layers of the blocks, in place; their parameters stay the same objects.

    Args:
        blocks: The decoder's.
        config: torchao's settings; None: one scale a tensor, rows padded to a multiple of 16.

    Raises:
        ConfigError: A matrix whose sides do not divide by 16.
        MissingExtraError: torchao is not installed.
    """
    float8 = load_float8()
    layers = {
        name: module
        for name, module in blocks.named_modules()
        if isinstance(module, nn.Linear) and not is_adapter(f".{name}.")
    }
    odd = {
        name: layer for name, layer in layers.items() if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE
    }
    if odd:
        shown = ", ".join(
            f"{name} ({layer.out_features} x {layer.in_features})" for name, layer in list(odd.items())[:_MAX_NAMED]
        )
        raise ConfigError(
            f"fp8 needs matrices whose sides divide by {MULTIPLE}; {len(odd)} of {len(layers)} do not: {shown}. "
            "Use bf16."
        )

    def is_wanted(module: nn.Module, name: str) -> bool:
        return layers.get(name) is module

    float8.convert_to_float8_training(
        blocks,
        module_filter_fn=is_wanted,
        config=config or float8.Float8LinearConfig(pad_inner_dim=True),
    )
