"""Adapters that live: after training every B has left zero, or the adapter changes nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import TrainingError
from shardwise.trainer.checkpoint.state import clean_name
from shardwise.trainer.sentinels.words import some


@torch.no_grad()
def check_adapters(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Every adapter's B holds something else than zeros on some rank; every rank must call it.

    Args:
        model: The model as it is split; nothing is asked of one without adapters.
        group: All ranks, over gloo.

    Raises:
        TrainingError: Adapters are dead; names them.
    """
    mine: dict[str, bool] = {}
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            mine[clean_name(name)] = bool(local.count_nonzero().item()) if local.numel() else False
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    alive = {name for one in everyone for name, lives in one.items() if lives}
    dead = sorted({name for one in everyone for name in one} - alive)
    if dead:
        raise TrainingError(
            f"{len(dead)} adapters are still zero after training: {some(dead)}. They change nothing; the learning rate "
            "may be too small for their dtype, or they are not the ones that the model computes with."
        )
