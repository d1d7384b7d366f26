"""What the engine runs is asked in one place, and the planner's sentences follow it."""

from __future__ import annotations

import importlib.util

import pytest

from shardwise.axes import engine
from shardwise.vocabulary.strategy import Axis, Strategy


@pytest.mark.parametrize("axis", Axis)
def test_an_axis_runs_where_it_can_be_applied(axis: Axis) -> None:
    room = {"pp": "pipeline", "dp_replicate": "replicate", "dp_shard": "shard", "tp": "tensor"}[axis.value]
    assert engine.runs_axis(axis) is (importlib.util.find_spec(f"shardwise.axes.{room}.apply") is not None)


def test_data_parallel_runs() -> None:
    assert engine.runs(Strategy())
    assert engine.runs(Strategy(dp_replicate=2, dp_shard=4, zero_stage=3))


def test_what_does_not_run_is_named_with_its_degree(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_but_tensor(axis: Axis) -> bool:
        return axis is not Axis.TP

    monkeypatch.setattr(engine, "runs_axis", all_but_tensor)
    sentences = list(engine.not_run(Strategy(tp=4, dp_replicate=2)))
    assert len(sentences) == 1
    assert "tensor parallel (tp 4)" in sentences[0]
    assert not engine.runs(Strategy(tp=4))
