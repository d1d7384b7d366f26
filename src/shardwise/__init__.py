"""shardwise: measure the cards and the wire, plan how to split a fine-tune, run it, and verify the prediction.

    from shardwise import Job, model, parse_gpus, plan

    answer = plan(Job(model=model("qwen2.5-7b"), tuning="any"), parse_gpus("2xrtx-5090"))
    print(answer.reason)

The names below are loaded when they are asked for: importing the package imports nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.errors import ShardwiseError
    from shardwise.facts.catalog import gpu, link, model, parse_gpus
    from shardwise.facts.hub import find_model
    from shardwise.planner.answer import make_plan as plan
    from shardwise.planner.explain import explain
    from shardwise.planner.search import Wishes
    from shardwise.vocabulary.cluster import Cluster, Gpu, Link
    from shardwise.vocabulary.job import Job
    from shardwise.vocabulary.ledger import Ledger
    from shardwise.vocabulary.model import ModelShape
    from shardwise.vocabulary.plan import Plan
    from shardwise.vocabulary.run import RunFile
    from shardwise.vocabulary.strategy import Strategy

__version__ = "0.1.0"

_HOMES = {
    "Cluster": "vocabulary.cluster",
    "Gpu": "vocabulary.cluster",
    "Job": "vocabulary.job",
    "Ledger": "vocabulary.ledger",
    "Link": "vocabulary.cluster",
    "ModelShape": "vocabulary.model",
    "Plan": "vocabulary.plan",
    "RunFile": "vocabulary.run",
    "ShardwiseError": "errors",
    "Strategy": "vocabulary.strategy",
    "Wishes": "planner.search",
    "explain": "planner.explain",
    "find_model": "facts.hub",
    "gpu": "facts.catalog",
    "link": "facts.catalog",
    "model": "facts.catalog",
    "parse_gpus": "facts.catalog",
    "plan": "planner.answer:make_plan",
}
__all__ = [
    "Cluster",
    "Gpu",
    "Job",
    "Ledger",
    "Link",
    "ModelShape",
    "Plan",
    "RunFile",
    "ShardwiseError",
    "Strategy",
    "Wishes",
    "__version__",
    "explain",
    "find_model",
    "gpu",
    "link",
    "model",
    "parse_gpus",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    home, _, own_name = _HOMES[name].partition(":")
    return getattr(importlib.import_module(f"shardwise.{home}"), own_name or name)
