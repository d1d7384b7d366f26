from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
from tests.unit.factories import make_plan

from shardwise.facts import catalog
from shardwise.planner.answer import make_plan as planned
from shardwise.planner.search import Wishes
from shardwise.report.data import plan_data, plan_json
from shardwise.vocabulary.job import Job, TuningWish


def test_json_carries_the_totals_that_follow() -> None:
    plan = make_plan()
    data = json.loads(plan_json(plan))
    taken = plan.recommended
    assert taken is not None
    for shown in (data["recommended"], data["candidates"][0]):
        memory = shown["memory"]
        assert memory["allocated_bytes"] == taken.memory.allocated_bytes
        assert memory["reserved_bytes"] == taken.memory.reserved_bytes
        assert memory["device_bytes"] == taken.memory.device_bytes
        assert sum(memory["by_category"].values()) == memory["device_bytes"]
        assert len(memory["terms"]) == len(taken.memory.terms)
        assert shown["strategy"]["name"] == "ZeRO-2"
        assert shown["step"]["seconds"] == taken.step.seconds
    assert data["refusals"][0]["strategy"]["name"] == "TP 2"


def test_json_says_null_where_nothing_fits() -> None:
    assert json.loads(plan_json(make_plan(recommended=None)))["recommended"] is None


def test_the_keys_that_others_rely_on() -> None:
    data = json.loads(plan_json(make_plan()))
    assert {"recommended", "candidates", "refusals", "advice", "headline", "job", "cluster", "facts", "reason"} <= set(
        data
    )
    candidate = data["candidates"][0]
    assert {"strategy", "memory", "step", "tokens_per_s", "fits", "probability_of_oom"} <= set(candidate)
    assert {"seconds", "compute_seconds", "exposed_wire_seconds", "bubble_seconds"} <= set(candidate["step"])
    assert {"strategy", "rule", "message"} <= set(data["refusals"][0])


# ----------------------------------------------------------------------------------------------- as docs/plan.md has it

PAGE = Path(__file__).parents[3] / "docs" / "plan.md"
KEYS = re.compile(r"`([a-z_]+)`")


def documented() -> dict[str, str]:
    """What docs/plan.md says of each key, by the path of the key: `candidates[].step`."""
    rows = re.findall(r"^\| (`[^|]+`) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {path: words for paths, words in rows for path in re.findall(r"`([^`]+)`", paths)}


def keys_at(data: Any, path: str) -> set[str]:
    """Keys of the first noun at a path that is not empty."""
    for part in path.split("."):
        name, _, several = part.partition("[")
        data = data[name] if name else data
        if several:
            if not data:
                return set()
            data = data[0]
    return set(cast("dict[str, Any]", data)) if isinstance(data, dict) else set()


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """With a recommendation, with stages of a pipeline, with nothing that fits, and with what is refused."""
    cases: tuple[tuple[str, str, TuningWish, Wishes], ...] = (
        ("qwen2.5-0.5b", "2xrtx-4090", "any", Wishes()),
        ("llama-3.1-8b", "8xh100", "full", Wishes(pp=2)),
        ("llama-3.1-70b", "2xrtx-4090", "full", Wishes()),
        ("qwen3-30b-a3b", "8xh100", "qlora", Wishes()),
    )
    return [
        plan_data(planned(Job(model=catalog.model(name), tuning=tuning), catalog.parse_gpus(gpus), wishes))
        for name, gpus, tuning, wishes in cases
    ]


def test_every_key_is_documented_and_every_documented_key_is_there(answers: list[dict[str, Any]]) -> None:
    rows = documented()
    tops = {path.split("[")[0].split(".")[0] for path in rows}
    for data in answers:
        assert set(data) == tops
    for path in ("candidates[]", "refusals[]", "advice[]", "headline[]", "facts[]", "candidates[].memory",
                 "candidates[].memory.terms[]", "candidates[].step", "candidates[].collectives[]"):  # fmt: skip
        told = set(KEYS.findall(rows.get(path, ""))) | {
            other[len(path) + 1 :].split("[")[0].split(".")[0] for other in rows if other.startswith(f"{path}.")
        }
        found = set[str]().union(*(keys_at(data, path) for data in answers))
        assert found, path
        assert found <= told, (path, found - told)
        assert not [key for key in told - found if key not in ("needed_bytes", "cached_bytes")], (path, told - found)


def test_the_schema_of_the_answer(answers: list[dict[str, Any]]) -> None:
    """The names that other programs were promised."""
    for data in answers:
        assert {"recommended", "candidates", "refusals", "advice", "headline"} <= set(data)
        taken = [data["recommended"]] if data["recommended"] else []
        for candidate in [*taken, *data["candidates"]]:
            assert {"strategy", "memory", "step", "tokens_per_s", "fits", "probability_of_oom"} <= set(candidate)
            memory, step = candidate["memory"], candidate["step"]
            assert {"allocated_bytes", "reserved_bytes", "device_bytes", "terms"} <= set(memory)
            assert all(type(memory[key]) is int for key in ("allocated_bytes", "reserved_bytes", "device_bytes"))
            assert memory["allocated_bytes"] <= memory["reserved_bytes"] <= memory["device_bytes"]
            assert memory["needed_bytes"] == memory["device_bytes"] - memory["cached_bytes"]
            parts = ("compute_seconds", "exposed_wire_seconds", "bubble_seconds", "host_seconds")
            assert sum(step[part] for part in parts) == pytest.approx(step["seconds"])
            assert candidate["fits"] in (True, False)
            assert 0 <= candidate["probability_of_oom"] <= 1
        for refusal in data["refusals"]:
            assert {"strategy", "rule", "message"} == set(refusal)
            assert re.fullmatch(r"[a-z_]+", refusal["rule"])
    assert answers[2]["recommended"] is None
    assert answers[3]["candidates"] == []
