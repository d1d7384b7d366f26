import datetime
from dataclasses import replace
from typing import Any

import pytest

from shardwise.probe.build import build_report
from shardwise.probe.findings import (
    CardRecord,
    Contention,
    Findings,
    Inventory,
    MemoryRecord,
    PairPath,
    PairRecord,
    RankFacts,
    RateRecord,
    Scope,
    Skipped,
    WireRecord,
)
from shardwise.probe.page import inventory_page, report_page
from shardwise.vocabulary.cluster import Cluster, CollectiveOp
from shardwise.vocabulary.codec import from_data, parse_yaml, to_data, to_yaml
from shardwise.vocabulary.units import GIB, MIB

TODAY = datetime.date(2026, 11, 29)
SIZES = (8, 4096, 65_536, MIB, 16 * MIB, 64 * MIB)


def rank(number: int, **changes: Any) -> RankFacts:
    facts = RankFacts(
        rank=number,
        node=0,
        host="node-a",
        device_name="Some CPU",
        device_memory_bytes=(8 - number) * GIB,
        host_memory_bytes=16 * GIB,
        architecture="cpu",
        num_cpus=2,
    )
    return replace(facts, **changes)


def wire(op: CollectiveOp, grouping: str, scope: Scope, ranks: int, bus: float, latency: float) -> list[WireRecord]:
    factor = {"all_reduce": 2 * (ranks - 1) / ranks, "send": 1.0}.get(op, (ranks - 1) / ranks)
    return [
        WireRecord(
            op=op,
            grouping=grouping,
            scope=scope,
            ranks=ranks,
            bytes=size,
            iterations=10,
            seconds=latency + size * factor / bus,
            p95_seconds=2 * (latency + size * factor / bus),
            verified_elements=ranks * size // 4,
        )
        for size in SIZES
    ]


def cpu_findings(**changes: Any) -> Findings:
    findings = Findings(
        ranks=(rank(0), rank(1)),
        copy_bytes_per_s=9e9,
        wire=tuple(wire("all_reduce", "all", "intra_node", 2, 1e9, 100e-6)),
        rates=(
            RateRecord(what="matmul", dtype="fp32", size=512, rate=1e11, iterations=9),
            RateRecord(what="matmul", dtype="fp32", size=1024, rate=2e11, iterations=9),
            RateRecord(what="attention forward", dtype="fp32", size=256, rate=3e10, iterations=9),
        ),
        versions={"torch": "2.13.0"},
        switches={"OMP_NUM_THREADS": "1"},
        seconds=12.0,
    )
    return replace(findings, **changes)


def card(index: int) -> CardRecord:
    return CardRecord(
        index=index,
        name="NVIDIA H200",
        memory_bytes=143_771 * MIB,
        pcie_generation=5,
        pcie_width=16,
        pcie_generation_max=4,
        num_nvlinks=18,
        num_active_nvlinks=18,
        nvlink_bytes_per_s=18 * 26.5e9,
    )


def h200_findings(pair: PairPath, bus: float = 300e9, **changes: Any) -> Findings:
    facts = tuple(
        rank(
            i,
            device_name="NVIDIA H200",
            device_memory_bytes=143_000 * MIB,
            architecture="sm_90",
            peer_access=pair.peer_access,
        )
        for i in range(2)
    )
    inventory = Inventory(
        host="node-a", cpu="Some CPU", num_cpus=32, driver="580.1", cards=(card(0), card(1)), pairs=(pair,)
    )
    return cpu_findings(
        ranks=facts,
        inventories=(inventory,),
        wire=tuple(wire("all_reduce", "all", "intra_node", 2, bus, 30e-6)),
        memory=(
            MemoryRecord(what="context", bytes=500 * MIB),
            MemoryRecord(what="communicator of all", bytes=90 * MIB),
        ),
        **changes,
    )


NVLINK = PairPath(first=0, second=1, path="NVLINK", num_nvlinks=18, peer_access=True)
PCIE = PairPath(first=0, second=1, path="PHB", num_nvlinks=0, peer_access=True)
HOST = PairPath(first=0, second=1, path="SYS", num_nvlinks=0, peer_access=False)


def test_cores_become_a_card() -> None:
    cluster = build_report(cpu_findings(), TODAY).cluster
    assert cluster.name == "cpu-2x1"
    assert (cluster.num_nodes, cluster.gpus_per_node, cluster.inter_node) == (1, 2, None)
    assert cluster.gpu.memory_bytes == 7 * GIB  # the rank that has least
    assert cluster.gpu.peak_flops == {"fp32": 2e11}
    assert cluster.gpu.memory_bandwidth_bytes_per_s == 9e9
    assert (cluster.source, cluster.gpu.source, cluster.intra_node.source) == ("measured",) * 3
    assert cluster.intra_node.kind == "loopback"
    assert cluster.date == "2026-11-29"
    assert cluster.versions == {"torch": "2.13.0", "OMP_NUM_THREADS": "1"}
    assert cluster.host_memory_bytes == 16 * GIB


def test_line_of_the_wire() -> None:
    report = build_report(cpu_findings(), TODAY)
    link = report.cluster.intra_node
    assert link.bandwidth_bytes_per_s * link.attained_fraction == pytest.approx(1e9, rel=1e-6)
    assert link.latency_seconds == pytest.approx(100e-6, rel=0.05)
    assert "least squares" in link.attained_source
    assert "left out" in link.attained_source
    (fit,) = report.fits
    assert fit.bus_bandwidth_bytes_per_s == pytest.approx(1e9, rel=1e-6)
    assert fit.latency_seconds == pytest.approx(100e-6, rel=1e-3)
    assert fit.line_error < 1e-6
    assert fit.table_error == pytest.approx(0.0, abs=1e-6)  # a latency and bytes is what the table is read as


def test_the_line_is_fitted_to_large_sizes_where_there_are_enough() -> None:
    report = build_report(cpu_findings(), TODAY)
    assert report.fits[0].smallest_bytes == MIB
    few = tuple(record for record in cpu_findings().wire if record.bytes <= MIB)
    small = build_report(cpu_findings(wire=few), TODAY)
    assert small.fits == ()  # two points above 64 KiB: a line through them, nothing to check it with
    attained = small.cluster.intra_node.bandwidth_bytes_per_s
    assert attained == pytest.approx(1e9, rel=1e-6)
    assert "left out" not in small.cluster.intra_node.attained_source


def test_what_was_not_measured_stays_none() -> None:
    measurements = build_report(cpu_findings(), TODAY).cluster.measurements
    for name in ("launch_gap_seconds", "context_bytes", "communicator_bytes", "checkpoint_bytes_per_s",
                 "host_to_device_bytes_per_s", "matmul_slowdown_under_wire"):  # fmt: skip
        assert getattr(measurements, name) is None
    assert [point.size for point in measurements.matmul_flops["fp32"]] == [512, 1024]
    assert list(measurements.attention_flops) == ["forward"]


def test_cluster_file_survives_the_codec() -> None:
    cluster = build_report(h200_findings(NVLINK), TODAY).cluster
    assert from_data(Cluster, parse_yaml(to_yaml(cluster))) == cluster


def test_findings_survive_the_codec() -> None:
    findings = h200_findings(NVLINK, pairs=(PairRecord(sender=0, receiver=1, bytes=8, seconds=0.1),))
    assert from_data(Findings, to_data(findings)) == findings


@pytest.mark.parametrize(
    ("pair", "switches", "kind"),
    [
        (NVLINK, {}, "nvlink"),
        (NVLINK, {"NCCL_P2P_DISABLE": "1"}, "host_memory"),
        (NVLINK, {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, "network"),
        (PCIE, {}, "pcie"),
        (HOST, {}, "host_memory"),
    ],
)
def test_kinds_of_wire(pair: PairPath, switches: dict[str, str], kind: str) -> None:
    cluster = build_report(h200_findings(pair, switches=switches), TODAY).cluster
    assert cluster.intra_node.kind == kind
    attained = cluster.intra_node.bandwidth_bytes_per_s * cluster.intra_node.attained_fraction
    assert attained == pytest.approx(300e9, rel=1e-6)
    if kind == "nvlink":
        assert cluster.intra_node.bandwidth_bytes_per_s == 450e9  # the data sheet's, not the line rate


UNKNOWN = PairPath(first=0, second=1, peer_access=True)


@pytest.mark.parametrize(("bus", "kind"), [(300e9, "nvlink"), (50e9, "pcie")])
def test_without_the_drivers_word_the_rate_tells_nvlink(bus: float, kind: str) -> None:
    assert build_report(h200_findings(UNKNOWN, bus=bus), TODAY).cluster.intra_node.kind == kind
    unread = replace(h200_findings(UNKNOWN, bus=bus), inventories=())
    cluster = build_report(unread, TODAY).cluster
    assert cluster.intra_node.kind == kind
    nominal = 450e9 if kind == "nvlink" else bus
    assert cluster.intra_node.bandwidth_bytes_per_s == pytest.approx(nominal, rel=1e-6)
    assert cluster.intra_node.attained_fraction == pytest.approx(bus / nominal, rel=1e-6)


def test_a_known_card_keeps_its_data_sheet_and_the_drivers_memory() -> None:
    cluster = build_report(h200_findings(NVLINK), TODAY).cluster
    assert cluster.gpu.name == "h200"
    assert cluster.gpu.peak_flops["bf16"] == pytest.approx(989.4e12)
    assert (cluster.gpu.memory_bytes, cluster.gpu.cuda_memory_bytes) == (143_771 * MIB, 143_000 * MIB)
    assert cluster.measurements.context_bytes == 500 * MIB
    assert cluster.versions["driver"] == "580.1"
    assert cluster.measurements.communicator_bytes == 90 * MIB
    assert cluster.measurements.matmul_flops["fp32"][-1].rate == 2e11


def test_another_variant_of_a_known_card_is_not_taken_for_it() -> None:
    findings = h200_findings(NVLINK)
    halved = tuple(replace(facts, device_memory_bytes=70_000 * MIB) for facts in findings.ranks)
    cluster = build_report(replace(findings, ranks=halved, inventories=()), TODAY).cluster
    assert (cluster.gpu.name, cluster.gpu.source) == ("NVIDIA H200", "measured")


def test_two_machines() -> None:
    records = [
        *wire("all_reduce", "all", "inter_node", 4, 0.5e9, 1e-3),
        *wire("all_reduce", "inside nodes", "intra_node", 2, 10e9, 50e-6),
        *wire("all_reduce", "across nodes", "inter_node", 2, 0.25e9, 1e-3),
        *wire("all_gather", "across nodes", "inter_node", 2, 0.2e9, 1e-3),
    ]
    ranks = tuple(rank(i, node=i // 2) for i in range(4))
    cluster = build_report(cpu_findings(ranks=ranks, wire=tuple(records)), TODAY).cluster
    assert (cluster.num_nodes, cluster.gpus_per_node, cluster.name) == (2, 2, "cpu-2x2x1")
    assert cluster.intra_node.kind == "loopback"
    assert cluster.intra_node.bandwidth_bytes_per_s == pytest.approx(10e9, rel=1e-6)
    assert cluster.inter_node is not None
    assert cluster.inter_node.kind == "network"
    assert cluster.inter_node.bandwidth_bytes_per_s == pytest.approx(0.5e9, rel=1e-6)
    assert {(curve.op, curve.ranks) for curve in cluster.inter_node.curves} == {
        ("all_reduce", 4), ("all_reduce", 2), ("all_gather", 2)
    }  # fmt: skip


def test_neighbors_stand_for_their_number_of_ranks() -> None:
    records = [
        *wire("all_reduce", "strides of 2", "intra_node", 2, 1e9, 1e-4),
        *wire("all_reduce", "blocks of 2", "intra_node", 2, 9e9, 1e-4),
    ]
    (curve,) = build_report(cpu_findings(wire=tuple(records)), TODAY).cluster.intra_node.curves
    assert curve.points[-1].bytes / curve.points[-1].seconds == pytest.approx(9e9, rel=0.1)


def test_one_rank_has_no_wire_and_says_so() -> None:
    cluster = build_report(cpu_findings(ranks=(rank(0),), wire=()), TODAY).cluster
    assert (cluster.intra_node.source, cluster.intra_node.curves) == ("assumed", ())
    assert any("No wire was measured" in sentence for sentence in cluster.assumptions)


def test_a_busy_machine_and_unequal_cards_are_told() -> None:
    ranks = (rank(0, load=1.9), rank(1, device_name="Another CPU"))
    told = " ".join(build_report(cpu_findings(ranks=ranks), TODAY).cluster.assumptions)
    assert "load 1.9 on 2" in told
    assert "Another CPU, Some CPU" in told
    calm = " ".join(build_report(cpu_findings(), TODAY).cluster.assumptions)
    assert "busy" not in calm


def test_page_shows_what_was_measured_and_what_not() -> None:
    findings = h200_findings(
        NVLINK,
        skipped=(Skipped(what="checkpoint disk", why="full"),),
        contention=Contention(
            matmul_size=4096, dtype="bf16", message_bytes=64 * MIB, matmul_slowdown=1.25, wire_slowdown=1.5
        ),
        pairs=(PairRecord(sender=0, receiver=1, bytes=64 * MIB, seconds=0.001),),
    )
    page = report_page(build_report(findings, TODAY))
    for text in ("h200", "all_reduce", "64 MiB", "1.25 and 1.50", "checkpoint disk: full", "0 -> 1", "context",
                 "torch 2.13.0", "OMP_NUM_THREADS=1"):  # fmt: skip
        assert text in page
    assert "kernel launch" not in page


def test_inventory_page_says_what_is_unknown() -> None:
    inventory = Inventory(
        host="node-a",
        cpu="Some CPU",
        num_cpus=8,
        cards=(card(0), CardRecord(index=1, name="NVIDIA H200", slowdowns=("power cap",))),
        pairs=(PCIE,),
        unreadable=("driver: no permission (try: sudo cat x)",),
    )
    page = inventory_page(inventory)
    for text in ("18 of 18 NVLinks", "? of ? NVLinks", "gen ? x?", "clocks held down: power cap", "PHB, peer access",
                 "unknown memory", "unreadable: driver"):  # fmt: skip
        assert text in page


def small(records: list[WireRecord], limit: int = 64 * 1024) -> list[WireRecord]:
    return [record for record in records if record.bytes <= limit]


def test_a_table_of_small_messages_is_left_out_and_said_so() -> None:
    records = [
        *wire("all_reduce", "all", "intra_node", 2, 1e9, 100e-6),
        *small(wire("broadcast", "all", "intra_node", 2, 1e9, 100e-6)),
    ]
    cluster = build_report(cpu_findings(wire=tuple(records)), TODAY).cluster
    assert [curve.op for curve in cluster.intra_node.curves] == ["all_reduce"]
    told = " ".join(cluster.assumptions)
    assert "no message of 1.049 MB or more was measured: broadcast over all" in told
    assert "catalogue" not in told


@pytest.mark.parametrize(
    ("pair", "switches", "name"),
    [
        (NVLINK, {}, "nvlink4"),
        (PCIE, {}, "pcie4-x16"),
        (HOST, {}, "pcie4-x16-host"),
        (NVLINK, {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, "10gbe"),
    ],
)
def test_a_wire_measured_at_8_bytes_only_becomes_no_bandwidth(
    pair: PairPath, switches: dict[str, str], name: str
) -> None:
    """As on a busy machine once: the plan made from it said 18 hours for a minute's work."""
    findings = h200_findings(pair, switches=switches)
    findings = replace(findings, wire=tuple(small(list(findings.wire), 8)))
    cluster = build_report(findings, TODAY).cluster
    assert (cluster.intra_node.name, cluster.intra_node.source) == (name, "assumed")
    assert cluster.intra_node.curves == ()
    assert any("link catalogue's, not this machine's" in sentence for sentence in cluster.assumptions)


def test_cores_whose_wire_was_not_measured_well_get_the_catalogues_loopback() -> None:
    findings = cpu_findings(wire=tuple(small(list(cpu_findings().wire))))
    link = build_report(findings, TODAY).cluster.intra_node
    assert (link.name, link.curves) == ("loopback", ())


def test_dead_nvlinks_lower_the_data_sheets_rate() -> None:
    findings = h200_findings(NVLINK)
    (inventory,) = findings.inventories
    worse = replace(inventory, cards=(card(0), replace(card(1), num_active_nvlinks=16)))
    cluster = build_report(replace(findings, inventories=(worse,)), TODAY).cluster
    assert cluster.intra_node.bandwidth_bytes_per_s == pytest.approx(16 / 18 * 450e9)


def test_page_tells_where_the_time_went() -> None:
    page = report_page(build_report(cpu_findings(phases={"start": 7.0, "compute": 3.0, "wire": 4.0}), TODAY))
    assert "start 7.0 s, compute 3.0 s, wire 4.0 s" in page
