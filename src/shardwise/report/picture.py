"""A plan as one picture in a file of its own, such as the one in the README."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.planner.uncertainty import usable_bytes
from shardwise.report import charts, svg, words
from shardwise.report.markup import Child, Markup, join
from shardwise.vocabulary.plan import Candidate, Plan
from shardwise.vocabulary.units import format_rate, format_seconds

MOST_OF_A_KIND = 3
"""Splits shown of those that fit, and of those that do not."""


def plan_picture(plan: Plan, width: float = 880) -> Markup:
    """A plan as one picture: memory of the best splits and of some that do not fit, and the step of the chosen one."""
    margin, inner = 24.0, width - 48
    shown = _shown(plan)
    title = f"{plan.job.model.name} on {plan.cluster.num_gpus} × {plan.cluster.gpu.name}"
    parts: list[Child] = [
        svg.text(margin, 36, title, "title"),
        svg.text(margin, 56, svg.clipped(words.describe_job(plan.job), int(inner / svg.GLYPH)), "muted"),
    ]
    y = 80.0
    drawings = [
        (
            "Memory of one card at its peak",
            charts.memory_chart(memory_bars(plan, shown), usable_bytes(plan.cluster), inner),
        )
    ]
    taken = plan.recommended
    if taken is not None:
        row = charts.StepRow(
            label=words.full_name(taken.strategy), step=taken.step, interval=taken.step_interval_seconds
        )
        drawings.append(("One optimizer step", charts.step_chart([row], inner)))
        lanes = charts.lanes_chart([row], inner)
        if lanes is not None:
            part = "its first, an inner and its last micro-batch" if charts.is_shortened(taken.step) else "all of it"
            drawings.append((f"The step on lanes: {part}", lanes))
    for name, drawing in drawings:
        parts += [svg.text(margin, y, name, "strong"), svg.moved(drawing, margin, y + 16)]
        y += drawing.height + 48
    label = f"{title}: {'nothing fits' if taken is None else words.full_name(taken.strategy) + ' is taken'}"
    return svg.frame(svg.Drawing(width=width, height=y - 18, body=join(parts)), label, standalone=True)


def _shown(plan: Plan) -> list[Candidate]:
    """The chosen one, the next best, and the smallest of those that do not fit."""
    best = words.leaders(plan.candidates, plan.recommended, limit=len(plan.candidates))
    fitting = [candidate for candidate in best if candidate.fits and candidate != plan.recommended]
    missing = sorted((c for c in best if not c.fits), key=lambda c: c.memory.needed_bytes)
    chosen = [] if plan.recommended is None else [plan.recommended]
    return [*chosen, *fitting][:MOST_OF_A_KIND] + missing[:MOST_OF_A_KIND]


def memory_bars(plan: Plan, candidates: Sequence[Candidate]) -> list[charts.MemoryBar]:
    """A bar for each candidate, the chosen one in bold."""
    return [
        charts.MemoryBar(
            label=f"{words.full_name(c.strategy)}, {words.describe_settings(c.strategy)}",
            note=f"{format_seconds(c.step.seconds)} a step, {format_rate(c.tokens_per_s)} tokens/s",
            totals=words.memory_by_category(c),
            interval=c.memory_interval_bytes,
            fits=c.fits,
            chosen=c == plan.recommended,
        )
        for c in candidates
    ]
