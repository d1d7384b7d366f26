"""Every strategy gives the losses, gradient norms and weights of one process."""

from dataclasses import replace
from functools import cache

import pytest
from checkpoint_pool import Pool
from harness import Case, Trace, train, train_ddp, train_plain

from shardwise.vocabulary.strategy import Strategy

pytestmark = pytest.mark.distributed

ONE = Strategy(precision="fp32", micro_batch_size=1, accumulation=8)
DDP = replace(ONE, accumulation=4, dp_replicate=2)
ZERO_1 = replace(ONE, accumulation=4, dp_shard=2, zero_stage=1)
ZERO_2 = replace(ZERO_1, zero_stage=2)
ZERO_3 = replace(ZERO_1, zero_stage=3)
HSDP = replace(ONE, accumulation=2, dp_replicate=2, dp_shard=2, zero_stage=3)
STAGES = {"ddp": DDP, "zero1": ZERO_1, "zero2": ZERO_2, "zero3": ZERO_3}
FP32 = {"loss": 2e-6, "norm": 5e-6, "weight": 5e-5}
"""Rounding of sums in another order; AdamW divides by the root of tiny numbers, so weights differ by more."""
FP64 = {"loss": 1e-13, "norm": 1e-13, "weight": 2e-12}


def reference(case: Case) -> Trace:
    """One process without the engine; the split does not matter to it."""
    one = replace(ONE, tuning=case.strategy.tuning, accumulation=case.strategy.global_batch_size)
    return _reference(replace(case, strategy=one))


_reference = cache(train_plain)


def check(ranks: Pool, case: Case, limits: dict[str, float]) -> None:
    traces = ranks.run(case.strategy.num_ranks, train, case)
    for trace in traces:
        found = trace.difference(reference(case))
        assert all(found[what] <= limit for what, limit in limits.items()), found


@pytest.mark.parametrize("model", ["llama", "qwen2"])
@pytest.mark.parametrize("name", STAGES)
def test_fp32_equals_one_process(ranks: Pool, name: str, model: str) -> None:
    check(ranks, Case(strategy=STAGES[name], model=model, tied=model == "qwen2"), FP32)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", STAGES)
def test_fp64_equals_one_process(ranks: Pool, name: str, *, tied: bool) -> None:
    check(ranks, Case(strategy=STAGES[name], model="qwen2", tied=tied, double=True), FP64)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicated_shards_on_four_ranks(ranks: Pool, stage: int) -> None:
    strategy = replace(HSDP, zero_stage=stage)  # pyright: ignore[reportArgumentType]
    check(ranks, Case(strategy=strategy, tied=True, double=True), FP64)


def test_three_ranks(ranks: Pool) -> None:
    """3 is no power of two: the average is taken as a sum, divided afterwards.

    transformers' norms compute in fp32 even in an fp64 model, and a loss scaled by 3 rounds otherwise there.
    """
    strategy = replace(ZERO_2, dp_shard=3, accumulation=4)
    check(ranks, Case(strategy=strategy, double=True), {"loss": 1e-8, "norm": 1e-7, "weight": 2e-6})


@pytest.mark.parametrize("name", STAGES)
def test_adapters_equal_one_process(ranks: Pool, name: str) -> None:
    check(ranks, Case(strategy=replace(STAGES[name], tuning="lora"), tied=True, double=True), FP64)


@pytest.mark.parametrize(
    "strategy",
    [
        replace(ZERO_2, keep_unsharded=True),
        replace(ZERO_3, keep_unsharded=True),
        replace(ZERO_3, checkpointing="full"),
        replace(DDP, checkpointing="selective"),
        replace(ZERO_3, loss="chunked"),
        replace(ZERO_3, loss="fused"),
        replace(ZERO_3, micro_batch_size=2, accumulation=2),
        replace(ONE, checkpointing="full", loss="chunked"),
    ],
    ids=["zero2-whole", "zero3-whole", "full", "selective", "chunked", "fused", "rows", "one-card"],
)
def test_levers_change_no_result(ranks: Pool, strategy: Strategy) -> None:
    check(ranks, Case(strategy=strategy, double=True), FP64)


@pytest.mark.parametrize(("stage", "tuning"), [(0, "full"), (1, "full"), (2, "full"), (3, "full"), (3, "lora")])
def test_fused_loss_of_some_tokens_of_a_tied_head(ranks: Pool, stage: int, tuning: str) -> None:
    """Rows long enough that logits are made for some of them only; the embedding adds to the head's gradient."""
    split = {0: DDP, 1: ZERO_1, 2: ZERO_2, 3: ZERO_3}[stage]
    strategy = replace(split, loss="fused", tuning=tuning, micro_batch_size=4, accumulation=1)  # pyright: ignore[reportArgumentType]
    check(ranks, Case(strategy=strategy, tied=True, double=True, max_tokens=150, steps=3), FP64)


@pytest.mark.parametrize("model", ["mistral", "qwen3", "gemma", "gemma2", "gemma3"])
def test_families(ranks: Pool, model: str) -> None:
    """Fused loss too: Gemma 2 caps its logits."""
    strategy = replace(ZERO_3, loss="fused", checkpointing="full")
    attention = "eager" if model == "gemma2" else "sdpa"  # transformers has no other for it
    case = Case(strategy=strategy, model=model, tied=model.startswith("gemma"), double=True, steps=3)
    check(ranks, replace(case, attention=attention), {**FP64, "weight": 1e-8})  # norms compute in fp32, see above


def test_stage_0_equals_distributed_data_parallel(ranks: Pool) -> None:
    case = Case(strategy=DDP)
    ours, theirs = ranks.run(2, train, case)[0], ranks.run(2, train_ddp, case)[0]
    found = ours.difference(theirs)
    assert found["loss"] <= 5e-7, found
    assert found["norm"] <= 1e-6, found
    assert found["weight"] <= 2e-5, found
