from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.factories import make_cluster, make_job, make_model, make_plan, make_timeline

from shardwise.report import charts, svg
from shardwise.report.picture import plan_picture
from shardwise.vocabulary.memory import Category
from shardwise.vocabulary.timeline import Span, StepTimeline


def rects(drawing: svg.Drawing, css: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(f"<g>{drawing.body}</g>")
    return [node for node in root.iter("rect") if node.get("class") == css]


def width(node: ElementTree.Element) -> float:
    return float(node.get("width", "nan"))


def test_bars_are_as_long_as_their_bytes() -> None:
    totals = {Category.PARAMETER: 10_000_000_000, Category.ACTIVATION: 5_000_000_000}
    drawing = charts.memory_chart([charts.MemoryBar(label="a", totals=totals)], 20_000_000_000, 1030)
    first, second = rects(drawing, "c-parameter")[0], rects(drawing, "c-activation")[0]
    assert width(first) == pytest.approx(500 - 1)
    assert width(second) == pytest.approx(250 - 1)
    assert float(second.get("x", "")) == pytest.approx(500)
    line = ElementTree.fromstring(f"<g>{drawing.body}</g>").find("line")
    assert line is not None
    assert float(line.get("x1", "")) == pytest.approx(1000)


def test_a_bar_beyond_the_limit_is_said_and_stays_inside() -> None:
    bar = charts.MemoryBar(label="a", totals={Category.GRADIENT: 90_000_000_000}, fits=False)
    drawing = charts.memory_chart([bar], 24_000_000_000, 400)
    assert "does not fit" in drawing.body
    assert width(rects(drawing, "c-gradient")[0]) < 400


def test_the_parts_of_a_step_add_up() -> None:
    step = make_timeline(2.0, exposed=0.3)
    assert sum(charts.step_parts(step)) == pytest.approx(step.seconds)
    drawing = charts.step_chart([charts.StepRow(label="predicted", step=step)], 1030)
    assert width(rects(drawing, "c-wait")[0]) == pytest.approx(150 - 1, abs=0.1)


def test_lanes_show_when_the_compute_lane_waits() -> None:
    step = make_timeline(2.0, exposed=0.3)
    drawing = charts.lanes_chart([charts.StepRow(label="predicted", step=step)], 1096)
    assert drawing is not None
    (wait,) = rects(drawing, "c-wait faint")
    assert width(wait) == pytest.approx(150, abs=0.1)
    assert "dp_shard" in drawing.body


def test_lanes_need_spans() -> None:
    bare = StepTimeline(seconds=1.0, compute_seconds=1.0, exposed_wire_seconds=0.0)
    assert charts.lanes_chart([charts.StepRow(label="measured", step=bare)], 400) is None


def test_ten_thousand_spans_become_a_small_picture() -> None:
    spans = tuple(
        Span(lane="compute", kind="compute", name=f"forward {i}", start_seconds=i * 1e-4, seconds=1e-4)
        for i in range(10_000)
    )
    step = StepTimeline(seconds=1.0, compute_seconds=1.0, exposed_wire_seconds=0.0, spans=spans)
    drawing = charts.lanes_chart([charts.StepRow(label="predicted", step=step)], 880)
    assert drawing is not None
    assert len(drawing.body) < 5_000
    assert "(10000 in a row)" in drawing.body


def test_spans_that_can_be_seen_are_kept_apart() -> None:
    spans = [Span(lane="a", kind="wire", name=str(i), start_seconds=float(i), seconds=0.9) for i in range(3)]
    assert charts.coalesced(spans, 0.01) == spans


def test_loss_curve_marks_held_out_points_and_leaves_out_what_is_not_a_number() -> None:
    curves = charts.LossCurves(train=((1, 3.0), (2, float("nan")), (3, 1.0)), held_out=((1, 2.5), (3, 2.0)))
    drawing = charts.loss_chart(curves, 600)
    assert drawing is not None
    assert drawing.body.count("<circle") == 2
    assert "nan" not in drawing.body
    assert charts.loss_chart(charts.LossCurves(train=((1, 3.0),)), 600) is None


def test_a_long_curve_keeps_its_spike() -> None:
    train = tuple((i, 9.0 if i == 5000 else 1.0) for i in range(1, 20_001))
    drawing = charts.loss_chart(charts.LossCurves(train=train), 400)
    assert drawing is not None
    path = re.search(r'd="M([^"]+)" class="train"', drawing.body)
    assert path is not None
    heights = [float(point.split()[1]) for point in path[1].split("L")]
    assert len(heights) <= 2 * 400
    assert min(heights) < 40


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 9), st.booleans())
def test_ticks_are_even_and_within_or_around(low: float, span: float, count: int, around: bool) -> None:
    high = low + span
    ticks = svg.nice_ticks(low, high, count, around=around)
    steps = {round(b - a, 6 if span > 1e-3 else 12) for a, b in itertools.pairwise(ticks)}
    assert len(ticks) <= 2 * count + 3
    if around:
        assert ticks[0] <= low + 1e-6 * span + 1e-9
        assert ticks[-1] >= high - 1e-6 * span - 1e-9
    assert len(steps) <= 2


@pytest.mark.parametrize("px", [320, 560, 880])
def test_the_picture_of_a_plan_is_well_formed_and_says_what_was_taken(px: int) -> None:
    picture = plan_picture(make_plan(), px)
    root = ElementTree.fromstring(picture)
    assert root.get("width") == str(px)
    assert "▸ ZeRO-2" in picture
    assert "prefers-color-scheme:dark" in picture
    assert not re.search(r"<script|href|url\(|on\w+=", picture)


def test_a_hostile_model_name_stays_text() -> None:
    plan = make_plan(
        job=make_job(model=make_model(name='"></text><script>alert(1)</script>\x00')), cluster=make_cluster()
    )
    picture = plan_picture(plan)
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert "<script" not in picture
