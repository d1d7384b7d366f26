"""How right is the collective model: predicted against measured at every size, group and wire that was probed.

    PYTHONPATH=src python benchmarks/collective_model.py --out benchmarks/results

Reads the probes that are kept under results/ (and any report of `shardwise probe --json` that is named) and measures
nothing. Each inner size in turn is left out of its table and predicted from the others, as the planner would: `table`.
Beside it stand the line through the same points, the table read in log-log (as it was until 2026-11-30), and what the
planner says with nothing but the link catalogue: `datasheet`. Errors are |predicted / measured - 1|, means over sizes
above 1 MiB; the pass mark is 10 % for tables.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.facts import catalog
from shardwise.planner.wire import link_seconds
from shardwise.probe.build import fitted_points
from shardwise.probe.curves import interpolate, predict_by_line
from shardwise.vocabulary.cluster import CollectiveOp, CurvePoint, Link
from shardwise.vocabulary.units import MIB

RESULTS = Path(__file__).parent / "results"
TRAINING = ("all_reduce", "all_gather", "reduce_scatter")
"""What training by data lives on."""
PASS = 0.10
DATASHEETS = {"nvlink": "nvlink4", "host memory": "pcie5-x16-host", "sockets": "loopback"}
"""The catalogue's link for each wire of the machine with H200s."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """One collective over one group of ranks on one wire."""

    wire: str
    op: CollectiveOp
    grouping: str
    ranks: int
    points: tuple[CurvePoint, ...]
    datasheet: Link


@dataclass(frozen=True, kw_only=True)
class Row:
    """One size, measured and predicted in seconds; None where a size is the smallest or the largest."""

    bytes: int
    measured: float
    table: float | None
    log_log: float | None
    line: float | None
    datasheet: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="*", help="reports of `shardwise probe --json`")
    parser.add_argument("--datasheet", default="nvlink4", help="the catalogue's link for those reports")
    parser.add_argument("--out", type=Path, help="folder for the result")
    arguments = parser.parse_args()
    tables = [*kept_tables()]
    for path in arguments.reports:
        findings = json.loads(path.read_text())["findings"]
        tables += tables_of(path.stem, findings["wire"], catalog.link(arguments.datasheet))
    scores = [score(table) for table in tables]
    show(scores)
    summary = summarize(scores)
    print(json.dumps(summary, indent=2))
    if arguments.out is not None:
        result = {
            "what": "collective times predicted at sizes that were left out of the tables, and from data sheets alone",
            "error": "|predicted / measured - 1|, mean over sizes above 1 MiB",
            "summary": summary,
            "tables": scores,
        }
        (arguments.out / "collective_model.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(each["table"] is None or each["table"] <= PASS for each in summary["training"].values()) else 1


def kept_tables() -> Iterator[Table]:
    """Of two H200s on three wires, and of links of known rate."""
    cards = json.loads((RESULTS / "probe_h200_x2.json").read_text())
    for wire, found in cards["wires"].items():
        yield from tables_of(f"2 H200s, {wire}", found["report"]["findings"]["wire"], catalog.link(DATASHEETS[wire]))
    shaped = json.loads((RESULTS / "probe_shaped_link.json").read_text())
    for row in shaped["rows"]:
        rate = row["shaped_mbit_per_s"]
        link = replace(catalog.link("10gbe"), name=f"{rate:g} Mbit/s", bandwidth_bytes_per_s=rate * 1e6 / 8)
        yield from tables_of(f"{rate:g} Mbit/s, gloo", row.get("records", ()), link)


def tables_of(wire: str, records: Iterable[dict[str, Any]], datasheet: Link) -> Iterator[Table]:
    """Records of a probe, by collective and group."""
    found: dict[tuple[CollectiveOp, str, int], list[CurvePoint]] = {}
    for record in records:
        key = (record["op"], record["grouping"], int(record["ranks"]))
        found.setdefault(key, []).append(CurvePoint(bytes=int(record["bytes"]), seconds=float(record["seconds"])))
    for (op, grouping, ranks), points in found.items():
        points.sort(key=lambda point: point.bytes)
        yield Table(wire=wire, op=op, grouping=grouping, ranks=ranks, points=tuple(points), datasheet=datasheet)


def score(table: Table) -> dict[str, Any]:
    """All sizes of a table, and its mean errors."""
    rows = list(rows_of(table))
    judged = [row for row in rows if row.bytes > MIB]
    return {
        "wire": table.wire,
        "op": table.op,
        "grouping": table.grouping,
        "ranks": table.ranks,
        **{how: mean_error(judged, how) for how in ("table", "log_log", "line", "datasheet")},
        "rows": [vars(row) for row in rows],
    }


def rows_of(table: Table) -> Iterator[Row]:
    points = table.points
    for i, point in enumerate(points):
        inner = 0 < i < len(points) - 1
        others = [*points[:i], *points[i + 1 :]]
        large = point in fitted_points(points)
        yield Row(
            bytes=point.bytes,
            measured=point.seconds,
            table=interpolate(others, point.bytes) if inner else None,
            log_log=log_log(others, point.bytes) if inner else None,
            line=predict_by_line(fitted_points(others), point.bytes) if inner and large else None,
            datasheet=link_seconds(table.datasheet, table.op, table.ranks, point.bytes),
        )


def log_log(points: Sequence[CurvePoint], num_bytes: int) -> float:
    """A power of the size between the two neighbors."""
    low = max((point for point in points if point.bytes < num_bytes), key=lambda point: point.bytes)
    high = min((point for point in points if point.bytes > num_bytes), key=lambda point: point.bytes)
    share = math.log(num_bytes / low.bytes) / math.log(high.bytes / low.bytes)
    return low.seconds * (high.seconds / low.seconds) ** share


def mean_error(rows: Iterable[Row], how: str) -> float | None:
    errors = [
        abs(predicted / row.measured - 1) for row in rows if (predicted := getattr(row, how)) is not None
    ]  # fmt: skip
    return sum(errors) / len(errors) if errors else None


def summarize(scores: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Means over all sizes of a wire: of the collectives that training lives on, and of all."""

    def means(chosen: Callable[[dict[str, Any]], bool]) -> dict[str, float | None]:
        rows = [Row(**row) for each in scores if chosen(each) for row in each["rows"] if row["bytes"] > MIB]
        return {how: mean_error(rows, how) for how in ("table", "log_log", "line", "datasheet")}

    wires = list(dict.fromkeys(each["wire"] for each in scores))
    return {
        "training": {wire: means(lambda each, w=wire: each["wire"] == w and each["op"] in TRAINING) for wire in wires},
        "all": {wire: means(lambda each, w=wire: each["wire"] == w) for wire in wires},
    }


def show(scores: list[dict[str, Any]]) -> None:
    print(f"{'wire':<24}{'collective':<16}{'ranks':>6}{'table':>8}{'log-log':>9}{'line':>7}{'datasheet':>11}")
    for each in scores:
        cells = [percent(each[how]) for how in ("table", "log_log", "line", "datasheet")]
        print(
            f"{each['wire']:<24}{each['op']:<16}{each['ranks']:>6}{cells[0]:>8}{cells[1]:>9}{cells[2]:>7}{cells[3]:>11}"
        )


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


if __name__ == "__main__":
    sys.exit(main())
