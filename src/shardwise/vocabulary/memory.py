"""Term and MemoryBreakdown: memory is a timeline, not a sum.

[Note: instants]
A term has a lifetime inside the step. Everything between two of these instants grows or shrinks evenly (blocks are
equal), so the peak is at one of them:

    load             weights are read and placed
    forward          the last block's forward: all saved activations exist
    loss             logits and their gradient
    backward_first   inside the backward of the last block: all saved activations still exist
    reduce_first     its gradients are reduced: the other blocks' activations still exist
    backward_last    inside the backward of the first block: all other gradients exist
    reduce_last      the gradients of root and embedding are reduced
    optimizer        the optimizer's step
    evaluation       a forward without saved activations
    save             a checkpoint is staged

[Note: totals]
allocated is what torch hands out (`max_memory_allocated`), reserved adds what its allocator holds beyond that, device
adds what lies outside the allocator: context, libraries' workspaces, communicators. These three are what a run shows.

needed is device without the cached blocks, which the allocator gives back before it runs out. It is what runs out, so
whether a plan fits, the chance that it does not, and the interval beside both are those of needed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Literal

from shardwise.vocabulary.limits import Predicted


class Category(StrEnum):
    """What memory is used for."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"
    RUNTIME = "runtime"


class Instant(StrEnum):
    """The moments at which memory can peak; see [Note: instants]."""

    LOAD = "load"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD_FIRST = "backward_first"
    REDUCE_FIRST = "reduce_first"
    BACKWARD_LAST = "backward_last"
    REDUCE_LAST = "reduce_last"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    SAVE = "save"


STEP = (
    Instant.FORWARD,
    Instant.LOSS,
    Instant.BACKWARD_FIRST,
    Instant.REDUCE_FIRST,
    Instant.BACKWARD_LAST,
    Instant.REDUCE_LAST,
    Instant.OPTIMIZER,
)
"""The instants of a training step, in order."""
ALWAYS = tuple(Instant)
"""From the loading of the weights to the last save."""
TRAINED = tuple(instant for instant in Instant if instant is not Instant.LOAD)
"""From the first step on: what the first optimizer step allocates stays."""


def span(first: Instant, last: Instant) -> tuple[Instant, ...]:
    """The instants of a step from `first` to `last`, both included."""
    return STEP[STEP.index(first) : STEP.index(last) + 1]


CACHED = "cached blocks"
"""Name of the term that the allocator gives back before it runs out."""
_INSTANTS = tuple(Instant)
Level = Literal["allocated", "reserved", "device"]
_LEVELS: tuple[Level, ...] = ("allocated", "reserved", "device")


@dataclass(frozen=True, kw_only=True)
class Term:
    """Bytes of one rank with a name, a lifetime and a formula."""

    category: Category
    name: str
    """Such as `weights`, `gathered block` or `logits`."""
    bytes: Predicted
    alive: tuple[Instant, ...]
    formula: str = ""
    """The arithmetic in words and symbols, such as `2 B x P_block`."""
    source: str = ""
    """Where the formula comes from, or what it was measured on."""
    level: Level = "allocated"
    """The first total that counts it."""


@dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """All terms of one rank and what follows from them."""

    terms: tuple[Term, ...]

    @cached_property
    def _totals(self) -> dict[Level, dict[Instant, int]]:
        own: dict[Level, dict[Instant, int]] = {level: dict.fromkeys(_INSTANTS, 0) for level in _LEVELS}
        for term in self.terms:
            row = own[term.level]
            for instant in term.alive:
                row[instant] += term.bytes
        for below, level in itertools.pairwise(_LEVELS):
            for instant in _INSTANTS:
                own[level][instant] += own[below][instant]
        return own

    def at(self, instant: Instant, level: Level = "allocated") -> int:
        """Bytes alive at one instant, counted up to `level`."""
        return self._totals[level][instant]

    @cached_property
    def peak_instant(self) -> Instant:
        """The instant of the training step at which most is allocated."""
        return max(STEP, key=self.at)

    @property
    def allocated_bytes(self) -> int:
        """Peak of torch's allocated memory in a training step."""
        return self.at(self.peak_instant)

    @property
    def reserved_bytes(self) -> int:
        """Peak of what torch's allocator holds."""
        return self.at(self.peak_instant, "reserved")

    @property
    def device_bytes(self) -> int:
        """Peak of what the driver counts for this process."""
        return self.at(self.peak_instant, "device")

    @property
    def cached_bytes(self) -> int:
        """Blocks that the allocator holds free and gives back before it runs out."""
        return sum(term.bytes for term in self.terms if term.name == CACHED)

    @property
    def needed_bytes(self) -> int:
        """Peak of device memory that cannot be given back; what a plan is judged on."""
        return self.device_bytes - self.cached_bytes

    def by_category(self, instant: Instant | None = None) -> dict[Category, int]:
        """Bytes of each category at one instant (the peak if None), all levels included."""
        when = instant or self.peak_instant
        totals = dict.fromkeys(Category, 0)
        for term in self.terms:
            if when in term.alive:
                totals[term.category] += term.bytes
        return totals
