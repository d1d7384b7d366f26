"""Was the plan right? One sentence for time, one for memory."""

from __future__ import annotations

import dataclasses

import pytest
from tests.unit.factories import make_candidate, make_ledger

from shardwise.report.verdict import verdict
from shardwise.vocabulary.ledger import Ledger, LedgerRow


def ledger_with(step: float | None, allocated: float = 24.2e9) -> Ledger:
    rows = (
        LedgerRow(kind="memory", name="allocated", unit="bytes", predicted=24.1e9, measured=allocated),
        LedgerRow(kind="time", name="step", unit="seconds", predicted=1.92, measured=step),
    )
    return dataclasses.replace(make_ledger(), rows=rows)


@pytest.mark.parametrize(
    ("step", "others", "words"),
    [
        (2.04, None, "a step took 2.04 s, predicted 1.92 s (1.73–2.17): the plan was right."),
        (2.04, 0.9, "the plan was right."),
        (4.34, 0.35, "100 % above its interval. Other programs took 35 % of this machine's cores meanwhile"),
        (4.34, 0.02, "The plan was wrong here: the ledger below says in which part. Other programs took 2 % of its"),
        (4.34, None, "The plan was wrong here: the ledger below says in which part."),
        (0.864, 0.9, "50 % below its interval. The plan was wrong here"),
        (None, None, "no step was measured"),
    ],
)
def test_time_in_words(step: float | None, others: float | None, words: str) -> None:
    assert words in verdict(make_candidate(), ledger_with(step), others)[0]


def test_memory_in_words() -> None:
    assert verdict(make_candidate(), ledger_with(2.0))[1] == (
        "Memory: 24.2 GB allocated, predicted 24.1 GB: the plan was right, 0.4 % below it."
    )
    assert "the plan was 20 % below what came out" in verdict(make_candidate(), ledger_with(2.0, 30.1e9))[1]
