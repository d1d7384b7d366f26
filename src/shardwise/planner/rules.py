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
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.planner.memory import memory
from shardwise.planner.uncertainty import fits, usable_bytes
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job, Tuning
from shardwise.vocabulary.plan import Candidate, Refusal
from shardwise.vocabulary.strategy import Checkpointing, LossKind, Strategy
from shardwise.vocabulary.units import format_gb, format_percent, format_seconds

WITHIN = 0.03
"""A simpler strategy is taken if it is slower by no more than this."""
ONE_CARD = "fits on one card: one job on each card, or DDP when one run must finish sooner"
ADAPTERS_FIRST = "a full fine-tune does not fit on one card and adapters were not excluded: LoRA or QLoRA first"
LOWEST_STAGE = "must be a full fine-tune and does not fit on one card: the lowest sharding stage that fits"
OTHER_AXES = (
    "no data-parallel strategy fits: tensor or pipeline parallel does, which is planned here but not run by this "
    "version's engine"
)
WORDS = {"full": "full fine-tune", "lora": "LoRA", "qlora": "QLoRA"}
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
        return Choice(candidate=None, reason=_nothing_fits(cluster, candidates))
    runs_here = [each for each in fitting if each.strategy.tp == 1 and each.strategy.pp == 1]
    fitting = runs_here or fitting
    tunings, spoken = _tunings(job, cluster, fitting)
    allowed = [candidate for candidate in fitting if candidate.strategy.tuning in tunings]
    best = fastest_or_simpler(allowed)
    rules, reason = [spoken] if spoken else [], _why(best, allowed)
    if not runs_here:
        rules.append(OTHER_AXES)
    if cluster.num_gpus > 1:
        overruled = _overruled(best, allowed)
        if overruled:
            rules.append(f"{TIME_WINS}: {overruled}")
    return Choice(candidate=best, reason=reason, rules=tuple(rules))


def fits_one_card(job: Job, cluster: Cluster, tuning: Tuning) -> Strategy | None:
    """The simplest strategy of one card that fits, if there is one."""
    one = dataclasses.replace(cluster, num_nodes=1, gpus_per_node=1)
    variants: tuple[tuple[Checkpointing, LossKind], ...] = (("none", "plain"), ("full", "plain"), ("full", "chunked"))
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
        return (job.tuning,), ONE_CARD if alone else (LOWEST_STAGE if job.tuning == "full" else "")
    if "full" in available and (cluster.num_gpus == 1 or fits_one_card(job, cluster, "full")):
        return ("full",), ONE_CARD if cluster.num_gpus > 1 else ""
    if available & {"lora", "qlora"}:
        return ("lora", "qlora"), ADAPTERS_FIRST
    return ("full",), LOWEST_STAGE


def _why(best: Candidate, allowed: Sequence[Candidate]) -> str:
    """The reason in plain words, with the numbers of the alternatives."""
    strategy, step = best.strategy, best.step
    reason = (
        f"{_called(strategy)} with micro-batch {strategy.micro_batch_size}, accumulation {strategy.accumulation} and "
        f"checkpointing {strategy.checkpointing} fits with {format_gb(best.memory.device_bytes)} a card and takes "
        f"{format_seconds(step.seconds)} a step"
    )
    others = sorted((each for each in allowed if each is not best), key=lambda each: each.step.seconds)
    if not others:
        return reason + "."
    next_best = others[0]
    ratio = next_best.step.seconds / step.seconds - 1
    if ratio >= 0:
        reason += f"; the next, {_called(next_best.strategy)}, takes {format_percent(ratio, 1)} longer"
    else:
        reason += f"; {_called(next_best.strategy)} is {format_percent(-ratio, 1)} faster but less simple"
    if step.exposed_wire_seconds > 0.01 * step.seconds:
        reason += f"; the wire is exposed for {format_percent(step.exposed_wire_seconds / step.seconds)} of the step"
    return reason + "."


def _called(strategy: Strategy) -> str:
    return strategy.name if strategy.tuning == "full" else f"{strategy.name} with {WORDS[strategy.tuning]}"


def _overruled(best: Candidate, allowed: Sequence[Candidate]) -> str:
    """A simpler strategy that the rules of thumb would have taken, and by how much it is slower."""
    lowest = min(allowed, key=lambda candidate: simplicity(candidate.strategy)[:4])
    if simplicity(lowest.strategy)[:4] >= simplicity(best.strategy)[:4]:
        return ""
    slower = lowest.step.seconds / best.step.seconds - 1
    return f"{lowest.strategy.name} fits and is simpler, but takes {format_percent(slower, 1)} longer"


def _nothing_fits(cluster: Cluster, candidates: Sequence[Candidate]) -> str:
    if not candidates:
        return "No strategy is legal here; the refusals say why."
    smallest = min(candidates, key=lambda candidate: candidate.memory.device_bytes)
    return (
        f"No strategy fits: the smallest, {smallest.strategy.name} ({smallest.strategy.tuning}), needs "
        f"{format_gb(smallest.memory.device_bytes)} a card, and {format_gb(usable_bytes(cluster))} are usable."
    )


def refusals_of(candidates: Sequence[Candidate], cluster: Cluster) -> tuple[Refusal, ...]:
    """One refusal for each strategy that does not fit."""
    limit = usable_bytes(cluster)
    return tuple(
        Refusal(
            strategy=candidate.strategy,
            rule="does_not_fit",
            message=(
                f"{candidate.strategy.name} ({candidate.strategy.tuning}) needs "
                f"{format_gb(candidate.memory.device_bytes)} a card at best "
                f"({_largest(candidate)}); {format_gb(limit)} of {cluster.gpu.name} are usable"
            ),
        )
        for candidate in candidates
        if not candidate.fits
    )


def _largest(candidate: Candidate) -> str:
    categories = candidate.memory.by_category()
    name, size = max(categories.items(), key=lambda item: item[1])
    return f"largest: {name.value} {format_gb(size)}"
