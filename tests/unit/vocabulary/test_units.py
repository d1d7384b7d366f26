"""How numbers are written: the unit that suits, no exponent, the plural of the noun."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.vocabulary.units import format_seconds, some


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"), (3.42e-3, "3.42 ms"), (0.9996, "1 s"), (119.4, "119 s"), (119.6, "2 min 00 s"),
        (243.2, "4 min 03 s"), (7199.4, "119 min 59 s"), (7500, "2 h 05 min"), (4e6, "1,111 h 07 min"),
        (-0.5, "-500 ms"),
    ],
)  # fmt: skip
def test_a_time_has_the_unit_that_suits_it(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.floats(1e-6, 1e9))
def test_no_time_is_written_with_an_exponent(seconds: float) -> None:
    assert "e" not in format_seconds(seconds)


def test_a_noun_follows_its_count() -> None:
    assert [some(1, "group"), some(3, "group"), some(0, "group")] == ["1 group", "3 groups", "0 groups"]
    assert some(2, "micro-batch", "micro-batches") == "2 micro-batches"
