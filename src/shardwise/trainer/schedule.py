"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.planner.learning_rate import scaled
from shardwise.vocabulary.run import OptimizerKey, RunFile, Scheduler
from shardwise.vocabulary.strategy import Strategy

FULL_LEARNING_RATE, ADAPTER_LEARNING_RATE = 2e-5, 2e-4
LINEAR_OPTIMIZERS: tuple[OptimizerKey, ...] = ("sgd", "lamb")
"""Their rate grows with the batch; that of the others, all of Adam's kind, with its root ([Note: scaling the rate])."""
SCALED_WARMUP = 0.05
"""Share of the steps over which a rate that was scaled up warms up, where the run file does not say."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Warm-up, then decay, as transformers computes them."""

    kind: Scheduler
    peak: float
    num_warmup_steps: int
    num_steps: int

    def at(self, step: int) -> float:
        """Learning rate of the optimizer step with this number, from 0."""
        if step < self.num_warmup_steps and self.kind != "constant":
            return self.peak * step / max(1, self.num_warmup_steps)
        if self.kind in ("constant", "constant_with_warmup"):
            return self.peak
        done = (step - self.num_warmup_steps) / max(1, self.num_steps - self.num_warmup_steps)
        if self.kind == "linear":
            return self.peak * max(0.0, 1.0 - done)
        return self.peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * done)))


def schedule_of(run: RunFile, num_steps: int, strategy: Strategy) -> Schedule:
    """The schedule that a run file asks for, scaled to the batch if it says which batch its rate belongs to.

    A rate that was scaled up warms up (arXiv:1706.02677), whatever the scheduler.

    Args:
        run: For the scheduler, the rate and the warm-up.
        num_steps: Optimizer steps of the whole run.
        strategy: For the batch, and whether only adapters train, which want a higher rate.
    """
    default = FULL_LEARNING_RATE if strategy.tuning == "full" else ADAPTER_LEARNING_RATE
    rate = default if run.learning_rate is None else run.learning_rate
    factor = strategy.global_batch_size / (run.learning_rate_base_batch or strategy.global_batch_size)
    kind, warmup = run.lr_scheduler_type, run.warmup_steps or math.ceil(run.warmup_ratio * num_steps)
    if factor > 1:
        warmup = warmup or math.ceil(SCALED_WARMUP * num_steps)
        kind = "constant_with_warmup" if kind == "constant" else kind
    both = scaled(rate, factor)
    peak = both.linear if run.optim in LINEAR_OPTIMIZERS else both.square_root
    return Schedule(kind=kind, peak=peak, num_warmup_steps=warmup, num_steps=num_steps)
