"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.vocabulary.run import RunFile, Scheduler

FULL_LEARNING_RATE, ADAPTER_LEARNING_RATE = 2e-5, 2e-4


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


def schedule_of(run: RunFile, num_steps: int, *, adapters: bool) -> Schedule:
    """The schedule that a run file asks for.

    Args:
        run: For the scheduler, the rate and the warm-up.
        num_steps: Optimizer steps of the whole run.
        adapters: Whether only adapters train, which want a higher rate.
    """
    default = ADAPTER_LEARNING_RATE if adapters else FULL_LEARNING_RATE
    return Schedule(
        kind=run.lr_scheduler_type,
        peak=default if run.learning_rate is None else run.learning_rate,
        num_warmup_steps=run.warmup_steps or math.ceil(run.warmup_ratio * num_steps),
        num_steps=num_steps,
    )
