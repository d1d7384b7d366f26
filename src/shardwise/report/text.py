"""Plans and ledgers as terminal pages. Every function returns text; nothing is printed here."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.planner.uncertainty import usable_bytes
from shardwise.report import words
from shardwise.report.style import CATEGORY_COLORS, Style
from shardwise.report.table import Column, render_table
from shardwise.vocabulary.ledger import Kind, Ledger, LedgerRow
from shardwise.vocabulary.memory import Category
from shardwise.vocabulary.plan import Candidate, Plan, Refusal
from shardwise.vocabulary.strategy import Strategy
from shardwise.vocabulary.units import GLUE, format_rate, format_seconds, glued, some

NARROW = 60
"""Below this many columns a table is told as lines."""
MAX_REFUSALS = 6


def plan_page(plan: Plan, style: Style, *, every_candidate: bool = False) -> str:
    """What `shardwise plan` answers.

    Args:
        plan: The answer.
        style: What the stream can show.
        every_candidate: Show all candidates and refusals; otherwise the best of each split.

    Returns:
        Text that ends with a newline.
    """
    shown = list(plan.candidates) if every_candidate else words.leaders(plan.candidates, plan.recommended)
    blocks = [_head(plan, style), _answer(plan, style)]
    if shown:
        blocks.append(_strategies(plan, shown, style, losses=every_candidate))
    blocks += [
        _memory_bars(plan, style),
        _refusals(words.other_refusals(plan, shown), style, None if every_candidate else MAX_REFUSALS),
        _advice(plan, style),
        _headline(plan, style),
        _small_print(plan, len(shown), style),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def ledger_page(ledger: Ledger, style: Style) -> str:
    """Predicted beside measured, with the error of each."""
    blocks = [[style.paint(style.plain(f"Predicted and measured: {ledger.strategy_name}, rank {ledger.rank}"), "bold")]]
    kinds: tuple[tuple[Kind, str], ...] = (
        ("memory", "memory"),
        ("time", "time"),
        ("wire", "wire"),
        ("count", "counts"),
    )
    for kind, title in kinds:
        rows = [row for row in ledger.rows if row.kind == kind]
        if rows:
            blocks.append(render_table(_ledger_columns(title, rows), rows, style))
    if ledger.versions:
        text = ", ".join(f"{name} {version}" for name, version in ledger.versions.items())
        blocks.append(_wrap(f"Measured with {text}.", style))
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _ledger_columns(title: str, rows: Sequence[LedgerRow]) -> list[Column[LedgerRow]]:
    def figure(name: str, value: Callable[[LedgerRow], float | None]) -> Column[LedgerRow]:
        return Column(title=name, cell=lambda row: words.format_quantity(value(row), row.unit))

    columns: list[Column[LedgerRow]] = [
        Column(title=title, cell=lambda row: row.name, right=False),
        figure("predicted", lambda row: row.predicted),
    ]
    if any(row.simulated is not None for row in rows):
        columns.append(figure("simulated", lambda row: row.simulated))
    columns += [
        figure("measured", lambda row: row.measured),
        Column(title="error", cell=words.format_error),
    ]
    if any(row.note for row in rows):
        columns.append(Column(title="", cell=lambda row: row.note, right=False, priority=1))
    return columns


# ---------------------------------------------------------------------------------------------------- blocks


def _head(plan: Plan, style: Style) -> list[str]:
    lines: list[str] = []
    for name, text in (
        ("model", words.describe_model(plan.job)),
        ("cards", words.describe_cluster(plan.cluster)),
        ("job", words.describe_job(plan.job)),
    ):
        head, *rest = _wrap(text, style, indent=7)
        lines += [style.paint(f"{name:<7}", "dim") + head.lstrip(), *rest]
    return lines


def _answer(plan: Plan, style: Style) -> list[str]:
    taken = plan.recommended
    if taken is None:
        title = style.paint(words.nothing(plan), "bold", "red")
        return [title, *_wrap(plan.reason, style, indent=2)]
    mark = style.plain("▸")
    name = style.plain(f"{words.full_name(taken.strategy)}: {words.describe_settings(taken.strategy)}")
    lines = [style.paint(f"{mark} {name}", "bold", "green")]
    lines += _wrap(words.describe_batch(taken.strategy, plan.job), style, indent=2)
    for text in words.sentence_about(taken, plan):
        lines += _wrap(text, style, indent=2)
    lines += ["", *_wrap(f"Why: {plan.reason}", style, indent=2)]
    for rule in plan.rules:
        lines += _wrap(f"rule: {rule}", style, indent=2)
    return lines


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A candidate in the table of strategies."""

    candidate: Candidate
    taken: bool
    usable: int

    @property
    def strategy(self) -> Strategy:
        return self.candidate.strategy

    @property
    def colors(self) -> tuple[str, ...]:
        return ("bold",) if self.taken else () if self.candidate.fits else ("dim",)

    @property
    def verdict(self) -> str:
        return words.verdict(self.candidate, self.usable)

    @property
    def verdict_colors(self) -> tuple[str, ...]:
        if not self.candidate.fits:
            return ("red",)
        return ("green",) if self.candidate.probability_of_oom <= words.TIGHT else ("yellow",)


def _strategies(plan: Plan, candidates: Sequence[Candidate], style: Style, *, losses: bool) -> list[str]:
    usable = usable_bytes(plan.cluster)
    rows = [_Row(candidate=c, taken=c is plan.recommended or c == plan.recommended, usable=usable) for c in candidates]
    scale = words.table_scale(candidates)
    if style.width < NARROW:
        return [line for row in rows for line in _told(row, style)]
    title = (
        f"Memory in {scale.name} that each card needs at the peak, {words.format_size(usable)} usable; bytes one rank "
        "sends, and time, in one step"
    )
    return [*_wrap(title, style), *render_table(_strategy_columns(scale, losses=losses), rows, style)]


def _strategy_columns(scale: words.Scale, *, losses: bool) -> list[Column[_Row]]:
    def of(title: str, cell: Callable[[_Row], str], priority: int = 0, *, right: bool = True) -> Column[_Row]:
        return Column(title=title, cell=cell, right=right, priority=priority, colors=lambda row: row.colors)

    def category(name: Category) -> Column[_Row]:
        return of(
            words.CATEGORY_HEADS[name], lambda row: scale.number(words.memory_by_category(row.candidate)[name]), 4
        )

    return [
        of("", lambda row: "▸" if row.taken else "", right=False),
        of("strategy", lambda row: words.full_name(row.strategy), right=False),
        of("batch", lambda row: f"{row.strategy.micro_batch_size}×{row.strategy.accumulation}", 1),
        of("ckpt", lambda row: row.strategy.checkpointing, 2),
        *([of("loss", lambda row: row.strategy.loss, 2)] if losses else []),
        *(category(name) for name in Category),
        of("needs", lambda row: scale.number(row.candidate.memory.needed_bytes)),
        of("5–95 %", lambda row: "–".join(map(scale.number, row.candidate.memory_interval_bytes)), 5),
        of("wire", lambda row: words.format_size(words.wire_bytes(row.candidate)), 3),
        of("step", lambda row: format_seconds(row.candidate.step.seconds)),
        of("tokens/s", lambda row: format_rate(row.candidate.tokens_per_s)),
        Column(title="verdict", cell=lambda row: row.verdict, right=False, colors=lambda row: row.verdict_colors),
    ]


def _told(row: _Row, style: Style) -> list[str]:
    candidate = row.candidate
    first = f"{'▸' if row.taken else ' '} {words.full_name(candidate.strategy)}: {row.verdict}"
    second = (
        f"{words.format_size(candidate.memory.needed_bytes)}, {format_seconds(candidate.step.seconds)} a step, "
        f"{format_rate(candidate.tokens_per_s)} tokens/s"
    )
    return [style.paint(style.plain(first), *row.verdict_colors), *_wrap(second, style, indent=4)]


def _memory_bars(plan: Plan, style: Style) -> list[str]:
    taken = plan.recommended
    if taken is None or style.width < NARROW:
        return []
    totals = words.memory_by_category(taken)
    usable = usable_bytes(plan.cluster)
    scale = max(usable, taken.memory.needed_bytes)
    cells = min(style.width - 2, 100)
    legend: list[tuple[str, str]] = []
    bar, drawn, running = "", 0, 0
    for category, size in totals.items():
        running += size
        length = round(cells * running / scale) - drawn
        drawn += length
        glyph = ("█" if style.unicode else "#") if style.color else category.value[0].upper()
        bar += style.paint(glyph * length, CATEGORY_COLORS[category])
        if size:
            legend.append((f"{category.value} {words.format_size(size)}", CATEGORY_COLORS[category]))
    free = usable - taken.memory.needed_bytes
    bar += style.paint(("·" if style.unicode else ".") * (cells - drawn), "dim")
    legend.append((f"free {words.format_size(max(free, 0))}", "dim"))
    return [f"  {bar}", *_flow(legend, style)]


def _flow(parts: Sequence[tuple[str, str]], style: Style) -> list[str]:
    """Colored words in a row, wrapped; each part is a text and its color."""
    lines: list[str] = []
    line, used = "", 0
    for text, color in parts:
        if used and used + len(text) + 2 > style.width - 2:
            lines.append(f"  {line}")
            line, used = "", 0
        line += (", " if used else "") + style.paint(text, color)
        used += len(text) + (2 if used else 0)
    return [*lines, f"  {line}"]


def _refusals(refusals: Sequence[Refusal], style: Style, limit: int | None) -> list[str]:
    groups = words.grouped_refusals(refusals)
    if not groups:
        return []
    lines = [style.paint("Refused", "bold")]
    for names, refusal in groups[:limit]:
        lines += _wrap(f"{names}: {refusal.message} [{refusal.rule}]", style, indent=4, first=2)
    hidden = len(groups) - len(groups[:limit])
    if hidden:
        lines.append(f"  and {hidden} more; see them with --all")
    return lines


def _advice(plan: Plan, style: Style) -> list[str]:
    if not plan.advice:
        return []
    lines = [style.paint("Would help" if plan.recommended is None else "Worth knowing", "bold")]
    for advice in plan.advice:
        price = f" Price: {advice.price}." if advice.price else ""
        lines += _wrap(f"{advice.message}{price}", style, indent=4, first=2)
        if advice.command:
            lines.append(style.paint(style.plain(f"    $ {advice.command}"), "cyan"))
    return lines


def _headline(plan: Plan, style: Style) -> list[str]:
    rows = words.headline_rows(plan.headline)
    if not rows:
        return []
    columns: list[Column[tuple[str, str, str, str]]] = [
        Column(title="On the back of an envelope", cell=lambda row: row[0], right=False),
        Column(title="headline", cell=lambda row: row[1]),
        Column(title="calibrated", cell=lambda row: row[2]),
        Column(title="headline arithmetic", cell=lambda row: row[3], right=False, priority=1),
    ]
    return render_table(columns, rows, style)


def _small_print(plan: Plan, num_shown: int, style: Style) -> list[str]:
    hidden = len(plan.candidates) - num_shown
    texts = ["GB = 1e9 bytes, MB = 1e6. Brackets and ranges: 5th to 95th percentile of past predictions' errors."]
    if hidden > 0:
        texts.append(f"{some(hidden, 'more candidate')} with --all.")
    if plan.headline:
        texts.append("Headline figures: both directions of the link, no latency; calibrated: this planner's own count.")
    if plan.facts:
        texts.append(f"Rests on {some(len(plan.facts), 'figure')}; --explain tells them, and every line of arithmetic.")
    return [style.paint(line, "dim") for line in _wrap(" ".join(texts), style)]


def _wrap(text: str, style: Style, *, indent: int = 0, first: int | None = None) -> list[str]:
    """Lines no wider than the style, on `indent` spaces (the first line on `first`)."""
    lines = textwrap.wrap(
        glued(style.plain(text).replace("\n", " ")),
        max(style.width, 20),
        initial_indent=" " * (indent if first is None else first),
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )
    return [line.replace(GLUE, " ") for line in lines]
