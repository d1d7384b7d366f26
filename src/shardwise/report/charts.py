"""Charts: memory bars, where a step's time goes, the step on lanes, the loss curve.

Every chart takes a width in pixels and lays itself out for it: text keeps its size, so a narrow chart reads well on a
phone. Colors are CSS variables of `theme.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.report import svg, theme, words
from shardwise.report.markup import Child, Markup, element, join
from shardwise.vocabulary.memory import Category
from shardwise.vocabulary.timeline import COMPUTE_LANE, Span, StepTimeline
from shardwise.vocabulary.units import format_seconds

NARROW = 560
FAR = 8
"""A limit more than this many times the longest bar is not drawn, or nothing else could be seen."""
BAR, ROW, BAR_TOP = 18, 50, 19
"""Pixels: height of a bar, of a row, and from a row's top to its bar."""


@dataclass(frozen=True, kw_only=True)
class MemoryBar:
    """One bar of the memory chart."""

    label: str
    note: str = ""
    """Stands on the right, such as the time of a step."""
    totals: Mapping[Category, int]
    interval: tuple[float, float] | None = None
    """Of the sum."""
    fits: bool = True
    strong: bool = False
    chosen: bool = False


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One timeline of the step chart."""

    label: str
    step: StepTimeline
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class LossCurves:
    """Points of (optimizer step, loss)."""

    train: tuple[tuple[int, float], ...] = ()
    held_out: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Segment:
    """A part of a stacked bar."""

    value: float
    css: str
    tip: str


# ------------------------------------------------------------------------------------------------------------- memory


def memory_chart(bars: Sequence[MemoryBar], limit: int | None, width: float) -> svg.Drawing:
    """Stacked bars by category on one scale, with what is usable of a card as a line.

    Args:
        bars: Top to bottom.
        limit: Bytes of one card that a plan may use; None if nobody knows.
        width: Pixels.
    """
    ends = [max(sum(bar.totals.values()), bar.interval[1] if bar.interval else 0) for bar in bars]
    inside = limit is not None and limit <= FAR * max([*ends, 1])
    scale = width / (1.03 * max([*ends, limit if inside and limit else 0, 1]))
    top = 18 if limit else 0
    parts: list[Child] = []
    for i, bar in enumerate(bars):
        y = top + i * ROW
        segments = [
            _Segment(
                value=size, css=theme.CATEGORY_CLASSES[category], tip=f"{category.value}: {words.format_size(size)}"
            )
            for category in Category
            if (size := bar.totals.get(category, 0)) > 0
        ]
        parts += [_memory_label(bar, y, width), _stacked(segments, y + BAR_TOP, scale, width)]
        if bar.interval is not None:
            parts.append(_whisker(bar.interval, y + BAR_TOP + BAR / 2, scale))
        if limit and inside:
            parts.append(svg.line(limit * scale, y + BAR_TOP - 4, limit * scale, y + BAR_TOP + BAR + 4, "limit"))
    if limit:
        x = limit * scale if inside else width
        words_there = f"usable {words.format_size(limit)}" + ("" if inside else ", far beyond the edge")
        parts.append(svg.text(x, 10, words_there, "small bad", anchor="end" if x > 80 else "start"))
    used = [category for category in Category if any(bar.totals.get(category) for bar in bars)]
    items = [(theme.CATEGORY_CLASSES[category], category.value) for category in used]
    legend = svg.legend(items, top + len(bars) * ROW, width)
    return svg.Drawing(width=width, height=legend.height, body=join([*parts, legend.body]))


def _memory_label(bar: MemoryBar, y: float, width: float) -> Markup:
    total = sum(bar.totals.values())
    value = words.bytes_interval(total, bar.interval) if bar.interval else words.format_size(total)
    if not bar.fits:
        value += ", does not fit"
    note = bar.note if width >= NARROW else ""
    room = int((width - 12) / svg.GLYPH) - len(note) - len(value) - 2
    label = svg.clipped(f"▸ {bar.label}" if bar.chosen else bar.label, max(10, room))
    return join(
        [
            element(
                "text",
                {"x": 0, "y": y + 12},
                element("tspan", {"class": "strong" if bar.chosen or bar.strong else None}, label),
                element("tspan", {"class": "muted" if bar.fits else "bad"}, f"  {value}"),
            ),
            svg.text(width, y + 12, note, "muted", anchor="end") if note else None,
        ]
    )


def _stacked(segments: Sequence[_Segment], y: float, scale: float, width: float) -> Markup:
    """Segments side by side on a track, a hair apart."""
    parts: list[Child] = [svg.rect((0, y, width, BAR), "track", rx=2)]
    x = 0.0
    for segment in segments:
        length = segment.value * scale
        gap = 1 if length > 3 else 0
        parts.append(svg.rect((x, y, max(length - gap, 0.6), BAR), segment.css, tip=segment.tip))
        x += length
    return join(parts)


def _whisker(interval: tuple[float, float], y: float, scale: float) -> Markup | None:
    """The 5th to the 95th percentile; a halo keeps it visible on every color."""
    low, high = interval[0] * scale, interval[1] * scale
    if high - low < 1:
        return None
    path = f"M{low:.1f} {y - 4:.1f}v8M{low:.1f} {y:.1f}H{high:.1f}M{high:.1f} {y - 4:.1f}v8"
    halo = element("path", {"d": path, "class": "halo"})
    return join([halo, element("path", {"d": path, "class": "whisker"})])


# --------------------------------------------------------------------------------------------------------------- step

PARTS = (("c-backward", "compute"), ("c-optimizer", "optimizer"), ("c-wait", "waiting for the wire"),
         ("c-temporary", "pipeline bubble"), ("c-other", "waiting for the host"))  # fmt: skip
LANES = (("c-forward", "forward"), ("c-backward", "backward"), ("c-optimizer", "optimizer"), ("c-wire", "messages"),
         ("c-wait", "waiting"), ("c-temporary", "loss"), ("c-other", "other"))  # fmt: skip


def step_parts(step: StepTimeline) -> tuple[float, ...]:
    """Seconds of PARTS, which add up to the step."""
    return (
        max(0.0, step.compute_seconds - step.optimizer_seconds),
        step.optimizer_seconds,
        step.exposed_wire_seconds,
        step.bubble_seconds,
        step.host_seconds,
    )


def step_chart(rows: Sequence[StepRow], width: float) -> svg.Drawing:
    """Where the time of one step goes, one bar a timeline, all on one scale; waiting is exposed, hidden wire is not."""
    ends = [max(sum(step_parts(row.step)), row.interval[1] if row.interval else 0) for row in rows]
    scale = width / (1.03 * max([*ends, 1e-9]))
    parts: list[Child] = []
    for i, row in enumerate(rows):
        y = i * ROW
        segments = [
            _Segment(value=seconds, css=css, tip=f"{name}: {format_seconds(seconds)}")
            for (css, name), seconds in zip(PARTS, step_parts(row.step), strict=True)
            if seconds > 0
        ]
        parts += [_step_label(row, y, width), _stacked(segments, y + BAR_TOP, scale, width)]
        if row.interval is not None:
            parts.append(_whisker(row.interval, y + BAR_TOP + BAR / 2, scale))
    shown = [part for i, part in enumerate(PARTS) if any(step_parts(row.step)[i] > 0 for row in rows)]
    legend = svg.legend(shown, len(rows) * ROW, width)
    return svg.Drawing(width=width, height=legend.height, body=join([*parts, legend.body]))


def _step_label(row: StepRow, y: float, width: float) -> Markup:
    value = words.seconds_interval(row.step.seconds, row.interval or (row.step.seconds, row.step.seconds))
    hidden = row.step.wire_seconds - row.step.exposed_wire_seconds
    note = f"{format_seconds(hidden)} of messages hidden" if hidden > 0 else ""
    fits = svg.GLYPH * (len(row.label) + len(value) + len(note) + 6) <= width
    return join(
        [
            element(
                "text",
                {"x": 0, "y": y + 12},
                element("tspan", {"class": "strong"}, row.label),
                element("tspan", {"class": "muted"}, f"  {value}"),
            ),
            svg.text(width, y + 12, note, "muted", anchor="end") if note and fits else None,
        ]
    )


def lanes_chart(rows: Sequence[StepRow], width: float) -> svg.Drawing | None:
    """Spans on lanes, one block of lanes a timeline, all on one time axis; None where no timeline kept its spans."""
    drawn = [row for row in rows if row.step.spans]
    longest = max((span.end_seconds for row in drawn for span in row.step.spans), default=0.0)
    if longest <= 0:
        return None
    left = 0.0 if width < NARROW else 96.0
    parts: list[Child] = []
    y = 0.0
    for row in drawn:
        if len(drawn) > 1 or not left:
            parts.append(svg.text(0, y + 12, row.label, "strong"))
            y += 20
        for lane in _lanes(row.step.spans):
            if left:
                parts.append(svg.text(left - 10, y + 13, lane, "small muted", anchor="end"))
            else:
                parts.append(svg.text(0, y + 10, lane, "small muted"))
                y += 14
            parts.append(
                _lane([span for span in row.step.spans if span.lane == lane], (left, y, width - left, longest))
            )
            y += BAR + 4
        y += 8
    axis = _time_axis(longest, y, left, width)
    used = {span_class(span) for row in drawn for span in row.step.spans}
    used |= {"c-wait"} if any(_waits(_compute_lane(row.step), longest / width) for row in drawn) else set()
    legend = svg.legend([item for item in LANES if item[0] in used], y + axis.height + 4, width)
    return svg.Drawing(width=width, height=legend.height, body=join([*parts, axis.body, legend.body]))


def is_shortened(step: StepTimeline) -> bool:
    """Whether the spans leave out micro-batches that only repeat others."""
    return bool(step.spans) and max(span.end_seconds for span in step.spans) < 0.97 * step.seconds


def _lane(spans: Sequence[Span], place: tuple[float, float, float, float]) -> Markup:
    """One lane; `place` is left, top, width in pixels, and the seconds that the width stands for."""
    left, y, width, longest = place
    scale = width / longest
    parts: list[Child] = [svg.rect((left, y, width, BAR), "track", rx=2)]
    for start, end in _waits(spans, 1 / scale):
        tip = f"waiting: {format_seconds(end - start)}"
        parts.append(svg.rect((left + start * scale, y, (end - start) * scale, BAR), "c-wait faint", tip=tip))
    for span in coalesced(spans, 1 / scale):
        tip = f"{span.name}: {format_seconds(span.seconds)} from {format_seconds(span.start_seconds)}"
        length = span.seconds * scale
        box = (left + span.start_seconds * scale, y, max(length - (0.5 if length > 2 else 0), 0.4), BAR)
        parts.append(svg.rect(box, span_class(span), tip=tip))
    return join(parts)


def span_class(span: Span) -> str:
    """The color of a span: by kind, and compute by its pass."""
    if span.kind == "wire":
        return "c-wire"
    if span.kind == "optimizer":
        return "c-optimizer"
    for name in ("forward", "backward"):
        if span.name.startswith(name):
            return f"c-{name}"
    return "c-temporary" if span.name == "loss" else "c-other"


def coalesced(spans: Sequence[Span], resolution_seconds: float) -> list[Span]:
    """Spans of one lane with those too short to see melted into their neighbors of the same color."""
    result: list[tuple[Span, int]] = []
    for span in sorted(spans, key=lambda item: item.start_seconds):
        if result:
            last, count = result[-1]
            near = span.start_seconds - last.end_seconds < resolution_seconds / 4
            tiny = min(span.seconds, last.seconds) < 3 * resolution_seconds or count > 1
            if near and tiny and span_class(span) == span_class(last):
                name = f"{last.name.split(' (')[0]} ({count + 1} in a row)"
                seconds = max(last.end_seconds, span.end_seconds) - last.start_seconds
                merged = Span(
                    lane=last.lane, kind=last.kind, name=name, start_seconds=last.start_seconds, seconds=seconds
                )
                result[-1] = (merged, count + 1)
                continue
        result.append((span, 1))
    return [span for span, _count in result]


def _compute_lane(step: StepTimeline) -> list[Span]:
    return [span for span in step.spans if span.lane == COMPUTE_LANE]


def _waits(spans: Sequence[Span], shortest: float) -> list[tuple[float, float]]:
    """When the compute lane stands still; nothing for the other lanes, which may be idle at no cost."""
    waits: list[tuple[float, float]] = []
    now = 0.0
    for span in sorted(spans, key=lambda item: item.start_seconds):
        if span.lane == COMPUTE_LANE and span.start_seconds - now > shortest:
            waits.append((now, span.start_seconds))
        now = max(now, span.end_seconds)
    return waits


def _lanes(spans: Sequence[Span]) -> list[str]:
    """Compute first, then the groups in order of appearance."""
    return sorted(dict.fromkeys(span.lane for span in spans), key=lambda lane: lane != COMPUTE_LANE)


def _time_axis(longest: float, y: float, left: float, width: float) -> svg.Drawing:
    parts: list[Child] = [svg.line(left, y, width, y, "grid")]
    for tick in svg.nice_ticks(0.0, longest, max(3, int(width / 140))):
        x = left + (width - left) * tick / longest
        anchor = "start" if tick == 0 else "end" if x > width - 30 else "middle"
        parts += [
            svg.line(x, y, x, y + 4, "grid"),
            svg.text(x, y + 16, format_seconds(tick) if tick else "0", "small muted", anchor=anchor),
        ]
    return svg.Drawing(width=width, height=22, body=join(parts))


# --------------------------------------------------------------------------------------------------------------- loss


def loss_chart(curves: LossCurves, width: float) -> svg.Drawing | None:
    """Training loss as a line, held-out loss as points; None without two points of either."""
    points = [point for point in (*curves.train, *curves.held_out) if math.isfinite(point[1])]
    if len(points) < 2:
        return None
    left, top, height = 40.0, 10.0, 220.0
    right = width - 12
    steps, losses = [step for step, _ in points], [loss for _, loss in points]
    first, last = min(steps), max(max(steps), min(steps) + 1)
    ticks = svg.nice_ticks(min(losses), max(losses), 5, around=True)
    low, high = ticks[0], ticks[-1]

    def at(point: tuple[int, float]) -> tuple[float, float]:
        return (
            left + (right - left) * (point[0] - first) / (last - first),
            top + (height - top) * (high - point[1]) / (high - low),
        )

    parts: list[Child] = []
    for tick in ticks:
        y = at((first, tick))[1]
        parts += [
            svg.line(left, y, right, y, "grid"),
            svg.text(left - 8, y + 4, f"{tick:g}", "small muted", anchor="end"),
        ]
    for tick in svg.nice_ticks(first, last, max(3, int(width / 110)), whole=True):
        x = at((int(tick), low))[0]
        parts.append(svg.text(x, height + 18, f"{tick:,.0f}", "small muted", anchor="middle"))
    parts.append(svg.text(right, height + 34, "optimizer step", "small muted", anchor="end"))
    train = [at(point) for point in curves.train if math.isfinite(point[1])]
    held = [at(point) for point in curves.held_out if math.isfinite(point[1])]
    if train:
        parts.append(element("path", {"d": _path(_thinned(train, int(width))), "class": "train"}))
    if held:
        parts.append(element("path", {"d": _path(held), "class": "held"}))
        for (x, y), (step, loss) in zip(held, (p for p in curves.held_out if math.isfinite(p[1])), strict=True):
            tip = element("title", None, f"held out, step {step}: {loss:.4f}")
            parts.append(element("circle", {"cx": x, "cy": y, "r": 3, "class": "held-dot"}, tip))
    items = [
        item
        for item, there in ((("c-forward", "training loss"), train), (("c-activation", "held-out loss"), held))
        if there
    ]
    legend = svg.legend(items, height + 40, width)
    return svg.Drawing(width=width, height=legend.height, body=join([*parts, legend.body]))


def _thinned(points: Sequence[tuple[float, float]], most: int) -> Sequence[tuple[float, float]]:
    """At most two points a pixel, keeping the highest and the lowest of each, so that no spike is lost."""
    if len(points) <= 2 * most:
        return points
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        columns.setdefault(int(point[0]), []).append(point)
    kept: list[tuple[float, float]] = []
    for column in columns.values():
        kept += sorted({min(column, key=lambda p: p[1]), max(column, key=lambda p: p[1])})
    return kept


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
