"""All strategies of a job on a cluster: enumerated, refused or priced, and ranked.

Every candidate is priced by the same two functions, `memory` and `step_timeline`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardwise.axes.pipeline import cost as pipeline
from shardwise.axes.replicate import cost as replicate
from shardwise.axes.shard import cost as shard
from shardwise.axes.tensor import cost as tensor
from shardwise.errors import ConfigError
from shardwise.levers.accumulation import cost as accumulation
from shardwise.levers.adapters import cost as adapters
from shardwise.levers.offload import cost as offload
from shardwise.levers.precision import cost as precision
from shardwise.planner.pricing import price
from shardwise.planner.variants import best_variants
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job, Tuning
from shardwise.vocabulary.plan import Candidate, Refusal
from shardwise.vocabulary.strategy import (
    Checkpointing,
    LossKind,
    Offload,
    PipelineSchedule,
    Strategy,
    ZeroStage,
)

_LEGAL = (replicate, shard, tensor, pipeline, accumulation, adapters, offload, precision)


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user decides about the split; None leaves it to the planner."""

    zero_stage: ZeroStage | None = None
    micro_batch_size: int | None = None
    accumulation: int | None = None
    checkpointing: Checkpointing | None = None
    loss: LossKind | None = None
    tp: int | None = None
    pp: int | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    sequence_parallel: bool | None = None
    pipeline_schedule: PipelineSchedule | None = None
    virtual_stages: int = 1
    offload: Offload = "none"
    compile_blocks: bool | None = None
    """None: on CUDA cards from Ampere on."""
    keep_unsharded: bool = False
    every_axis: bool = False
    """Try tensor and pipeline degrees that nobody asked for, too."""
    every_candidate: bool = False
    """Keep every micro-batch and checkpointing of a strategy, not only the best."""


def survey(job: Job, cluster: Cluster, wishes: Wishes) -> tuple[tuple[Candidate, ...], tuple[Refusal, ...]]:
    """All candidates, best first (those that fit before those that do not), and the refusals, one for each rule."""
    refusals: dict[tuple[str, str], Refusal] = {}
    legal_names: set[str] = set()

    def legal_kinds() -> Iterator[list[Strategy]]:
        """The legal variants of one split after another, so that never all exist at once."""
        every = strategies(job, cluster, wishes)
        for (_, name), variants in itertools.groupby(every, key=lambda each: (each.tuning, each.name)):
            legal = [strategy for strategy in variants if _is_legal(job, cluster, strategy, refusals)]
            if legal:
                legal_names.add(name)
                yield legal

    kinds = legal_kinds()
    if wishes.every_candidate:
        candidates = [price(job, cluster, strategy) for kind in kinds for strategy in kind]
    else:
        candidates = list(best_variants(job, cluster, kinds))
    candidates.sort(key=lambda each: (not each.fits, each.step.seconds if each.fits else each.memory.device_bytes))
    return tuple(candidates), tuple(each for (_, name), each in refusals.items() if name not in legal_names)


def _is_legal(job: Job, cluster: Cluster, strategy: Strategy, refusals: dict[tuple[str, str], Refusal]) -> bool:
    """Ask every axis and lever; what they refuse is kept, once for each rule and split."""
    broken = [refusal for module in _LEGAL for refusal in module.legal(job, cluster, strategy)]
    for refusal in broken:
        refusals.setdefault((refusal.rule, strategy.name), refusal)
    return not broken


# -------------------------------------------------------------------------------------------------- enumeration


def strategies(job: Job, cluster: Cluster, wishes: Wishes) -> Iterator[Strategy]:
    """Every combination of mesh, stage and levers that the wishes leave open, legal or not."""
    tunings: tuple[Tuning, ...] = ("full", "lora", "qlora") if job.tuning == "any" else (job.tuning,)
    for tuning, (pp, dp_replicate, dp_shard, tp) in itertools.product(tunings, meshes(cluster.num_gpus, wishes)):
        for stage in _stages(dp_shard, wishes):
            base = Strategy(
                pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp, zero_stage=stage, tuning=tuning,
                precision=job.precision, reduce_dtype=job.reduce_dtype, optimizer=job.optimizer, offload=wishes.offload,
                compile_blocks=_compiles(cluster, wishes), keep_unsharded=wishes.keep_unsharded and stage >= 2,
                sequence_parallel=tp > 1 if wishes.sequence_parallel is None else wishes.sequence_parallel,
                pipeline_schedule=wishes.pipeline_schedule or "1f1b",
                virtual_stages=wishes.virtual_stages if pp > 1 else 1,
            )  # fmt: skip
            yield from _levers(job, base, wishes)


def meshes(num_gpus: int, wishes: Wishes) -> Iterator[tuple[int, int, int, int]]:
    """All (pp, dp_replicate, dp_shard, tp) whose product is the number of cards and that the wishes allow.

    Tensor and pipeline degrees other than 1 are tried where they are asked for, where all other degrees are given (the
    last one is then solved), and with `every_axis`: the engine does not run them yet.
    """
    given = [degree is not None for degree in (wishes.pp, wishes.dp_replicate, wishes.dp_shard, wishes.tp)]
    usual = None if sum(given) == 3 or wishes.every_axis else 1
    for pp in _degrees(num_gpus, wishes.pp or usual):
        for tp in _degrees(num_gpus // pp, wishes.tp or usual):
            rest = num_gpus // (pp * tp)
            for dp_shard in _degrees(rest, wishes.dp_shard):
                dp_replicate = rest // dp_shard
                if wishes.dp_replicate in (None, dp_replicate):
                    yield pp, dp_replicate, dp_shard, tp


def _degrees(limit: int, wished: int | None) -> Iterable[int]:
    if wished is not None:
        return (wished,) if limit % wished == 0 else ()
    return (degree for degree in range(1, limit + 1) if limit % degree == 0)


def _stages(dp_shard: int, wishes: Wishes) -> tuple[ZeroStage, ...]:
    open_stages: tuple[ZeroStage, ...] = (0,) if dp_shard == 1 else (1, 2, 3)
    if wishes.zero_stage is None:
        return open_stages
    return tuple(stage for stage in open_stages if stage == wishes.zero_stage)


def _levers(job: Job, base: Strategy, wishes: Wishes) -> Iterator[Strategy]:
    checkpointings: tuple[Checkpointing, ...] = ("none", "selective", "full")
    losses: tuple[LossKind, ...] = ("plain", "chunked")
    for micro_batch, steps in _batches(job, base.data_parallel, wishes):
        for checkpointing in (wishes.checkpointing,) if wishes.checkpointing else checkpointings:
            for loss in (wishes.loss,) if wishes.loss else losses:
                yield dataclasses.replace(
                    base, micro_batch_size=micro_batch, accumulation=steps, checkpointing=checkpointing, loss=loss
                )


def _batches(job: Job, data_parallel: int, wishes: Wishes) -> Iterator[tuple[int, int]]:
    """(micro-batch, accumulation) pairs that give the global batch; what does not divide is yielded to be refused."""
    share, rest = divmod(job.global_batch_size, data_parallel)
    wished = wishes.micro_batch_size
    if rest or share == 0 or (wished is not None and share % wished):
        micro_batch = wished or 1
        yield micro_batch, wishes.accumulation or max(1, share // micro_batch)
        return
    sizes = [wished] if wished else [size for size in range(1, min(share, 64) + 1) if share % size == 0]
    for size in sizes:
        if wishes.accumulation in (None, share // size):
            yield size, share // size
    if wished and wishes.accumulation not in (None, share // wished):
        yield wished, wishes.accumulation or 1


def _compiles(cluster: Cluster, wishes: Wishes) -> bool:
    if wishes.compile_blocks is not None:
        return wishes.compile_blocks
    return cluster.gpu.architecture in ("ampere", "ada", "hopper", "blackwell")


def check(job: Job, cluster: Cluster, wishes: Wishes) -> None:
    """Look for problems that no mesh can solve.

    Raises:
        ConfigError: All of them at once.
    """
    problems: list[str] = []
    given = {name: getattr(wishes, name) for name in ("pp", "dp_replicate", "dp_shard", "tp")}
    product = 1
    for degree in given.values():
        product *= degree or 1
    known = ", ".join(f"{name} {degree}" for name, degree in given.items() if degree)
    if cluster.num_gpus % product:
        problems.append(f"{known} multiply to {product}, which does not divide the {cluster.num_gpus} cards")
    elif all(degree is not None for degree in given.values()) and product != cluster.num_gpus:
        problems.append(
            f"{known} multiply to {product}, not to the {cluster.num_gpus} cards; leave one out to solve it"
        )
    if wishes.zero_stage and cluster.num_gpus == 1:
        problems.append(f"ZeRO-{wishes.zero_stage} shards over cards, and there is one; use stage 0 or more cards")
    if wishes.zero_stage and wishes.dp_shard == 1 and cluster.num_gpus > 1:
        problems.append(f"ZeRO-{wishes.zero_stage} needs dp_shard of 2 or more, not 1")
    if wishes.zero_stage == 0 and (wishes.dp_shard or 1) > 1:
        problems.append(f"ZeRO stage 0 shards nothing, but dp_shard is {wishes.dp_shard}; use stage 1, 2 or 3")
    if job.sequence_length > job.model.max_position_embeddings:
        limit = job.model.max_position_embeddings
        problems.append(
            f"{job.model.name} was made for {limit:,} tokens; a sequence of {job.sequence_length:,} is longer"
        )
    problems += [refusal.message for refusal in _shape_problems(job, cluster, wishes)]
    problems += [refusal.message for refusal in _batch_problem(job, cluster, wishes)]
    if problems:
        raise ConfigError(*problems)


def _shape_problems(job: Job, cluster: Cluster, wishes: Wishes) -> Iterator[Refusal]:
    """Wished degrees that the model's heads or layers do not allow, whatever the rest of the mesh."""
    chunks = wishes.virtual_stages if (wishes.pp or 1) > 1 else 1
    asked = Strategy(tp=wishes.tp or 1, pp=wishes.pp or 1, virtual_stages=chunks, accumulation=wishes.pp or 1)
    for refusal in (*tensor.legal(job, cluster, asked), *pipeline.legal(job, cluster, asked)):
        if refusal.rule in ("heads_divide_by_tp", "layers_fill_stages"):
            yield refusal


def _batch_problem(job: Job, cluster: Cluster, wishes: Wishes) -> tuple[Refusal, ...]:
    """The batch that was asked for, if no mesh gives it."""
    if cluster.num_gpus % ((wishes.pp or 1) * (wishes.tp or 1)):
        return ()
    found: tuple[Refusal, ...] = ()
    for pp, dp_replicate, dp_shard, tp in meshes(cluster.num_gpus, wishes):
        for micro_batch, steps in _batches(job, dp_replicate * dp_shard, wishes):
            strategy = Strategy(
                pp=pp,
                dp_replicate=dp_replicate,
                dp_shard=dp_shard,
                tp=tp,
                micro_batch_size=micro_batch,
                accumulation=steps,
            )
            refusals = accumulation.legal(job, cluster, strategy)
            if not refusals:
                return ()
            found = found or refusals
    return found
