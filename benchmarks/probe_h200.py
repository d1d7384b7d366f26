"""The probe on three wires of one machine: NVLink, host memory, sockets.

    PYTHONPATH=src python benchmarks/probe_h200.py --out RESULTS_FOLDER

Each wire is one child process (NCCL reads its switches once), ended when its time is over. Prints bus bandwidth by
collective and size beside the figures that were measured before with other programs on a machine of the same kind, and
writes probe_h200.json: every record, the fits and the memory of contexts and communicators.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.probe import ProbeOptions, probe
from shardwise.probe.findings import ProbeReport
from shardwise.vocabulary.codec import from_data, to_data, to_json
from shardwise.vocabulary.units import GB, GIB, KIB, MIB

SHOWN = (4 * MIB, 64 * MIB, 512 * MIB, 2 * GIB)
SIZES = (8, 4 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 512 * MIB, GIB, 2 * GIB)
OPS = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True, kw_only=True)
class Wire:
    """One way for the cards to talk, how it is forced, and what was measured before on four cards."""

    name: str
    switches: dict[str, str]
    budget_seconds: float
    """Of measuring; the whole probe for the first wire, the wire alone for the others."""
    before: dict[str, tuple[float | None, ...]]
    """GB/s by collective at the shown sizes, with 4 ranks, torch 2.11, NCCL 2.28.9."""


WIRES = (
    Wire(
        name="nvlink",
        switches={},
        budget_seconds=42,
        before={
            "all_reduce": (107, 304, 344, 359),
            "all_gather": (62, 259, 313, 333),
            "reduce_scatter": (50, 253, 304, 328),
        },
    ),
    Wire(
        name="host memory",
        switches={"NCCL_P2P_DISABLE": "1"},
        budget_seconds=18,
        before={
            "all_reduce": (27, 23, 24, None),
            "all_gather": (24, 23, 24, None),
            "reduce_scatter": (23, 22, 22, None),
        },
    ),
    Wire(
        name="sockets",
        switches={"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
        budget_seconds=22,
        before={
            "all_reduce": (2.2, 2.1, None, None),
            "all_gather": (2.5, 2.0, None, None),
            "reduce_scatter": (2.7, 2.2, None, None),
        },
    ),
)
GRACE_SECONDS = 20.0
"""For the ranks' end and for the last message under way, on top of a wire's budget; all three wires within 142 s."""
AGREEMENT = 0.05
AGREEMENT_BYTES = 512 * MIB
"""From this size up bus bandwidth must agree with what was measured before on as many cards."""
RANKS_BEFORE = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the benchmark itself")
    parser.add_argument("--scale", type=float, default=1.0, help="times every budget")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        return measure_wire(arguments.child, arguments)
    results: dict[str, object] = {}
    for number, wire in enumerate(WIRES):
        report, why = run_child(number, wire, arguments)
        results[wire.name] = {
            "switches": wire.switches,
            "why_not": why,
            "bus_bandwidth": [] if report is None else compared(wire, report),
            "report": report and to_data(report),
        }
        print(f"\n{wire.name} ({' '.join(f'{k}={v}' for k, v in wire.switches.items()) or 'default'})")
        print(f"  failed: {why}" if report is None else table(wire, report), flush=True)
        # After each wire, so that a limit on the whole run loses only what came after it.
        text = json.dumps({"date": datetime.date.today().isoformat(), "wires": results}, indent=1)
        (arguments.out / "probe_h200.json").write_text(text + "\n")
    return 0


def run_child(number: int, wire: Wire, arguments: argparse.Namespace) -> tuple[ProbeReport | None, str]:
    """The report of one wire, or why there is none."""
    command = [sys.executable, __file__, "--child", str(number), "--out", str(arguments.out)]
    command += ["--device", arguments.device, "--scale", str(arguments.scale)]
    log = arguments.out / f"probe_h200_{number}.log"
    started = time.monotonic()
    with log.open("w") as output:
        child = subprocess.Popen(
            command,
            env={**os.environ, **wire.switches},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(timeout=wire.budget_seconds * arguments.scale + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            child.wait()
            return None, f"not over after {time.monotonic() - started:.0f} s; see {log.name}"
    print(f"{wire.name}: {time.monotonic() - started:.1f} s")
    if code:
        return None, log.read_text()[-2000:]
    return from_data(ProbeReport, json.loads(child_file(number, arguments).read_text())), ""


def child_file(number: int, arguments: argparse.Namespace) -> Path:
    return arguments.out / f"probe_h200_{number}.json"


def measure_wire(number: int, arguments: argparse.Namespace) -> int:
    """In the child: probe, with everything for the first wire and the wire alone for the others."""
    wire = WIRES[number]
    options = ProbeOptions(
        device=arguments.device,
        parts=("compute", "disk", "wire") if number == 0 else ("wire",),
        sizes=SIZES,
        budget_seconds=wire.budget_seconds * arguments.scale,
        progress=lambda text: print(text, flush=True),
    )
    try:
        report = probe(options)
    except ShardwiseError as error:
        print(error)
        return 1
    child_file(number, arguments).write_text(to_json(report))
    return 0


def compared(wire: Wire, report: ProbeReport) -> list[dict[str, object]]:
    """Bus bandwidth over all ranks at the shown sizes, beside what was measured before on four cards."""
    rows: list[dict[str, object]] = []
    records = {(record.op, record.bytes): record for record in report.findings.wire if record.grouping == "all"}
    for op in OPS:
        for size, before in zip(SHOWN, wire.before[op], strict=True):
            record = records.get((op, size))
            if record is None:
                continue
            share = None if before is None else record.bus_bandwidth / GB / before
            judged = share is not None and size >= AGREEMENT_BYTES and record.ranks == RANKS_BEFORE
            rows.append({
                "op": op, "bytes": size, "ranks": record.ranks, "gb_per_s": record.bus_bandwidth / GB,
                "before_gb_per_s": before, "over_before": share,
                "within_5_percent": abs(share - 1) <= AGREEMENT if judged and share is not None else None,
            })  # fmt: skip
    return rows


def table(wire: Wire, report: ProbeReport) -> str:
    """Bus bandwidth over all ranks, and the share of what was measured before on four."""
    records = {(record.op, record.bytes): record for record in report.findings.wire if record.grouping == "all"}
    lines = [
        f"  {'GB/s, ' + str(len(report.findings.ranks)) + ' ranks':<16}"
        + "".join(f"{size // MIB:>12} MiB" for size in SHOWN)
    ]
    for op in OPS:
        cells: list[str] = []
        for size, before in zip(SHOWN, wire.before[op], strict=True):
            record = records.get((op, size))
            if record is None:
                cells.append("-")
                continue
            share = "" if before is None else f" ({record.bus_bandwidth / GB / before:.2f}x)"
            cells.append(f"{record.bus_bandwidth / GB:.1f}{share}")
        lines.append(f"  {op:<16}" + "".join(f"{cell:>16}" for cell in cells))
    small = [f"{op} {records[op, 4 * KIB].seconds * 1e6:.0f} us" for op in OPS if (op, 4 * KIB) in records]
    return "\n".join([*lines, "  4 KiB: " + ", ".join(small)])


if __name__ == "__main__":
    sys.exit(main())
