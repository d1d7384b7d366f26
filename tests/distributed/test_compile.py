"""Blocks compile to one graph without a break, whatever lies around them; nothing compiles again from step to step."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoint_pool import Pool
from harness import Case, batches_of, build, make_plan, make_stepper
from torch import nn
from torch._dynamo.utils import counters

from shardwise.trainer.data.store import from_samples
from shardwise.vocabulary.strategy import Strategy

pytestmark = pytest.mark.distributed

ONE = Strategy(precision="bf16", micro_batch_size=2, compile_blocks=True, loss="fused")
CASES = {
    "qwen2": Case(strategy=ONE, model="qwen2"),
    "qwen3": Case(strategy=ONE, model="qwen3"),
    "full": Case(strategy=replace(ONE, checkpointing="full")),
    "selective": Case(strategy=replace(ONE, checkpointing="selective")),
    "lora": Case(strategy=replace(ONE, tuning="lora", checkpointing="full")),
}


def graphs_of_steps(cases: dict[str, Case]) -> dict[str, tuple[int, dict[str, int]]]:
    """Graphs and breaks of two steps of each case, traced but not turned into kernels, which the CPU does slowly."""
    compile_module, compile_function = nn.Module.compile, torch.compile
    traced: Any = functools.partial(torch.compile, backend="eager")

    def compile_traced(self: nn.Module, **options: Any) -> None:
        compile_module(self, backend="eager", **options)

    nn.Module.compile, torch.compile = compile_traced, traced
    try:
        return {name: _graphs(case) for name, case in cases.items()}
    finally:
        nn.Module.compile, torch.compile = compile_module, compile_function
        torch.compiler.reset()


def _graphs(case: Case) -> tuple[int, dict[str, int]]:
    case = replace(case, layers=2, max_tokens=32)
    torch.compiler.reset()
    skeleton, mesh = build(case)
    stepper = make_stepper(case, skeleton, mesh)
    data = from_samples([[(7 * i + j) % case.vocab_size for j in range(32)] for i in range(8)])
    plan = make_plan(replace(case, steps=2), data, 1)
    counters.clear()
    for step in range(2):
        batches = batches_of(data, plan, step, 0, "cpu")
        stepper.run(batches, len(batches), plan.num_supervised_tokens(step))
    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


def test_one_graph_for_all_blocks(ranks: Pool) -> None:
    """And one of the loss. Adapters: the first block's input has no gradient, so that it is a graph of its own."""
    found = ranks.run(1, graphs_of_steps, CASES)[0]
    assert found == {name: (3 if "lora" in name else 2, {}) for name in CASES}
