"""All strategies of a job on a cluster: enumerated, refused or priced, and ranked.

Every candidate is priced by the same two functions, `memory` and `step_timeline`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
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
from shardwise.planner.splits import Batch, Split, meshes, possible_batches, splits, strategies
from shardwise.planner.variants import best_variants
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.plan import Candidate, Refusal
from shardwise.vocabulary.strategy import (
    Checkpointing,
    LossKind,
    Offload,
    PipelineSchedule,
    Strategy,
    ZeroStage,
)

__all__ = ["Wishes", "check", "meshes", "price", "strategies", "survey"]
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

    def legal_splits() -> Iterator[Split]:
        for split in splits(job, cluster, wishes):
            legal = _legal(job, cluster, split, refusals)
            if legal is not None:
                legal_names.add(split.base.name)
                yield legal

    if wishes.every_candidate:
        candidates = [price(job, cluster, strategy) for split in legal_splits() for strategy in split.variants()]
    else:
        candidates = list(best_variants(job, cluster, legal_splits()))
    candidates.sort(key=lambda each: (not each.fits, each.step.seconds if each.fits else each.memory.device_bytes))
    return tuple(candidates), tuple(each for (_, name), each in refusals.items() if name not in legal_names)


def _legal(job: Job, cluster: Cluster, split: Split, refusals: dict[tuple[str, str], Refusal]) -> Split | None:
    """The split with those of its batches that no axis and no lever refuses; what they refuse is kept, once a rule.

    None of them looks at checkpointing or loss, so one variant of each batch is asked about.
    """
    allowed: list[Batch] = []
    for batch in split.batches:
        strategy = split.variant(batch, split.levers[0])
        broken = [refusal for module in _LEGAL for refusal in module.legal(job, cluster, strategy)]
        for refusal in broken:
            refusals.setdefault((refusal.rule, strategy.name), refusal)
        if not broken:
            allowed.append(batch)
    return dataclasses.replace(split, batches=tuple(allowed)) if allowed else None


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
        several = sum(degree is not None for degree in given.values()) > 1
        multiply = f"{known} multiply to {product}, which does" if several else f"{known} does"
        ways = ", ".join(str(d) for d in range(1, cluster.num_gpus + 1) if cluster.num_gpus % d == 0)
        problems.append(f"{multiply} not divide the {cluster.num_gpus} cards; {ways} do")
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
            f"{job.model.name} was made for {limit:,} tokens; a sequence of {job.sequence_length:,} is longer: cut it "
            f"to {limit:,} or fewer, or take a model made for more"
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


def _batch_of_degrees(job: Job, wishes: Wishes) -> tuple[Refusal, ...]:
    """The same where the degrees make no mesh of these cards: what they, micro-batch and accumulation alone say."""
    data_parallel = (wishes.dp_replicate or 1) * (wishes.dp_shard or 1)
    unit = data_parallel * (wishes.micro_batch_size or 1) * (wishes.accumulation or 1)
    if job.global_batch_size % unit == 0:
        return ()
    below = job.global_batch_size // unit * unit
    message = (
        f"a global batch of {job.global_batch_size} does not divide by {unit} (data-parallel degrees, micro-batch and "
        f"accumulation together); {f'{below} and ' if below else ''}{below + unit} {'do' if below else 'does'}"
    )
    return (Refusal(strategy=None, rule="global_batch_divides", message=message),)


def _batch_problem(job: Job, cluster: Cluster, wishes: Wishes) -> tuple[Refusal, ...]:
    """The batch that was asked for, if no mesh gives it."""
    if cluster.num_gpus % ((wishes.pp or 1) * (wishes.tp or 1) * (wishes.dp_replicate or 1) * (wishes.dp_shard or 1)):
        return _batch_of_degrees(job, wishes)
    found: tuple[Refusal, ...] = ()
    for pp, dp_replicate, dp_shard, tp in meshes(cluster.num_gpus, wishes):
        for micro_batch, steps in possible_batches(job, dp_replicate * dp_shard, wishes):
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
