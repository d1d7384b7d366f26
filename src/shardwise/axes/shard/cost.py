"""Shard: ZeRO stages 1 to 3, and the inner axis of HSDP.

| stage | all_gather of a group               | reduce_scatter of a group |
|-------|-------------------------------------|---------------------------|
| 1     | once a step                         | once a step               |
| 2     | once a micro-batch                  | once a micro-batch        |
| 3     | twice a micro-batch (root: once)    | once a micro-batch        |

Accumulation therefore divides the wire bill under stages 0 and 1 only; under 2 and 3 every micro-batch pays, unless
whole gradients are kept (`keep_unsharded`: reductions once a step).
"""

from __future__ import annotations

from shardwise.axes import fully_shard
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.memory import Term
from shardwise.vocabulary.placement import Group, Placement
from shardwise.vocabulary.plan import Refusal
from shardwise.vocabulary.strategy import Axis, Strategy
from shardwise.vocabulary.timeline import Collective

SOURCE = "torch.distributed.fsdp.fully_shard"


def legal(job: Job, cluster: Cluster, strategy: Strategy) -> tuple[Refusal, ...]:
    """A stage above 0 needs more than one shard; QLoRA's 4-bit weights are sharded under stage 3 only."""
    del job, cluster
    if strategy.zero_stage > 0 and strategy.dp_shard == 1:
        message = f"ZeRO-{strategy.zero_stage} over one card shards nothing; use stage 0"
        return (Refusal(strategy=strategy, rule="nothing_to_shard", message=message),)
    return ()


def stores(place: Placement) -> tuple[Term, ...]:
    """Shards, gathered copies and reduction buffers."""
    return fully_shard.stores(place) if place.strategy.zero_stage > 0 else ()


def sends(place: Placement) -> tuple[Collective, ...]:
    """all_gather and reduce_scatter of every group."""
    if place.strategy.zero_stage == 0:
        return ()
    messages: list[Collective] = []
    for group in place.groups:
        messages.extend(_gathers(place, group))
        if group.trainable:
            messages.append(_reduction(place, group))
    return (*messages, _norm(place))


def _norm(place: Placement) -> Collective:
    """The sum of squares over the shards, for clipping by the norm of the whole gradient; also where nothing is cut."""
    return Collective(
        op="all_reduce",
        axis=Axis.DP_SHARD,
        ranks=place.strategy.dp_shard,
        bytes=4,
        count=1,
        site="step",
        during="optimizer",
        every="step",
        hides_behind="nothing",
        name="all_reduce of the gradient's norm",
        formula="one fp32 number",
        source="trainer/step.py, [Note: true norm]",
    )


def _gathers(place: Placement, group: Group) -> list[Collective]:
    strategy = place.strategy
    size = fully_shard.managed_bytes(place, group)
    if not size:
        return []
    once = strategy.zero_stage == 1
    passes = ["forward"]
    if strategy.zero_stage == 3 and group.site != "root":
        passes.append("backward")
    return [
        Collective(
            op="all_gather",
            axis=Axis.DP_SHARD,
            ranks=strategy.dp_shard,
            bytes=size,
            count=group.count * (1 if once else strategy.accumulation),
            site=group.site,
            during="forward" if during == "forward" else "backward",
            every="step" if once else "micro_batch",
            name=f"all_gather {group.site}",
            formula=f"{place.element_bytes} B x {group.elements:,}",
            source=SOURCE,
        )
        for during in passes
    ]


def _reduction(place: Placement, group: Group) -> Collective:
    strategy = place.strategy
    once = strategy.zero_stage == 1 or strategy.keep_unsharded
    return Collective(
        op="reduce_scatter",
        axis=Axis.DP_SHARD,
        ranks=strategy.dp_shard,
        bytes=group.trainable * place.reduce_bytes,
        count=group.count * (1 if once else strategy.accumulation),
        site=group.site,
        during="backward",
        every="step" if once else "micro_batch",
        name=f"reduce_scatter {group.site} gradients",
        formula=f"{place.reduce_bytes} B x {group.trainable:,}",
        source=SOURCE,
    )
