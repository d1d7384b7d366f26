"""The learning rate's peak, and the batch that it belongs to."""

from dataclasses import replace

import pytest

from shardwise.trainer.optimizer import optimizer_settings
from shardwise.trainer.schedule import schedule_of
from shardwise.vocabulary.run import OptimizerKey, RunFile
from shardwise.vocabulary.strategy import Strategy

RUN = RunFile(model_name_or_path="x", learning_rate=1e-4, learning_rate_base_batch=16)
BATCH_64 = Strategy(micro_batch_size=2, accumulation=8, dp_replicate=4)


@pytest.mark.parametrize(
    ("optim", "factor"), [("sgd", 4.0), ("lamb", 4.0), ("adamw_torch_fused", 2.0), ("adamw_8bit", 2.0)]
)
def test_rate_is_scaled_to_the_batch(optim: OptimizerKey, factor: float) -> None:
    schedule = schedule_of(replace(RUN, optim=optim), 100, BATCH_64)
    assert schedule.peak == pytest.approx(1e-4 * factor)
    assert schedule.num_warmup_steps == 5
    assert schedule.at(0) == 0.0
    assert schedule.at(5) == pytest.approx(schedule.peak)


def test_a_smaller_batch_lowers_the_rate_and_needs_no_warm_up() -> None:
    schedule = schedule_of(replace(RUN, learning_rate_base_batch=256), 100, BATCH_64)
    assert (schedule.peak, schedule.num_warmup_steps) == (pytest.approx(5e-5), 0)


def test_without_a_base_batch_nothing_changes() -> None:
    schedule = schedule_of(replace(RUN, learning_rate_base_batch=None), 100, BATCH_64)
    assert (schedule.peak, schedule.num_warmup_steps, schedule.kind) == (1e-4, 0, "cosine")
    default = replace(RUN, learning_rate=None, learning_rate_base_batch=None)
    assert schedule_of(default, 100, BATCH_64).peak == 2e-5
    assert schedule_of(default, 100, replace(BATCH_64, tuning="qlora")).peak == 2e-4


def test_warm_up_that_is_asked_for_wins_and_a_constant_rate_warms_up_too() -> None:
    assert schedule_of(replace(RUN, warmup_steps=20), 100, BATCH_64).num_warmup_steps == 20
    assert schedule_of(replace(RUN, warmup_ratio=0.1), 100, BATCH_64).num_warmup_steps == 10
    constant = schedule_of(replace(RUN, lr_scheduler_type="constant"), 100, BATCH_64)
    assert (constant.at(0), constant.at(50)) == (0.0, pytest.approx(2e-4))


def test_every_optimizer_of_a_run_file_has_settings() -> None:
    names = {key: optimizer_settings(replace(RUN, optim=key), 1e-4).name for key in OptimizerKey.__args__}  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
    assert names["adamw_torch"] == names["adamw_torch_fused"] == "adamw"
    assert {key: name for key, name in names.items() if not key.startswith("adamw_torch")} == {
        name: name for name in ("adamw_bf16_states", "adamw_8bit", "paged_adamw_8bit", "lamb", "sgd")
    }
