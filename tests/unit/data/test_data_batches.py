from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError, DataError, PlanMismatchError
from shardwise.trainer.data.batches import BatchOptions, BatchPlan, BatchState, place, plan_batches, shuffled
from shardwise.trainer.data.store import TokenizedSet, from_samples

WORLDS = (1, 2, 3, 4)


def make_set(lengths: list[int]) -> TokenizedSet:
    return from_samples([[7] * length for length in lengths])


def plan(lengths: list[int], **options: Any) -> BatchPlan:
    defaults: dict[str, Any] = {"global_batch": 8, "micro_batch": 2, "num_ranks": 1, "max_length": 64}
    return plan_batches(make_set(lengths), BatchOptions(**{**defaults, **options}))


cases = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 64), min_size=1, max_size=60),
        "global_batch": st.integers(1, 20),
        "micro_batch": st.integers(1, 5),
        "packing": st.booleans(),
        "seed": st.integers(0, 3),
        "num_train_epochs": st.sampled_from([0.5, 1.0, 2.0]),
    }
)


@given(cases)
def test_ranks_get_equal_steps_and_together_the_global_step(case: dict[str, Any]) -> None:
    plans = {world: plan(num_ranks=world, **case) for world in WORLDS}
    reference = plans[1]
    assert {one.fingerprint for one in plans.values()} == {reference.fingerprint}
    assert {one.num_steps for one in plans.values()} == {reference.num_steps}
    for world, one in plans.items():
        for step in range(one.num_steps):
            ranks = [one.for_rank(step, rank) for rank in range(world)]
            assert {len(micros) for micros in ranks} == {one.num_micro_steps(step)}
            seen = [sample for micros in ranks for micro in micros for sample in micro.sample_ids]
            assert len(seen) == len(set(seen))
            assert sorted(seen) == sorted(reference.sample_ids(step))
            filled = [micro for micros in ranks for micro in micros if not micro.is_empty]
            assert sorted(micro.rows for micro in filled) == sorted(
                micro.rows for micro in reference.micro_batches(step)
            )


@given(cases)
def test_an_epoch_is_every_sample_once(case: dict[str, Any]) -> None:
    doubled: dict[str, Any] = {**case, "num_train_epochs": 2.0}
    one = plan(**doubled)
    for epoch in range(2):
        steps = range(epoch * one.steps_per_epoch, (epoch + 1) * one.steps_per_epoch)
        seen = [sample for step in steps for sample in one.sample_ids(step)]
        assert sorted(seen) == list(range(len(case["lengths"])))


@given(cases, st.sampled_from(WORLDS), st.integers(0, 5))
def test_a_resumed_run_draws_the_same_samples_on_other_ranks(case: dict[str, Any], world: int, step: int) -> None:
    before = plan(**case)
    step = min(step, before.num_steps - 1)
    saved = dataclasses.asdict(before.state(step))
    elsewhere: dict[str, Any] = {**case, "num_ranks": world, "micro_batch": 3}
    after = plan(**elsewhere)
    first = after.resume(BatchState(**saved))
    assert first == step
    assert saved["epoch"] == step // before.steps_per_epoch
    for later in range(first, after.num_steps):
        assert after.sample_ids(later) == before.sample_ids(later)


def test_supervised_tokens_of_a_step_are_what_the_ranks_hold() -> None:
    one = plan([5, 9, 3, 12, 7, 1, 30], num_ranks=2, global_batch=4)
    for step in range(one.num_steps):
        assert one.num_supervised_tokens(step) == one.num_tokens(step) - len(one.sample_ids(step))


def test_the_last_step_is_smaller_or_dropped() -> None:
    kept = plan([4] * 10, num_ranks=3)
    assert (kept.num_steps, len(kept.sample_ids(1))) == (2, 2)
    assert kept.num_micro_steps(1) == 1
    assert [micro.is_empty for rank in range(3) for micro in kept.for_rank(1, rank)].count(True) == 2
    dropped = plan([4] * 10, dataloader_drop_last=True)
    assert (dropped.num_steps, len(dropped.sample_ids(0))) == (1, 8)
    with pytest.raises(DataError, match="gives 5 rows, fewer than the global batch of 8"):
        plan([4] * 5, dataloader_drop_last=True)


def test_epochs_differ_and_evaluation_keeps_the_order() -> None:
    one = plan([4] * 32, num_train_epochs=2)
    assert one.sample_ids(0) != one.sample_ids(one.steps_per_epoch)
    still = plan([4] * 32, shuffle=False)
    assert still.sample_ids(0) == tuple(range(8))


def test_max_steps_repeats_the_set() -> None:
    one = plan([4] * 10, max_steps=7)
    assert (one.steps_per_epoch, one.num_steps, one.epoch(6)) == (2, 7, 3)
    with pytest.raises(IndexError, match="step 7 is outside the plan of 7 steps"):
        one.sample_ids(7)


def test_the_shuffle_is_frozen() -> None:
    """A changed order would break every resume, so the first values are pinned."""
    assert shuffled(10, seed=42, epoch=0).tolist() == [2, 9, 7, 5, 3, 8, 0, 6, 1, 4]
    assert sorted(shuffled(1000, 1, 2).tolist()) == list(range(1000))
    assert abs(np.corrcoef(np.arange(10000), shuffled(10000, 0, 0))[0, 1]) < 0.03


def test_resume_refuses_another_set_seed_or_end() -> None:
    one = plan([4, 5, 6] * 8)
    with pytest.raises(PlanMismatchError, match="data file, the tokenizer or template"):
        plan([4, 5, 7] * 8).resume(one.state(1))
    with pytest.raises(PlanMismatchError, match="global batch has changed"):
        plan([4, 5, 6] * 8, global_batch=4).resume(one.state(1))
    with pytest.raises(PlanMismatchError, match="has seed 42, this run has 1"):
        plan([4, 5, 6] * 8, seed=1).resume(one.state(1))
    with pytest.raises(PlanMismatchError, match="stands at step 3, but this run ends at 2"):
        plan([4, 5, 6] * 8, max_steps=2).resume(plan([4, 5, 6] * 8).state(3))


def test_the_layout_fingerprint_sees_what_the_plan_does_not() -> None:
    two, four = plan([4] * 16, num_ranks=2), plan([4] * 16, num_ranks=4)
    assert two.fingerprint == four.fingerprint
    assert two.layout_fingerprint != four.layout_fingerprint


def test_ranks_share_the_work_evenly() -> None:
    lengths = np.random.default_rng(0).integers(5, 2000, size=512).tolist()
    one = plan(lengths, global_batch=128, micro_batch=2, num_ranks=8, max_length=2048)
    shares = [sum(len(make_row) for micro in one.for_rank(0, rank) for make_row in micro.rows) for rank in range(8)]
    assert shares == [16] * 8
    naive = _naive_balance(lengths, one)
    assert one.balance(0) > 0.9 > naive


def _naive_balance(lengths: list[int], one: BatchPlan) -> float:
    """What the usual sampler gives: the step in its shuffled order, dealt to the ranks in turn."""
    costs = [max(lengths[i] for i in one.sample_ids(0)[start : start + 2]) for start in range(0, 128, 2)]
    rounds = [costs[start : start + 8] for start in range(0, 64, 8)]
    return sum(costs) / 8 / sum(max(each) for each in rounds)


def test_place_gives_the_heaviest_to_the_lightest_rank() -> None:
    assert place([5, 4, 3, 1, 1], 2) == [[0, 3, 4], [1, 2, None]]  # loads 5 and 4, then 6 and 7, then 7 and 7


def test_all_problems_of_the_options_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        plan([4], global_batch=0, num_ranks=0, max_steps=0, packing=True, max_length=None)
    assert len(caught.value.problems) == 4


def test_the_effective_batch_in_words() -> None:
    text = plan([10] * 20, num_ranks=2).describe()
    assert "2 x 2 x 2 ranks = 8 sequences = about 80 tokens a step" in text
    assert "the remaining sequences (4) form a smaller last step" in text
    uneven = plan([10] * 32, num_ranks=3).describe()
    assert "2 x 2 x 3 ranks = 12 sequences, of which 4 stay empty: the global batch is 8" in uneven


def test_a_global_batch_above_the_set_is_told() -> None:
    text = plan([10] * 5, num_ranks=2).describe()
    assert "Warning: the set has only 5 sequences, fewer than the global batch of 8: a step is a whole epoch" in text
    assert "Lower global_batch_size to 5 or less" in text
    packed = plan([10] * 5, packing=True).describe()
    assert "the set has only 1 packed rows of 64 tokens" in packed
    assert "or turn packing off" in packed


def test_resuming_reads_and_skips_nothing() -> None:
    """Far into a run of many epochs, only the epoch of the next step is ever put in order."""
    one = plan([4] * 100, max_steps=10**9)
    orders: list[int] = []
    shuffle = one._epoch_order  # pyright: ignore[reportPrivateUsage]

    def counted(epoch: int) -> Any:
        orders.append(epoch)
        return shuffle(epoch)

    one._epoch_order = counted  # type: ignore[assignment]  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    step = 10**9 - 5
    assert one.resume(plan([4] * 100, max_steps=10**9).state(step)) == step
    assert orders == []
    assert one.for_rank(step, 0)
    assert set(orders) == {step // 13}
