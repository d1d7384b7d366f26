"""Levers on real cards: optimizers, 4-bit weights and offload on two cards equal one; fp8 stays near bf16."""

from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import pytest
from gpu_ranks import on_cards, train_all
from harness import Case, Trace, train_plain

from shardwise.launch.local import LaunchOptions, launch
from shardwise.vocabulary.strategy import Strategy

ONE = Strategy(precision="fp32", micro_batch_size=1, accumulation=8)
DDP = replace(ONE, accumulation=4, dp_replicate=2)
ZERO_1 = replace(ONE, accumulation=4, dp_shard=2, zero_stage=1)
ZERO_3 = replace(ZERO_1, zero_stage=3)
FP32 = {"loss": 2e-5, "norm": 2e-4, "weight": 5e-4}
OFFLOADED = {
    "ddp": replace(DDP, offload="optimizer"),
    "zero1": replace(ZERO_1, offload="optimizer"),
    "zero3": replace(ZERO_3, offload="parameters"),
    "zero3-lora": replace(ZERO_3, offload="parameters", tuning="lora"),
}
_NEEDS_BITSANDBYTES = {
    "8bit": replace(ONE, optimizer="adamw_8bit"),
    "paged": replace(ONE, optimizer="paged_adamw_8bit"),
    "qlora": replace(ONE, tuning="qlora"),
}
LEVERS: dict[str, Strategy] = {
    "lamb": replace(ONE, optimizer="lamb"),
    "bf16-states": replace(ONE, optimizer="adamw_bf16_states"),
    "sgd": replace(ONE, optimizer="sgd"),
    **(_NEEDS_BITSANDBYTES if find_spec("bitsandbytes") else {}),
}
EIGHT_BIT = {"loss": 2e-4, "norm": 2e-3, "weight": 5e-3}
"""A moment whose gradient differs in its last bit may move by one of 256 steps."""


def case_of(strategy: Strategy) -> Case:
    """Wide enough for paged moments: a part of a matrix has more than 100,000 elements."""
    return Case(strategy=strategy, device="cuda", hidden_size=512, layers=2, steps=4)


def cut(strategy: Strategy, split: Strategy) -> Strategy:
    """The same lever on two cards."""
    return replace(split, optimizer=strategy.optimizer, tuning=strategy.tuning)


@cache
def on_one() -> dict[str, Trace]:
    cases = {name: case_of(strategy) for name, strategy in LEVERS.items()}
    return launch(on_cards, (train_all, cases), LaunchOptions(num_ranks=1, device="cuda"))


@cache
def on_two() -> dict[str, Trace]:
    cases = {f"offload-{name}": Case(strategy=strategy, device="cuda") for name, strategy in OFFLOADED.items()}
    for name, strategy in LEVERS.items():
        cases[f"{name}-ddp"] = case_of(cut(strategy, DDP))
        cases[f"{name}-zero3"] = case_of(cut(strategy, ZERO_3))
    return launch(on_cards, (train_all, cases), LaunchOptions(num_ranks=2, device="cuda"))


@pytest.mark.parametrize("split", ["ddp", "zero3"])
@pytest.mark.parametrize("name", LEVERS)
def test_two_cards_equal_one(name: str, split: str) -> None:
    found = on_two()[f"{name}-{split}"].difference(on_one()[name])
    limits = EIGHT_BIT if name in ("8bit", "paged") else FP32
    assert all(found[what] <= limit for what, limit in limits.items()), found


def test_paged_moments_change_nothing() -> None:
    if "paged" not in LEVERS:
        pytest.skip("paged moments need bitsandbytes")
    found = on_one()["paged"].difference(on_one()["8bit"])
    assert all(value <= 1e-6 for value in found.values()), found


@pytest.mark.parametrize("name", OFFLOADED)
def test_offloaded_training_equals_one_process(name: str) -> None:
    strategy = OFFLOADED[name]
    expected = train_plain(Case(strategy=replace(ONE, tuning=strategy.tuning)))
    found = on_two()[f"offload-{name}"].difference(expected)
    assert all(found[what] <= limit for what, limit in FP32.items()), found


def test_fp8_stays_near_bf16() -> None:
    if not find_spec("torchao"):
        pytest.skip("fp8 needs torchao")
    bf16 = case_of(replace(ZERO_3, precision="bf16", compile_blocks=True))
    cases = {"bf16": bf16, "fp8": replace(bf16, strategy=replace(bf16.strategy, precision="fp8"))}
    traces = launch(on_cards, (train_all, cases), LaunchOptions(num_ranks=2, device="cuda"))
    pairs = zip(traces["bf16"].losses, traces["fp8"].losses, strict=True)
    assert all(abs(one - other) <= 0.02 * one for one, other in pairs), traces
    assert traces["bf16"].losses != traces["fp8"].losses
