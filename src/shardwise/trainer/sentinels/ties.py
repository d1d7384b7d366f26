"""Tied weights still share memory ([Note: ties] of trainer/model.py)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.errors import PlanMismatchError
from shardwise.trainer.checkpoint.state import clean_name


def check_ties(model: nn.Module, aliases: Sequence[Sequence[str]]) -> None:
    """Parameters that were tied are still one.

    Raises:
        PlanMismatchError: They are two.
    """
    found = {clean_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    for names in aliases:
        first = found[names[0]]
        for other in names[1:]:
            if found[other] is not first and _address(found[other]) != _address(first):
                raise PlanMismatchError(f"{names[0]} and {other} were tied, and are two parameters now.")


def _address(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.data_ptr()
