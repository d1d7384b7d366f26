"""Plain stochastic gradient descent: no states, and no copy of the gradients; torch's fused one knows no DTensor."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.levers.optimizer.apply_local import chunks, foreach_add_, foreach_mul_, local, local_gradient


class Sgd(torch.optim.Optimizer):
    """weight -= lr x (gradient + weight_decay x weight).

    Args:
        groups: Parameters, sharded or not, with `weight_decay`.
        lr: Learning rate.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient."""
        assert closure is None, "losses are computed by the step, not by the optimizer"
        for group in self.param_groups:
            rate = float(group["lr"])
            for chunk in chunks([parameter for parameter in group["params"] if parameter.grad is not None]):
                weights = [local(parameter) for parameter in chunk]
                foreach_mul_(weights, 1 - rate * group["weight_decay"])
                foreach_add_(weights, [local_gradient(parameter) for parameter in chunk], alpha=-rate)
