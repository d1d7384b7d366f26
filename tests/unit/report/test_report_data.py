from __future__ import annotations

import json

from tests.unit.factories import make_plan

from shardwise.report.data import plan_json


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
