"""A run that no strategy may carry out says why, instead of pointing to refusals that nobody sees."""

from __future__ import annotations

import pytest

from shardwise.errors import DoesNotFitError
from shardwise.facts.catalog import parse_gpus
from shardwise.verify import trials
from shardwise.vocabulary.run import RunFile


def test_refusals_are_in_the_message() -> None:
    run = RunFile(model_name_or_path="qwen2.5-0.5b", use_peft=True, lora_target_modules=("nope",))
    plan = trials.plan_run(run, parse_gpus("2xh100"))
    assert not plan.candidates
    with pytest.raises(DoesNotFitError) as caught:
        trials.prepare(run, plan)
    assert "nope" in str(caught.value)
    assert "smaller model" not in str(caught.value)
    assert len(caught.value.problems) == 1 + len({refusal.message for refusal in plan.refusals})
