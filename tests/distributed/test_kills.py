"""The benchmark of killed runs in small: a rank dies in a step, all die in a save; both go on as if nothing was."""

import importlib
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.distributed

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
POINTS = [
    {"kind": "run", "at": 42, "ranks": (1,), "others_after_s": 0.0, "resumed_as": "zero-3 x 2"},
    {"kind": "save", "at": 150, "ranks": (0, 1), "others_after_s": 0.0, "resumed_as": "one"},
]


@pytest.mark.timeout(600)
def test_killed_runs_go_on_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    kills: Any = importlib.import_module("checkpoint_kills")
    reference = kills.make_reference(tmp_path)
    for number, point in enumerate(POINTS):
        found = kills.check(reference, kills.Point(**point), tmp_path / str(number))
        assert found["problems"] == [], found
        assert found["resumed_after"] > 0
