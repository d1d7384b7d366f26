"""How long the whole job takes, what it costs, and what packing would save."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.plan import Advice, Candidate
from shardwise.vocabulary.units import HOUR, format_count, format_percent, format_seconds

CENT, SHORT_HOURS = 0.01, 0.1
"""Below these a price or a number of hours would print as zero."""
WORTH_PACKING = 0.1
"""Padding above this share of all tokens is worth a word."""


@dataclass(frozen=True, kw_only=True)
class Duration:
    """One run over the data set."""

    num_steps: int
    seconds: float
    gpu_hours: float
    price: float | None
    """In the currency of price_per_gpu_hour; None if none was given."""


def num_steps(job: Job) -> int | None:
    """Optimizer steps of the job: max_steps, or epochs over the data set; None if neither is known."""
    if job.max_steps is not None:
        return job.max_steps
    if job.lengths is None:
        return None
    rows = job.lengths.num_sequences
    if job.packing:
        rows = math.ceil(job.lengths.total_tokens / job.sequence_length)
    return math.ceil(rows / job.global_batch_size * job.num_train_epochs)


def duration(job: Job, cluster: Cluster, candidate: Candidate) -> Duration | None:
    """Time and price of all steps (evaluation, saving and start-up not counted), or None if their number is unknown."""
    steps = num_steps(job)
    if steps is None:
        return None
    seconds = steps * candidate.step.seconds
    hours = cluster.num_gpus * seconds / HOUR
    price = None if job.price_per_gpu_hour is None else hours * job.price_per_gpu_hour
    return Duration(num_steps=steps, seconds=seconds, gpu_hours=hours, price=price)


def how_long(job: Job, cluster: Cluster, candidate: Candidate) -> Advice | None:
    """Hours and price of the job; of a billion tokens where its length is unknown but a price was given."""
    whole = duration(job, cluster, candidate)
    if whole is None:
        if job.price_per_gpu_hour is None:
            return None
        hours = cluster.num_gpus * 1e9 / candidate.tokens_per_s / HOUR
        message = (
            f"A billion tokens take {hours:,.1f} card hours: {hours * job.price_per_gpu_hour:,.2f} at "
            f"{job.price_per_gpu_hour:g} a card hour. Name the data set or max_steps for the whole job."
        )
        return Advice(rule="how_long", message=message)
    message = (
        f"{whole.num_steps:,} steps of {format_seconds(candidate.step.seconds)} take {format_seconds(whole.seconds)} "
        f"({_card_time(whole)}), without evaluation, saving and start-up"
    )
    if whole.price is not None:
        price = f"{whole.price:,.2f}" if whole.price >= CENT else f"less than {CENT:g}"
        message += f": {price} at {job.price_per_gpu_hour:g} a card hour"
    return Advice(rule="how_long", message=message + ".")


def _card_time(whole: Duration) -> str:
    """In card hours, as they are paid; short jobs in seconds of cards."""
    if whole.gpu_hours < SHORT_HOURS:
        return f"{format_seconds(whole.gpu_hours * HOUR)} of card time"
    return f"{whole.gpu_hours:,.2f} card hours"


def padding_share(job: Job, candidate: Candidate) -> float:
    """Share of all tokens that is padding, with micro-batches as wide as their longest row; 0 if unknown or packed."""
    if job.lengths is None or job.packing:
        return 0.0
    width = job.typical_length(candidate.strategy.micro_batch_size)
    return max(0.0, 1 - job.lengths.mean / width) if width else 0.0


def packing(job: Job, candidate: Candidate) -> Advice | None:
    """What packing would save, where padding is worth a word."""
    share = padding_share(job, candidate)
    if share < WORTH_PACKING or job.lengths is None:
        return None
    message = (
        f"{format_percent(share)} of the tokens would be padding: rows of {format_count(job.lengths.mean)} tokens on "
        f"average in micro-batches as wide as their longest. Packing rows to {job.sequence_length:,} tokens saves "
        "about that share of the time."
    )
    return Advice(rule="packing_saves", message=message + " In a run file: packing: true.")
