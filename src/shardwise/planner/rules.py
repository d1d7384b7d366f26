"""The decision rules, in their order, and the choice.

1. fits on one card: one job on each card, or DDP when one run must finish sooner
2. does not fit, adapters not tried: LoRA or QLoRA first
3. must be a full fine-tune: the lowest sharding stage that fits
4. tensor parallel never trains across a slow wire (refused in `axes/tensor`)
5. 2 to 3 GB of a card stay free (`uncertainty.usable_bytes`)

They order the choice where time is within 3 %; where the fastest strategy is faster than that, time wins and the
answer says which rule it overrules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.axes import engine
from shardwise.planner import reasons
from shardwise.planner.memory import memory
from shardwise.planner.uncertainty import fits
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job, Tuning
from shardwise.vocabulary.plan import Candidate, Refusal
from shardwise.vocabulary.strategy import Checkpointing, LossKind, Strategy

WITHIN = 0.03
"""A simpler strategy is taken if it is slower by no more than this."""
ONE_CARD = "fits on one card: one job on each card, or DDP when one run must finish sooner"
ADAPTERS_FIRST = "a full fine-tune does not fit on one card and adapters were not excluded: LoRA or QLoRA first"
LOWEST_STAGE = "must be a full fine-tune and does not fit on one card: the lowest sharding stage that fits"
OTHER_AXES = "no data-parallel strategy fits"
FULL_FITS = "a full fine-tune, which trains every weight, fits on one card; say --tuning lora to have adapters"
ADAPTERS_FIT = "adapters are tried before a full fine-tune is sharded; say --tuning full to have it"
TIME_WINS = "time wins over the rule of thumb"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was taken and why."""

    candidate: Candidate | None
    reason: str
    rules: tuple[str, ...] = ()


def simplicity(strategy: Strategy) -> tuple[int, ...]:
    """Smaller is simpler: fewer axes, lower stage, fewer levers."""
    return (
        int(strategy.pp > 1),
        int(strategy.tp > 1),
        int(strategy.zero_stage > 0 and strategy.dp_replicate > 1),
        strategy.zero_stage,
        ("full", "lora", "qlora").index(strategy.tuning),
        ("none", "selective", "full").index(strategy.checkpointing),
        ("plain", "chunked", "fused").index(strategy.loss),
        strategy.accumulation,
    )


def fastest_or_simpler(candidates: Sequence[Candidate]) -> Candidate:
    """The simplest candidate within 3 % of the fastest."""
    fastest = min(candidate.step.seconds for candidate in candidates)
    near = [candidate for candidate in candidates if candidate.step.seconds <= fastest * (1 + WITHIN)]
    return min(near, key=lambda candidate: (simplicity(candidate.strategy), candidate.step.seconds))


def choose(job: Job, cluster: Cluster, candidates: Sequence[Candidate]) -> Choice:
    """Apply the rules to all candidates."""
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        return Choice(candidate=None, reason=reasons.nothing_fits(cluster, candidates))
    running = [each for each in fitting if engine.runs(each.strategy)]
    idle = [each for each in fitting if not engine.runs(each.strategy)] if running else []
    running = running or fitting
    tunings, spoken = _tunings(job, cluster, running)
    allowed = [candidate for candidate in running if candidate.strategy.tuning in tunings]
    best = fastest_or_simpler(allowed)
    alone = len({reasons.called(each.strategy) for each in candidates}) == 1
    reason = reasons.why(best, allowed, [simplicity(each.strategy) for each in allowed], alone=alone)
    kept_out = [each for each in running if each.strategy.tuning not in tunings]
    said = (
        reason,
        reasons.passed_over(best, kept_out, ADAPTERS_FIT if best.strategy.tuning != "full" else FULL_FITS),
        reasons.passed_over(best, idle, "this version's engine does not run what is split like that"),
    )
    return Choice(
        candidate=best,
        reason=" ".join(filter(None, said)),
        rules=tuple(_spoken(cluster, spoken, best, allowed, candidates)),
    )


def _spoken(
    cluster: Cluster, tuning_rule: str, best: Candidate, allowed: Sequence[Candidate], candidates: Sequence[Candidate]
) -> Iterator[str]:
    """The rules that spoke, in their order."""
    data_parallel = [each for each in candidates if each.strategy.tp == 1 and each.strategy.pp == 1]
    other_axes = best.strategy.tp > 1 or best.strategy.pp > 1
    if tuning_rule and not (other_axes and tuning_rule == LOWEST_STAGE):
        yield tuning_rule
    if other_axes and data_parallel and not any(each.fits for each in data_parallel):
        yield f"{OTHER_AXES}; {best.strategy.name} does"
    yield from engine.not_run(best.strategy)
    if cluster.num_gpus > 1:
        overruled = _overruled(best, allowed)
        if overruled:
            yield f"{TIME_WINS}: {overruled}"


def fits_one_card(job: Job, cluster: Cluster, tuning: Tuning) -> Strategy | None:
    """The simplest strategy of one card that fits, if there is one."""
    one = dataclasses.replace(cluster, num_nodes=1, gpus_per_node=1)
    variants: tuple[tuple[Checkpointing, LossKind], ...] = (("none", "plain"), ("full", "plain"), ("full", "fused"))
    for checkpointing, loss in variants:
        strategy = Strategy(
            tuning=tuning, checkpointing=checkpointing, loss=loss, micro_batch_size=1, precision=job.precision,
            accumulation=job.global_batch_size, optimizer=job.optimizer, reduce_dtype=job.reduce_dtype,
        )  # fmt: skip
        if fits(memory(job, one, strategy), one):
            return strategy
    return None


def _tunings(job: Job, cluster: Cluster, fitting: Sequence[Candidate]) -> tuple[tuple[Tuning, ...], str]:
    """Which tunings the rules allow, and the rule that spoke."""
    available = {candidate.strategy.tuning for candidate in fitting}
    if job.tuning != "any":
        alone = cluster.num_gpus > 1 and fits_one_card(job, cluster, job.tuning)
        sharded = job.tuning == "full" and cluster.num_gpus > 1
        return (job.tuning,), ONE_CARD if alone else (LOWEST_STAGE if sharded else "")
    if "full" in available and (cluster.num_gpus == 1 or fits_one_card(job, cluster, "full")):
        return ("full",), ONE_CARD if cluster.num_gpus > 1 else ""
    if available & {"lora", "qlora"}:
        return ("lora", "qlora"), ADAPTERS_FIRST
    return ("full",), LOWEST_STAGE


def _overruled(best: Candidate, allowed: Sequence[Candidate]) -> str:
    """A simpler strategy that the rules of thumb would have taken, and by how much it is slower."""
    lowest = min(allowed, key=lambda candidate: simplicity(candidate.strategy)[:4])
    if simplicity(lowest.strategy)[:4] >= simplicity(best.strategy)[:4]:
        return ""
    slower = lowest.step.seconds / best.step.seconds - 1
    return f"{reasons.called(lowest.strategy)} fits and is simpler, but takes {reasons.longer(slower)}"


def refusals_of(candidates: Sequence[Candidate], cluster: Cluster) -> tuple[Refusal, ...]:
    """One refusal for each strategy that does not fit."""
    return tuple(reasons.does_not_fit(candidate, cluster) for candidate in candidates if not candidate.fits)
