"""Why a strategy was taken, and why another was not: the rules' outcome in plain words, with the numbers."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.planner.uncertainty import ACCEPTED_PROBABILITY, fits, needed_bytes, probability_of_oom, usable_bytes
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.plan import Candidate, Refusal
from shardwise.vocabulary.strategy import Strategy
from shardwise.vocabulary.units import format_gb, format_percent, format_seconds, some

WORDS = {"full": "full fine-tune", "lora": "LoRA", "qlora": "QLoRA"}
WORTH_SAYING = 0.01
"""A share of the step that is too small to be worth a word."""
NOTHING = 0.0005
"""Steps that differ by less, as a share, are called equal."""
_SIMPLER = (
    "no pipeline", "no tensor parallel", "one sharding axis instead of two", "a lower ZeRO stage", "unpacked weights",
    "less checkpointing", "a plainer loss", "less accumulation",
)  # fmt: skip
"""What makes a strategy the simpler one, in the order of `rules.simplicity`."""


def called(strategy: Strategy) -> str:
    """As people call it: `ZeRO-2`, `LoRA under DDP`, `QLoRA on one card`."""
    if strategy.tuning == "full":
        return "a full fine-tune on one card" if strategy.num_ranks == 1 else strategy.name
    where = "on one card" if strategy.num_ranks == 1 else f"under {strategy.name}"
    return f"{WORDS[strategy.tuning]} {where}"


def named(strategy: Strategy) -> str:
    """As tables name it: `ZeRO-2` or `LoRA, DDP`."""
    return strategy.name if strategy.tuning == "full" else f"{WORDS[strategy.tuning]}, {strategy.name}"


def settings(strategy: Strategy) -> str:
    """Micro-batch, accumulation, checkpointing and loss in words."""
    parts = [f"micro-batch {strategy.micro_batch_size}"]
    if strategy.accumulation > 1:
        parts.append(f"accumulation {strategy.accumulation}")
    parts.append("no checkpointing" if strategy.checkpointing == "none" else f"{strategy.checkpointing} checkpointing")
    if strategy.loss != "plain":
        parts.append(f"{strategy.loss} loss")
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def why(
    best: Candidate, allowed: Sequence[Candidate], simplicity: Sequence[tuple[int, ...]], *, alone: bool = False
) -> str:
    """The reason, beside the alternatives that the rules left open.

    Args:
        best: What is taken.
        allowed: Every candidate that fits and that the rules allow, `best` among them.
        simplicity: Of each of them, as `rules.simplicity` orders.
        alone: True if no other split was looked at.

    Returns:
        Sentences.
    """
    step = best.step
    taken = called(best.strategy)
    reason = (
        f"{taken[0].upper()}{taken[1:]}, {settings(best.strategy)}, takes {format_seconds(step.seconds)} a step and "
        f"{format_gb(best.memory.needed_bytes)} a card."
    )
    if not alone:
        reason += f" {_beside(best, allowed, simplicity)}"
    exposed = step.exposed_wire_seconds / step.seconds
    if exposed > WORTH_SAYING:
        reason += f" The wire is exposed for {format_percent(exposed)} of the step."
    return reason


def _beside(best: Candidate, allowed: Sequence[Candidate], simplicity: Sequence[tuple[int, ...]]) -> str:
    """The next best split, or the faster ones that are less simple."""
    ranked = sorted(zip(allowed, simplicity, strict=True), key=lambda pair: pair[0].step.seconds)
    own = next(order for each, order in ranked if each is best)
    others = [(each, order) for each, order in ranked if called(each.strategy) != called(best.strategy)]
    if not others:
        return "No other split fits."
    first, order = others[0]
    ratio = first.step.seconds / best.step.seconds - 1
    if ratio > NOTHING:
        splits = some(len({called(each.strategy) for each in allowed}), "split")
        return f"It is the fastest of the {splits} that fit; the next, {called(first.strategy)}, takes {longer(ratio)}."
    simpler = next((text for text, mine, its in zip(_SIMPLER, own, order, strict=True) if mine < its), "")
    said = f"of what lies within 3 % the simplest is taken{f' ({simpler})' if simpler else ''}."
    if ratio > -NOTHING:
        return f"{called(first.strategy)} is as fast; {said}"
    return f"{called(first.strategy)} is {format_percent(-ratio, 1)} faster, but {said}"


def longer(ratio: float) -> str:
    """How much longer: `12.0 % longer` or `3.0 times as long`.

    Args:
        ratio: Excess over the other's time, as a share of it.
    """
    return f"{1 + ratio:.1f} times as long" if ratio > 1 else f"{format_percent(ratio, 1)} longer"


def chance(probability: float) -> str:
    """`12 %`; never a bare 0 % or 100 %, because no prediction is that sure."""
    if probability < 0.005:
        return "under 1 %"
    return "over 99 %" if probability > 0.995 else format_percent(probability)


def passed_over(best: Candidate, others: Sequence[Candidate], because: str) -> str:
    """A sentence about candidates that fit and are faster, but that a rule keeps out; empty if none is faster.

    Args:
        best: What is taken.
        others: What the rule keeps out.
        because: The rule, as the end of a sentence.
    """
    faster = [each for each in others if each.step.seconds < best.step.seconds * (1 - NOTHING)]
    if not faster:
        return ""
    first = min(faster, key=lambda each: each.step.seconds)
    gain = format_percent(1 - first.step.seconds / best.step.seconds)
    if len(faster) == 1:
        return f"{called(first.strategy)} is faster by {gain}, but {because}."
    return f"{called(first.strategy)} and {some(len(faster) - 1, 'other')} are faster, by up to {gain}, but {because}."


def nothing_fits(cluster: Cluster, candidates: Sequence[Candidate]) -> str:
    """What the smallest candidate lacks."""
    if not candidates:
        return "No strategy is legal here; the refusals say why."
    smallest = min(candidates, key=lambda candidate: candidate.memory.needed_bytes)
    return (
        f"No strategy fits. The smallest, {called(smallest.strategy)} with {settings(smallest.strategy)}, "
        f"{_lacks(smallest, cluster)}."
    )


def does_not_fit(candidate: Candidate, cluster: Cluster) -> Refusal:
    """The refusal of a strategy that does not fit."""
    largest, size = max(candidate.memory.by_category().items(), key=lambda item: item[1])
    return Refusal(
        strategy=candidate.strategy,
        rule="does_not_fit",
        message=(
            f"with {settings(candidate.strategy)} it {_lacks(candidate, cluster)}; the largest part is "
            f"{largest.value}, {format_gb(size)}"
        ),
    )


def _lacks(candidate: Candidate, cluster: Cluster) -> str:
    """How much memory a candidate wants and how much is there."""
    needed, usable = needed_bytes(candidate.memory), usable_bytes(cluster)
    want = f"needs {format_gb(needed)} a card, and {format_gb(usable)} of {cluster.gpu.name} are usable"
    if needed > usable or fits(candidate.memory, cluster):
        return want
    chance = format_percent(probability_of_oom(candidate.memory, cluster))
    return f"{want}, but it would run out of memory with a chance of {chance} (at most {ACCEPTED_PROBABILITY:.0%})"


def grouped_refusals(refusals: Sequence[Refusal]) -> list[tuple[str, Refusal]]:
    """Refusals that say the same thing told once, with the names of all strategies they concern."""
    names: dict[tuple[str, str], list[str]] = {}
    first: dict[tuple[str, str], Refusal] = {}
    for refusal in refusals:
        key = (refusal.rule, refusal.message)
        first.setdefault(key, refusal)
        name = "the job" if refusal.strategy is None else named(refusal.strategy)
        if name not in names.setdefault(key, []):
            names[key].append(name)
    return [(_listed(names[key]), refusal) for key, refusal in first.items()]


def _listed(names: Sequence[str], most: int = 3) -> str:
    comma = "; " if any("," in name for name in names) else ", "
    if len(names) <= most:
        return comma.join(names)
    return f"{comma.join(names[: most - 1])} and {len(names) - most + 1} others"
