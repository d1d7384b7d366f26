"""A probe's result as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.probe.findings import Findings, Inventory, ProbeReport, WireRecord
from shardwise.vocabulary.units import (
    GIB,
    KIB,
    MIB,
    TERA,
    format_bandwidth,
    format_bytes,
    format_percent,
    format_seconds,
)

SHOWN_SIZES = 5
MAX_SHOWN_PAIRS = 28


def report_page(report: ProbeReport) -> str:
    """Cards, rates, the wire by collective and size, and what was not measured or had to be assumed."""
    cluster, findings = report.cluster, report.findings
    lines = [
        f"{cluster.name}: {cluster.num_nodes} machine(s) with {cluster.gpus_per_node} x {cluster.gpu.name}, "
        f"{cluster.gpu.memory_bytes / GIB:.1f} GiB each; measured in {findings.seconds:.1f} s on {cluster.date}",
        "",
        *_rate_lines(findings),
        "",
        *_wire_lines(findings),
        *_pair_lines(findings),
        *_fit_lines(report),
    ]
    if findings.skipped:
        lines += ["", "Not measured:", *(f"  {skipped.what}: {skipped.why}" for skipped in findings.skipped)]
    if cluster.assumptions:
        lines += ["", "Mind:", *(f"  {sentence}" for sentence in cluster.assumptions)]
    if findings.phases:
        spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in findings.phases.items())
        lines += ["", f"Time went to: {spent}"]
    switches = ", ".join(f"{name}={value}" for name, value in findings.switches.items())
    versions = ", ".join(f"{name} {version}" for name, version in findings.versions.items())
    return "\n".join([*lines, "", f"With {versions}" + (f"; {switches}" if switches else "")]) + "\n"


def _rate_lines(findings: Findings) -> Iterator[str]:
    yield "One rank, while all do the same:"
    best: dict[tuple[str, str], tuple[float, int]] = {}
    for record in findings.rates:
        key = (record.what, record.dtype)
        best[key] = max(best.get(key, (0.0, 0)), (record.rate, record.size))
    for (what, dtype), (rate, size) in best.items():
        unit = "n" if what == "matmul" else "s"
        yield f"  {f'{what} {dtype}':<24} {rate / TERA:>9.3g} TFLOP/s at {unit}={size}"
    rates = {
        "memory copy": findings.copy_bytes_per_s,
        "host to device": findings.host_to_device_bytes_per_s,
        "device to host": findings.device_to_host_bytes_per_s,
        "checkpoint disk": findings.checkpoint_bytes_per_s,
    }
    for what, rate in rates.items():
        if rate is not None:
            yield f"  {what:<24} {format_bandwidth(rate):>17}"
    if findings.launch_gap_seconds is not None:
        yield f"  {'kernel launch':<24} {format_seconds(findings.launch_gap_seconds):>17}"
    for record in findings.memory:
        yield f"  {record.what:<24} {record.bytes / MIB:>13,.0f} MiB"
    if findings.contention is not None:
        both = findings.contention
        yield (
            f"  matmul and all_reduce together: {both.matmul_slowdown:.2f} and {both.wire_slowdown:.2f} times as long "
            "as alone"
        )


def _wire_lines(findings: Findings) -> Iterator[str]:
    """A table a grouping: bus bandwidth by size, and the time of the smallest message."""
    names = list(dict.fromkeys(record.grouping for record in findings.wire))
    for name in names:
        records = [record for record in findings.wire if record.grouping == name]
        sizes = _spread(sorted({record.bytes for record in records if record.bytes >= 64 * KIB}))
        yield f"Wire, {name} ({records[0].ranks} ranks a group), bus bandwidth; every element checked:"
        yield f"  {'':<16}{'smallest':>10}" + "".join(f"{_binary(size):>12}" for size in sizes)
        for op in dict.fromkeys(record.op for record in records):
            found = {record.bytes: record for record in records if record.op == op}
            smallest = found[min(found)]
            cells = "".join(f"{_cell(found.get(size)):>12}" for size in sizes)
            yield f"  {op:<16}{format_seconds(smallest.seconds):>10}{cells}"
        yield ""


def _cell(record: WireRecord | None) -> str:
    return "-" if record is None else format_bandwidth(record.bus_bandwidth)


def _spread(sizes: Sequence[int]) -> list[int]:
    """At most SHOWN_SIZES of them, the largest among them."""
    step = max(1, -(-len(sizes) // SHOWN_SIZES))
    return list(reversed(sizes[::-1][::step]))


def _binary(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"


def _pair_lines(findings: Findings) -> Iterator[str]:
    if not findings.pairs:
        return
    yield f"Between two ranks alone, {format_bytes(findings.pairs[0].bytes)} one way:"
    ordered = sorted(findings.pairs, key=lambda pair: pair.seconds, reverse=True)
    for pair in ordered[:MAX_SHOWN_PAIRS]:
        yield f"  {pair.sender} -> {pair.receiver}  {format_bandwidth(pair.bytes / pair.seconds)}"
    yield ""


def _fit_lines(report: ProbeReport) -> Iterator[str]:
    if not report.fits:
        return
    yield "t = latency + bytes / rate, and the mean error at sizes left out (line / table read between neighbors):"
    for fit in report.fits:
        yield (
            f"  {fit.op + ', ' + fit.grouping:<32} {format_seconds(fit.latency_seconds):>9} "
            f"{format_bandwidth(fit.bus_bandwidth_bytes_per_s):>12} "
            f"{format_percent(fit.line_error):>7} / {format_percent(fit.table_error)}"
        )


def inventory_page(inventory: Inventory) -> str:
    """What a machine holds."""
    memory = "unknown memory" if inventory.memory_bytes is None else f"{inventory.memory_bytes / GIB:.1f} GiB"
    numa = f", {inventory.num_numa_nodes} NUMA node(s)" if inventory.num_numa_nodes else ""
    lines = [f"{inventory.host}: {inventory.num_cpus} cores of {inventory.cpu}{numa}, {memory}"]
    told = {
        "kernel": inventory.kernel,
        "driver": inventory.driver,
        "container": inventory.container,
        "virtual machine": inventory.virtual_machine,
    }
    for name, value in told.items():
        if value:
            lines.append(f"  {name}: {value}")
    for card in inventory.cards:
        pcie = f"PCIe gen {_or(card.pcie_generation)} x{_or(card.pcie_width)} now, "
        pcie += f"gen {_or(card.pcie_generation_max)} x{_or(card.pcie_width_max)} at most"
        links = f"{_or(card.num_active_nvlinks)} of {_or(card.num_nvlinks)} NVLinks active"
        slow = f"; clocks held down: {', '.join(card.slowdowns)}" if card.slowdowns else ""
        lines.append(f"  card {card.index}: {card.name}; {pcie}; {links}{slow}")
    for pair in inventory.pairs:
        peer = {True: "peer access", False: "no peer access", None: "peer access unknown"}[pair.peer_access]
        lines.append(f"  cards {pair.first} and {pair.second}: {pair.path or 'path unknown'}, {peer}")
    for network in inventory.networks:
        speed = "speed unknown" if network.bits_per_s is None else f"{network.bits_per_s / 1e9:g} Gbit/s"
        lines.append(f"  network {network.name}: {network.state or 'state unknown'}, {speed}, MTU {_or(network.mtu)}")
    for adapter in inventory.adapters:
        speed = "speed unknown" if adapter.bits_per_s is None else f"{adapter.bits_per_s / 1e9:g} Gbit/s"
        lines.append(f"  {adapter.layer} {adapter.device} port {adapter.port}: {adapter.state}, {speed}")
    lines += [f"  {name} {version}" for name, version in inventory.versions.items()]
    lines += [f"  unreadable: {excuse}" for excuse in inventory.unreadable]
    return "\n".join(lines) + "\n"


def _or(value: int | None) -> str:
    return "?" if value is None else str(value)
