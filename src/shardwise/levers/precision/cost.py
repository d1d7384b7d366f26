"""Precision: which dtypes a card computes in."""

from __future__ import annotations

from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job, Precision
from shardwise.vocabulary.plan import Refusal
from shardwise.vocabulary.strategy import Strategy

COMPUTE_DTYPE: dict[Precision, str] = {"bf16": "bf16", "bf16_pure": "bf16", "fp32": "fp32", "fp8": "fp8"}
"""The dtype of the matrix products, by precision."""


def legal(job: Job, cluster: Cluster, strategy: Strategy) -> tuple[Refusal, ...]:
    """The card must have the dtype."""
    del job
    dtype = COMPUTE_DTYPE[strategy.precision]
    if dtype in cluster.gpu.peak_flops:
        return ()
    known = ", ".join(cluster.gpu.peak_flops)
    message = f"{cluster.gpu.name} does not multiply in {dtype} (it has {known}); choose another precision"
    return (Refusal(strategy=strategy, rule="card_has_dtype", message=message),)
