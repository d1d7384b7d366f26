"""From what the ranks found to the Cluster that `plan` reads. Arithmetic only, no torch."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shardwise.facts import catalog
from shardwise.facts.machine.wires import bytes_per_s_of_one_link, nvlink_entry, pcie_entry
from shardwise.probe.budget import NO_TIME
from shardwise.probe.curves import fit_line, interpolate, left_out_error, median, predict_by_line
from shardwise.probe.findings import Findings, Fit, ProbeReport, RateRecord, Scope, WireRecord
from shardwise.vocabulary.cluster import (
    Cluster,
    CollectiveCurve,
    CurvePoint,
    Gpu,
    Link,
    LinkKind,
    Measurements,
    RatePoint,
)
from shardwise.vocabulary.timeline import bus_factor
from shardwise.vocabulary.units import KIB, MIB, format_bytes

MOST_LISTED = 6
"""Of what was left out, in the Cluster; the report has all of it."""
SMALL_BYTES = 4 * KIB
"""Up to this size a message's time is latency."""
FASTER_THAN_PCIE = 130e9
"""Bytes a second one way; PCIe 6 x16 carries 126e9. Tells NVLink apart where the driver cannot be asked."""
SAME_CARD = 0.05
"""A card whose memory differs by more from the catalogue's is another variant."""
BUSY = 0.5
"""Load a core from which a measurement is said to have been disturbed."""
LEAST_TABLE_BYTES = MIB
"""A table that ends below this holds latencies only. Read as bandwidth it would be off by orders of magnitude."""
FITTED_FROM_BYTES = (MIB, 64 * KIB)
"""The line is fitted from the first of these sizes up that leaves three points. Small messages use other protocols,
with a kink between, and ride in the buffers of switches and shapers; their times belong to the table, not the line."""


def build_report(findings: Findings, today: datetime.date | None = None) -> ProbeReport:
    """The Cluster, and how well its tables predict.

    Args:
        findings: Of all ranks.
        today: The date to write; the clock's if None.
    """
    first = findings.ranks[0]
    num_nodes = 1 + max(rank.node for rank in findings.ranks)
    per_node = len(findings.ranks) // num_nodes
    fits = tuple(fit_all(findings.wire))
    host_memory = [rank.host_memory_bytes for rank in findings.ranks if rank.host_memory_bytes is not None]
    cluster = Cluster(
        name=_cluster_name(findings, num_nodes, per_node),
        gpu=_gpu(findings),
        num_nodes=num_nodes,
        gpus_per_node=per_node,
        intra_node=_link(findings, "intra_node") or _no_wire(findings),
        inter_node=_link(findings, "inter_node"),
        host_memory_bytes=min(host_memory, default=None),
        measurements=_measurements(findings),
        versions={**_driver(findings), **findings.versions, **findings.switches},
        source="measured",
        date=(today or datetime.date.today()).isoformat(),
        assumptions=tuple(_assumptions(findings)),
    )
    assert first.rank == 0
    return ProbeReport(cluster=cluster, findings=findings, fits=fits)


def _cluster_name(findings: Findings, num_nodes: int, per_node: int) -> str:
    first = findings.ranks[0]
    prefix = f"{num_nodes}x" if num_nodes > 1 else ""
    if first.architecture == "cpu":
        return f"cpu-{prefix}{per_node}x{first.num_threads}"
    return f"{prefix}{per_node}x-" + first.device_name.lower().replace(" ", "-")


def _driver(findings: Findings) -> dict[str, str]:
    """The driver as the inventory has it, for machines whose kernel does not show the module's version."""
    driver = next((each.driver for each in findings.inventories), "")
    return {"driver": driver} if driver else {}


def _assumptions(findings: Findings) -> Iterable[str]:
    names = sorted({rank.device_name for rank in findings.ranks})
    if len(names) > 1:
        yield f"The cards differ ({', '.join(names)}); all are taken for the weakest of them."
    if not findings.wire:
        yield "No wire was measured (one rank); intra_node stands for memory copies inside one device."
    yield from _too_short(findings)
    cut = [skipped.what for skipped in findings.skipped if NO_TIME in skipped.why]
    if cut:
        listed = ", ".join(cut[:MOST_LISTED]) + (
            f" and {len(cut) - MOST_LISTED} more" if len(cut) > MOST_LISTED else ""
        )
        yield f"Not measured, or not at every size, for want of time: {listed}."
    busiest = max(findings.ranks, key=lambda rank: rank.load / rank.num_cpus)
    if busiest.load > BUSY * busiest.num_cpus:
        yield (
            f"The machine was busy when it was measured (load {busiest.load:.1f} on {busiest.num_cpus} core(s)); "
            "an idle one is faster."
        )
    if findings.ranks[0].architecture == "cpu":
        yield "A card is one rank's share of the cores; its memory is that share of what was free for new programs."


# ----------------------------------------------------------------------------------------------------------------- gpu


def _gpu(findings: Findings) -> Gpu:
    """The card by its data sheet if the catalogue knows it, else by what was measured; memory as the driver has it."""
    first = findings.ranks[0]
    usable = min(rank.device_memory_bytes for rank in findings.ranks)
    cuda = None if first.architecture == "cpu" else usable
    cards = [card for each in findings.inventories for card in each.cards if card.name == first.device_name]
    memory = min((card.memory_bytes for card in cards if card.memory_bytes is not None), default=usable)
    if catalog.knows("gpus", first.device_name):
        known = catalog.gpu(first.device_name)
        if abs(known.memory_bytes / memory - 1) < SAME_CARD:
            return replace(known, memory_bytes=memory, cuda_memory_bytes=cuda)
    peak: dict[str, float] = {}
    for record in findings.rates:
        if record.what == "matmul":
            peak[record.dtype] = max(record.rate, peak.get(record.dtype, 0.0))
    cores = f"{first.num_threads} core(s) of " if first.architecture == "cpu" else ""
    return Gpu(
        name=cores + first.device_name,
        memory_bytes=memory,
        cuda_memory_bytes=cuda,
        peak_flops=peak,
        memory_bandwidth_bytes_per_s=findings.copy_bytes_per_s,
        architecture=first.architecture,
        source="measured",
    )


def _measurements(findings: Findings) -> Measurements:
    memory = {record.what: record.bytes for record in findings.memory}
    attention = [record for record in findings.rates if record.what.startswith("attention ")]
    communicators = [num_bytes for what, num_bytes in memory.items() if what.startswith("communicator")]
    return Measurements(
        matmul_flops=_rate_points((record for record in findings.rates if record.what == "matmul"), by="dtype"),
        attention_flops=_rate_points(attention, by="pass"),
        copy_bytes_per_s=findings.copy_bytes_per_s,
        host_to_device_bytes_per_s=findings.host_to_device_bytes_per_s,
        device_to_host_bytes_per_s=findings.device_to_host_bytes_per_s,
        launch_gap_seconds=findings.launch_gap_seconds,
        context_bytes=memory.get("context"),
        communicator_bytes=max(communicators, default=None),
        matmul_slowdown_under_wire=findings.contention.matmul_slowdown if findings.contention else None,
        wire_slowdown_under_matmul=findings.contention.wire_slowdown if findings.contention else None,
        checkpoint_bytes_per_s=findings.checkpoint_bytes_per_s,
    )


def _rate_points(records: Iterable[RateRecord], by: str) -> Mapping[str, tuple[RatePoint, ...]]:
    found: dict[str, list[RatePoint]] = {}
    for record in records:
        key = record.dtype if by == "dtype" else record.what.removeprefix("attention ")
        found.setdefault(key, []).append(RatePoint(size=record.size, rate=record.rate))
    return {key: tuple(sorted(points, key=lambda point: point.size)) for key, points in found.items()}


# ---------------------------------------------------------------------------------------------------------------- link


def points_of(records: Iterable[WireRecord]) -> tuple[CurvePoint, ...]:
    """A table in order of size."""
    ordered = sorted(records, key=lambda record: record.bytes)
    return tuple(CurvePoint(bytes=record.bytes, seconds=record.seconds) for record in ordered)


def _by_curve(records: Iterable[WireRecord]) -> dict[tuple[str, str], list[WireRecord]]:
    found: dict[tuple[str, str], list[WireRecord]] = {}
    for record in records:
        found.setdefault((record.op, record.grouping), []).append(record)
    return found


def has_bandwidth(records: Sequence[WireRecord]) -> bool:
    """Whether a table reaches sizes at which bandwidth and not latency decides."""
    return max((record.bytes for record in records), default=0) >= LEAST_TABLE_BYTES


def _too_short(findings: Findings) -> Iterable[str]:
    """What is left out of the Cluster because only small messages were measured."""
    short = [members for members in _by_curve(findings.wire).values() if not has_bandwidth(members)]
    if short:
        names = ", ".join(sorted({f"{members[0].op} over {members[0].grouping}" for members in short}))
        yield (
            f"Left out, because no message of {format_bytes(LEAST_TABLE_BYTES)} or more was measured: {names}. Small "
            "messages tell no bandwidth; probe again with more time or on an idle machine."
        )
    scopes: tuple[Scope, ...] = ("intra_node", "inter_node")
    for scope in scopes:
        records = [record for record in findings.wire if record.scope == scope]
        if records and not has_bandwidth(records):
            yield f"{scope} was not measured well enough; its figures are the link catalogue's, not this machine's."


def curves_of(records: Iterable[WireRecord]) -> tuple[CollectiveCurve, ...]:
    """One table for each op and number of ranks, of those that reach large messages.

    Groups of neighbors stand for their number of ranks; strides are only in the full report, as a Cluster's table does
    not tell the two apart.
    """
    found: dict[tuple[str, int], CollectiveCurve] = {}
    for (_, grouping), members in _by_curve(records).items():
        key = (members[0].op, members[0].ranks)
        if key not in found and not grouping.startswith("strides") and has_bandwidth(members):
            found[key] = CollectiveCurve(op=members[0].op, ranks=members[0].ranks, points=points_of(members))
    return tuple(found.values())


def fitted_points(points: Sequence[CurvePoint]) -> Sequence[CurvePoint]:
    """The sizes that the line is fitted to: the large ones if there are three, else whatever there is."""
    for smallest in FITTED_FROM_BYTES:
        large = [point for point in points if point.bytes >= smallest]
        if len(large) >= 3:
            return large
    return points[-2:]


def fit_all(records: Iterable[WireRecord]) -> Iterable[Fit]:
    """The line through each table, and both ways of predicting judged at left-out sizes."""
    for (_, grouping), members in _by_curve(records).items():
        points = points_of(members)
        fitted = fitted_points(points)
        if len(fitted) < 3:
            continue
        line = fit_line(fitted)
        line_error, table_error = left_out_error(fitted, predict_by_line), left_out_error(points, interpolate)
        if line.seconds_per_byte <= 0 or line_error is None or table_error is None:
            continue
        yield Fit(
            op=members[0].op,
            grouping=grouping,
            ranks=members[0].ranks,
            smallest_bytes=fitted[0].bytes,
            largest_bytes=fitted[-1].bytes,
            latency_seconds=line.latency_seconds,
            bus_bandwidth_bytes_per_s=bus_factor(members[0].op, members[0].ranks) / line.seconds_per_byte,
            line_error=line_error,
            table_error=table_error,
        )


def _link(findings: Findings, scope: Scope) -> Link | None:
    """The wire of one scope, described by its all_reduce over the most ranks; None if nothing was measured on it."""
    records = [record for record in findings.wire if record.scope == scope]
    if not records:
        return None
    if not has_bandwidth(records):
        return _stand_in(findings, scope)
    told = [record for members in _by_curve(records).values() if has_bandwidth(members) for record in members]
    reference = [record for record in told if record.op == "all_reduce"] or told
    widest = max(record.ranks for record in reference)
    reference = [record for record in reference if record.ranks == widest]
    points = points_of(record for record in reference if record.grouping == reference[0].grouping)
    large = fitted_points(points)
    line = fit_line(large)
    factor = bus_factor(reference[0].op, widest)
    attained = (
        factor / line.seconds_per_byte if line.seconds_per_byte else factor * points[-1].bytes / points[-1].seconds
    )
    small = [point.seconds for point in points if point.bytes <= SMALL_BYTES] or [points[0].seconds]
    error = left_out_error(large, predict_by_line)
    checked = f"; off by {100 * error:.0f} % on average at sizes left out of it" if error is not None else ""
    kind = _link_kind(findings, scope, attained)
    nominal = _line_rate(findings, kind) or attained
    return Link(
        name=f"measured-{kind.replace('_', '-')}",
        kind=kind,
        bandwidth_bytes_per_s=nominal,
        latency_seconds=median(small),
        attained_fraction=attained / nominal,
        attained_source=(
            f"bus bandwidth of {reference[0].op} over {widest} ranks, least squares of t = a + b*bytes over "
            f"{format_bytes(large[0].bytes)} to {format_bytes(large[-1].bytes)}{checked}; latency: median up to "
            f"{format_bytes(max(SMALL_BYTES, points[0].bytes))}"
        ),
        curves=curves_of(records),
        source="measured",
    )


def _link_kind(findings: Findings, scope: Scope, attained: float) -> LinkKind:
    if scope == "inter_node":
        return "network"
    if findings.ranks[0].architecture == "cpu":
        return "loopback"
    off = findings.switches
    if off.get("NCCL_P2P_DISABLE") == "1":
        return "network" if off.get("NCCL_SHM_DISABLE") == "1" else "host_memory"
    pairs = [pair for each in findings.inventories for pair in each.pairs]
    known = bool(pairs) and all(pair.num_nvlinks is not None for pair in pairs)
    if known and all(pair.num_nvlinks for pair in pairs):
        return "nvlink"
    if not all(rank.peer_access for rank in findings.ranks):
        return "host_memory"
    return "nvlink" if not known and attained > FASTER_THAN_PCIE else "pcie"


def _line_rate(findings: Findings, kind: LinkKind) -> float | None:
    """One way, of a card's active NVLinks: the catalogue's, else the driver's line rate; None for other wires."""
    if kind != "nvlink":
        return None
    entry = nvlink_entry(findings.ranks[0].device_name)
    cards = [card for each in findings.inventories for card in each.cards]
    if entry is not None:
        active = [card.num_active_nvlinks for card in cards if card.num_active_nvlinks]
        return min([entry.bandwidth_bytes_per_s, *(count * bytes_per_s_of_one_link(entry) for count in active)])
    return min((card.nvlink_bytes_per_s for card in cards if card.nvlink_bytes_per_s is not None), default=None)


def _stand_in(findings: Findings, scope: Scope) -> Link:
    """The catalogue's link for a wire on which only small messages were measured."""
    kind = _link_kind(findings, scope, 0.0)
    if kind == "network":
        return replace(catalog.link("10gbe"), source="assumed")
    if kind == "loopback":
        return catalog.link("loopback")
    entry = nvlink_entry(findings.ranks[0].device_name) if kind == "nvlink" else None
    cards = [card for each in findings.inventories for card in each.cards]
    generations = [card.pcie_generation_max for card in cards if card.pcie_generation_max is not None]
    widths = [card.pcie_width for card in cards if card.pcie_width is not None]
    pcie = pcie_entry(min(generations, default=4), min(widths, default=16), through_host=kind == "host_memory")
    return replace(entry or pcie, source="assumed")


def _no_wire(findings: Findings) -> Link:
    """A stand-in for machines of one card each, where no message stays inside."""
    return Link(
        name="none-one-card",
        kind="loopback",
        bandwidth_bytes_per_s=findings.copy_bytes_per_s / 2,
        attained_fraction=1.0,
        attained_source="there is one card on each machine; this is a memory copy inside of it",
        source="assumed",
    )
