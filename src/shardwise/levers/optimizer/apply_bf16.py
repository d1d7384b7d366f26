"""AdamW that keeps its moments in bf16 and computes in fp32: 4 bytes a parameter instead of 8.

[Note: a slow average in bf16] The second moment moves by at most 1 - beta2 of itself a step as it falls: 0.1 % with
the usual 0.999. bf16 has steps of 0.4 to 0.8 %, so rounding to nearest returns what was there: the moment could grow
but never fall, and the rate of a weight that once saw a large gradient would stay low for good. So the rounding's
threshold moves from step to step through the van der Corput sequence: of 256 steps, a value that lies a quarter of the
way to its upper neighbor is rounded up in 64. That is right on average, as stochastic rounding is, but without a random
number: the same for every rank, every split, and after a resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.levers.optimizer.apply_local import (
    AdamStep,
    LocalAdam,
    adamw_,
    as_exact,
    chunks,
    foreach_copy_,
    local,
    local_gradient,
    update_moments,
)


class AdamWBf16States(LocalAdam):
    """AdamW with bf16 moments ([Note: a slow average in bf16])."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient."""
        assert closure is None, "losses are computed by the step, not by the optimizer"
        for group in self.param_groups:
            parameters, step = self.begin(group)
            for chunk in chunks(parameters):
                self._update(step, chunk)

    def make_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Two moments in bf16."""
        return {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in ("exp_avg", "exp_avg_sq")}

    def _update(self, step: AdamStep, chunk: list[nn.Parameter]) -> None:
        kept_first, kept_second = self.moments(chunk)
        first, second = as_exact(kept_first), as_exact(kept_second)
        update_moments(step, [local_gradient(parameter).float() for parameter in chunk], first, second)
        kept_weights = [local(parameter) for parameter in chunk]
        weights = [weight.float() for weight in kept_weights]
        adamw_(step, weights, first, second)
        foreach_copy_(kept_first, first)
        foreach_copy_(kept_second, rounded(second, step.step))
        if weights[0] is not kept_weights[0]:
            foreach_copy_(kept_weights, weights)


def rounded(values: Sequence[Tensor], step: int) -> list[Tensor]:
    """fp32 values that are not negative, moved to a bf16 neighbor by the step's threshold; returned in fp32.

    Args:
        values: Tensors of fp32.
        step: Decides the threshold: 16 bits of its number, reversed.
    """
    threshold = int(f"{step % 2**16:016b}"[::-1], 2)
    return [value.view(torch.int32).add(threshold).bitwise_and_(-(2**16)).view(torch.float32) for value in values]
