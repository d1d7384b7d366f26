"""The derivation: every sum adds up, every product is what stands beside it, on one machine and on several."""

from __future__ import annotations

import functools
import re

import pytest

from shardwise.facts import catalog
from shardwise.planner.answer import make_plan
from shardwise.planner.explain import WIDTH, explain
from shardwise.planner.search import Wishes
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.plan import Plan

DATA = Wishes(tp=1, pp=1)
"""Data parallel only."""
CASES: dict[str, tuple[Job, str, str | None, Wishes]] = {
    "adapters": (Job(model=catalog.model("qwen2.5-7b"), tuning="any"), "2xrtx-3090", None, DATA),
    "full": (Job(model=catalog.model("llama-3.1-8b")), "8xh100", None, Wishes(zero_stage=3)),
    "across": (Job(model=catalog.model("llama-3.1-8b")), "2x8xh100", "100gbe", DATA),
    "hybrid": (Job(model=catalog.model("qwen2.5-1.5b")), "2x8xh100", None, Wishes(dp_shard=8, zero_stage=3)),
    "one card": (Job(model=catalog.model("qwen2.5-0.5b")), "h100", None, Wishes()),
    "mixture": (Job(model=catalog.model("qwen3-30b-a3b"), tuning="lora"), "8xh100", None, DATA),
    "pipeline": (Job(model=catalog.model("llama-3.1-8b"), global_batch_size=64), "8xh100", None, Wishes(pp=2, tp=2)),
    "nothing": (Job(model=catalog.model("llama-3.1-70b")), "2xrtx-4090", None, DATA),
}
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


@functools.cache
def plan(case: str) -> Plan:
    job, gpus, network, wishes = CASES[case]
    return make_plan(job, catalog.parse_gpus(gpus, network=network), wishes)


@functools.cache
def text(case: str) -> str:
    return explain(plan(case), 10_000)


def value(number: str, unit: str) -> float:
    return float(number.replace(",", "")) * UNITS[unit]


@pytest.mark.parametrize("case", CASES)
def test_memory_adds_up_to_each_total(case: str) -> None:
    running, totals = 0.0, 0
    for sign, number in re.findall(r"^  ([ +=]) +([\d,.]+) GB  ", text(case), re.MULTILINE):
        if sign == "=":
            assert float(number.replace(",", "")) == pytest.approx(running, abs=0.006 * 20)
            totals += 1
        else:
            running += float(number.replace(",", ""))
    assert totals == 3


@pytest.mark.parametrize("case", CASES)
def test_the_step_adds_up(case: str) -> None:
    candidate = plan(case).recommended or plan(case).candidates[0]
    step = candidate.step
    section = text(case).split("ONE OPTIMIZER STEP")[1].split("\n\n")[0]
    if "min" in section:
        pytest.skip("minutes and seconds are not read here")
    parts = re.findall(r"^    +([\d.]+) (us|ms|s)  [a-z]", section, re.MULTILINE)
    compute = re.search(r"= +([\d.]+) (us|ms|s)  compute$", section, re.MULTILINE)
    assert compute
    assert sum(value(*part) for part in parts) == pytest.approx(step.compute_seconds, rel=0.02)
    assert value(*compute.groups()) == pytest.approx(step.compute_seconds, rel=0.006)
    whole = re.search(r"= +([\d.]+) (us|ms|s)  the step", section)
    assert whole
    added = re.findall(r"^  \+ +([\d.]+) (us|ms|s)  ", section, re.MULTILINE)
    assert value(*compute.groups()) + sum(value(*part) for part in added) == pytest.approx(
        value(*whole.groups()), rel=0.01
    )


def test_every_message_is_its_arithmetic() -> None:
    pattern = re.compile(
        r"([\d.]+) (us|ms|s) \+ ([\d.,]+) (B|KB|MB|GB|TB) x (2 x )?(\d+)/(\d+) / \(([\d.]+) (MB|GB)/s x (\d+) %\)"
        r"(?: \(inside the machine [\d.]+ (?:us|ms|s) beside it\))? = ([\d.]+) (us|ms|s);"
    )
    seen = 0
    for case in ("adapters", "full", "across", "hybrid", "pipeline"):
        for match in pattern.finditer(text(case)):
            latency, moved = value(match[1], match[2]), value(match[3], match[4])
            share = (2 if match[5] else 1) * int(match[6]) / int(match[7])
            rate = value(match[8], match[9]) * int(match[10]) / 100
            assert latency + moved * share / rate == pytest.approx(value(match[11], match[12]), rel=0.02), match[0]
            seen += 1
    assert seen > 30


def test_several_machines_have_two_wires() -> None:
    assert "over 16 ranks on 2 machines" in text("across")
    assert "inside a machine: nvlink4, 450 GB/s one way" in text("across")
    assert "between machines, each card's share: 100gbe, 1.562 GB/s one way" in text("across")
    assert "between machines" not in text("full")


def test_adapters_and_experts_are_explained() -> None:
    assert "weights are trained, 0.53 % as many as the model has" in text("adapters")
    assert "8 of 128 experts; all are stored" in text("mixture")


def test_what_is_refused_is_told_with_its_numbers() -> None:
    refused = text("adapters").split("REFUSED\n")[1].split("\n\n")[0]
    assert re.search(r"DDP: with micro-batch \d+.* it needs [\d.]+ GB a card, and 23.3 GB of rtx-3090", refused)


def test_where_nothing_fits_the_smallest_is_explained_with_the_ways_out() -> None:
    smallest = min(plan("nothing").candidates, key=lambda each: each.memory.needed_bytes)
    assert f"MEMORY OF ONE CARD under {smallest.strategy.name}, " in text("nothing")
    assert "WOULD HELP, from the smallest change to the largest" in text("nothing")
    assert "\n  No strategy fits. The smallest" in text("nothing")


@pytest.mark.parametrize("case", CASES)
def test_lines_fit_the_page_and_numbers_have_no_exponent(case: str) -> None:
    page = explain(plan(case))
    assert [line for line in page.splitlines() if len(line) > WIDTH and not line.lstrip().startswith("$ ")] == []
    assert not re.search(r"\de[+-]\d", page)
    assert " 1 ranks" not in page
    assert re.search(r"\b1 (?:groups|cards|machines|splits|figures|others)\b", page) is None
