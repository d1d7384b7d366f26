"""One strategy with everything that is known about it: a Candidate."""

from __future__ import annotations

from shardwise.levers.offload import cost as offload
from shardwise.planner.compute import block_times, head_seconds, model_flops_per_token
from shardwise.planner.memory import memory
from shardwise.planner.timeline import Parts, step_timeline
from shardwise.planner.uncertainty import fits, interval, memory_spread, probability_of_oom, time_spread
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.memory import MemoryBreakdown
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.plan import Candidate
from shardwise.vocabulary.strategy import Strategy


def price(
    job: Job, cluster: Cluster, strategy: Strategy, used: MemoryBreakdown | None = None, parts: Parts | None = None,
    *, spans: bool = False,
) -> Candidate:  # fmt: skip
    """One strategy with memory, time and their intervals.

    Args:
        job: What is trained.
        cluster: On which cards.
        strategy: How.
        used: Its memory, if it is known.
        parts: What its step is made of, if that is known.
        spans: Keep the lanes of the step.
    """
    used = used or memory(job, cluster, strategy)
    parts = parts or slowest_stage(job, cluster, strategy)
    step = step_timeline(parts, cluster, keep_spans=spans)
    tokens_per_s = strategy.global_batch_size * job.typical_length(strategy.micro_batch_size) / step.seconds
    place = parts.place
    peak = cluster.gpu.peak_flops.get("bf16" if strategy.precision != "fp32" else "fp32", 0.0) * strategy.num_ranks
    low, high = interval(used.needed_bytes, memory_spread(used))
    return Candidate(
        strategy=strategy,
        memory=used,
        step=step,
        collectives=parts.messages,
        tokens_per_s=tokens_per_s,
        model_flops_utilization=tokens_per_s * model_flops_per_token(place) / peak if peak else 0.0,
        fits=fits(used, cluster),
        probability_of_oom=probability_of_oom(used, cluster),
        memory_interval_bytes=(round(low), round(high)),
        step_interval_seconds=interval(step.seconds, time_spread(cluster) * step.seconds),
        host_bytes=offload.host_bytes(place, cluster),
    )


def slowest_stage(job: Job, cluster: Cluster, strategy: Strategy, like: dict[int, Placement] | None = None) -> Parts:
    """What a step is made of on the stage that takes longest.

    First and last stage differ in the number of their equal blocks, and in embedding or head; the one with more compute
    is taken.

    Args:
        job: What is trained.
        cluster: On which cards.
        strategy: How.
        like: Places of another variant of the same split by stage, filled on the way.
    """
    like = {} if like is None else like
    places: list[Placement] = []
    for stage in sorted({0, strategy.pp - 1}):
        if stage in like:
            places.append(like[stage].variant(strategy))
        else:
            like[stage] = Placement(job=job, strategy=strategy, stage=stage)
            places.append(like[stage])
    block = block_times(places[0], cluster)
    more = (places[0].num_blocks - places[-1].num_blocks) * (block.forward + block.backward)
    slowest = places[0] if len(places) == 1 or more > head_seconds(places[-1], cluster) else places[-1]
    return Parts.of(slowest, cluster, block)
