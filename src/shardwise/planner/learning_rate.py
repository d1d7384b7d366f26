"""What a change of the effective batch asks of the learning rate.

[Note: scaling the rate]
k times the batch takes k times fewer steps, each with less noise. As long as noise dominates, one step at k times the
rate goes as far as k steps did (linear scaling, with warm-up, arXiv:1706.02677); adaptive optimizers rather follow the
square root of k (arXiv:2205.10287). Past the critical batch (the gradient's noise scale, arXiv:1812.06162) neither
holds: more samples a step buy nothing, and only steps whose length is set layer by layer, as LAMB does
(arXiv:1904.00962), keep large batches stable. The critical batch of a fine-tune is seldom known, so the advice gives
both rates as ends of a range and says where it stops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.vocabulary.job import Job, Tuning
from shardwise.vocabulary.plan import Advice

REFERENCE_BATCH = 128
"""Sequences a step for which published recipes state rates near 2e-5 (full) and 2e-4 (adapters), such as Alpaca's."""
FULL_RATE, ADAPTER_RATE = 2e-5, 2e-4
"""Such rates, by what is trained."""
WORTH_SAYING = (1 / 8, 2.0)
"""Between these factors usual rates serve: small batches forgive a rate that is a little high."""
LINEAR_UP_TO = 8.0
"""Beyond this factor linear scaling is not expected to hold for a fine-tune."""


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """Two rules for one change of the batch."""

    linear: float
    square_root: float


def scaled(rate: float, factor: float) -> Scaled:
    """The rate for a batch that is `factor` times as large; see [Note: scaling the rate]."""
    return Scaled(linear=rate * factor, square_root=rate * math.sqrt(factor))


def advice(job: Job, tuning: Tuning) -> Advice | None:
    """What to do about the learning rate, if this batch is far from the one that usual rates were found for."""
    factor = job.global_batch_size / REFERENCE_BATCH
    if WORTH_SAYING[0] < factor < WORTH_SAYING[1]:
        return None
    rate = ADAPTER_RATE if job.learning_rate == FULL_RATE and tuning != "full" else job.learning_rate
    rates = scaled(rate, factor)
    message = (
        f"{job.global_batch_size:,} sequences a step are {factor:.3g} times the {REFERENCE_BATCH} that usual rates are "
        f"stated for. If {rate:g} is such a rate, linear scaling gives {rates.linear:.2g} and the square root, which "
        f"suits Adam better, {rates.square_root:.2g}"
    )
    if factor < 1:
        return Advice(rule="learning_rate", message=message + ".")
    message += "; with warm-up over the first steps in both cases."
    if factor > LINEAR_UP_TO:
        message += (
            f" Above about {LINEAR_UP_TO:g} times linear scaling stops holding: raise the rate no further, or let an "
            "optimizer with layer-wise steps set their length (LAMB: --optimizer lamb)."
        )
    return Advice(rule="learning_rate", message=message)
