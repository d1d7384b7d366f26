"""Precision: which dtypes a card computes in."""

from __future__ import annotations

from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job, Precision
from shardwise.vocabulary.model import LinearShape
from shardwise.vocabulary.plan import Refusal
from shardwise.vocabulary.strategy import Strategy

COMPUTE_DTYPE: dict[Precision, str] = {"bf16": "bf16", "bf16_pure": "bf16", "fp32": "fp32", "fp8": "fp8"}
"""The dtype of the matrix products, by precision."""
MULTIPLE = 16
"""Both sides of a matrix that is multiplied in fp8 divide by it, as cuBLAS wants it."""


def quantizes(linear: LinearShape) -> bool:
    """Whether fp8 reaches a matrix of a block: linear layers only; experts are fused parameters and stay in bf16."""
    return linear.copies == 1 and linear.site != "router"


def _is_odd(linear: LinearShape) -> bool:
    return bool(linear.in_features % MULTIPLE or linear.out_features % MULTIPLE)


def legal(job: Job, cluster: Cluster, strategy: Strategy) -> tuple[Refusal, ...]:
    """The card must have the dtype, and fp8 products need sides that divide by 16."""
    dtype = COMPUTE_DTYPE[strategy.precision]
    if dtype in cluster.gpu.peak_flops:
        odd = [linear for linear in job.model.linears if dtype == "fp8" and quantizes(linear) and _is_odd(linear)]
        if not odd:
            return ()
        shown = ", ".join(f"{linear.name} ({linear.out_features:,} x {linear.in_features:,})" for linear in odd)
        message = f"fp8 needs matrices whose sides divide by {MULTIPLE}; {job.model.name} has {shown}; use bf16"
        return (Refusal(strategy=strategy, rule="fp8_sides_divide", message=message),)
    known = ", ".join(cluster.gpu.peak_flops)
    message = f"{cluster.gpu.name} does not multiply in {dtype} (it has {known}); choose another precision"
    return (Refusal(strategy=strategy, rule="card_has_dtype", message=message),)
