"""The probe's time: aims, limits, slices, and what is said of what was left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.probe.budget import (
    END_SECONDS,
    FULL,
    NO_TIME,
    QUICK,
    SHARES,
    WIRE_FLOOR_SECONDS,
    WIRE_LEAST_SECONDS,
    budget_for,
    wire_seconds,
)
from shardwise.probe.build import MOST_LISTED, build_report
from shardwise.probe.findings import Findings, RankFacts, Skipped


def test_the_promised_limits() -> None:
    assert (QUICK.limit_seconds, FULL.limit_seconds) == (20.0, 120.0)
    for budget in (QUICK, FULL):
        assert budget.aim_seconds + END_SECONDS + WIRE_FLOOR_SECONDS <= budget.limit_seconds


def test_an_aim_of_ones_own_keeps_the_leeway() -> None:
    assert budget_for(quick=True, aim_seconds=None) == QUICK
    assert budget_for(quick=False, aim_seconds=None) == FULL
    own = budget_for(quick=True, aim_seconds=26.0)
    assert (own.aim_seconds, own.limit_seconds) == (26.0, 40.0)


@pytest.mark.parametrize("start", [2.0, 5.0, 9.0, 13.0, 18.0])
def test_slices_end_before_the_limit_whatever_the_start_took(start: float) -> None:
    """With parts that use all of their slice. Past 16 s only what every plan needs is left."""
    now = start
    for part in ("copy", "compute", "disk"):
        now += SHARES[part] * max(0.0, QUICK.aim_seconds - now)
    left = max(0.0, SHARES["wire"] * QUICK.aim_seconds - now)
    now += wire_seconds(left, QUICK.limit_seconds - END_SECONDS - now)
    now += SHARES["together"] * max(0.0, QUICK.aim_seconds - now)
    assert now + END_SECONDS <= max(QUICK.limit_seconds, start + WIRE_LEAST_SECONDS + END_SECONDS)


def test_the_wire_has_a_floor_as_far_as_the_limit_allows() -> None:
    assert wire_seconds(left=30.0, to_limit=50.0) == 30.0
    assert wire_seconds(left=0.0, to_limit=50.0) == WIRE_FLOOR_SECONDS
    assert wire_seconds(left=0.0, to_limit=2.5) == 2.5
    assert wire_seconds(left=0.0, to_limit=-7.0) == WIRE_LEAST_SECONDS


def test_the_cluster_says_what_was_left_out() -> None:
    rank = RankFacts(rank=0, node=0, host="node-a", device_name="Some CPU", device_memory_bytes=8, architecture="cpu")
    findings = Findings(ranks=(rank,), copy_bytes_per_s=1e9)
    assert not any("want of time" in sentence for sentence in build_report(findings).cluster.assumptions)
    cut = tuple(Skipped(what=f"part {i}", why=f"2 sizes {NO_TIME}") for i in range(MOST_LISTED + 3))
    other = Skipped(what="disk", why="no space")
    told = build_report(replace(findings, skipped=(other, *cut))).cluster.assumptions
    (sentence,) = [each for each in told if "want of time" in each]
    assert "part 0, part 1" in sentence
    assert sentence.endswith("part 5 and 3 more.")
    assert "disk" not in sentence
