"""Best-fit-decreasing packing: which samples share a row of a fixed number of tokens.

[Note: best fit] Samples are placed from the longest to the shortest, each into the row whose remaining room is the
smallest that still holds it. Ties go by sample index, so the answer depends on the lengths alone. No sample is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Rows of samples. Row `r` holds `samples[offsets[r]:offsets[r + 1]]`."""

    samples: NDArray[np.int64]
    """Sample indices, row after row. [num_samples]"""
    offsets: NDArray[np.int64]
    """Where each row starts, and the end. [num_rows + 1]"""
    row_tokens: NDArray[np.int64]
    """Tokens in each row. [num_rows]"""
    budget: int
    """Tokens that a row can hold."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.offsets) - 1

    @property
    def efficiency(self) -> float:
        """Share of the rows' tokens that are data and not padding, 0 to 1."""
        return float(self.row_tokens.sum()) / (self.num_rows * self.budget) if self.num_rows else 0.0

    def row(self, index: int) -> tuple[int, ...]:
        """The samples of one row."""
        return tuple(self.samples[self.offsets[index] : self.offsets[index + 1]].tolist())


def one_sample_per_row(lengths: NDArray[np.int64], budget: int) -> Packing:
    """No packing, in the same shape: row `i` holds sample `i`. `lengths` is [num_samples]."""
    index = np.arange(len(lengths) + 1, dtype=np.int64)
    return Packing(samples=index[:-1], offsets=index, row_tokens=lengths.astype(np.int64), budget=budget)


def pack(lengths: NDArray[np.int64], budget: int) -> Packing:
    """Packs samples into rows of `budget` tokens by best fit decreasing ([Note: best fit]).

    Args:
        lengths: Tokens of each sample, at least 1. [num_samples]
        budget: Tokens that a row can hold.

    Raises:
        ConfigError: A sample is longer than the budget.
    """
    longest = int(lengths.max(initial=0))
    if longest > budget:
        raise ConfigError(
            f"max_length {budget} is the token budget of a packed row, but the longest sample has {longest} tokens "
            f"({int((lengths > budget).sum())} samples are longer). Tokenize with max_length {budget}, or pack into "
            f"rows of {longest}."
        )
    row_of = np.empty(len(lengths), dtype=np.int64)
    rows_with_room: dict[int, list[int]] = {}  # remaining tokens -> rows with exactly that much room
    room_mask = 0  # bit b is set when some row has b tokens of room: the best fit is the lowest bit >= length
    num_rows = 0
    order = np.argsort(-lengths, kind="stable")
    for sample, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = room_mask >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                room_mask ^= 1 << room
        else:
            room, row = budget, num_rows
            num_rows += 1
        row_of[sample] = row
        if left := room - length:
            rows_with_room.setdefault(left, []).append(row)
            room_mask |= 1 << left
    row_tokens = np.zeros(num_rows, dtype=np.int64)
    np.add.at(row_tokens, row_of, lengths)
    offsets = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row_of, minlength=num_rows), out=offsets[1:])
    return Packing(
        samples=np.argsort(row_of, kind="stable").astype(np.int64),
        offsets=offsets,
        row_tokens=row_tokens,
        budget=budget,
    )
