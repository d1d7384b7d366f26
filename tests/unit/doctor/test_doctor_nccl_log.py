"""Real lines of NCCL 2.4 to 2.30, and lines made by every format that a version prints."""

from __future__ import annotations

import gzip
import random
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from shardwise.doctor.nccl_log import collector, parse_nccl_log, read, read_nccl_log
from shardwise.doctor.nccl_log.records import LogEdge, LogTimeout, LogTree, NcclLog
from shardwise.doctor.nccl_log.shapes import SHAPES, Shape
from shardwise.errors import UsageError

LINES = Path(__file__).parent / "nccl_log_lines.txt"
"""Real lines; the comment above each block names version and source, hosts and addresses are replaced."""
MORE = Path(__file__).parent / "nccl_log_lines_more.txt"
TABLES = (
    "versions", "edges", "rings", "ring_links", "trees", "channels", "networks", "plugins", "devices", "bootstrap",
    "switches", "communicators", "choices", "graphs", "topology", "nvls_available", "nvls_heads", "p2p_summary",
    "warnings", "notices", "results", "timeouts",
)  # fmt: skip
PRE = "node-a:2144:2556 [2] NCCL INFO "


@pytest.fixture(scope="module")
def real() -> NcclLog:
    return read_nccl_log(LINES)


def one_edge(message: str) -> LogEdge:
    (edge,) = parse_nccl_log(PRE + message + "\n").edges
    return edge


# ---- the real lines


def test_every_edge_of_the_real_lines(real: NcclLog) -> None:
    text = LINES.read_text()
    assert len(real.edges) == sum(" via " in line for line in text.splitlines()) == 21
    assert Counter(edge.transport for edge in real.edges) == {"P2P": 8, "NET": 9, "SHM": 4}
    for edge in real.edges:
        assert f" via {edge.via}" in text


def test_rings_trees_channels_of_the_real_lines(real: NcclLog) -> None:
    assert [(ring.num_channels, len(ring.ranks)) for ring in real.rings] == [(2, 8), (16, 20)]
    assert real.trees == (LogTree(channel=0, rank=4, up=3, down=(5,)), LogTree(channel=1, rank=4, up=3, down=(5,)))
    assert [(c.coll, c.nvls, c.p2p, c.p2p_per_peer) for c in real.channels] == [
        (8, None, 8, 1), (4, None, 4, 1), (16, 0, 16, 16),
    ]  # fmt: skip
    assert real.nvls_heads == ((0, 8, 16),)
    assert real.nvls_available == (("node-a", 0, True),)
    assert real.nvls_groups == 1


def test_devices_networks_and_switches_of_the_real_lines(real: NcclLog) -> None:
    found = {(d.network, tuple(x.name for x in d.devices), d.out_of_band) for d in real.devices}
    assert found == {
        ("Socket", ("ib0",), ""),
        ("IB", ("irdma0", "irdma3"), "eth0"),
        ("Socket", ("enp203s0", "br-03e037269530", "veth18cd3f2"), ""),
        ("IB", ("mlx5_bond_0",), "bond0"),
        ("IB", ("mlx5_0",), "eth0"),
    }
    assert real.networks == (("node-a", "IBext_v8"), ("node-a", "IB"))
    assert {(s.name, s.value) for s in real.switches} == {
        ("NCCL_ALGO", "Tree,Ring,,CollnetDirect,CollnetChain,NVLS"), ("NCCL_SOCKET_IFNAME", "ibs17"),
    }  # fmt: skip
    assert real.versions == (("node-a", "2.28.9+cuda13.0"),)
    assert real.version == (2, 28, 9)


def test_errors_and_choices_of_the_real_lines(real: NcclLog) -> None:
    assert [notice.kind for notice in real.notices] == [
        "shm_full", "iommu_not_passthrough", "verbs_missing", "nvls_failure", "net_plugin_missing", "dmabuf_available",
        "ib_qp_timeout",
    ]  # fmt: skip
    assert {warning.origin for warning in real.warnings} == {
        "include/shm.h:28", "/src/rccl/hipify/src/init.cc:179", "transport/nvls.cc:254", "ibvwrap.c:262",
    }  # fmt: skip
    assert [(c.op, c.num_bytes, c.algorithm, c.protocol) for c in real.choices] == [
        ("", 262144, "Tree", "LL128"), ("AllReduce", 33554432, "Ring", "Simple"),
    ]  # fmt: skip
    assert [(c.rank, c.num_ranks, c.num_nodes, c.complete) for c in real.communicators] == [
        (7, 16, None, True), (0, 24, 3, False),
    ]  # fmt: skip


# ---- every format


@pytest.mark.parametrize(
    ("message", "transport", "method", "flags", "connection"),
    [
        ("Channel 00 : 0[3d000] -> 1[3e000] via P2P/IPC", "P2P", "IPC", (), None),
        ("Channel 00 : 0[3d000] -> 1[3e000] via P2P/IPC/read/CE", "P2P", "IPC", ("read", "CE"), None),
        ("Channel 00/0 : 0[3d000] -> 1[3e000] via P2P/IPC/CE", "P2P", "IPC", ("CE",), 0),
        ("Channel 31/1 : 0[0] -> 1[1] via P2P/direct pointer/read", "P2P", "direct pointer", ("read",), 1),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/CE", "P2P", "CUMEM", ("CE",), 0),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/MNNVL", "P2P", "MNNVL", (), 0),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM comm 0x9bbf3b0 nRanks 4096", "P2P", "CUMEM", (), 0),
        ("Ring 00 : 2[3d000] -> 3[3e000] via direct shared memory", "SHM", "direct shared memory", (), None),
        ("Channel 00 : 0[0] -> 1[1] via SHM/direct/direct", "SHM", "direct/direct", (), None),
        ("Channel 00 : 0[0] -> 1[1] via SHM/CE/direct", "SHM", "CE/direct", (), None),
        ("Channel 00 : 0[0] -> 1[1] via SHM/direct", "SHM", "direct", (), None),
        ("Ring 01 : 0[160] -> 1[160] [send] via NET/AWS Libfabric/0", "NET", "AWS Libfabric", (), None),
        ("Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/1(3)/GDRDMA(PCI)/Shared", "NET", "IB",
         ("GDRDMA(PCI)", "Shared"), 0),
        ("Channel 00/0 : 0[0] -> 8[0] [receive] via NET/FastSocket/12", "NET", "FastSocket", (), 0),
        ("Channel 00/0 : 0[0] -> 8[0] [receive] via NET/IBext_v8/3/GDRDMA", "NET", "IBext_v8", ("GDRDMA",), 0),
        ("CollNet 00/0 : 0 [send] via COLLNET/SHARP/0/GDRDMA", "COLLNET", "SHARP", ("GDRDMA",), 0),
        ("Channel 00/0 : 0 -> 1 via P2P/CUMEM", "P2P", "CUMEM", (), 0),
    ],
)  # fmt: skip
def test_edge_formats(
    message: str, transport: str, method: str, flags: tuple[str, ...], connection: int | None
) -> None:
    edge = one_edge(message)
    assert (edge.transport, edge.method, edge.flags, edge.connection) == (transport, method, flags, connection)
    assert edge.host == "node-a"


def test_parts_of_edges() -> None:
    indirect = one_edge("Channel 02/0 : 0[1000] -> 2[3000] via P2P/indirect/1[2000]")
    assert (indirect.through_rank, indirect.method, indirect.source_id, indirect.target_id) == (
        1,
        "indirect",
        "1000",
        "3000",
    )
    net = one_edge("Channel 00/0 : 12[4] -> 8[0] [send] via NET/IB/11(3)/GDRDMA")
    assert (net.source_rank, net.target_rank, net.device, net.proxy_rank, net.direction) == (12, 8, 11, 3, "send")
    assert net.gpu_direct


@pytest.mark.parametrize(
    ("message", "channel", "count", "ranks"),
    [
        ("Channel 00/04 :    0   1   2   3", 0, 4, (0, 1, 2, 3)),
        ("Channel 03/24 : 0 1", 3, 24, (0, 1)),
        ("Channel 00 :    0   1", 0, None, (0, 1)),
        ("Ring 02 :    3   1   2   0", 2, None, (3, 1, 2, 0)),
    ],
)
def test_ring_formats(message: str, channel: int, count: int | None, ranks: tuple[int, ...]) -> None:
    (ring,) = parse_nccl_log(PRE + message).rings
    assert (ring.channel, ring.num_channels, ring.ranks) == (channel, count, ranks)


@pytest.mark.parametrize(
    ("message", "tree"),
    [
        ("Trees [0] 1/4/-1->0->-1", LogTree(channel=0, rank=0, up=None, down=(1, 4))),
        ("Trees [0] -1->0->1/-1/-1", LogTree(channel=0, rank=0, up=None, down=(1,))),
        ("Trees [0] 3/-1/-1->1->0 comm 0x9e4d8d0 nRanks 08 busId c6000", LogTree(channel=0, rank=1, up=0, down=(3,))),
        ("Tree 0 : -1 -> 0 -> 1/-1/-1", LogTree(channel=0, rank=0, up=None, down=(1,))),
    ],
)
def test_tree_formats(message: str, tree: LogTree) -> None:
    assert parse_nccl_log(PRE + message).trees == (tree,)


def test_ring_link_of_subsystem_graph() -> None:
    (link,) = parse_nccl_log(PRE + "Ring 00 : 1 -> 0 -> 1").ring_links
    assert (link.previous_rank, link.rank, link.next_rank) == (1, 0, 1)


@pytest.mark.parametrize(
    ("message", "counts"),
    [
        ("8 coll channels, 8 p2p channels, 1 p2p channels per peer", (8, None, None, 8, 1)),
        ("16 coll channels, 0 nvls channels, 16 p2p channels, 16 p2p channels per peer", (16, None, 0, 16, 16)),
        ("24 coll channels, 2 collnet channels, 16 nvls channels, 32 p2p channels, 4 p2p channels per peer",
         (24, 2, 16, 32, 4)),
    ],
)  # fmt: skip
def test_channel_count_formats(message: str, counts: tuple[int | None, ...]) -> None:
    (c,) = parse_nccl_log(PRE + message).channels
    assert (c.coll, c.collnet, c.nvls, c.p2p, c.p2p_per_peer) == counts


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("P2P is disabled between connected GPUs 1 and 0. You can repress this message with "
         "NCCL_IGNORE_DISABLED_P2P=1.", "p2p_refused_by_driver"),
        ("P2P is disabled between NVLINK connected GPUs 1 and 0. This should not be the case", "p2p_refused_nvlink"),
        ("Could not enable P2P between dev 0(=1000) and dev 1(=2000)", "p2p_refused_by_cuda"),
        ("Legacy IPC not supported", "legacy_ipc_unsupported"),
        ("cuMem host allocations do not appear to be working; falling back to a /dev/shm/ based implementation.",
         "cumem_host_fallback"),
        ("Error: failed to extend /dev/shm/nccl-Ab3 to 9637892 bytes, error: No space left on device (28)", "shm_full"),
        ("NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'", "gdr_disabled_for_hca"),
        ("GPU Direct RDMA Enabled for GPU 4000 / HCA 0 (distance 4 <= 5), read 1", "gdr_enabled"),
        ("NET/IB : Got completion from peer 192.0.2.1<1> with error 12, opcode 0, len 0, vendor err 129",
         "ib_completion_timeout"),
        ("NET/IB : Got completion from peer 192.0.2.1<1> with status=12 opcode=1 len=0 vendor err 129 (Send)",
         "ib_completion_timeout"),
        ("NET/IB: Got completion from peer 192.0.2.1<1> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) "
         "reqSize=0 vendor_err=129", "ib_completion_timeout"),
        ("NET/IB: Got completion from peer 192.0.2.1<1> with status=IBV_WC_LOC_PROT_ERR(4) opcode=IBV_WC_SEND(0)",
         "ib_completion_protection"),
        ("NET/IB : Got completion from peer 192.0.2.1<1> with error 5, opcode 1", "ib_completion_error"),
        ("Call to connect to 192.0.2.1<4> failed : No route to host", "no_route"),
        ("socketStartConnect: Connect to 192.0.2.1<4> failed : Connection refused", "connection_refused"),
        ("socketProgress: Connection closed by remote peer node-b<57521>", "connection_closed"),
        ("NET/IB : No device found.", "no_ib_device"),
        ("NET/Plugin : No plugin found (libnccl-net.so), using internal implementation", "net_plugin_missing"),
        ("NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file No plugin found (libnccl-net.so)",
         "net_plugin_missing"),
        ("NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.", "net_plugin_missing"),
        ("Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory", "memlock"),
        ("Cuda failure 802 'system not yet initialized'", "fabric_not_ready"),
        ("Invalid value on for NCCL_P2P_DISABLE, using default -2.", "invalid_switch_value"),
    ],
)  # fmt: skip
def test_notice_formats(message: str, kind: str) -> None:
    (notice,) = parse_nccl_log(PRE + message).notices
    assert notice.kind == kind


@pytest.mark.parametrize(
    ("message", "name", "value"),
    [
        ("NCCL_P2P_DISABLE set by environment to 1", "NCCL_P2P_DISABLE", "1"),
        ("NCCL_SHM_DISABLE set by environment to 1.", "NCCL_SHM_DISABLE", "1"),
        ("NCCL_IB_HCA set to mlx5", "NCCL_IB_HCA", "mlx5"),
        ("NCCL_TOPO_FILE set by environment to /etc/topo.v1.", "NCCL_TOPO_FILE", "/etc/topo.v1."),
        ("NCCL_NET_GDR_LEVEL set by environment to SYS", "NCCL_NET_GDR_LEVEL", "SYS"),
    ],
)
def test_switch_formats(message: str, name: str, value: str) -> None:
    (switch,) = parse_nccl_log(PRE + message).switches
    assert (switch.name, switch.value, switch.pid) == (name, value, 2144)


def test_graph_topology_timings_and_summary() -> None:
    log = parse_nccl_log(
        PRE + "Pattern 4, crossNic 0, nChannels 4, bw 24.000000/12.000000, type PHB/PIX, sameChannels 1\n"
        + PRE + "Pattern 4, crossNic 0, nChannels 2, speed 21.000000/21.000000, type NVL/PIX, sameChannels 1\n"
        + PRE + "+ PCI[0.2] - GPU/0-1000 (0)\n" + PRE + "  + NVL[370.8] - NVS/0\n"
        + PRE + "Check P2P Type isAllDirectP2p 1 directMode 0\n"
        + PRE + "Bootstrap : Using eth0:192.0.2.1<0>\n" + PRE + "Connected all rings, use ring PXN 0 GDR 1\n"
        + PRE + "ncclCommInitRankConfig comm 0x55 rank 1 nranks 2 cudaDev 0 nvmlDev 2 busId a2000 commId 0x8c "
        "- Init COMPLETE\n"
    )  # fmt: skip
    assert [(g.num_channels, g.intra_gb_per_s, g.inter_gb_per_s, g.intra_path) for g in log.graphs] == [
        (4, 24.0, 12.0, "PHB"), (2, 21.0, 21.0, "NVL"),
    ]  # fmt: skip
    assert [(t.kind, t.gb_per_s, t.target) for t in log.topology] == [
        ("PCI", 0.2, "GPU/0-1000"),
        ("NVL", 370.8, "NVS/0"),
    ]
    assert log.p2p_summary == (("isAllDirectP2p", "1"), ("directMode", "0"))
    assert log.bootstrap == (("node-a", "eth0"),)
    (comm,) = log.communicators
    assert (comm.nvml_device, comm.bus_id, comm.complete) == (2, "a2000", True)


# ---- what launchers and terminals do to lines


@pytest.mark.parametrize(
    "prefix",
    [
        "[rank3]:", "[0] ", "[1,0]<stdout>:", "2026-01-02T03:04:05.678Z ", "(Worker pid=123) ", "worker-0 | ",
        "[2026-03-13 22:26:02] ", '{"log":"', '{"time":"2026-01-02","message":"', "\x1b[32m", "\x1b]0;title\x07", "",
        "0: ", "[default0]:", "[rank0]: ", "10:02:33 ", " 45%|####  | 9/20 [00:01<00:01]\r", "node-a: ",
    ],
)  # fmt: skip
def test_prefixes_by_launchers(prefix: str) -> None:
    tail = {'{"log":"': '\\n","stream":"stdout"}', '{"time"': '"}'}.get(prefix[:8], "\r 50%|##")
    log = parse_nccl_log(
        f"{prefix}{PRE}Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM{tail}\r\n"
        f"{prefix}{PRE}NCCL_ALGO set by environment to Ring{tail}\r\n"
    )
    assert [(edge.host, edge.via) for edge in log.edges] == [("node-a", "P2P/CUMEM")]
    assert [(switch.host, switch.pid, switch.value) for switch in log.switches] == [("node-a", 2144, "Ring")]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
def test_encodings_of_windows(encoding: str, tmp_path: Path) -> None:
    text = f"{PRE}Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\r\n" * 3
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
    (tmp_path / "log").write_bytes(mark + text.encode(encoding))
    log = read_nccl_log(tmp_path / "log")
    assert [(edge.host, edge.via) for edge in log.edges] == [("node-a", "P2P/CUMEM")]
    assert (log.num_lines, log.num_unreadable_lines, log.ends_mid_line) == (3, 0, False)


def test_carriage_returns_alone() -> None:
    log = parse_nccl_log(f"{PRE}Using network IB\r{PRE}NCCL_ALGO set by environment to Ring\r")
    assert log.networks == (("node-a", "IB"),)
    assert [switch.value for switch in log.switches] == ["Ring"]


def test_lines_glued_together() -> None:
    a = PRE + "Channel 00 : 0[7000] -> 1[b000] via P2P/IPC/read"
    b = "node-b:7:8 [0] NCCL INFO Channel 00 : 1[b000] -> 0[7000] [send] via NET/IB/1"
    c = "[2026-03-13 22:26:02] node-a:3:4 [5] ibvwrap.c:262 NCCL WARN Call to ibv_modify_qp failed with 110"
    log = parse_nccl_log(f"{b}\n{a}{b}{c}{a}\n")
    assert {(edge.host, edge.via) for edge in log.edges} == {("node-a", "P2P/IPC/read"), ("node-b", "NET/IB/1")}
    assert [(warning.host, warning.origin) for warning in log.warnings] == [("node-a", "ibvwrap.c:262")]
    assert log.num_nccl_lines == 5


def test_glue_does_not_reach_into_a_value() -> None:
    log = parse_nccl_log(PRE + "NCCL_P2P_LEVEL set by environment to NVL" + PRE + "Using network IB\n")
    assert [switch.value for switch in log.switches] == ["NVL"]
    assert log.networks == (("node-a", "IB"),)


def test_a_line_without_origin_and_a_bare_version() -> None:
    log = parse_nccl_log("NCCL version 2.30.3+cuda13.0\nNCCL INFO Using network Socket\nRCCL version : 2.22.3-HEAD\n")
    assert log.versions == (("", "2.30.3+cuda13.0"), ("", "2.22.3-HEAD"))
    assert log.networks == (("", "Socket"),)


def test_the_same_switch_is_kept_for_every_process() -> None:
    text = "".join(f"node-a:{pid}:1 [0] NCCL INFO NCCL_ALGO set by environment to Ring\n" for pid in (1, 2, 1))
    assert [switch.pid for switch in parse_nccl_log(text).switches] == [1, 2]


def filled(log: NcclLog) -> dict[str, tuple[object, ...]]:
    """The tables in which there is something."""
    return {name: getattr(log, name) for name in TABLES if getattr(log, name)}


def flat(record: object) -> str:
    """All values of a record, for a sample to be found in."""
    values = list(vars(record).values()) if hasattr(record, "__dataclass_fields__") else [record]
    return " ".join(str(value) for value in values)


@pytest.mark.parametrize("line", [line for line in MORE.read_text().splitlines() if line and not line.startswith("#")])
def test_more_real_lines(line: str) -> None:
    wanted, _, printed = line.partition(" | ")
    table, *sample = wanted.split()
    log = parse_nccl_log(printed.removeprefix("| ") + "\n")
    tables = filled(log)
    if table == "-":
        assert not tables, tables
        return
    assert table in tables, tables
    text = flat(tables[table][0])
    for word in sample:
        assert word in text, (word, text)
    # Nothing else is read into it; a warning is also told as such, and a plugin that is missing as a notice.
    others = set(tables) - {table}
    assert others <= ({"warnings", "plugins"} if table == "notices" else {"notices"}), tables
    if "NCCL WARN" in printed:
        (warning,) = log.warnings
        assert warning.known == (table == "notices")
    hosts = {getattr(record, "host", "") for records in tables.values() for record in records}
    assert not {host for host in hosts if host.isdigit() or ":" in host or "<" in host}
    if "node-a" in printed and table not in ("topology", "rings", "trees", "graphs", "choices", "p2p_summary"):
        assert any("node-a" in flat(record) for record in tables[table])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.example[:40])
def test_every_shape_reads_its_own_example(shape: Shape) -> None:
    log = parse_nccl_log(PRE + shape.example + "\n")
    assert filled(log) or log.nvls_groups
    assert bool(shape.first) != bool(shape.part)


def test_torch_watchdog() -> None:
    log = parse_nccl_log(
        "[rank1]: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE) ran for "
        "600000 milliseconds before timing out.\n"
        "[rank1]: [PG 1 Rank 1] detected by watchdog at work: 5, last enqueued NCCL work: 7, "
        "last completed NCCL work: 4.\n"
    )
    told = LogTimeout(rank=1, sequence=5, op="ALLREDUCE", seconds=600.0, enqueued=7, completed=4)
    assert log.timeouts == (told,)


def test_words_after_last_error() -> None:
    log = parse_nccl_log(
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
        "Last error:\nsocketStartConnect: Connect to 192.0.2.1<4> failed : Connection refused\nconnection refused\n"
    )
    assert [(found.result, found.calls) for found in log.results] == [("system", 1)]
    assert [notice.kind for notice in log.notices] == ["connection_refused"]
    assert log.notices[0].calls == 1  # only the line that follows; other programs' words are not NCCL's


# ---- what comes again and again


def test_every_warning_is_counted_and_the_first_thousand_are_read() -> None:
    """Beyond that a warning that differs in numbers only is counted, so that 200 MB of them take seconds."""
    late = "NET/IB : Got completion from peer 192.0.2.1<{}> with status={} opcode=1 len=0 vendor err 129"
    lines = [f"node-a:1:2 [0] transport/net_ib.cc:101 NCCL WARN {late.format(i, 12 if i else 4)}" for i in range(5_000)]
    log = parse_nccl_log("\n".join(lines) + "\n")
    (warning,) = log.warnings
    assert (warning.calls, warning.known) == (5_000, True)
    assert {notice.kind for notice in log.notices} == {"ib_completion_timeout", "ib_completion_protection"}


def test_counters_are_passed_over_and_errors_among_them_are_not() -> None:
    lines = [
        f"{PRE}AllReduce: opCount {i:x} sendbuff 0x{i:x} count 1 comm 0x1 [nranks=8] stream 0x55" for i in range(3_000)
    ]
    lines += [f"{PRE}misc/socket.cc:{i} -> 7" for i in range(3_000)]
    log = parse_nccl_log("\n".join([*lines, f"{PRE}misc/socket.cc:567 -> 2"]) + "\n")
    assert [(found.result, found.where) for found in log.results] == [("system", "misc/socket.cc:567")]
    assert log.num_nccl_lines == 6_001


# ---- bad input


def test_half_written_and_compressed(tmp_path: Path) -> None:
    whole = PRE + "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
    (tmp_path / "half.log").write_text(whole + PRE + "Channel 01/0 : 1[1] ->")
    half = read_nccl_log(tmp_path / "half.log")
    assert half.ends_mid_line
    assert len(half.edges) == 1
    (tmp_path / "log.gz").write_bytes(gzip.compress(whole.encode()))
    assert len(read_nccl_log(tmp_path / "log.gz").edges) == 1


def test_a_compressed_log_cut_off(tmp_path: Path) -> None:
    data = gzip.compress((PRE + "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n").encode() * 200_000)
    (tmp_path / "log.gz").write_bytes(data[: len(data) // 2])
    log = read_nccl_log(tmp_path / "log.gz")
    assert log.ends_mid_line
    assert len(log.edges) == 1


def test_junk_between_good_lines(tmp_path: Path) -> None:
    good = (PRE + "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n").encode()
    junk = random.Random(1).randbytes(300_000) + b"NCCL INFO " + bytes(200_000) + b"\n"
    (tmp_path / "junk.log").write_bytes(junk + good + junk)
    log = read_nccl_log(tmp_path / "junk.log")
    assert len(log.edges) == 1
    assert log.num_unreadable_lines > 0


def test_missing_file_and_folder_say_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_nccl_log(tmp_path / "none.log")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_nccl_log(tmp_path)


def test_empty_log(tmp_path: Path) -> None:
    (tmp_path / "empty.log").touch()
    log = read_nccl_log(tmp_path / "empty.log")
    assert (log.num_lines, log.edges, log.version) == (0, (), None)


def test_memory_stays_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times the lines, hardly more memory."""
    monkeypatch.setattr(collector, "MAX_CACHED", 300)
    monkeypatch.setattr(read, "MAX_CACHED", 300)
    monkeypatch.setattr(read, "CHUNK_BYTES", 1 << 14)
    peaks: list[int] = []
    for times in (1, 10):
        with (tmp_path / "big.log").open("w") as stream:
            for number in range(1_500 * times):
                stream.write(f"{PRE}AllReduce: {number} Bytes -> Algo RING proto SIMPLE channel{{Lo..Hi}}={{0..31}}\n")
                stream.write(f"{PRE}Channel {number % 32:02d}/0 : {number % 64}[0] -> 1[1] via P2P/CUMEM\n")
        tracemalloc.start()
        log = read_nccl_log(tmp_path / "big.log")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(log.edges) == 64
        assert sum(choice.calls for choice in log.choices) == 1_500 * times
    assert peaks[1] < 2 * peaks[0]
