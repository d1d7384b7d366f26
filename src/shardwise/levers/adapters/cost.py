"""LoRA and QLoRA: which jobs allow them, and the matrix that is unpacked from 4 bits.

The bytes of adapters and frozen weights are in the Placement, which every cost reads.
"""

from __future__ import annotations

from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.memory import Category, Instant, Term
from shardwise.vocabulary.placement import Placement, adapted
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
    if strategy.tuning == "qlora" and job.model.is_mixture:
        message = (
            f"{job.model.name} keeps its experts in fused parameters, which 4-bit packing of matrices does not reach; "
            "use lora"
        )
        refusals.append(Refusal(strategy=strategy, rule="qlora_packs_matrices", message=message))
    return tuple(refusals)


_COMPUTING = (Instant.FORWARD, Instant.BACKWARD_FIRST, Instant.BACKWARD_LAST, Instant.EVALUATION)


def stores(place: Placement) -> tuple[Term, ...]:
    """4-bit weights are unpacked for each product and dropped after it; DoRA makes the whole adapted matrix as well."""
    terms: list[Term] = []
    if place.strategy.tuning == "qlora":
        largest = max(linear.matrix_parameters for linear in place.model.linears)
        size = place.element_bytes * largest // place.strategy.tp
        said = "bitsandbytes MatMul4Bit: dequantized for each product"
        terms.append(_term("unpacked matrix", size, f"{place.element_bytes} B x {largest:,}", said))
    if not place.trains_all and place.job.lora.use_dora:
        sizes = [
            linear.in_features**2 + 3 * linear.matrix_parameters for linear in adapted(place.model, place.job.lora)
        ]
        size = place.element_bytes * max(sizes, default=0) // place.strategy.tp
        said = (
            "peft.tuners.lora.dora: B A by way of a unit matrix, scaled, and added to the frozen weight for its lengths"
        )
        terms.append(_term("adapted matrix", size, f"{place.element_bytes} B x (in x in + 3 x out x in)", said))
    return tuple(terms)


def _term(name: str, num_bytes: int, formula: str, source: str) -> Term:
    return Term(
        category=Category.TEMPORARY, name=name, bytes=num_bytes, alive=_COMPUTING, formula=formula, source=source
    )
