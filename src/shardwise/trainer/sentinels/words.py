"""How sentinels name what they found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_NAMED = 8
"""Modules that a message names, of however many differ."""


def some(names: Sequence[str]) -> str:
    """The first few names, and that there are more."""
    return ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0 to 3`, `ranks 0, 2`."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]} to {numbers[-1]}"
    return f"ranks {some([str(number) for number in numbers])}"
