"""What the ranks of the GPU tests run: many cases in one start, because starting is the dear part."""

from typing import Any

import torch
import torch.distributed as dist
from harness import Case, StepCost, Trace, cost_of_step, train

from shardwise.trainer.mesh import choose_device, join_ranks, local_rank


def on_cards(function: Any, *arguments: Any) -> Any:
    """Joins the ranks and calls a function; TF32 is off, so that fp32 means fp32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    join_ranks(choose_device(local_rank()))
    try:
        return function(*arguments)
    finally:
        dist.destroy_process_group()


def train_all(cases: dict[str, Case]) -> dict[str, Trace]:
    """Every case, one after the other."""
    return {name: train(case) for name, case in cases.items()}


def cost_all(cases: dict[str, Case]) -> dict[str, StepCost]:
    """What a step of every case costs."""
    return {name: cost_of_step(case) for name, case in cases.items()}


def zero_gradients_in_bf16() -> list[str]:
    """Parameters whose gradient is all zero after bf16 reductions over NCCL, which a wrong scalar would make it."""
    from dataclasses import replace

    from harness import batches_of, build, local_gradient, make_data, make_plan, make_stepper

    from shardwise.vocabulary.strategy import Strategy

    strategy = Strategy(dp_shard=2, zero_stage=2, reduce_dtype="bf16", accumulation=2)
    case = Case(strategy=replace(strategy), device="cuda")
    skeleton, mesh = build(case)
    stepper = make_stepper(case, skeleton, mesh)
    data = make_data(case)
    plan = make_plan(case, data, 2)
    batches = batches_of(data, plan, 0, mesh.data_rank, mesh.device)
    stepper.backward(batches, len(batches), plan.num_supervised_tokens(0))
    named = skeleton.model.named_parameters()
    return [name for name, parameter in named if not local_gradient(parameter).abs().sum().item()]
