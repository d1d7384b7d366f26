"""Where the choice changes: what is told is planned anew on wires that are slower and faster than the figure."""

from __future__ import annotations

import dataclasses
import re

import pytest

from shardwise.facts import catalog
from shardwise.planner import crossover, reasons
from shardwise.planner.answer import make_plan
from shardwise.vocabulary.cluster import CollectiveCurve, CurvePoint
from shardwise.vocabulary.job import Job, TuningWish
from shardwise.vocabulary.plan import Candidate, Plan
from shardwise.vocabulary.units import parse_bytes

TOLD = re.compile(r"(Below|Above) about ([\d.,]+ [KMGT]?B)/s attained on \S+ \(now [^)]+\) (.+) would be the better")
FURTHER = 1.5
CASES: tuple[tuple[str, str, TuningWish], ...] = (
    ("qwen2.5-7b", "2xrtx-3090", "any"), ("qwen2.5-0.5b", "2xrtx-3090", "full"), ("qwen2.5-1.5b", "8xh100", "full"),
    ("qwen2.5-3b", "4xa100", "full"),
)  # fmt: skip


def planned(model: str, gpus: str, tuning: TuningWish, factor: float = 1.0) -> Plan:
    job = Job(model=catalog.model(model), tuning=tuning)
    return make_plan(job, crossover.scaled(catalog.parse_gpus(gpus), factor))


def taken(plan: Plan) -> Candidate:
    assert plan.recommended is not None
    return plan.recommended


def test_every_crossover_is_one() -> None:
    told = 0
    for model, gpus, tuning in CASES:
        plan = planned(model, gpus, tuning)
        now = crossover.attained(crossover.deciding_link(plan.cluster))
        for advice in plan.advice:
            match = TOLD.match(advice.message)
            assert (match is not None) == (advice.rule == "crossover")
            if match is None:
                continue
            factor = parse_bytes(match[2]) / now
            out = FURTHER if match[1] == "Above" else 1 / FURTHER
            same: TuningWish = taken(plan).strategy.tuning
            beyond = taken(planned(model, gpus, same, factor * out))
            inside = taken(planned(model, gpus, same, factor / out))
            assert reasons.called(beyond.strategy) == match[3]
            assert inside.strategy.name == taken(plan).strategy.name
            told += 1
    assert told >= 3


def test_cards_that_no_longer_help() -> None:
    plan = planned("qwen2.5-0.5b", "2xrtx-3090", "full")
    message = next(advice.message for advice in plan.advice if advice.rule == "do_more_cards_help")
    match = re.search(
        r"trains ([\d,]+) tokens/s.* Below about ([\d.]+ [KMG]?B)/s attained they would not help", message
    )
    assert match
    alone = float(match[1].replace(",", ""))
    factor = parse_bytes(match[2]) / crossover.attained(crossover.deciding_link(plan.cluster))
    assert taken(planned("qwen2.5-0.5b", "2xrtx-3090", "full", factor / FURTHER)).tokens_per_s <= alone * 1.01
    assert taken(planned("qwen2.5-0.5b", "2xrtx-3090", "full", factor * FURTHER)).tokens_per_s > alone


def test_one_card_alone_is_what_a_plan_for_one_card_says() -> None:
    plan = planned("qwen2.5-1.5b", "8xh100", "full")
    message = next(advice.message for advice in plan.advice if advice.rule == "do_more_cards_help")
    alone = taken(planned("qwen2.5-1.5b", "h100", "full"))
    match = re.search(r"trains ([\d,]+) tokens/s; 8 cards over nvlink4 are ([\d.]+) times as fast", message)
    assert match
    assert float(match[1].replace(",", "")) == pytest.approx(alone.tokens_per_s, rel=0.01)
    assert float(match[2]) == pytest.approx(taken(plan).tokens_per_s / alone.tokens_per_s, abs=0.01)


def test_a_scaled_wire_scales_its_table_and_only_itself() -> None:
    cluster = catalog.parse_gpus("2x8xh100")
    faster = crossover.scaled(cluster, 2.0)
    assert faster.intra_node == cluster.intra_node
    assert faster.inter_node is not None
    assert cluster.inter_node is not None
    assert faster.inter_node.bandwidth_bytes_per_s == 2 * cluster.inter_node.bandwidth_bytes_per_s
    points = (CurvePoint(bytes=1024, seconds=1e-5), CurvePoint(bytes=2**30, seconds=0.01))
    curve = CollectiveCurve(op="all_gather", ranks=2, points=points)
    link = dataclasses.replace(cluster.intra_node, curves=(curve,))
    one = dataclasses.replace(catalog.parse_gpus("2xh100"), intra_node=link)
    assert crossover.scaled(one, 2.0).intra_node.curves[0].points[1].seconds == 0.005
    assert crossover.attained(link) == pytest.approx(2**30 / 2 / 0.01)
