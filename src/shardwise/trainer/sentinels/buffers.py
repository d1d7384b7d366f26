"""Buffers hold what the CPU computed when the model was made ([Note: buffers] of trainer/model.py), on every rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardwise.errors import PlanMismatchError
from shardwise.trainer.checkpoint.state import clean_name


def check_buffers(model: nn.Module, reference: Mapping[str, Tensor]) -> None:
    """Buffers hold what the CPU computed when the model was made ([Note: buffers] of model.py).

    Raises:
        PlanMismatchError: A buffer differs or is missing.
    """
    problems: list[str] = []
    found = {clean_name(name): buffer for name, buffer in model.named_buffers()}
    for name, wanted in reference.items():
        buffer = found.get(name)
        if buffer is None:
            problems.append(f"The buffer {name} is gone.")
        elif buffer.shape != wanted.shape or not torch.equal(buffer.detach().cpu().to(wanted.dtype), wanted):
            problems.append(f"The buffer {name} does not hold what the CPU computed for it.")
    if problems:
        raise PlanMismatchError(*problems)
