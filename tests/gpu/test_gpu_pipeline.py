"""A pipeline over NCCL equals one process on the CPU in fp32: every schedule, tied and untied, beside other axes."""

from dataclasses import replace
from functools import cache

import pytest
from gpu_ranks import on_cards, train_all
from harness import Case, Trace, train_plain

from shardwise.launch.local import LaunchOptions, launch
from shardwise.vocabulary.strategy import Strategy

ONE = Strategy(precision="fp32", micro_batch_size=1, accumulation=8)
F1B = replace(ONE, pp=2)
ZERO_BUBBLE = replace(F1B, pipeline_schedule="zero_bubble")
FP32 = {"loss": 2e-5, "norm": 2e-4, "weight": 5e-4}
"""Other kernels than the CPU's sum in another order; AdamW divides by the root of tiny numbers."""


def case_of(strategy: Strategy, *, tied: bool = False) -> Case:
    return Case(strategy=strategy, tied=tied, model="qwen2", layers=5, vocab_size=96, device="cuda")


TWO = {
    "gpipe": case_of(replace(F1B, pipeline_schedule="gpipe")),
    "1f1b-tied": case_of(F1B, tied=True),
    "interleaved": case_of(replace(F1B, pipeline_schedule="interleaved_1f1b", virtual_stages=2)),
    "zero-bubble-tied": case_of(ZERO_BUBBLE, tied=True),
    "compiled": case_of(replace(F1B, compile_blocks=True)),
    "full-chunked": case_of(replace(F1B, checkpointing="full", loss="chunked")),
    "lora": case_of(replace(F1B, tuning="lora"), tied=True),
}
FOUR = {
    "ddp": case_of(replace(F1B, dp_replicate=2, accumulation=4), tied=True),
    "zero1": case_of(replace(F1B, dp_shard=2, zero_stage=1, accumulation=4), tied=True),
    "zero2": case_of(replace(F1B, dp_shard=2, zero_stage=2, accumulation=4)),
    "zero3": case_of(replace(F1B, dp_shard=2, zero_stage=3, accumulation=4)),
    "zero-bubble-zero1": case_of(replace(ZERO_BUBBLE, dp_shard=2, zero_stage=1, accumulation=4)),
    "four-stages": case_of(replace(F1B, pp=4), tied=True),
    "tensor": case_of(replace(F1B, tp=2, sequence_parallel=True), tied=True),
}


@cache
def traces(num_ranks: int) -> dict[str, Trace]:
    cases = TWO if num_ranks == 2 else FOUR
    return launch(on_cards, (train_all, cases), LaunchOptions(num_ranks=num_ranks, device="cuda"))


@cache
def reference(case: Case) -> Trace:
    one = replace(ONE, tuning=case.strategy.tuning)
    return train_plain(replace(case, strategy=one, device="cpu"))


def check(name: str, case: Case, num_ranks: int) -> None:
    found = traces(num_ranks)[name].difference(reference(case))
    assert all(found[what] <= limit for what, limit in FP32.items()), found


@pytest.mark.parametrize("name", TWO)
def test_two_stages_equal_one_process(name: str) -> None:
    check(name, TWO[name], 2)


@pytest.mark.parametrize("name", FOUR)
def test_stages_beside_other_axes_on_four_cards(name: str) -> None:
    check(name, FOUR[name], 4)
