"""Traps of docs/pitfalls.md that need ranks and are proven nowhere else."""

import dataclasses
from pathlib import Path

import pytest
import torch
from checkpoint_pool import Pool
from harness import Case, batches_of, build, local_gradient, make_data, make_plan, make_stepper

from shardwise.errors import ShardwiseError
from shardwise.trainer.run import run_training
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy

pytestmark = pytest.mark.distributed

BF16 = Strategy(precision="bf16", micro_batch_size=2, accumulation=1)
STAGES = [
    dataclasses.replace(BF16, dp_replicate=2),
    dataclasses.replace(BF16, dp_shard=2, zero_stage=1),
    dataclasses.replace(BF16, dp_shard=2, zero_stage=2),
    dataclasses.replace(BF16, dp_shard=2, zero_stage=3),
]


def accumulation_error(strategy: Strategy, repeats: int) -> tuple[float, float]:
    """The gradient of the same micro-batch computed again and again, against a multiple of the first one.

    Returns:
        Its largest relative error, and what sums in bf16 would have given.
    """
    case = Case(strategy=strategy, layers=1)
    skeleton, mesh = build(case)
    stepper = make_stepper(case, skeleton, mesh)
    data = make_data(case)
    batches = batches_of(data, make_plan(case, data, 2), 0, mesh.data_rank, mesh.device)
    weight = next(value for name, value in skeleton.model.named_parameters() if "up_proj" in name)
    stepper.backward(batches, 1, 100)
    once = local_gradient(weight).clone()
    stepper.optimizer.zero_grad(set_to_none=True)
    stepper.backward(batches * repeats, repeats, 100)
    found = local_gradient(weight)
    assert found.dtype == torch.float32
    in_bf16 = torch.zeros_like(once, dtype=torch.bfloat16)
    for _ in range(repeats):
        in_bf16 += once.to(torch.bfloat16)

    def error(gradient: torch.Tensor) -> float:
        return ((gradient.float() - repeats * once).norm() / (repeats * once).norm()).item()

    return error(found), error(in_bf16)


def test_micro_batches_are_summed_in_fp32(ranks: Pool) -> None:
    for strategy in STAGES:
        for found, in_bf16 in ranks.run(2, accumulation_error, strategy, 15):
            assert found < 1e-5, strategy.name
            assert in_bf16 > 1e-3


def run_with_other_data(run: RunFile, strategy: Strategy) -> str:
    """Each rank shuffles by a seed of its own, as if its machine had other files."""
    try:
        run_training(dataclasses.replace(run, seed=torch.distributed.get_rank()), strategy)
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_with_other_data_stop_before_the_first_step(ranks: Pool, tmp_path: Path) -> None:
    run = RunFile(
        model_name_or_path="llama-3.2-1b", random_init=True, dataset_name="random:8", max_length=8, max_steps=2,
        output_dir=str(tmp_path / "run"),
    )  # fmt: skip
    said = ranks.run(2, run_with_other_data, run, STAGES[0])
    assert said[0] == said[1]
    assert "PlanMismatchError: Ranks 1 have cut the data otherwise than rank 0" in said[0]
    assert not (tmp_path / "run").exists()
