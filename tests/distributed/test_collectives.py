"""The messages and the stored bytes of a real step are those that the axes' `sends` and the masters' arithmetic say."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from checkpoint_pool import Pool
from harness import Case, StepCost, cost_of_step, make_config

from shardwise.axes.replicate import cost as replicate
from shardwise.axes.shard import cost as shard
from shardwise.facts.config import model_from_config
from shardwise.levers.optimizer import cost as optimizer
from shardwise.vocabulary.job import Job, LoraSettings
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.strategy import Strategy

pytestmark = pytest.mark.distributed

BASE = Strategy(precision="bf16", micro_batch_size=1, accumulation=4)
DDP = replace(BASE, dp_replicate=2)
ZERO_1 = replace(BASE, dp_shard=2, zero_stage=1)
ZERO_2 = replace(ZERO_1, zero_stage=2)
ZERO_3 = replace(ZERO_1, zero_stage=3)
HSDP = replace(BASE, dp_replicate=2, dp_shard=2, zero_stage=3, accumulation=2)


def predicted(case: Case) -> Counter[tuple[Any, int, int]]:
    shape = model_from_config(make_config(case).to_dict(), "tiny")
    job = Job(
        model=shape,
        tuning=case.strategy.tuning,
        sequence_length=case.max_tokens,
        precision=case.strategy.precision,
        reduce_dtype=case.strategy.reduce_dtype,
        lora=LoraSettings(r=4),
    )
    place = Placement(job=job, strategy=case.strategy)
    counts: Counter[tuple[Any, int, int]] = Counter()
    for message in (*replicate.sends(place), *shard.sends(place), *optimizer.sends(place)):
        counts[message.op, message.ranks, message.bytes] += message.count
    return counts


def counted(cost: StepCost) -> Counter[tuple[Any, int, int]]:
    return Counter({(one.op, one.ranks, one.bytes): one.count for one in cost.collectives})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "strategy",
    [DDP, ZERO_1, ZERO_2, ZERO_3, HSDP, replace(HSDP, zero_stage=2), replace(HSDP, reduce_dtype="bf16"),
     replace(ZERO_2, reduce_dtype="bf16"),
     replace(ZERO_2, keep_unsharded=True), replace(ZERO_3, precision="fp32"), replace(DDP, tuning="lora"),
     replace(ZERO_2, tuning="lora"), replace(ZERO_3, tuning="lora"), replace(ZERO_2, optimizer="lamb"),
     replace(ZERO_3, optimizer="lamb", tuning="lora"), replace(ZERO_3, offload="parameters")],
    ids=["ddp", "zero1", "zero2", "zero3", "hsdp3", "hsdp2", "hsdp-bf16wire", "bf16wire", "whole", "fp32", "lora-ddp",
         "lora2", "lora3", "lamb2", "lora3-lamb", "offload3"],
)  # fmt: skip
def test_messages_are_those_of_sends(ranks: Pool, strategy: Strategy, *, tied: bool) -> None:
    case = Case(strategy=strategy, tied=tied, vocab_size=96)  # even, so that no shard is padded
    costs = ranks.run(strategy.num_ranks, cost_of_step, case)
    for cost in costs:
        assert counted(cost) == predicted(case)


def test_replicas_are_summed_once_a_step() -> None:
    """Whatever the accumulation; each micro-batch only where a sum in the wire's bf16 would be rounded again."""
    once, always = (predicted(Case(strategy=replace(HSDP, reduce_dtype=dtype))) for dtype in ("fp32", "bf16"))
    reduced = [
        sum(count for (op, ranks, size), count in counts.items() if op == "all_reduce" and ranks == 2 and size > 4)
        for counts in (once, always)
    ]
    assert reduced == [5, 10]  # 3 blocks, embedding and root; twice with two micro-batches


@pytest.mark.parametrize("strategy", [DDP, ZERO_1, ZERO_2, ZERO_3], ids=["ddp", "zero1", "zero2", "zero3"])
def test_stored_bytes(ranks: Pool, strategy: Strategy) -> None:
    """fp32 masters, gradients and two moments: 4 + 4 + 8 bytes a parameter, divided by the shards."""
    case = Case(strategy=strategy, vocab_size=96)
    num_parameters = model_from_config(make_config(case).to_dict(), "tiny").num_parameters
    stored = ranks.run(2, cost_of_step, case)[0].stored
    assert stored.parameters == 4 * num_parameters // strategy.dp_shard
    assert stored.gradients == 4 * num_parameters // strategy.dp_shard
    # Every parameter also has a step counter of four bytes.
    assert 0 <= stored.optimizer - 8 * num_parameters // strategy.dp_shard <= 4 * 100
