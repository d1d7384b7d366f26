"""The probe's ranks over gloo: real messages, planted faults, and the whole way to a Cluster file."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardwise.errors import ResourceError
from shardwise.probe import ProbeOptions, probe
from shardwise.probe.budget import budget_for
from shardwise.probe.compute import measure_attention, measure_copy, measure_disk, measure_matmul
from shardwise.probe.control import Control
from shardwise.probe.findings import WireRecord
from shardwise.probe.groups import groupings
from shardwise.probe.options import NEEDED_SIZES
from shardwise.probe.wire import (
    OPS,
    PERIOD,
    WEIGHTS,
    Exchange,
    Group,
    _fits,  # pyright: ignore[reportPrivateUsage]
    make_exchange,
    measure_exchange,
    open_group,
    sweep_group,
    verify,
)
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.codec import read_noun
from shardwise.vocabulary.units import MIB

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")


Check = Callable[[Control], None]


def run_ranks(world_size: int, folder: Path, *checks: Check) -> None:
    """Run the checks one after the other on every rank (starting ranks takes longer than a check).

    An assertion that fails on any rank fails here, with that rank's traceback.
    """
    mp.spawn(_rank, args=(checks, world_size, str(folder)), nprocs=world_size)  # pyright: ignore[reportPrivateImportUsage]


def _rank(rank: int, checks: tuple[Check, ...], world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    try:
        for check in checks:
            check(Control(budget_for(quick=True, aim_seconds=60.0), 0.0, lambda _text: None))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def all_ranks(world_size: int) -> Group:
    return open_group(groupings(world_size, world_size, quick=True)[0], CPU)


def after_call(exchange: Exchange, act: Callable[[], Any]) -> Exchange:
    """The same exchange, with something done to it after each call."""

    def call() -> None:
        exchange.call()
        act()

    return dataclasses.replace(exchange, call=call)


# ------------------------------------------------------------------------------------------------------- verification


def _every_element_is_checked(control: Control) -> None:
    group = all_ranks(control.world_size)
    # One element a part, parts that are no multiple of anything, and more than one period of the pattern.
    for num_bytes in (8, 4 * 1001, 4 * (3 * PERIOD + 17)):
        for op in OPS:
            exchange = make_exchange(op, num_bytes, group)
            assert verify(exchange, group, control) == control.total([exchange.received.numel()])[0]
            assert exchange.bytes >= num_bytes
            assert exchange.bytes - num_bytes < 4 * group.size


def _one_wrong_element_on_one_rank_is_seen_by_all(control: Control) -> None:
    group = all_ranks(control.world_size)
    for op in OPS:
        exchange = make_exchange(op, 4 * (2 * PERIOD + 10), group)
        # The last, in the rest after whole periods; rank 1, since a broadcast's root holds its own data.
        spoiled = after_call(exchange, lambda data=exchange.received: data[-1:].add_(control.rank == 1))
        with pytest.raises(ResourceError, match=f"{op} of .* brought 1 wrong element"):
            verify(spoiled, group, control)
        assert verify(exchange, group, control) > 0


def _misplaced_chunks_are_seen(control: Control) -> None:
    group = all_ranks(control.world_size)
    exchange = make_exchange("all_gather", 8 * MIB, group)
    half = exchange.received.numel() // 2

    def swap() -> None:
        exchange.received.copy_(torch.cat([exchange.received[half:], exchange.received[:half]]))

    with pytest.raises(ResourceError, match="wrong elements"):
        verify(after_call(exchange, swap), group, control)


# -------------------------------------------------------------------------------------------------------------- timing


def _slowest_rank_counts(control: Control) -> None:
    group = all_ranks(control.world_size)
    exchange = make_exchange("all_reduce", 1024, group)
    slowed = after_call(exchange, lambda: time.sleep(0.02 if control.rank == 1 else 0.0))
    sample = measure_exchange(slowed, group, control, 0.2)
    assert 0.02 <= sample.seconds < 0.06
    assert sample.p95_seconds >= sample.seconds
    assert len(set(control.gather(sample))) == 1  # every rank holds the same


def _groups_run_at_the_same_time(control: Control) -> None:
    for way in groupings(4, 4, quick=False):
        group = open_group(way, CPU)
        assert group.members[group.index] == control.rank
        sweep = sweep_group(group, (8, 4096), control, 1.0)
        assert {record.op for record in sweep.records} == set(OPS)
        assert {record.grouping for record in sweep.records} == {way.name}
        assert {record.ranks for record in sweep.records} == {way.ranks}


def _time_is_kept(control: Control) -> None:
    group = all_ranks(control.world_size)
    started = time.monotonic()
    sweep = sweep_group(group, tuple(2**power for power in range(10, 29)), control, 2.0)
    assert time.monotonic() - started < 6.0
    cut = [skipped for skipped in sweep.skipped if "time budget" in skipped.why]
    assert len(cut) == len(OPS)  # 256 MiB cannot be measured six times in two seconds
    assert {record.op for record in sweep.records} == set(OPS)


def _needed_sizes_are_measured_when_the_time_is_over(control: Control) -> None:
    group = all_ranks(control.world_size)
    sizes, needed = (8, 4096, MIB // 4, MIB, 4 * MIB), (4096, MIB // 4, 4 * MIB)
    sweep = sweep_group(group, sizes, control, -5.0, needed)
    for op in OPS:
        found = [record.bytes for record in sweep.records if record.op == op]
        assert found == (list(needed) if op in WEIGHTS else [8])
    assert all("time budget" in skipped.why for skipped in sweep.skipped)
    assert len(sweep.skipped) == len(OPS)


def _a_slow_wire_is_asked_few_times(control: Control) -> None:
    """Where one call takes seconds a table needs few of them, and no larger message than is all bandwidth."""
    group = all_ranks(control.world_size)
    exchange = make_exchange("all_reduce", MIB, group)
    calls: list[int] = []

    def wait() -> None:
        calls.append(1)
        time.sleep(0.3)

    sample = measure_exchange(after_call(exchange, wait), group, control, 0.0)
    assert (sample.iterations, len(calls)) == (2, 4)  # verified, tried, timed twice
    plain = {MIB: _record_of(MIB, 1.5)}
    assert not _fits(plain, 16 * MIB, -1.0, needed=True)
    assert _fits(plain, 16 * MIB, 1.0, needed=True)
    assert _fits({MIB: _record_of(MIB, 0.5)}, 16 * MIB, -1.0, needed=True)


def _record_of(num_bytes: int, seconds: float) -> WireRecord:
    return WireRecord(op="all_reduce", grouping="all", scope="intra_node", ranks=2, bytes=num_bytes, iterations=5,
                      seconds=seconds, p95_seconds=seconds, verified_elements=1)  # fmt: skip


def _rates_are_measured_when_the_time_is_over(control: Control) -> None:
    rates, left_out = measure_matmul({"fp32": (64, 32)}, CPU, control, -5.0)
    assert [record.size for record in rates] == [64]
    assert [skipped.what for skipped in left_out] == ["matmul fp32 n=32"]
    attention, left_out = measure_attention((64, 32), "fp32", CPU, control, -5.0)
    assert [(record.what, record.size) for record in attention] == [
        ("attention forward", 64),
        ("attention backward", 64),
    ]
    assert [skipped.what for skipped in left_out] == ["attention s=32"]
    assert measure_copy(MIB, CPU, control, 0.0) > 0


def test_two_ranks_check_every_element_see_faults_and_keep_time(tmp_path: Path) -> None:
    run_ranks(
        2,
        tmp_path,
        _every_element_is_checked,
        _one_wrong_element_on_one_rank_is_seen_by_all,
        _misplaced_chunks_are_seen,
        _slowest_rank_counts,
        _time_is_kept,
        _needed_sizes_are_measured_when_the_time_is_over,
        _a_slow_wire_is_asked_few_times,
        _rates_are_measured_when_the_time_is_over,
    )


def test_four_ranks_form_every_group_of_a_mesh(tmp_path: Path) -> None:
    run_ranks(4, tmp_path, _every_element_is_checked, _groups_run_at_the_same_time)


def test_a_disk_without_time_is_measured_or_explained_but_never_zero(tmp_path: Path) -> None:
    rate, why = measure_disk(tmp_path, 64 * MIB, 0.0)
    assert rate is not None
    assert rate > 0
    assert why == ""
    assert list(tmp_path.iterdir()) == []
    rate, why = measure_disk(tmp_path / "nowhere", MIB, 1.0)
    assert rate is None
    assert "nowhere" in why


# ------------------------------------------------------------------------------------------------------ the whole way


def test_two_ranks_become_a_cluster_file(tmp_path: Path) -> None:
    lines: list[str] = []
    out = tmp_path / "cluster.yaml"
    sizes = (8, 4096, MIB)
    options = ProbeOptions(quick=True, device="cpu", sizes=sizes, budget_seconds=30.0, out=out, progress=lines.append)
    report = probe(options)
    assert {"compute", "disk", "wire"} <= set(report.findings.phases)
    cluster = report.cluster
    assert read_noun(Cluster, out) == cluster
    assert list(tmp_path.iterdir()) == [out]  # neither the disk's test file nor a partial one is left

    assert (cluster.num_nodes, cluster.gpus_per_node) == (1, 2)
    assert (cluster.source, cluster.inter_node) == ("measured", None)
    assert cluster.versions["torch"] == str(torch.__version__)
    assert {"fp32", "bf16"} <= set(cluster.gpu.peak_flops)
    assert cluster.host_memory_bytes is not None
    assert 0 < cluster.gpu.memory_bytes <= cluster.host_memory_bytes / 2
    assert cluster.measurements.checkpoint_bytes_per_s is not None
    assert cluster.measurements.launch_gap_seconds is None
    assert cluster.measurements.wire_slowdown_under_matmul is not None
    assert cluster.measurements.wire_slowdown_under_matmul >= 1.0

    curves = {curve.op: curve for curve in cluster.intra_node.curves}
    assert set(curves) == set(OPS)
    for curve in curves.values():
        measured = tuple(point.bytes for point in curve.points)
        assert measured == sizes[: len(measured)]
        # On a busy machine the time may end before the sizes do, but never without a word.
        assert measured == sizes or any(skipped.what.startswith(curve.op) for skipped in report.findings.skipped)
        assert all(point.seconds > 0 for point in curve.points)
    assert all(record.verified_elements > 0 and record.iterations >= 5 for record in report.findings.wire)
    assert any("all_reduce" in line for line in lines)


def test_only_the_wire(tmp_path: Path) -> None:
    report = probe(ProbeOptions(device="cpu", parts=("wire",), sizes=(1024,), budget_seconds=4.0))
    assert report.findings.rates == ()
    assert report.cluster.measurements.checkpoint_bytes_per_s is None
    assert {record.bytes for record in report.findings.wire} == {1024}
    assert report.cluster.intra_node.curves == ()  # 1 KiB tells no bandwidth
    assert report.cluster.intra_node.source == "assumed"


def test_a_quick_probe_without_time_still_makes_a_sound_cluster() -> None:
    report = probe(ProbeOptions(quick=True, device="cpu", budget_seconds=0.1))
    for op in WEIGHTS:
        sizes = [record.bytes for record in report.findings.wire if record.op == op]
        assert set(NEEDED_SIZES) <= set(sizes)
    assert {curve.op for curve in report.cluster.intra_node.curves} >= set(WEIGHTS)
    measurements = report.cluster.measurements
    assert measurements.matmul_flops["fp32"]
    assert set(measurements.attention_flops) == {"forward", "backward"}
    assert measurements.copy_bytes_per_s
    assert list(report.findings.phases) == ["start", "compute", "disk", "wire", "end"]


def test_two_machines_join_by_torchrun(tmp_path: Path) -> None:
    """Two launches on this machine, of one rank each, stand for two machines."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = tmp_path / "cluster.yaml"
    launches = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}",
             "--master-addr=127.0.0.1", f"--master-port={port}", "-m", "shardwise", "probe", "--quick", "--nodes", "2",
             "--device", "cpu", "--budget", "6", "--out", str(out)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    try:
        texts = [launch.communicate(timeout=90)[0] for launch in launches]
    finally:
        for launch in launches:
            launch.kill()
    assert [launch.returncode for launch in launches] == [0, 0], texts
    cluster = read_noun(Cluster, out)
    assert (cluster.num_nodes, cluster.gpus_per_node) == (2, 1)
    assert cluster.inter_node is not None
    assert cluster.inter_node.kind == "network"
    assert {curve.ranks for curve in cluster.inter_node.curves} == {2}
    assert cluster.intra_node.source == "assumed"
    assert "2 machine(s)" in texts[0]
    assert "bus bandwidth" not in texts[1]  # one page, by the first rank
