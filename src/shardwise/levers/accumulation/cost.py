"""Accumulation: the batch must come out exactly."""

from __future__ import annotations

from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.plan import Refusal
from shardwise.vocabulary.strategy import Strategy


def legal(job: Job, cluster: Cluster, strategy: Strategy) -> tuple[Refusal, ...]:
    """micro-batch x accumulation x data-parallel ranks must be the global batch."""
    del cluster
    if strategy.global_batch_size == job.global_batch_size:
        return ()
    ranks = strategy.data_parallel
    unit = ranks * strategy.micro_batch_size
    below = max(unit, job.global_batch_size // unit * unit)
    message = (
        f"micro-batch {strategy.micro_batch_size} x accumulation {strategy.accumulation} x {ranks} data-parallel "
        f"ranks = {strategy.global_batch_size} sequences, not the global batch of {job.global_batch_size}; "
        f"{below} and {below + unit} divide by {unit}"
    )
    return (Refusal(strategy=strategy, rule="global_batch_divides", message=message),)
