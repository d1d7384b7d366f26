"""`report.html`: one self-contained page about a run. No script, nothing loaded from elsewhere, everything escaped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from shardwise.planner.uncertainty import usable_bytes
from shardwise.report import charts, svg, theme, words
from shardwise.report.folder import RunFolder
from shardwise.report.markup import Child, Markup, document, element, join, stylesheet
from shardwise.vocabulary.ledger import Kind, Ledger, LedgerRow
from shardwise.vocabulary.memory import Category
from shardwise.vocabulary.plan import Candidate, Plan, Refusal
from shardwise.vocabulary.timeline import StepTimeline
from shardwise.vocabulary.units import format_rate, format_seconds

WIDE, SLIM = 992, 340
"""Charts are drawn twice, for desks and for phones; the style sheet shows one."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""Even a mistake of ours could not run a script."""
MAX_CANDIDATES = 60
MAX_REFUSALS = 60


def write_report(run: RunFolder, path: Path) -> None:
    """Write the page.

    Raises:
        OSError: If the file cannot be written.
    """
    path.write_text(report_page(run), encoding="utf-8")


def report_page(run: RunFolder) -> str:
    """The whole page as text."""
    title = _title(run)
    sections = [part(run) for part in (_memory, _step, _loss, _answers, _ledger, _strategies, _rests_on, _again)]
    head = element(
        "head", None,
        element("meta", {"charset": "utf-8"}),
        element("meta", {"name": "viewport", "content": "width=device-width,initial-scale=1"}),
        element("meta", {"name": "color-scheme", "content": "light dark"}),
        element("meta", {"http-equiv": "Content-Security-Policy", "content": POLICY}),
        element("title", None, f"{title}: shardwise report"),
        stylesheet(theme.page_css()),
    )  # fmt: skip
    main = element("main", None, _header(run, title), *sections, _footer(run))
    return document(element("html", {"lang": "en"}, head, element("body", None, main)))


# ------------------------------------------------------------------------------------------------------------- header


def _title(run: RunFolder) -> str:
    if run.plan is None:
        return run.path.name
    cluster = run.plan.cluster
    return f"{run.plan.job.model.name} on {cluster.num_gpus} × {cluster.gpu.name}"


def _header(run: RunFolder, title: str) -> Markup:
    plan, taken = run.plan, _taken(run)
    chosen = None
    if plan is not None:
        name = words.nothing(plan) if taken is None else words.full_name(taken.strategy)
        settings = (
            None if taken is None else element("span", {"class": "muted"}, words.describe_settings(taken.strategy))
        )
        chosen = element("p", {"class": "chosen"}, element("strong", None, name), " ", settings)
    return element(
        "header", None,
        element("p", {"class": "eyebrow"}, "shardwise report"),
        element("h1", None, title),
        None if plan is None else element("p", {"class": "muted"}, words.describe_job(plan.job)),
        chosen,
        None if plan is None else element("p", {"class": "lead"}, plan.reason),
        element("dl", {"class": "tiles"}, *_tiles(run)),
    )  # fmt: skip


def _tiles(run: RunFolder) -> list[Markup]:
    """The figures that a reader looks for first, measured where there is a measurement."""
    taken, ledger = _taken(run), run.ledger
    tiles: list[Markup] = []
    if taken is not None or ledger is not None:
        rows = (
            ("Step time", _first(ledger, "time", ("step",)), None if taken is None else taken.step.seconds, "seconds"),
            ("Memory a card", _first(ledger, "memory", ("device", "reserved", "allocated")),
             None if taken is None else taken.memory.device_bytes, "bytes"),
            ("Throughput", _first(ledger, "time", ("throughput", "tokens/s")),
             None if taken is None else taken.tokens_per_s, "tokens/s"),
        )  # fmt: skip
        for label, row, predicted, unit in rows:
            if row is not None:
                tiles.append(
                    _tile(label if row.name in label.casefold() or row.kind == "time" else f"{label}, {row.name}", row)
                )
            elif predicted is not None:
                tiles.append(_plain_tile(label, words.format_quantity(predicted, unit), "predicted, not measured"))
    tiles += _loss_tile(run)
    return tiles


def _loss_tile(run: RunFolder) -> list[Markup]:
    measured, curve = run.measured, run.curves.held_out or run.curves.train
    if measured.held_out_loss_before is not None and measured.held_out_loss_after is not None:
        value = f"{measured.held_out_loss_before:.3f} → {measured.held_out_loss_after:.3f}"
        return [_plain_tile("Held-out loss", value, f"before and after {measured.num_steps:,} steps")]
    if len(curve) < 2:
        return []
    name = "Held-out loss" if run.curves.held_out else "Training loss"
    note = f"from step {curve[0][0]:,} to step {curve[-1][0]:,}"
    return [_plain_tile(name, f"{curve[0][1]:.3f} → {curve[-1][1]:.3f}", note)]


def _first(ledger: Ledger | None, kind: Kind, names: tuple[str, ...]) -> LedgerRow | None:
    """The first of these rows that was measured, else the first that is there."""
    rows = [row for name in names if ledger is not None and (row := ledger.row(kind, name)) is not None]
    return next((row for row in rows if row.measured is not None), rows[0] if rows else None)


def _tile(label: str, row: LedgerRow) -> Markup:
    predicted = words.format_quantity(row.predicted, row.unit)
    if row.measured is None:
        return _plain_tile(label, predicted, "predicted, not measured")
    note = f"predicted {predicted}" if row.predicted is not None else "not predicted"
    error = words.format_error(row)
    return _plain_tile(label, words.format_quantity(row.measured, row.unit), f"{note}{f' ({error})' if error else ''}")


def _plain_tile(label: str, value: str, note: str) -> Markup:
    return element(
        "div", {"class": "tile"},
        element("dt", None, label), element("dd", {"class": "value"}, value), element("dd", {"class": "note"}, note),
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- pictures


def _memory(run: RunFolder) -> Markup | None:
    taken = _taken(run)
    bars: list[charts.MemoryBar] = []
    predicted = _categories(run.ledger, "predicted")
    measured = dict(run.measured.peak_by_category or {}) or _categories(run.ledger, "measured")
    if not predicted and taken is not None:
        predicted = words.memory_by_category(taken)
    if predicted:
        interval = taken.memory_interval_bytes if taken is not None else None
        whole = taken is not None and abs(sum(predicted.values()) - taken.memory.needed_bytes) <= 1
        bars.append(
            charts.MemoryBar(label="predicted", totals=predicted, interval=interval if whole else None, strong=True)
        )
    if measured:
        bars.append(charts.MemoryBar(label="measured", totals=measured, strong=True))
    if not bars:
        return None
    limit = None if run.plan is None else usable_bytes(run.plan.cluster)
    peak = "" if taken is None else f" The predicted peak is {words.INSTANTS[taken.memory.peak_instant]}."
    return _section(
        "Memory of one card",
        f"By what it is used for, at the peak of a training step.{peak}",
        _picture(lambda width: charts.memory_chart(bars, limit, width), _memory_words(bars)),
    )


def _categories(ledger: Ledger | None, which: str) -> dict[Category, int]:
    totals: dict[Category, int] = {}
    for category in Category:
        row = None if ledger is None else ledger.row("memory", category.value)
        value = None if row is None else row.predicted if which == "predicted" else row.measured
        if value is not None:
            totals[category] = round(value)
    return totals


def _memory_words(bars: Sequence[charts.MemoryBar]) -> str:
    def one(bar: charts.MemoryBar) -> str:
        return f"{bar.label}: " + ", ".join(
            f"{c.value} {words.format_size(size)}" for c, size in bar.totals.items() if size
        )

    return "Memory. " + "; ".join(map(one, bars))


def _step(run: RunFolder) -> Markup | None:
    taken = _taken(run)
    rows: list[charts.StepRow] = []
    if taken is not None:
        rows.append(charts.StepRow(label="predicted", step=taken.step, interval=taken.step_interval_seconds))
    measured = run.measured.step or _step_from_ledger(run.ledger)
    if measured is not None:
        rows.append(charts.StepRow(label="measured", step=measured))
    if not rows:
        return None
    label = "One step. " + "; ".join(f"{row.label} {format_seconds(row.step.seconds)}" for row in rows)
    lanes = None
    if charts.lanes_chart(rows, WIDE) is not None:
        note = (
            ""
            if taken is None or not charts.is_shortened(taken.step)
            else (" Equal micro-batches repeat: the predicted lanes show the first, one inner and the last.")
        )
        lanes = join([
            element("p", {"class": "muted"}, f"The same on lanes: what computes, and what crosses the wire.{note}"),
            _picture(lambda width: charts.lanes_chart(rows, width), f"{label}, as lanes"),
        ])  # fmt: skip
    return _section(
        "One optimizer step",
        "Where the time goes. Messages that hide behind compute cost nothing; waiting for them does.",
        _picture(lambda width: charts.step_chart(rows, width), label),
        lanes,
    )


def _step_from_ledger(ledger: Ledger | None) -> StepTimeline | None:
    """The measured parts, where the ledger has them all."""
    if ledger is None:
        return None
    values = {name: None if (row := ledger.row("time", name)) is None else row.measured for name in
              ("step", "compute", "exposed wire", "bubble", "host", "all wire", "optimizer")}  # fmt: skip
    seconds, compute, exposed = values["step"], values["compute"], values["exposed wire"]
    if seconds is None or compute is None or exposed is None:
        return None
    return StepTimeline(
        seconds=seconds,
        compute_seconds=compute,
        exposed_wire_seconds=exposed,
        bubble_seconds=values["bubble"] or 0.0,
        host_seconds=values["host"] or 0.0,
        wire_seconds=values["all wire"] or exposed,
        optimizer_seconds=values["optimizer"] or 0.0,
    )


def _loss(run: RunFolder) -> Markup | None:
    if charts.loss_chart(run.curves, WIDE) is None:
        return None
    text = "Mean over supervised tokens."
    held = run.curves.held_out
    if len(held) >= 2:
        fell = held[-1][1] < held[0][1]
        text += f" Held-out loss {'fell' if fell else 'did not fall'}: {held[0][1]:.3f} to {held[-1][1]:.3f}."
    return _section("Loss", text, _picture(lambda width: charts.loss_chart(run.curves, width), f"Loss curve. {text}"))


def _picture(draw: Callable[[float], svg.Drawing | None], label: str) -> Markup:
    """The same chart for a wide and for a slim page."""
    drawings = [(draw(width), name) for width, name in ((WIDE, "wide"), (SLIM, "slim"))]
    return element("figure", None, *(svg.frame(d, label, css_class=name) for d, name in drawings if d is not None))


# ------------------------------------------------------------------------------------------------------------- tables


def _answers(run: RunFolder) -> Markup | None:
    if not run.measured.samples:
        return None
    blocks: list[Markup] = []
    for sample in run.measured.samples:
        columns = [
            element("div", None, element("h3", None, name), element("blockquote", None, text or "(nothing)"))
            for name, text in (("Before", sample.before), ("After", sample.after))
        ]
        blocks.append(element("p", {"class": "prompt"}, sample.prompt))
        blocks.append(element("div", {"class": "pair"}, *columns))
    return _section("A sample answer", "The same question, answered greedily, before and after training.", *blocks)


def _ledger(run: RunFolder) -> Markup | None:
    ledger = run.ledger
    if ledger is None or not ledger.rows:
        return None
    simulated = any(row.simulated is not None for row in ledger.rows)
    noted = any(row.note for row in ledger.rows)
    heads = [
        "", "predicted", *(["simulated"] if simulated else []), "measured", "error", *(["note"] if noted else []),
    ]  # fmt: skip
    bodies: list[Markup] = []
    kinds: tuple[tuple[Kind, str], ...] = (
        ("memory", "Memory"),
        ("time", "Time"),
        ("wire", "Wire"),
        ("count", "Counts"),
    )
    left = (0, len(heads) - 1) if noted else (0,)
    for kind, title in kinds:
        rows = [row for row in ledger.rows if row.kind == kind]
        if rows:
            group = element("th", {"scope": "rowgroup", "colspan": len(heads), "class": "words"}, title)
            lines = [_row(_ledger_cells(row, simulated=simulated, noted=noted), left) for row in rows]
            bodies.append(element("tbody", None, element("tr", {"class": "group"}, group), *lines))
    text = f"{ledger.strategy_name}, rank {ledger.rank}. Error = (predicted − measured) / measured."
    return _section("Predicted and measured", text, _table(heads, bodies, left=left))


def _ledger_cells(row: LedgerRow, *, simulated: bool, noted: bool) -> list[Child]:
    figures = [row.predicted, *([row.simulated] if simulated else []), row.measured]
    cells: list[Child] = [row.name, *(words.format_quantity(figure, row.unit) for figure in figures)]
    return [*cells, words.format_error(row), *([row.note] if noted else [])]


def _strategies(run: RunFolder) -> Markup | None:
    plan = run.plan
    if plan is None or not (plan.candidates or plan.refusals or plan.advice):
        return None
    shown = plan.candidates[:MAX_CANDIDATES]
    hidden = len(plan.candidates) - len(shown)
    refusals = words.other_refusals(plan, shown)
    return _section(
        "Ways to split it",
        f"{words.table_scale(shown).name} at the peak on each card, {words.format_size(usable_bytes(plan.cluster))} "
        "usable; the bytes one rank sends, and the time, of one optimizer step. Ranges: 5th to 95th percentile.",
        _candidates_table(plan, shown) if shown else None,
        element("p", {"class": "muted"}, f"{hidden} more candidates are in plan.yaml.") if hidden else None,
        _details(
            f"Refused ({len(refusals)})",
            [_refusal(*group) for group in words.grouped_refusals(refusals)[:MAX_REFUSALS]],
        ),
        _details("Worth knowing", [_advice_item(a.message, a.price, a.command) for a in plan.advice], opened=True),
        _details("Rules that spoke", [element("li", None, rule) for rule in plan.rules], opened=True),
    )


def _candidates_table(plan: Plan, shown: Sequence[Candidate]) -> Markup:
    usable, scale = usable_bytes(plan.cluster), words.table_scale(shown)
    categories = [words.CATEGORY_HEADS[category] for category in Category]
    heads = ["strategy", "batch", "ckpt", *categories, "needs", "range", "wire", "step", "tokens/s", "verdict"]
    left = (0, len(heads) - 1)
    rows = [
        _row(_candidate_cells(c, usable, scale), left, css="taken" if c == plan.recommended else None) for c in shown
    ]
    return _table(heads, [element("tbody", None, *rows)], left=left, css="dense")


def _candidate_cells(c: Candidate, usable: int, scale: words.Scale) -> list[Child]:
    low, high = c.memory_interval_bytes
    state = "good" if c.fits and c.probability_of_oom <= words.TIGHT else "warn" if c.fits else "bad"
    return [
        words.full_name(c.strategy),
        f"{c.strategy.micro_batch_size} × {c.strategy.accumulation}",
        c.strategy.checkpointing,
        *(scale.number(size) for size in words.memory_by_category(c).values()),
        scale.number(c.memory.needed_bytes),
        f"{scale.number(low)}–{scale.number(high)}",
        words.format_size(words.wire_bytes(c)),
        format_seconds(c.step.seconds),
        format_rate(c.tokens_per_s),
        element("span", {"class": state}, words.verdict(c, usable)),
    ]


def _refusal(names: str, refusal: Refusal) -> Markup:
    return element(
        "li", None, element("strong", None, names), f": {refusal.message} ", element("code", None, refusal.rule)
    )


def _advice_item(message: str, price: str, command: str) -> Markup:
    return element(
        "li", None, message, f" Price: {price}." if price else None,
        element("pre", None, command) if command else None,
    )  # fmt: skip


def _rests_on(run: RunFolder) -> Markup | None:
    plan = run.plan
    if plan is None:
        return None
    heads = ("quantity", "headline", "calibrated", "headline arithmetic")
    headline, facts = words.headline_rows(plan.headline), [(f.name, f.value, f.source) for f in plan.facts]
    envelope = "On the back of an envelope: headline bandwidth, no latency, bytes counted once."
    figures = None
    if facts:
        summary = element("summary", None, f"Figures and sources ({len(facts)})")
        figures = element("details", None, summary, _simple_table(("figure", "value", "source"), facts, (0, 1, 2)))
    assumed = [element("li", None, assumption) for assumption in plan.cluster.assumptions]
    return _section(
        "What it rests on",
        f"Model: {words.describe_model(plan.job)}. Cards: {words.describe_cluster(plan.cluster)}.",
        element("p", {"class": "muted"}, envelope) if headline else None,
        _simple_table(heads, headline, (0, 3)) if headline else None,
        _details("Assumed, because nobody measured or said", assumed, opened=True),
        figures,
        _versions(run),
    )


def _versions(run: RunFolder) -> Markup | None:
    versions: dict[str, str] = {}
    if run.plan is not None:
        versions |= dict(run.plan.cluster.versions) | ({"shardwise": run.plan.version} if run.plan.version else {})
    versions |= (run.ledger.versions or {}) if run.ledger is not None else {}
    versions |= dict(run.measured.versions)
    if not versions:
        return None
    return element(
        "p", {"class": "muted"}, "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items())
    )


def _again(run: RunFolder) -> Markup | None:
    if not run.measured.command:
        return None
    return _section("Run it again", None, element("pre", None, run.measured.command))


def _footer(run: RunFolder) -> Markup:
    notes = element("ul", None, *(element("li", None, note) for note in run.notes)) if run.notes else None
    return element(
        "footer", None,
        element("p", None, "Not everything was there:") if notes is not None else None, notes,
        element("p", None, "Made by shardwise. GB = 1e9 bytes, MB = 1e6, GiB = 2^30."),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- pieces


def _taken(run: RunFolder) -> Candidate | None:
    return None if run.plan is None else run.plan.recommended


def _section(title: str, text: str | None, *children: Child) -> Markup:
    about = None if text is None else element("p", {"class": "muted"}, text)
    return element("section", None, element("h2", None, title), about, *children)


def _details(title: str, items: Sequence[Markup], *, opened: bool = False) -> Markup | None:
    if not items:
        return None
    attributes: dict[str, str | float | None] = {"open": "" if opened else None}
    return element("details", attributes, element("summary", None, title), element("ul", None, *items))


def _table(heads: Sequence[str], bodies: Sequence[Markup], *, left: tuple[int, ...], css: str | None = None) -> Markup:
    """A table that scrolls by itself where the page is narrow; columns in `left` hold words, the others numbers."""
    cells = (element("th", {"scope": "col", "class": _column(i, left)}, text) for i, text in enumerate(heads))
    head = element("thead", None, element("tr", None, *cells))
    return element("div", {"class": "scroll", "tabindex": "0"}, element("table", {"class": css}, head, *bodies))


def _row(cells: Sequence[Child], left: tuple[int, ...], *, css: str | None = None) -> Markup:
    first = element("th", {"scope": "row", "class": _column(0, left)}, cells[0])
    rest = (element("td", {"class": _column(i, left)}, cell) for i, cell in enumerate(cells[1:], start=1))
    return element("tr", {"class": css}, first, *rest)


def _column(i: int, left: tuple[int, ...]) -> str | None:
    return "words" if i in left else None


def _simple_table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: tuple[int, ...]) -> Markup:
    return _table(heads, [element("tbody", None, *(_row(list[Child](row), left) for row in rows))], left=left)
