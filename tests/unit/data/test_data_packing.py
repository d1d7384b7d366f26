from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.trainer.data.packing import one_sample_per_row, pack

lengths_and_budget = st.integers(1, 300).flatmap(
    lambda budget: st.tuples(st.lists(st.integers(1, budget), max_size=80), st.just(budget))
)


@given(lengths_and_budget)
def test_every_sample_is_in_one_row_and_no_row_overflows(case: tuple[list[int], int]) -> None:
    lengths, budget = np.array(case[0], dtype=np.int64), case[1]
    packing = pack(lengths, budget)
    assert sorted(packing.samples.tolist()) == list(range(len(lengths)))
    for index in range(packing.num_rows):
        row = packing.row(index)
        assert row
        assert lengths[list(row)].sum() == packing.row_tokens[index] <= budget


@given(lengths_and_budget)
def test_no_two_rows_could_be_one(case: tuple[list[int], int]) -> None:
    """Best fit opens a row only when no other has room, so at most one row is less than half full."""
    packing = pack(np.array(case[0], dtype=np.int64), case[1])
    assert (packing.row_tokens * 2 <= packing.budget).sum() <= 1


def test_best_fit_takes_the_tightest_row() -> None:
    packing = pack(np.array([4, 7, 3, 6]), 10)
    assert {packing.row(index) for index in range(packing.num_rows)} == {(1, 2), (0, 3)}
    assert packing.efficiency == 1.0


def test_it_depends_on_the_lengths_alone() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, size=2000)
    first, second = pack(lengths, 512), pack(lengths.copy(), 512)
    assert first.samples.tolist() == second.samples.tolist()
    assert first.offsets.tolist() == second.offsets.tolist()
    assert first.efficiency > 0.98


def test_a_sample_above_the_budget_is_refused_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"max_length 10 .* longest sample has 12 tokens \(1 samples"):
        pack(np.array([3, 12]), 10)


def test_without_packing_each_row_is_a_sample() -> None:
    packing = one_sample_per_row(np.array([5, 2]), 8)
    assert [packing.row(index) for index in range(packing.num_rows)] == [(0,), (1,)]
    assert packing.efficiency == 7 / 16
