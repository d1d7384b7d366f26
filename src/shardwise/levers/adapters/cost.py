"""LoRA and QLoRA: which jobs allow them. Their bytes are in the Placement, which every cost reads."""

from __future__ import annotations

from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.placement import adapted
from shardwise.vocabulary.plan import Refusal
from shardwise.vocabulary.strategy import Strategy


def legal(job: Job, cluster: Cluster, strategy: Strategy) -> tuple[Refusal, ...]:
    """The adapters must find a matrix, and NF4 weights need a CUDA card."""
    refusals: list[Refusal] = []
    if strategy.tuning != "full" and not adapted(job.model, job.lora):
        names = ", ".join(linear.name for linear in job.model.linears if linear.copies == 1)
        message = (
            f"lora_target_modules {', '.join(job.lora.target_modules)} match no matrix of {job.model.name}; "
            f"use all-linear or some of {names}"
        )
        refusals.append(Refusal(strategy=strategy, rule="adapters_find_a_matrix", message=message))
    if strategy.tuning == "qlora" and cluster.gpu.architecture == "cpu":
        message = "QLoRA's 4-bit weights need a CUDA card; use lora on this machine"
        refusals.append(Refusal(strategy=strategy, rule="qlora_needs_cuda", message=message))
    return tuple(refusals)
