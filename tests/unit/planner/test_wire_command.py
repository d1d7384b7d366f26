"""`shardwise wire`: the article's slow wire, JSON, and every problem at once."""

from __future__ import annotations

import json
import math

import pytest

from shardwise.cli.main import main
from shardwise.facts import catalog
from shardwise.planner.passes import OPS, beside, hiding_compute_seconds, passings, rule_compute_seconds


def test_the_slow_wire_of_the_article(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wire", "--bytes", "700MB", "--link", "10gbe", "--ranks", "8", "--compute", "600ms"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for figure in ("560 ms", "1.68 s", "2.80", "612.5 MB", "do not fully shard over this wire"):
        assert figure in printed
    assert "38 % of it hides and 1.02 s stay exposed" in printed


def test_json_has_every_collective(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wire", "--bytes", "1GB", "--link", "nvlink4", "--ranks", "4", "--compute", "10ms", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in data["messages"]}
    assert set(rows) == {*OPS, "full sharding"}
    assert math.isclose(rows["all_reduce"]["sent_bytes"], 1.5e9)
    assert rows["all_gather"]["beside_compute"]["hides_by_rule"]
    assert rows["full sharding"]["attained_seconds"] > rows["all_gather"]["attained_seconds"]


def test_all_problems_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wire", "--bytes", "lots", "--link", "10gbe", "--ranks", "1", "--compute", "5"]) == 2
    printed = capsys.readouterr().err
    for piece in ("--bytes", "--ranks must be 2", "--compute"):
        assert piece in printed
    assert main(["wire", "--bytes", "1GB"]) == 2
    assert "--link 10gbe" in capsys.readouterr().err


def test_overlap_leaves_what_compute_does_not_cover() -> None:
    link = catalog.link("pcie5-x8-host")
    gather = passings(link, 400_000_000, 2)[1]
    short, long = (beside(gather, link, seconds) for seconds in (1e-3, 1.0))
    assert 0 < short.exposed_seconds < gather.attained_seconds
    assert long.exposed_seconds == 0
    assert 1.0 < long.slowed_compute_seconds < 1.05


def test_the_compute_that_is_named_hides_all_and_no_less_does() -> None:
    for name in ("nvlink4", "pcie5-x8-host", "10gbe", "ndr-400"):
        link = catalog.link(name)
        for passing in passings(link, 400_000_000, 8):
            enough = hiding_compute_seconds(passing, link)
            assert beside(passing, link, enough * 1.001).exposed_seconds == 0
            assert beside(passing, link, enough * 0.98).exposed_seconds > 0
            assert beside(passing, link, rule_compute_seconds(passing) * 1.001).hides_by_rule
            assert not beside(passing, link, rule_compute_seconds(passing) * 0.999).hides_by_rule


def test_without_compute_the_page_says_how_much_would_hide_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wire", "--bytes", "700MB", "--link", "10gbe", "--ranks", "8"]) == 0
    page = capsys.readouterr().out
    assert "hides behind  by the 0.3 rule" in page
    row = next(line for line in page.splitlines() if line.startswith("full sharding "))
    assert row.split()[-4:] == ["1.59", "s", "5.6", "s"]


def test_rule_and_overlap_may_disagree_and_the_page_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wire", "--bytes", "436MB", "--link", "ndr-400", "--ranks", "16", "--compute", "28ms"]) == 0
    assert "The rule is careful" in " ".join(capsys.readouterr().out.split())
    assert main(["wire", "--bytes", "436MB", "--link", "pcie4-x8-host", "--ranks", "8", "--compute", "140ms"]) == 0
    assert "The rule is too kind here" in " ".join(capsys.readouterr().out.split())
