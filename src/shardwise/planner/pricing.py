"""One strategy with everything that is known about it: a Candidate."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.levers.offload import cost as offload
from shardwise.planner.compute import model_flops_per_token
from shardwise.planner.memory import memory
from shardwise.planner.timeline import sends, step_timeline
from shardwise.planner.uncertainty import fits, interval, memory_spread, probability_of_oom, time_spread
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.memory import MemoryBreakdown
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.plan import Candidate
from shardwise.vocabulary.strategy import Strategy
from shardwise.vocabulary.timeline import Collective, StepTimeline


def price(
    job: Job, cluster: Cluster, strategy: Strategy, used: MemoryBreakdown | None = None, *, spans: bool = False
) -> Candidate:
    """One strategy with memory, time and their intervals."""
    used = used or memory(job, cluster, strategy)
    slowest = _slowest_stage(job, cluster, strategy, spans=spans)
    step, messages = slowest.step, slowest.messages
    tokens_per_s = strategy.global_batch_size * job.typical_length(strategy.micro_batch_size) / step.seconds
    place = Placement(job=job, strategy=strategy)
    peak = cluster.gpu.peak_flops.get("bf16" if strategy.precision != "fp32" else "fp32", 0.0) * strategy.num_ranks
    low, high = interval(used.needed_bytes, memory_spread(used))
    return Candidate(
        strategy=strategy,
        memory=used,
        step=step,
        collectives=messages,
        tokens_per_s=tokens_per_s,
        model_flops_utilization=tokens_per_s * model_flops_per_token(place) / peak if peak else 0.0,
        fits=fits(used, cluster),
        probability_of_oom=probability_of_oom(used, cluster),
        memory_interval_bytes=(round(low), round(high)),
        step_interval_seconds=interval(step.seconds, time_spread(cluster) * step.seconds),
        host_bytes=offload.host_bytes(place, cluster),
    )


def _slowest_stage(job: Job, cluster: Cluster, strategy: Strategy, *, spans: bool) -> _Timed:
    """The step of the stage that takes longest, and what it sends."""
    places = [Placement(job=job, strategy=strategy, stage=stage) for stage in sorted({0, strategy.pp - 1})]
    timed = [_Timed(step=step_timeline(place, cluster, keep_spans=spans), messages=sends(place)) for place in places]
    return max(timed, key=lambda each: each.step.seconds)


@dataclass(frozen=True, kw_only=True)
class _Timed:
    step: StepTimeline
    messages: tuple[Collective, ...]
