from __future__ import annotations

import dataclasses
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.factories import make_cluster, make_job, make_ledger, make_model, make_plan

from shardwise.planner import reasons
from shardwise.report import words
from shardwise.report.style import PIPED_WIDTH, Style
from shardwise.report.table import Column, render_table
from shardwise.report.text import ledger_page, plan_page
from shardwise.vocabulary.ledger import LedgerRow
from shardwise.vocabulary.plan import Refusal
from shardwise.vocabulary.strategy import Strategy
from shardwise.vocabulary.units import format_rate

PLAIN = Style(width=140)
ANSI = re.compile(r"\033\[[0-9;]*m")


class Stream(io.StringIO):
    def __init__(self, tty: bool, encoding: str = "utf-8") -> None:
        super().__init__()
        self.tty = tty
        self.named = encoding

    def isatty(self) -> bool:
        return self.tty

    @property
    def encoding(self) -> str:  # type: ignore[override]  # StringIO has none; a real stream has
        return self.named


@pytest.mark.parametrize(
    ("tty", "environ", "color"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": "0"}, False),
        (True, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, True),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_color_follows_the_stream_and_the_environment(tty: bool, environ: dict[str, str], color: bool) -> None:
    assert Style.of(Stream(tty), environ).color is color


def test_width_follows_columns() -> None:
    assert Style.of(Stream(False), {}).width == PIPED_WIDTH
    assert Style.of(Stream(True), {"COLUMNS": "71"}).width == 71
    assert Style.of(Stream(False), {"COLUMNS": "0"}).width == PIPED_WIDTH


def test_plain_text_for_streams_without_unicode() -> None:
    style = Style.of(Stream(False, "ascii"), {})
    page = plan_page(make_plan(), style)
    assert page.isascii()
    assert "> ZeRO-2" in page


def test_control_characters_are_shown_not_sent() -> None:
    plan = make_plan(reason="red \033[31m alert \x07")
    assert "\033" not in plan_page(plan, PLAIN)
    assert "\\x1b[31m" in plan_page(plan, PLAIN)


def test_the_page_answers_what_was_asked() -> None:
    plan = make_plan()
    page = plan_page(plan, PLAIN)
    taken = plan.recommended
    assert taken is not None
    assert "qwen2.5-1.5b, 1.54B parameters in 28 blocks" in page
    assert "2 × rtx-5090 (34.2 GB = 31.8 GiB each), pcie5-x8 at 31.5 GB/s one way (datasheet)" in page
    assert "micro-batch 2 × accumulation 8 × 2 data-parallel ranks = 32 sequences = 65,536 tokens" in page
    assert f"Why: {plan.reason}" in page
    assert f"rule: {plan.rules[0]}" in page
    assert plan.refusals[0].message in page
    assert f"$ {plan.advice[0].command}" in page
    assert "24.6 GB     27.8 GB  16 B x 1.54e9" in page
    device = taken.memory.device_bytes
    assert f"{device / 1e9:.1f} GB ({0.93 * device / 1e9:.1f}–{1.08 * device / 1e9:.1f}) of 32.2 GB usable" in page


def test_each_strategy_has_its_categories_and_they_add_up() -> None:
    page = plan_page(make_plan(), PLAIN)
    line = next(line for line in page.splitlines() if line.startswith("▸  ZeRO-2"))
    numbers = [float(text) for text in re.findall(r"(?<= )\d+\.\d(?= )", line)]
    assert sum(numbers[:6]) == pytest.approx(numbers[6], abs=0.3)


def test_what_does_not_fit_says_how_much_is_missing() -> None:
    plan = make_plan()
    worst = plan.candidates[-1]
    missing = worst.memory.device_bytes - (plan.cluster.gpu.memory_bytes - 2_000_000_000)
    assert f"needs {missing / 1e9:.2f} GB more" in plan_page(plan, PLAIN)


def test_the_usual_page_shows_the_best_of_each_split_and_all_shows_all() -> None:
    plan = make_plan()
    few, every = plan_page(plan, PLAIN), plan_page(plan, PLAIN, every_candidate=True)
    assert few.count("ZeRO-3") == 1
    assert every.count("ZeRO-3") == 2
    assert "1 more candidate with --all" in few
    assert "with --all" not in every


def test_nothing_fits() -> None:
    plan = make_plan(recommended=None, reason="The smallest needs 60 GB.")
    page = plan_page(plan, PLAIN)
    assert "Nothing fits.\n  The smallest needs 60 GB." in page
    assert "Would help" in page
    assert "▸" not in page


@pytest.mark.parametrize("width", [24, 40, 59, 60, 72, 80, 100, 120, 200])
def test_the_page_fits_its_width(width: int) -> None:
    page = plan_page(make_plan(), Style(width=width))
    lines = [line for line in page.splitlines() if not line.lstrip().startswith("$ ")]
    table = [line for line in lines if len(line) > width]
    # Columns that are always shown need 72; below that the strategies are told as lines, the envelope's keep two.
    assert not table or width < 72
    colored = ANSI.sub("", plan_page(make_plan(), Style(width=width, color=True)))
    assert [len(line) for line in colored.splitlines() if "GB = 1e9" in line] == [
        len(line) for line in page.splitlines() if "GB = 1e9" in line
    ]


def test_ledger_shows_both_and_the_error() -> None:
    page = ledger_page(make_ledger(), PLAIN)
    assert re.search(r"step +1\.92 s +2\.04 s +-5\.9 %", page)
    assert re.search(r"parameter +6\.18 GB +6\.18 GB +exact", page)
    assert re.search(r"device +25\.4 GB +- +no driver figure", page)
    assert "torch 2.13.0, nccl 2.28.9" in page
    assert "simulated" not in page


def test_ledger_shows_the_simulation_where_there_is_one() -> None:
    ledger = dataclasses.replace(
        make_ledger(), rows=(LedgerRow(kind="wire", name="all_gather", unit="bytes", predicted=1e9, simulated=1e9),)
    )
    assert re.search(r"all_gather +1 GB +1 GB +-", ledger_page(ledger, PLAIN))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.92, "1.92 s (1.73–2.17)"),
        (0.0484, "48.4 ms (43.6–54.7)"),
        (250.0, "250 s (225–282)"),
        (3e-5, "30.0 us (27.0–33.9)"),
    ],
)
def test_an_interval_has_one_unit(seconds: float, text: str) -> None:
    assert words.seconds_interval(seconds, (0.9 * seconds, 1.13 * seconds)) == text


def test_an_interval_that_is_a_point_is_not_shown() -> None:
    assert words.bytes_interval(21.3e9, (21.3e9, 21.3e9)) == "21.3 GB"


@pytest.mark.parametrize(
    ("value", "text"), [(34133.3, "34,100"), (5.254, "5.25"), (123456789.0, "123,000,000"), (0.0, "0")]
)
def test_rates_have_three_digits(value: float, text: str) -> None:
    assert format_rate(value) == text


@pytest.mark.parametrize(("chance", "text"), [(0.0, "under 1 %"), (0.12, "12 %"), (1.0, "over 99 %")])
def test_no_prediction_is_certain(chance: float, text: str) -> None:
    assert reasons.chance(chance) == text


def test_nodes_and_mixtures_are_told() -> None:
    cluster = make_cluster(num_nodes=2)
    assert words.describe_cluster(cluster).startswith("2 nodes × 2 × rtx-5090")
    mixture = make_job(model=make_model(num_experts=8, num_experts_per_tok=2))
    assert "active" in words.describe_model(mixture)


@given(st.integers(20, 200), st.lists(st.tuples(st.text(max_size=20), st.integers(0, 3)), min_size=1, max_size=8))
def test_tables_leave_out_columns_until_they_fit(width: int, columns: list[tuple[str, int]]) -> None:
    style = Style(width=width)
    made: list[Column[int]] = [
        Column(title=f"c{i}", cell=lambda row, text=text: text, priority=priority)
        for i, (text, priority) in enumerate(columns)
    ]
    always = sum(max(len(f"c{i}"), len(style.plain(text))) + 2 for i, (text, p) in enumerate(columns) if p == 0) - 2
    lines = render_table(made, [1, 2], style)
    assert len(lines) == 3
    assert max(map(len, lines)) <= max(width, always)


def test_refusals_that_say_the_same_are_told_once() -> None:
    strategies = [Strategy(tp=tp) for tp in (2, 4, 8, 16)]
    refusals = tuple(Refusal(strategy=s, rule="slow_link", message="too slow") for s in strategies)
    page = plan_page(make_plan(refusals=(*refusals, Refusal(strategy=None, rule="batch", message="odd"))), PLAIN)
    assert "  TP 2, TP 4 and 2 others: too slow [slow_link]\n  the job: odd [batch]\n" in page


def test_a_plan_without_candidates_says_so() -> None:
    assert "Nothing can run as asked." in plan_page(make_plan(recommended=None, candidates=()), PLAIN)


def test_sizes_of_a_table_have_one_unit_that_suits_them() -> None:
    assert words.Scale.of(4_278_000, 361_700).text(361_700) == "0.36 MB"
    assert words.Scale.of(43e9).text(2.345e9) == "2.3 GB"
    assert words.format_size(0) == "0 B"
