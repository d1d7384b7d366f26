"""The driver asked in a child: what happens to the child never happens to whoever asks."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.facts.machine import child, read_machine
from shardwise.facts.machine.child import ask_child, ask_cuda, count_cuda_cards, read_nvml
from shardwise.facts.machine.record import Unreadable

Runs = Callable[[str], None]


@pytest.fixture
def child_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Replace the child's interpreter by a shell script, on a machine that seems to have a card."""
    monkeypatch.setattr(child, "_has_card", lambda: True)

    def replace(body: str) -> None:
        script = tmp_path / "child.sh"
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(script))

    return replace


def test_a_crash_in_the_drivers_library_is_a_reading(child_runs: Runs) -> None:
    child_runs("kill -11 $$")
    found = read_nvml()
    assert isinstance(found, Unreadable)
    assert "SIGSEGV" in found.why
    assert found.command == "nvidia-smi -q"
    machine = read_machine()  # goes on without
    assert isinstance(machine.gpus, Unreadable)
    assert "SIGSEGV" in machine.gpus.why


def test_a_driver_that_does_not_answer(child_runs: Runs) -> None:
    child_runs("exec sleep 60")
    found = ask_child("nvml", 0.2)
    assert isinstance(found, Unreadable)
    assert "did not answer within 0.2 s" in found.why


@pytest.mark.parametrize("body", ["echo no such module >&2; exit 1", "echo half { ; echo no such module >&2"])
def test_a_child_that_says_nothing_sensible_is_quoted(child_runs: Runs, body: str) -> None:
    child_runs(body)
    found = ask_child("nvml")
    assert isinstance(found, Unreadable)
    assert "no such module" in found.why


def test_answers_come_back_with_their_gaps(child_runs: Runs, tmp_path: Path) -> None:
    said = {"driver": "580.1", "gpus": [], "pairs": [], "x": {"unreadable": "why", "command": "c"}}
    (tmp_path / "said").write_text(json.dumps(said))
    child_runs(f"cat {tmp_path / 'said'}")
    assert read_nvml() == {"driver": "580.1", "gpus": [], "pairs": [], "x": Unreadable(why="why", command="c")}
    child_runs("echo 4")
    assert count_cuda_cards() == 4


def test_the_real_child_answers() -> None:
    found = ask_child("nvml")
    assert isinstance(found, Unreadable) or {"driver", "gpus", "pairs"} <= set(found)
    assert child.answer(["wires"]) == 2
    assert child.answer([]) == 2


class FakeCuda:
    def __init__(self, codes: tuple[int, int], count: int = 0) -> None:
        self.codes, self.count = codes, count

    def cuInit(self, flags: int) -> int:
        return self.codes[0]

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.count
        return self.codes[1]


def test_cuda_cards() -> None:
    assert ask_cuda(FakeCuda((0, 0), 2)) == 2
    assert ask_cuda(FakeCuda((100, 0))) == 0
    assert ask_cuda(FakeCuda((0, 100))) == 0
    broken = ask_cuda(FakeCuda((999, 0)))
    assert isinstance(broken, Unreadable)
    assert "999" in broken.why
