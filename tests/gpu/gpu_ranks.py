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


def waits_of_steps(cases: dict[str, Case], packed: bool) -> dict[str, str]:
    """Where the host waits for the card inside the third step of each case; empty if nowhere."""
    from harness import build, make_data, make_stepper

    from shardwise.trainer.data.batches import BatchOptions, plan_batches
    from shardwise.trainer.data.collate import collate
    from shardwise.trainer.feeder import BatchForm, collate_options

    waits: dict[str, str] = {}
    for name, case in cases.items():
        skeleton, mesh = build(case)
        stepper = make_stepper(case, skeleton, mesh)
        data, strategy = make_data(case), case.strategy
        cut = BatchOptions(
            global_batch=strategy.global_batch_size, micro_batch=strategy.micro_batch_size,
            num_ranks=strategy.data_parallel, packing=packed, max_length=case.max_tokens, max_steps=3,
        )  # fmt: skip
        plan = plan_batches(data, cut)
        form = BatchForm(layout="flat" if packed else "padded", is_static=strategy.compile_blocks)
        options = collate_options(form, cut, 0)
        waits[name] = ""
        for step in range(3):
            hosted = [collate(data, micro, options).pin_memory() for micro in plan.for_rank(step, mesh.data_rank)]
            torch.cuda.synchronize()
            if step == 2:
                torch.cuda.set_sync_debug_mode("error")
            try:
                batches = [batch.to(mesh.device) for batch in hosted]
                stepper.run(batches, len(batches), plan.num_supervised_tokens(step))
            except RuntimeError as error:
                waits[name] = str(error)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return waits
