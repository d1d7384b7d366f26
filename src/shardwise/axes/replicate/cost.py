"""Replicate: every rank holds the whole model; gradients are summed by all_reduce once a step.

Stage 0 (what people call DDP) and the outer axis of HSDP. The engine carries both by `fully_shard` on a mesh
(dp_replicate, dp_shard), which gives fp32 master weights, bf16 compute and one all_reduce a group.
"""

from __future__ import annotations

from shardwise.axes import fully_shard
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.memory import Term
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.plan import Refusal
from shardwise.vocabulary.strategy import Axis, Strategy
from shardwise.vocabulary.timeline import Collective

SOURCE = "torch.distributed.fsdp.fully_shard on a 2-D mesh"


def legal(job: Job, cluster: Cluster, strategy: Strategy) -> tuple[Refusal, ...]:
    """Stage 0 does not shard."""
    del job, cluster
    if strategy.zero_stage == 0 and strategy.dp_shard > 1:
        message = f"ZeRO-0 shards nothing, but dp_shard is {strategy.dp_shard}; use dp_replicate, or a stage of 1 to 3"
        return (Refusal(strategy=strategy, rule="stage_zero_does_not_shard", message=message),)
    return ()


def stores(place: Placement) -> tuple[Term, ...]:
    """Whole weights and gradients under stage 0; nothing of its own as the outer axis of HSDP."""
    return fully_shard.stores(place) if place.strategy.zero_stage == 0 else ()


def sends(place: Placement) -> tuple[Collective, ...]:
    """One all_reduce for each group with trainable parameters; of shards under HSDP, summed over the micro-batches."""
    strategy = place.strategy
    if strategy.dp_replicate == 1:
        return ()
    once = strategy.zero_stage <= 1 or strategy.keep_unsharded or fully_shard.sums_shards_first(strategy)
    messages: list[Collective] = []
    for group in place.groups:
        if group.trainable:
            messages.append(
                Collective(
                    op="all_reduce",
                    axis=Axis.DP_REPLICATE,
                    ranks=strategy.dp_replicate,
                    bytes=-(-group.trainable // strategy.dp_shard) * place.reduce_bytes,
                    count=group.count * (1 if once else strategy.accumulation),
                    site=group.site,
                    during="backward",
                    every="step" if once else "micro_batch",
                    name=f"all_reduce {group.site} gradients",
                    formula=f"{place.reduce_bytes} B x {group.trainable:,} / {strategy.dp_shard}",
                    source=SOURCE,
                )
            )
    return tuple(messages)
