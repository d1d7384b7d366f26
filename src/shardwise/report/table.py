"""Tables that fit a width: the least important columns go first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from shardwise.report.style import Style

Row = TypeVar("Row")
GAP = "  "


@dataclass(frozen=True, kw_only=True)
class Column(Generic[Row]):
    """One column of a table."""

    title: str
    cell: Callable[[Row], str]
    right: bool = True
    """Numbers stand on the right, words on the left."""
    priority: int = 0
    """Columns with the highest number are left out first; 0 is always shown."""
    colors: Callable[[Row], tuple[str, ...]] | None = None


def render_table(columns: Sequence[Column[Row]], rows: Sequence[Row], style: Style) -> list[str]:
    """Lines of a table no wider than the style's width, if leaving out columns can do that."""
    texts = {id(column): [style.plain(column.cell(row)) for row in rows] for column in columns}
    widths = {id(column): max(len(text) for text in [column.title, *texts[id(column)]]) for column in columns}
    shown = list(columns)
    while sum(widths[id(column)] + len(GAP) for column in shown) - len(GAP) > style.width:
        worst = max(shown, key=lambda column: column.priority)
        if worst.priority == 0:
            break
        shown = [column for column in shown if column.priority < worst.priority]

    def line(cells: list[str], paints: list[tuple[str, ...]]) -> str:
        padded = [
            cell.rjust(widths[id(column)]) if column.right else cell.ljust(widths[id(column)])
            for column, cell in zip(shown, cells, strict=True)
        ]
        while padded and not padded[-1].strip():
            padded.pop()
        return GAP.join(style.paint(cell, *paint) for cell, paint in zip(padded, paints, strict=False)).rstrip()

    lines = [line([column.title for column in shown], [("dim",)] * len(shown))]
    for i, row in enumerate(rows):
        cells = [texts[id(column)][i] for column in shown]
        lines.append(line(cells, [column.colors(row) if column.colors else () for column in shown]))
    return lines
