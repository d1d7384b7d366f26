"""A ledger has no row about nothing, and how busy others were is what is not ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.factories import make_candidate, make_timeline

from shardwise.cli import demo
from shardwise.cli.options import again
from shardwise.verify import busy
from shardwise.verify.ledger import ledger_json, make_ledger
from shardwise.vocabulary import codec
from shardwise.vocabulary.ledger import Ledger
from shardwise.vocabulary.measured import Measured


def test_a_cpu_has_no_rows_that_only_cards_have() -> None:
    seen = Measured(allocated_bytes=10**9, step=make_timeline())
    names = {row.name for row in make_ledger(make_candidate(), seen).rows}
    assert "allocated" in names
    assert not {"reserved", "device", "host"} & names
    card = Measured(allocated_bytes=10**9, reserved_bytes=2 * 10**9, device_bytes=3 * 10**9)
    assert {"reserved", "device"} <= {row.name for row in make_ledger(make_candidate(), card).rows}


def test_what_nobody_simulated_is_not_written(tmp_path: Path) -> None:
    ledger = make_ledger(make_candidate(), Measured(allocated_bytes=10**9))
    text = ledger_json(ledger)
    assert "simulated" not in text
    assert json.loads(text)["rows"][0]["predicted"] > 0
    (tmp_path / "ledger.json").write_text(text)
    assert codec.read_noun(Ledger, tmp_path / "ledger.json") == ledger


def test_the_share_of_others() -> None:
    before = busy.CpuTimes(everyone=100.0, ours=10.0, whole=1000.0)
    after = busy.CpuTimes(everyone=160.0, ours=40.0, whole=1200.0)
    assert busy.share_of_others(before, after) == pytest.approx(0.15)
    assert busy.share_of_others(before, before) is None
    assert busy.share_of_others(None, after) is None


def test_cpu_times_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 50 800 50 0 0 0 7 0\ncpu0 1 2 3\n")
    monkeypatch.setattr(busy, "STAT", stat)
    found = busy.read_cpu_times()
    assert found is not None
    assert found.everyone / found.whole == pytest.approx(0.15)
    monkeypatch.setattr(busy, "STAT", tmp_path / "none")
    assert busy.read_cpu_times() is None


def test_the_command_that_does_it_again_is_the_one_that_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/shardwise", "demo"])
    assert again("demo", demo.Options(steps=3)) == "shardwise demo --steps 3"
    monkeypatch.setattr("sys.argv", ["/somewhere/shardwise/__main__.py", "demo"])
    assert again("demo", demo.Options(steps=3)) == "python -m shardwise demo --steps 3"
