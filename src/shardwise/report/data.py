"""Plans as plain data for other programs: what `--json` prints.

Every field of the nouns under its own name, and what follows from them (the three totals of memory, a strategy's name)
beside it, so that a reader needs none of our formulas. Keys are only ever added.
"""

from __future__ import annotations

import json
from typing import Any

from shardwise.vocabulary import codec
from shardwise.vocabulary.memory import MemoryBreakdown
from shardwise.vocabulary.plan import Candidate, Plan
from shardwise.vocabulary.strategy import Strategy


def plan_json(plan: Plan) -> str:
    """The whole plan as JSON text."""
    return json.dumps(plan_data(plan), indent=2, ensure_ascii=False) + "\n"


def plan_data(plan: Plan) -> dict[str, Any]:
    """The whole plan as plain data, totals included."""
    data: dict[str, Any] = codec.to_data(plan)
    data["recommended"] = None if plan.recommended is None else candidate_data(plan.recommended)
    data["candidates"] = [candidate_data(candidate) for candidate in plan.candidates]
    for refusal, refused in zip(plan.refusals, data["refusals"], strict=True):
        refused["strategy"] = None if refusal.strategy is None else strategy_data(refusal.strategy)
    return data


def candidate_data(candidate: Candidate) -> dict[str, Any]:
    """A candidate with its strategy's name and its memory's totals."""
    data: dict[str, Any] = codec.to_data(candidate)
    return data | {"strategy": strategy_data(candidate.strategy), "memory": memory_data(candidate.memory)}


def strategy_data(strategy: Strategy) -> dict[str, Any]:
    """A strategy with its name."""
    return {"name": strategy.name, **codec.to_data(strategy)}


def memory_data(memory: MemoryBreakdown) -> dict[str, Any]:
    """Three totals, the instant of the peak, bytes by category there, and every term."""
    return {
        "allocated_bytes": memory.allocated_bytes,
        "reserved_bytes": memory.reserved_bytes,
        "device_bytes": memory.device_bytes,
        "needed_bytes": memory.needed_bytes,
        "cached_bytes": memory.cached_bytes,
        "peak_instant": memory.peak_instant.value,
        "by_category": {category.value: size for category, size in memory.by_category().items()},
        **codec.to_data(memory),
    }
