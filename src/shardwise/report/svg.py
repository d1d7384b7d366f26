"""Hand-written SVG: the frame of a picture, and the pieces that charts are made of. No script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.report import theme
from shardwise.report.markup import Child, Markup, element, join, stylesheet

GLYPH, SMALL_GLYPH = 6.4, 5.7
"""Pixels of a usual character at 12 and at 11 px, a little on the safe side."""
Box = tuple[float, float, float, float]
"""Left, top, width, height."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A picture without its frame."""

    width: float
    height: float
    body: Markup


def frame(drawing: Drawing, label: str, *, standalone: bool = False, css_class: str | None = None) -> Markup:
    """A drawing as an SVG element.

    Args:
        drawing: What to show.
        label: What it says, in words, for those who cannot see it.
        standalone: Bring the namespace, the style and a background along, for a file of its own.
        css_class: Of the element.
    """
    attributes: dict[str, str | float | None] = {
        "xmlns": "http://www.w3.org/2000/svg" if standalone else None,
        "class": css_class,
        "viewBox": f"0 0 {drawing.width:.0f} {drawing.height:.0f}",
        "width": drawing.width,
        "height": drawing.height,
        "role": "img",
        "aria-label": label,
    }
    if not standalone:
        return element("svg", attributes, drawing.body)
    box = (0.5, 0.5, drawing.width - 1, drawing.height - 1)
    background, edge = rect(box, "paper", rx=10), rect(box, "edge", rx=10)
    style = stylesheet(theme.picture_css())
    return element("svg", attributes, element("title", None, label), style, background, edge, drawing.body)


def rect(box: Box, css: str, *, tip: str | None = None, rx: float | None = None) -> Markup:
    """A filled rectangle; `tip` shows where a pointer rests on it."""
    x, y, width, height = box
    attributes: dict[str, str | float | None] = {
        "x": x, "y": y, "width": max(width, 0.0), "height": height, "rx": rx, "class": css,
    }  # fmt: skip
    return element("rect", attributes, None if tip is None else element("title", None, tip))


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> Markup:
    """A straight line."""
    return element("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "class": css})


def text(x: float, y: float, content: str, css: str, *, anchor: str | None = None) -> Markup:
    """One line of text; y is its baseline."""
    return element("text", {"x": x, "y": y, "class": css, "text-anchor": anchor}, content)


def clipped(content: str, most: int) -> str:
    """Text of at most that many characters."""
    return content if len(content) <= most else content[: max(most - 1, 1)] + "…"


def moved(drawing: Drawing, x: float, y: float) -> Markup:
    """A drawing elsewhere."""
    return element("g", {"transform": f"translate({x:.1f} {y:.1f})"}, drawing.body)


def legend(items: Sequence[tuple[str, str]], y: float, width: float) -> Drawing:
    """Colored squares and their names (class, name), wrapped; the height counts from the top of the whole chart."""
    parts: list[Child] = []
    x = 0.0
    for css, name in items:
        length = 16 + SMALL_GLYPH * len(name) + 16
        if x > 0 and x + length > width:
            x, y = 0.0, y + 18
        parts += [rect((x, y + 2, 10, 10), css, rx=2), text(x + 15, y + 11, name, "small muted")]
        x += length
    return Drawing(width=width, height=y + 18, body=join(parts))


def nice_ticks(low: float, high: float, count: int, *, around: bool = False, whole: bool = False) -> list[float]:
    """Round numbers from `low` to `high` in steps of 1, 2 or 5 times a power of ten.

    Args:
        low: The smallest value.
        high: The largest value.
        count: About how many.
        around: Start at or below `low` and end at or above `high`, instead of staying inside.
        whole: Whole numbers only.
    """
    span = high - low if high > low else max(abs(high), 1.0) * 0.1
    raw = span / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    unit = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    if whole:
        unit = max(1.0, round(unit))
    start = math.floor(low / unit + 1e-9) if around else math.ceil(low / unit - 1e-9)
    end = math.ceil(high / unit - 1e-9) if around else math.floor(high / unit + 1e-9)
    end = max(end, start + 1) if around else end
    return [round(i * unit, 12) for i in range(start, end + 1)]
