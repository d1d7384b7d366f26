"""The time that is left: neither the first step nor a single evaluation makes it wrong."""

from __future__ import annotations

import io

import pytest

from shardwise.trainer.progress import Progress


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("shardwise.trainer.progress.time.monotonic", made.monotonic)
    return made


def run(bar: Progress, clock: Clock, steps: range, seconds: float) -> None:
    for step in steps:
        clock.now += seconds
        bar.step(step, {"loss": 1.0}, logs=True)


def test_the_first_step_tells_nothing(clock: Clock) -> None:
    stream = io.StringIO()
    bar = Progress(100, 0, speaks=True, stream=stream)
    run(bar, clock, range(1, 2), 300.0)  # it compiles
    assert bar.seconds_left(1) is None
    assert stream.getvalue() == "step 1/100 | loss 1.0000\n"
    run(bar, clock, range(2, 11), 2.0)
    assert bar.seconds_left(10) == pytest.approx(180.0)
    assert "step 10/100 | loss 1.0000 | 3 min 00 s left" in stream.getvalue()


def test_pauses_count_as_often_as_they_come(clock: Clock) -> None:
    bar = Progress(100, 0, speaks=False)
    with bar.pause():  # before the first step, once
        clock.now += 1000.0
    for part in range(5):
        run(bar, clock, range(10 * part + 1, 10 * part + 11), 2.0)
        with bar.pause():  # an evaluation after every tenth step
            clock.now += 30.0
    assert bar.seconds_left(50) == pytest.approx(50 * 2.0 + 5 * 30.0)


def test_one_slow_step_changes_little(clock: Clock) -> None:
    bar = Progress(1000, 0, speaks=False)
    run(bar, clock, range(1, 20), 1.0)
    clock.now += 500.0
    run(bar, clock, range(20, 22), 1.0)
    assert bar.seconds_left(21) == pytest.approx(979.0)


def test_a_resumed_run_counts_its_own_steps(clock: Clock) -> None:
    bar = Progress(100, 90, speaks=False)
    run(bar, clock, range(91, 94), 5.0)
    assert bar.seconds_left(93) == pytest.approx(35.0)
