"""Does the probe measure a wire whose rate is known? Two network namespaces joined by a shaped link, gloo, torchrun.

Needs root (or CAP_NET_ADMIN and CAP_SYS_ADMIN), `ip` and `tc` (package iproute2):

    PYTHONPATH=src python benchmarks/shaped_link.py --out benchmarks/results

A token bucket (tc tbf) on each end lets RATE bits a second out, counted with Ethernet, IP and TCP headers. At an MTU of
1,500 a full segment carries 1,448 bytes of data in 1,514 on the wire, so 95.6 % of the shaped rate is the most that any
program can see.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

from shardwise.probe import ProbeOptions, probe
from shardwise.probe.findings import ProbeReport
from shardwise.probe.options import Part
from shardwise.vocabulary.codec import from_data, to_json
from shardwise.vocabulary.timeline import bus_factor
from shardwise.vocabulary.units import KIB, MIB

MBIT = 1e6 / 8
GOODPUT_SHARE = 1448 / 1514
NAMES = ("shardwise-a", "shardwise-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
BURST_SECONDS = 0.004
"""The bucket: what may leave at once after a pause. A timer tick's worth, or the rate is not reached."""
PORT = 29577


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[50, 200, 1000], help="Mbit/s")
    parser.add_argument("--budget", type=float, default=45.0, help="seconds of measuring for each rate")
    parser.add_argument("--out", type=Path, help="folder for the result")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--parts", nargs="+", default=["wire"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        return measure_in_namespace(arguments.child, arguments.budget, tuple(arguments.parts))
    why = why_impossible()
    if why:
        print(f"cannot shape a link here: {why}")
        return 2
    rows = [measure_shaped(rate, arguments.budget) for rate in arguments.rates]
    print(json.dumps(rows, indent=2))
    if arguments.out is not None:
        result = {
            "what": "probe over a link of known rate: two network namespaces, tc tbf on both ends, gloo, torchrun",
            "date": datetime.date.today().isoformat(),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
            "load_before": os.getloadavg()[0],
            "goodput_share_of_shaped_rate": GOODPUT_SHARE,
            "rows": rows,
        }
        (arguments.out / "probe_shaped_link.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(row["within_15_percent"] for row in rows) else 1


def why_impossible() -> str:
    """Why no namespace can be made here; empty if one can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (install iproute2)"
    with contextlib.suppress(subprocess.CalledProcessError):
        run("ip", "netns", "add", "shardwise-try")
        run("ip", "netns", "delete", "shardwise-try")
        return ""
    return "the kernel refuses a network namespace (root is needed)"


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def shaped_link(mbit: float) -> Generator[None]:
    """Two namespaces with one interface each, `mbit` one way in each direction."""
    burst = max(16 * KIB, int(mbit * MBIT * BURST_SECONDS))
    try:
        for name in NAMES:
            run("ip", "netns", "add", name)
        run(
            "ip",
            "link",
            "add",
            "wire-a",
            "netns",
            NAMES[0],
            "type",
            "veth",
            "peer",
            "name",
            "wire-b",
            "netns",
            NAMES[1],
        )
        for name, device, address in zip(NAMES, ("wire-a", "wire-b"), ADDRESSES, strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", device)
            for each in ("lo", device):
                run("ip", "-n", name, "link", "set", each, "up")
            run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{mbit}mbit",
                "burst", str(burst), "latency", "100ms")  # fmt: skip
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def measure_shaped(mbit: float, budget: float) -> dict[str, object]:
    """What the probe says about a link of `mbit`."""
    return row(mbit, probe_shaped(mbit, budget, ("wire",)))


def probe_shaped(mbit: float, budget: float, parts: tuple[Part, ...]) -> ProbeReport:
    """The whole report of a probe over a link of `mbit`."""
    with shaped_link(mbit), tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "report.json"
        in_both(budget + 120, __file__, "--child", str(result), "--budget", str(budget), "--parts", *parts)
        return from_data(ProbeReport, json.loads(result.read_text()))


def in_both(limit_seconds: float, script: str, *arguments: str) -> None:
    """Run a script under torchrun, one rank in each namespace.

    Raises:
        SystemExit: With what it printed, if it fails on either side.
    """
    launches = [start(node, script, *arguments) for node in range(2)]
    try:
        texts = [launch.communicate(timeout=limit_seconds)[0] for launch in launches]
    finally:
        for launch in launches:
            launch.kill()
    if any(launch.returncode for launch in launches):
        raise SystemExit("\n".join(texts))


def start(node: int, script: str, *arguments: str) -> subprocess.Popen[str]:
    """torchrun with one rank in one namespace."""
    device = ("wire-a", "wire-b")[node]
    command = ["ip", "netns", "exec", NAMES[node], sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}", f"--local-addr={ADDRESSES[node]}"]
    command += [f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}", script, *arguments]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": device, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def measure_in_namespace(result: Path, budget: float, parts: tuple[Part, ...]) -> int:
    """One rank."""
    sizes = (8, 4 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB)
    report = probe(ProbeOptions(device="cpu", parts=parts, nodes=2, sizes=sizes, budget_seconds=budget))
    if os.environ["RANK"] == "0":
        result.write_text(to_json(report))
    return 0


def row(mbit: float, report: ProbeReport) -> dict[str, object]:
    link = report.cluster.inter_node
    assert link is not None
    largest: dict[str, dict[str, float]] = {}
    for record in report.findings.wire:
        largest[record.op] = {
            "bytes": record.bytes,
            "seconds": record.seconds,
            "busbw_mbit_per_s": record.bytes * bus_factor(record.op, record.ranks) / record.seconds / MBIT,
        }
    attained = link.bandwidth_bytes_per_s * link.attained_fraction
    return {
        "shaped_mbit_per_s": mbit,
        "link_mbit_per_s": attained / MBIT,
        "link_over_shaped": attained / (mbit * MBIT),
        "within_15_percent": abs(attained / (mbit * MBIT) - 1) <= 0.15,
        "link_over_goodput": attained / (mbit * MBIT * GOODPUT_SHARE),
        "latency_seconds": link.latency_seconds,
        "how": link.attained_source,
        "largest": largest,
        "records": [
            {"op": record.op, "grouping": record.grouping, "ranks": record.ranks, "bytes": record.bytes,
             "seconds": record.seconds, "iterations": record.iterations}
            for record in report.findings.wire
        ],
        "fits": [
            {"op": fit.op, "busbw_mbit_per_s": fit.bus_bandwidth_bytes_per_s / MBIT, "line_error": fit.line_error,
             "table_error": fit.table_error}
            for fit in report.fits
        ],
        "seconds": report.findings.seconds,
        "assumptions": list(report.cluster.assumptions),
        "versions": dict(report.cluster.versions),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
