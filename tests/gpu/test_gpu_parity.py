"""Every strategy on real cards over NCCL equals one process on the CPU, in fp32; bf16 stays near it."""

from dataclasses import replace
from functools import cache

import pytest
from gpu_ranks import cost_all, on_cards, train_all, zero_gradients_in_bf16
from harness import Case, StepCost, Trace, train_plain

from shardwise.launch.local import LaunchOptions, launch
from shardwise.vocabulary.strategy import Strategy

ONE = Strategy(precision="fp32", micro_batch_size=1, accumulation=8)
DDP = replace(ONE, accumulation=4, dp_replicate=2)
ZERO_1 = replace(ONE, accumulation=4, dp_shard=2, zero_stage=1)
ZERO_2 = replace(ZERO_1, zero_stage=2)
ZERO_3 = replace(ZERO_1, zero_stage=3)
HSDP = replace(ONE, accumulation=2, dp_replicate=2, dp_shard=2, zero_stage=3)
TP = replace(ONE, tp=2)
SP = replace(TP, sequence_parallel=True)
TP_ZERO_3 = replace(SP, accumulation=4, dp_shard=2, zero_stage=3)
FP32 = {"loss": 2e-5, "norm": 2e-4, "weight": 5e-4}
"""Other kernels than the CPU's sum in another order; AdamW divides by the root of tiny numbers."""
BF16 = {"loss": 3e-2, "norm": 1e-1}
CASES = {
    "ddp": Case(strategy=DDP, device="cuda"),
    "zero1": Case(strategy=ZERO_1, device="cuda"),
    "zero2": Case(strategy=ZERO_2, device="cuda", tied=True, model="qwen2"),
    "zero3": Case(strategy=ZERO_3, device="cuda"),
    "zero3-tied": Case(strategy=ZERO_3, device="cuda", tied=True),
    "lora-ddp": Case(strategy=replace(DDP, tuning="lora"), device="cuda"),
    "lora-zero3": Case(strategy=replace(ZERO_3, tuning="lora"), device="cuda"),
    "full-chunked": Case(strategy=replace(ZERO_3, checkpointing="full", loss="chunked"), device="cuda"),
    "selective": Case(strategy=replace(ZERO_2, checkpointing="selective"), device="cuda"),
    "tensor": Case(strategy=TP, device="cuda", vocab_size=96, model="qwen3", tied=True),
    "tensor-sequence": Case(strategy=replace(SP, loss="chunked", checkpointing="full"), device="cuda", vocab_size=96),
    "tensor-lora": Case(strategy=replace(SP, tuning="lora"), device="cuda", vocab_size=96),
    "compiled": Case(strategy=replace(ZERO_3, compile_blocks=True), device="cuda", steps=3),
}
BF16_CASES = {
    f"bf16-{name}": replace(case, strategy=replace(case.strategy, precision="bf16"))
    for name, case in CASES.items()
    if name in ("ddp", "zero1", "zero3", "lora-zero3", "tensor", "tensor-sequence")
}
ON_FOUR = {
    "hsdp": Case(strategy=HSDP, device="cuda"),
    "tensor-zero3": Case(strategy=TP_ZERO_3, device="cuda", vocab_size=96, model="qwen3"),
}


@cache
def traces(num_ranks: int) -> dict[str, Trace]:
    cases = {**CASES, **BF16_CASES} if num_ranks == 2 else ON_FOUR
    return launch(on_cards, (train_all, cases), LaunchOptions(num_ranks=num_ranks, device="cuda"))


@cache
def costs(device: str) -> dict[str, StepCost]:
    cases = {name: Case(strategy=strategy, device=device) for name, strategy in
             {"ddp": DDP, "zero1": ZERO_1, "zero2": ZERO_2, "zero3": ZERO_3}.items()}  # fmt: skip
    return launch(on_cards, (cost_all, cases), LaunchOptions(num_ranks=2, device="cuda"))


@cache
def reference(case: Case) -> Trace:
    one = replace(ONE, tuning=case.strategy.tuning, accumulation=case.strategy.global_batch_size)
    return train_plain(replace(case, strategy=one, device="cpu"))


def check(name: str, case: Case, limits: dict[str, float], num_ranks: int = 2) -> None:
    found = traces(num_ranks)[name].difference(reference(case))
    assert all(found[what] <= limit for what, limit in limits.items()), found


@pytest.mark.parametrize("name", CASES)
def test_fp32_equals_one_process(name: str) -> None:
    check(name, CASES[name], FP32)


@pytest.mark.parametrize("name", BF16_CASES)
def test_bf16_stays_near(name: str) -> None:
    check(name, BF16_CASES[name], BF16)


@pytest.mark.parametrize("name", ON_FOUR)
def test_two_axes_on_four_cards(name: str) -> None:
    check(name, ON_FOUR[name], FP32, num_ranks=4)


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3"])
def test_messages_on_cards_are_counted(name: str) -> None:
    """The dispatch mode sees what autograd's own threads send."""
    ops = {one.op: one.count for one in costs("cuda")[name].collectives}
    expected = {
        "ddp": {"all_reduce": 5},
        "zero1": {"all_gather": 5, "reduce_scatter": 5, "all_reduce": 1},
        "zero2": {"all_gather": 20, "reduce_scatter": 20, "all_reduce": 1},
        "zero3": {"all_gather": 36, "reduce_scatter": 20, "all_reduce": 1},
    }[name]
    totals = dict.fromkeys(expected, 0)
    for one in costs("cuda")[name].collectives:
        totals[one.op] += one.count
    assert totals == expected, ops


def test_bf16_reductions_leave_no_gradient_zero() -> None:
    assert launch(on_cards, (zero_gradients_in_bf16,), LaunchOptions(num_ranks=2, device="cuda")) == []
