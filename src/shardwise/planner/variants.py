"""The best variant of each split, by bounds rather than by pricing every one.

[Note: bounds]
A split (mesh and stage) comes in variants: micro-batch, checkpointing, loss. With equal levers, memory grows with the
micro-batch: if the smallest does not fit none does, and the largest that fits is found by halving. It is also the
fastest (fewer gathers, larger products), unless rows differ in length and a wider micro-batch brings padding, or the
stages of a pipeline wait for it. What is left is ranked by a quick estimate, and the step of what may win is simulated.
`tests/unit/planner` compares the outcome with pricing everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardwise.planner import rules
from shardwise.planner.memory import memory
from shardwise.planner.pricing import price
from shardwise.planner.timeline import estimate_seconds
from shardwise.planner.uncertainty import fits
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.memory import MemoryBreakdown
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.plan import Candidate
from shardwise.vocabulary.strategy import Checkpointing, LossKind, Strategy

SIMULATED = 4
"""Variants of one split whose step is simulated block by block; the rest is ranked by the quick estimate."""
PROMISING = 1.15
"""Splits, and variants of one split, whose quick estimate is above the best by more than this are not simulated beside
it: the estimate is that good."""


@dataclass(frozen=True, kw_only=True)
class _Variant:
    """One strategy and what is known of it so far."""

    strategy: Strategy
    used: MemoryBreakdown | None = None
    """None where bounds say that it fits."""
    fits: bool = True


def best_variants(job: Job, cluster: Cluster, kinds: Iterable[list[Strategy]]) -> Iterator[Candidate]:
    """Of every split the fastest variant that fits, or the smallest if none does.

    Args:
        job: What is trained.
        cluster: On which cards.
        kinds: The legal variants of one split after another.
    """
    splits: list[list[tuple[float, _Variant]]] = []
    for kind in kinds:
        looked_at = list(_look_at(job, cluster, kind))
        fitting = [variant for variant in looked_at if variant.fits]
        if not fitting:
            smallest = min(looked_at, key=lambda variant: variant.used.device_bytes if variant.used else 0)
            yield price(job, cluster, smallest.strategy, smallest.used)
            continue
        estimated = [
            (estimate_seconds(Placement(job=job, strategy=variant.strategy), cluster), variant) for variant in fitting
        ]
        splits.append(sorted(estimated, key=lambda pair: pair[0]))
    leader = min((estimated[0][0] for estimated in splits), default=0.0)
    for estimated in splits:
        best = estimated[0][0]
        limit = best * PROMISING if best <= leader * PROMISING else best
        near = [variant for estimate, variant in estimated[:SIMULATED] if estimate <= limit]
        yield rules.fastest_or_simpler([price(job, cluster, each.strategy, each.used) for each in near])


def _look_at(job: Job, cluster: Cluster, kind: list[Strategy]) -> Iterator[_Variant]:
    """Variants that fit and may be the fastest, and those that were found not to fit; see [Note: bounds]."""
    larger_is_faster = (job.lengths is None or job.packing) and kind[0].pp == 1
    guess = 0
    for variants in _by_levers(kind):
        looked_at = _around_the_limit(job, cluster, variants, guess)
        yield from looked_at.values()
        fitting = [index for index, variant in looked_at.items() if variant.fits]
        guess = max(fitting, default=0)
        if not larger_is_faster:
            yield from (_Variant(strategy=variants[i]) for i in range(guess) if i not in looked_at)


def _around_the_limit(job: Job, cluster: Cluster, variants: list[Strategy], guess: int) -> dict[int, _Variant]:
    """The largest variant that fits and the next one, by halving, after a look at the guess and at the one above it."""
    found: dict[int, _Variant] = {}
    low, high, middle = 0, len(variants), min(guess, len(variants) - 1)
    while low < high:
        used = memory(job, cluster, variants[middle])
        found[middle] = _Variant(strategy=variants[middle], used=used, fits=fits(used, cluster))
        if found[middle].fits:
            low = middle + 1
            middle = low if middle == guess else (low + high) // 2
        else:
            high = middle
            middle = (low + high) // 2
    return found


def _by_levers(kind: list[Strategy]) -> Iterable[list[Strategy]]:
    """The variants of one split with equal checkpointing and loss, by micro-batch.

    Accumulation of whole gradients takes memory that a single micro-batch does not, so that one stands apart.
    """
    levers: dict[tuple[Checkpointing, LossKind, bool], list[Strategy]] = {}
    for strategy in kind:
        levers.setdefault((strategy.checkpointing, strategy.loss, strategy.accumulation > 1), []).append(strategy)
    for variants in levers.values():
        variants.sort(key=lambda strategy: strategy.micro_batch_size)
    return levers.values()
