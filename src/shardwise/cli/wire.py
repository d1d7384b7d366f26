"""`shardwise wire`: milliseconds of a message on a link, and what hides it."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import UsageError
from shardwise.report.style import Style
from shardwise.report.table import Column, render_table
from shardwise.vocabulary.cluster import Cluster, Link
from shardwise.vocabulary.limits import MAX_GPUS
from shardwise.vocabulary.units import (
    format_bandwidth,
    format_bytes,
    format_percent,
    format_seconds,
    parse_bytes,
)

if TYPE_CHECKING:
    from shardwise.planner.passes import Beside, Passing


_TIME = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(us|ms|s)\s*")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
MOST_SECONDS = 1e9


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time of every collective of one size on one link, as advertised and as attained; with --compute, what hides it.

    Arithmetic only. A cluster file that `shardwise probe` wrote gives measured times.

    Examples:
      shardwise wire --bytes 700MB --link 10gbe --ranks 8 --compute 600ms
      shardwise wire --bytes 3.08GB --link nvlink4
      shardwise wire --bytes 436MB --cluster cluster.yaml --ranks 4
    """

    bytes: str
    """Size of the message: of the whole for all_gather and reduce_scatter, of one rank's tensor otherwise."""
    link: str | None = None
    """A link of the catalogue, such as nvlink4, pcie5-x8-host or 10gbe."""
    cluster: str | None = None
    """A cluster file instead: its link inside a machine, or across machines if the ranks need more than one."""
    ranks: int = 2
    """Members of the group."""
    compute: str | None = None
    """Compute beside the message, such as 600ms."""
    json: bool = False
    """The figures as JSON on stdout."""


def run(options: Options) -> int:
    """Answer, and return 0."""
    from shardwise.planner.passes import beside, hiding_compute_seconds, passings

    size, compute = _numbers(options)
    link = _link(options)
    found = passings(link, size, options.ranks)
    hidden = None if compute is None else [beside(each, link, compute) for each in found]
    if options.json:
        sys.stdout.write(json.dumps(_data(link, options.ranks, found, hidden), indent=2) + "\n")
        return 0
    style = Style.of(sys.stdout)
    lines = [*_wrapped(_head(link, size, options.ranks), style), "", *_table(found, hidden, link, style), ""]
    words = _notes(link, hidden is None)
    if compute is not None and hidden is not None:
        words = [*_verdict(compute, found[-1], hidden[-1], hiding_compute_seconds(found[-1], link)), *words]
    lines += [line for text in words for line in _wrapped(text, style)]
    sys.stdout.write(style.plain("\n".join(lines)) + "\n")
    return 0


def _wrapped(text: str, style: Style) -> list[str]:
    return textwrap.wrap(text, max(style.width, 40), subsequent_indent="  ", break_on_hyphens=False) or [""]


def _notes(link: Link, no_compute: bool) -> list[str]:
    """What the columns are."""
    from shardwise.planner.headline import HIDDEN_SHARE
    from shardwise.planner.passes import slowdown

    measured = "the measured table" if link.curves else f"{link.attained_source or link.source}"
    notes = [
        f"headline: every byte once at the advertised bandwidth, no latency; attained: {measured}",
        "full sharding: two all_gathers and one reduce_scatter, as a block of ZeRO-3 needs for a micro-batch",
    ]
    if no_compute:
        notes.append(
            f"hides behind: compute of at least so long, if all of it overlaps (it takes {slowdown(link):.2f} times as "
            f"long beside messages on this wire); by the rule of thumb, headline time may be {HIDDEN_SHARE:g} of "
            "compute at most. --compute 600ms says what is left of yours"
        )
    return notes


def _numbers(options: Options) -> tuple[int, float | None]:
    """Bytes and seconds.

    Raises:
        UsageError: All that cannot be read.
    """
    problems: list[str] = []
    size, compute = 0, None
    try:
        size = parse_bytes(options.bytes)
    except ValueError as error:
        problems.append(f"--bytes: {error}")
    if not problems and size == 0:
        problems.append("--bytes must be more than 0")
    if options.ranks < 2:
        problems.append(f"--ranks must be 2 or more, not {options.ranks}: one rank sends nothing")
    if options.ranks > MAX_GPUS:
        problems.append(f"--ranks must be at most {MAX_GPUS:,}, not {options.ranks}")
    if options.compute is not None:
        match = _TIME.fullmatch(options.compute)
        compute = float(match[1]) * _SECONDS[match[2]] if match else None
        if not compute or compute > MOST_SECONDS:
            problems.append(
                f"--compute {options.compute[:40]!r} is not a time up to {MOST_SECONDS:,.0f} s; write a number and a "
                "unit, such as 600ms"
            )
    if problems:
        raise UsageError(*problems)
    return size, compute


def _link(options: Options) -> Link:
    """The link that was named.

    Raises:
        UsageError: None or two were named, or the cluster has none across machines.
        UnknownNameError: No such link.
    """
    if (options.link is None) == (options.cluster is None):
        raise UsageError("which wire? Say --link 10gbe (or nvlink4, pcie5-x8-host ...), or --cluster FILE; one of them")
    if options.link is not None:
        from shardwise.facts import catalog

        return catalog.link(options.link)
    from shardwise.vocabulary import codec

    cluster = codec.read_noun(Cluster, Path(str(options.cluster)))
    if options.ranks <= cluster.gpus_per_node:
        return cluster.intra_node
    if cluster.inter_node is None:
        raise UsageError(
            f"--ranks {options.ranks} need more than the {cluster.gpus_per_node} cards of {cluster.name}, whose file "
            "names no link across machines"
        )
    return cluster.inter_node


def _head(link: Link, size: int, ranks: int) -> str:
    advertised = "one way" if link.kind == "network" else "both directions"
    return (
        f"{format_bytes(size)} over {link.name}, {ranks} ranks: "
        f"{format_bandwidth(link.bandwidth_bytes_per_s)} one way, "
        f"{format_bandwidth(link.headline_bandwidth_bytes_per_s)} advertised ({advertised}), "
        + ("measured" if link.curves else f"{format_percent(link.attained_fraction)} attained by large messages")
    )


@dataclass(frozen=True, kw_only=True)
class _Row:
    passing: Passing
    beside: Beside | None


def _table(found: Sequence[Passing], hidden: Sequence[Beside] | None, link: Link, style: Style) -> list[str]:
    rows = [_Row(passing=each, beside=None if hidden is None else hidden[i]) for i, each in enumerate(found)]
    columns: list[Column[_Row]] = [
        Column(title="op", cell=lambda row: row.passing.name, right=False),
        Column(title="one rank sends", cell=lambda row: format_bytes(row.passing.sent_bytes), priority=2),
        Column(title="headline", cell=lambda row: format_seconds(row.passing.headline_seconds)),
        Column(title="attained", cell=lambda row: format_seconds(row.passing.attained_seconds)),
    ]
    return render_table(columns + (_needed(link) if hidden is None else _overlap()), rows, style)


def _overlap() -> list[Column[_Row]]:
    """What becomes of each message beside the given compute."""
    return [
        Column(title="headline/compute", cell=lambda row: f"{_known(row).headline_ratio:.2f}", priority=1),
        Column(title="0.3 rule", cell=lambda row: "hides" if _known(row).hides_by_rule else "does not hide"),
        Column(title="hidden", cell=lambda row: format_percent(_known(row).hidden_share)),
        Column(title="exposed", cell=lambda row: _exposed(_known(row))),
    ]


def _needed(link: Link) -> list[Column[_Row]]:
    """How much compute would hide each message."""
    from shardwise.planner.passes import hiding_compute_seconds, rule_compute_seconds

    return [
        Column(
            title="hides behind", cell=lambda row: format_seconds(hiding_compute_seconds(row.passing, link)), priority=1
        ),
        Column(title="by the 0.3 rule", cell=lambda row: format_seconds(rule_compute_seconds(row.passing)), priority=1),
    ]


def _known(row: _Row) -> Beside:
    assert row.beside is not None
    return row.beside


def _exposed(beside: Beside) -> str:
    return format_seconds(beside.exposed_seconds) if beside.exposed_seconds else "-"


def _verdict(compute: float, passing: Passing, hidden: Beside, enough: float) -> list[str]:
    """Full sharding beside the given compute, by the rule of thumb and by the overlap."""
    rule = (
        f"By the rule of thumb, full sharding hides behind {format_seconds(compute)} of compute here"
        if hidden.hides_by_rule
        else f"By the rule of thumb (0.3 of compute), full sharding cannot hide behind {format_seconds(compute)} of "
        "compute: do not fully shard over this wire"
    )
    attained = (
        f"At attained speed it takes {format_seconds(passing.attained_seconds)}; compute beside it lasts "
        f"{format_seconds(hidden.slowed_compute_seconds)}. "
    )
    if not hidden.exposed_seconds:
        attained += "All of it hides, if everything overlaps."
    else:
        attained += (
            f"If everything overlaps, {format_percent(hidden.hidden_share)} of it hides and "
            f"{format_seconds(hidden.exposed_seconds)} stay exposed; {format_seconds(enough)} of compute, or a wire "
            f"about {enough / compute:.2g} times as fast, would hide it all."
        )
    disagree = hidden.hides_by_rule == bool(hidden.exposed_seconds)
    if disagree and hidden.hides_by_rule:
        attained += " The rule is too kind here: the wire attains far less than its headline."
    elif disagree:
        attained += " The rule is careful: it leaves room for what does not overlap, such as the first gather."
    return [f"{rule} ({hidden.headline_ratio:.2f}).", attained, ""]


def _data(link: Link, ranks: int, found: Sequence[Passing], hidden: Sequence[Beside] | None) -> dict[str, Any]:
    from shardwise.planner.passes import hiding_compute_seconds, rule_compute_seconds
    from shardwise.vocabulary import codec

    rows: list[dict[str, Any]] = [
        {
            **codec.to_data(each),
            "hidden_by_compute_seconds": hiding_compute_seconds(each, link),
            "hidden_by_compute_seconds_by_rule": rule_compute_seconds(each),
        }
        for each in found
    ]
    for i, row in enumerate(rows):
        if hidden is not None:
            row["beside_compute"] = codec.to_data(hidden[i])
    return {"link": codec.to_data(link), "ranks": ranks, "messages": rows}
