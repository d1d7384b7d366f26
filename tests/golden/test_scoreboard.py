"""The planner against published measurements: the targets hold, and docs/accuracy.md is what scripts/score writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def score() -> Any:
    """benchmarks/score.py, which is a script and no module of the package."""
    spec = importlib.util.spec_from_file_location("score", ROOT / "benchmarks" / "score.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["score"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cases(score: Any) -> list[Any]:
    return score.read_cases()


@pytest.fixture(scope="module")
def scores(score: Any, cases: list[Any]) -> list[Any]:
    return [score.score(case) for case in cases if not case.unmatched]


def test_targets(score: Any, scores: list[Any]) -> None:
    assert score.missed_targets(scores) == []
    assert sum(each.is_known("memory") for each in scores) >= 60
    assert sum(each.is_known("time") for each in scores) >= 45


def test_nothing_that_ran_out_of_memory_is_called_a_fit(score: Any, scores: list[Any]) -> None:
    ran_out = [each for each in scores if each.case.measured.oom]
    assert len(ran_out) >= 5
    assert score.wrong_fits(scores) == []


def test_rankings(score: Any, scores: list[Any]) -> None:
    ranked = score.ranking(scores)
    assert ranked.right > 25 * len(ranked.wrong)


def test_nine_of_ten_readings_lie_in_their_interval(score: Any, scores: list[Any]) -> None:
    """The spreads in planner/uncertainty.py are those of this scoreboard."""
    from shardwise.planner.uncertainty import interval, memory_spread, time_spread

    inside = {"memory": list[bool](), "time": list[bool]()}
    for each in scores:
        measured = each.case.measured
        if each.is_known("memory"):
            used = score.memory_of(each.case)
            assert used.needed_bytes <= used.device_bytes
            low, high = interval(each.memory_bytes, memory_spread(used))
            inside["memory"].append(low <= measured.memory_bytes <= high)
        if each.is_known("time"):
            spread = time_spread(score.cluster_of(each.case))
            low, high = interval(each.tokens_per_s, spread * each.tokens_per_s)
            inside["time"].append(low <= measured.tokens_per_s <= high)
    shares = {what: sum(found) / len(found) for what, found in inside.items()}
    assert shares["memory"] >= 0.85, shares
    assert shares["time"] >= 0.85, shares


def test_our_own_engine(score: Any) -> None:
    """Runs of the engine whose costs these are: with the cluster file of their machine, no constant fitted to them."""
    errors = [run.errors() for run in score.own_engine()]
    assert len(errors) >= 8
    limits = (("allocated", 0.01, 0.02), ("reserved", 0.04, 0.09), ("device", 0.04, 0.09), ("step", 0.03, 0.08))
    for what, mean, worst in limits:
        found = [abs(error[what]) for error in errors]
        assert sum(found) / len(found) <= mean, what
        assert max(found) <= worst, what


def test_pairs_out_of_order_are_explained(score: Any, scores: list[Any]) -> None:
    for pair in score.ranking(scores).wrong:
        assert any(name in pair for name in score.OUT_OF_ORDER), pair


def test_page_is_fresh(score: Any, scores: list[Any], cases: list[Any]) -> None:
    assert score.page(scores, cases) == (ROOT / "docs" / "accuracy.md").read_text()


def test_cases_are_public_facts_with_sources(cases: list[Any]) -> None:
    ids = [case.id for case in cases]
    assert len(ids) == len(set(ids))
    assert all(case.source for case in cases)
    for line in (Path(__file__).parent / "cases.jsonl").read_text().splitlines():
        data = json.loads(line)
        assert data.get("unmatched") or data["measured"], data["id"]


def test_a_case_carries_no_constant_of_its_own(score: Any) -> None:
    """A case may name settings and its stack; no field of it is a correction."""
    fields = set(score.Case.__dataclass_fields__)
    assert fields == {
        "id", "source", "group", "model", "shape", "gpus", "link", "job", "strategy", "stack", "measured", "unknown",
        "note", "unmatched",
    }  # fmt: skip
