"""The best variant of each split, by bounds rather than by pricing every one.

[Note: bounds]
A split (mesh and stage) comes in variants: micro-batch, checkpointing, loss. With equal levers, memory grows with the
micro-batch: if the smallest does not fit none does, and the largest that fits is found by halving. It is also the
fastest (fewer gathers, larger products), unless rows differ in length and a wider micro-batch brings padding, or the
stages of a pipeline wait for it; then smaller ones are tried until they take longer. A lever that computes more for the
same batch (`Lever.saves_no_more_than`) is looked at only for micro-batches that do not fit without it, and not at all
where even its largest would be too slow. What is left is ranked by a quick estimate, and the step of what may win is
simulated.
`tests/unit/planner` compares the outcome with pricing everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardwise.planner import rules
from shardwise.planner.compute import block_times
from shardwise.planner.memory import Footprint
from shardwise.planner.pricing import price, slowest_stage
from shardwise.planner.splits import Batch, Lever, Split
from shardwise.planner.timeline import Parts, estimate_seconds
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.plan import Candidate
from shardwise.vocabulary.strategy import Strategy

SIMULATED = 4
"""Variants of one split whose step is simulated block by block; the rest is ranked by the quick estimate."""
PROMISING = 1.15
"""Splits, and variants of one split, whose quick estimate is above the best by more than this are not simulated beside
it: the estimate is that good."""


@dataclass(frozen=True, kw_only=True)
class _Timed:
    """A variant that fits, and its step as far as it is known."""

    strategy: Strategy
    parts: Parts
    estimate: float


def best_variants(job: Job, cluster: Cluster, open_splits: Iterable[Split]) -> Iterator[Candidate]:
    """Of every split the fastest variant that fits, or the smallest if none does.

    Args:
        job: What is trained.
        cluster: On which cards.
        open_splits: The legal ones.
    """
    found: list[list[_Timed]] = []
    for split in open_splits:
        look = _Look(job, cluster, split)
        fitting = look.fitting()
        if fitting:
            found.append(sorted(fitting, key=lambda each: each.estimate)[:SIMULATED])
        else:
            yield price(job, cluster, look.smallest())
    leader = min((timed[0].estimate for timed in found), default=0.0)
    for timed in found:
        best = timed[0].estimate
        limit = best * PROMISING if best <= leader * PROMISING else best
        near = [each for each in timed if each.estimate <= limit]
        yield rules.fastest_or_simpler([price(job, cluster, each.strategy, parts=each.parts) for each in near])


class _Look:
    """A search among the variants of one split; see [Note: bounds]."""

    def __init__(self, job: Job, cluster: Cluster, split: Split) -> None:
        self._job, self._cluster, self._split = job, cluster, split
        self._footprint = Footprint(job, cluster)
        self._places: dict[int, Placement] = {}
        self._fastest = float("inf")
        self._needed: list[tuple[int, Strategy]] = []

    def fitting(self) -> list[_Timed]:
        """Variants that fit and may be the fastest."""
        found: list[_Timed] = []
        larger_is_faster = (self._job.lengths is None or self._job.packing) and self._split.base.pp == 1
        for batches in _by_accumulation(self._split.batches):
            largest: dict[Lever, int] = {}
            for lever in self._split.levers:
                known = max(
                    (number for other, number in largest.items() if other.saves_no_more_than(lever)), default=-1
                )
                if known == len(batches) - 1 or self._is_hopeless(self._split.variant(batches[-1], lever)):
                    continue
                guess = max(known + 1, max(largest.values(), default=0))
                number = largest[lever] = self._largest_that_fits(batches, lever, known, guess)
                new = [self._split.variant(batch, lever) for batch in batches[known + 1 : number + 1]]
                found += self._downhill(new[-1:] if larger_is_faster else new)
        return found

    def smallest(self) -> Strategy:
        """The variant that needs least memory, of those that were looked at."""
        return min(self._needed, key=lambda pair: pair[0])[1]

    def _is_hopeless(self, strategy: Strategy) -> bool:
        """True if the compute of blocks alone, in the largest micro-batch, takes too long beside what fits already."""
        if self._fastest == float("inf") or self._job.lengths is not None:
            return False
        place = self._places[0].variant(strategy)
        block = block_times(place, self._cluster)
        least = (block.forward + block.backward) * place.num_blocks * strategy.accumulation
        return least > self._fastest * PROMISING

    def _time(self, strategy: Strategy) -> _Timed:
        parts = slowest_stage(self._job, self._cluster, strategy, self._places)
        timed = _Timed(strategy=strategy, parts=parts, estimate=estimate_seconds(parts))
        self._fastest = min(self._fastest, timed.estimate)
        return timed

    def _downhill(self, variants: Sequence[Strategy]) -> list[_Timed]:
        """From the largest micro-batch that fits to smaller ones, until they take longer.

        Padding and the bubble fall with the micro-batch, gathers and small products grow: there is one valley.
        """
        found: list[_Timed] = []
        for strategy in reversed(variants):
            found.append(self._time(strategy))
            if len(found) > 1 and found[-1].estimate > found[-2].estimate:
                break
        return found

    def _largest_that_fits(self, batches: Sequence[Batch], lever: Lever, known: int, guess: int) -> int:
        """Number of the largest batch that fits: by halving, after a look at the guess and at the one above it.

        Args:
            batches: Smallest first.
            lever: Of all of them.
            known: Number of one that fits, or -1.
            guess: Where to look first.
        """
        low, high, middle = known + 1, len(batches), min(guess, len(batches) - 1)
        while low < high:
            strategy = self._split.variant(batches[middle], lever)
            fits, needed = self._footprint.look(strategy)
            if fits:
                low = middle + 1
                middle = low if middle == guess else (low + high) // 2
            else:
                self._needed.append((needed, strategy))
                high = middle
                middle = (low + high) // 2
        return low - 1


def _by_accumulation(batches: Sequence[Batch]) -> Iterator[tuple[Batch, ...]]:
    """Batches that accumulate, and the one that does not, by micro-batch.

    Accumulation of whole gradients takes memory that a single micro-batch does not, so that one stands apart.
    """
    for accumulates in (False, True):
        chosen = [batch for batch in batches if (batch.accumulation > 1) == accumulates]
        if chosen:
            yield tuple(sorted(chosen, key=lambda batch: batch.micro_batch_size))
