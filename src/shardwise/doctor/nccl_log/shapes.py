"""The one table of line shapes: what a message looks like, in which versions, and which records it fills.

A message is looked up by its first word (digits count as `#`, NCCL's variables as `NCCL_*`), or, where that may be
anything, by a part of it. The first shape whose pattern matches takes it. Every shape has an example, and a test reads
each of them. Lines that are known by their meaning rather than by their shape are in `notices.py`; torch's in
`torch_lines.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardwise.doctor.nccl_log import edges, graph, jobs, networks, notices
from shardwise.doctor.nccl_log.collector import Collector, Origin

Keep = Callable[[Collector, re.Match[str], Origin], None]
VARIABLE = "NCCL_*"
NUMBER = "#"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One kind of message."""

    keep: Keep
    first: tuple[str, ...] = ()
    """First words, without a colon behind them; empty if `part` finds it."""
    part: str = ""
    """What stands somewhere in the message."""
    pattern: re.Pattern[str]
    versions: str
    """Of NCCL that print it so."""
    example: str
    repeats: bool = False
    """Whether the same message again, or from another process, says something new."""


_RANK = r"(?P<{0}>\d+)(?:\[(?P<{0}_id>[^\]]*)\])?"
_LANE = r"(?P<channel>\d+)(?:/(?P<connection>\d+))?\s*:\s*"

SHAPES: tuple[Shape, ...] = (
    # ---- edges
    Shape(
        keep=edges.keep_edge,
        first=("Channel", "Ring"),
        pattern=re.compile(
            rf"(?:Channel|Ring) {_LANE}{_RANK.format('a')}\s*->\s*{_RANK.format('b')}"
            r"(?:\s+\[(?P<direction>send|receive)\])?\s+via\s+(?P<via>\S.*)"
        ),
        versions="2.4 to 2.30 (Ring to 2.5, /connection from 2.14)",
        example="Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read",
    ),
    Shape(
        keep=edges.keep_edge,
        first=("CollNet",),
        pattern=re.compile(rf"CollNet {_LANE}(?P<a>\d+)\s+\[(?P<direction>send|receive)\]\s+via\s+(?P<via>COLLNET/.*)"),
        versions="2.6 to 2.30",
        example="CollNet 00/0 : 0 [send] via COLLNET/SHARP/0/GDRDMA",
    ),
    # ---- rings, trees, channels
    Shape(
        keep=graph.keep_ring_link,
        first=("Ring",),
        pattern=re.compile(r"Ring (\d+)\s*:\s*(\d+)\s*->\s*(\d+)\s*->\s*(\d+)"),
        versions="2.5 to 2.30 (GRAPH)",
        example="Ring 00 : 1 -> 0 -> 1",
    ),
    Shape(
        keep=graph.keep_ring,
        first=("Channel", "Ring"),
        pattern=re.compile(
            r"(?:Channel|Ring) (?P<channel>\d+)(?:/(?P<count>\d+))?\s*:(?P<ranks>(?:\s+\d+)+)(?!\s*->|\d|\[)"
        ),
        versions="2.4 to 2.30",
        example="Channel 00/04 :    0   1   2   3",
    ),
    Shape(
        keep=graph.keep_trees,
        first=("Trees",),
        pattern=re.compile(r"Trees \["),
        versions="2.4 to 2.30 (three forms)",
        example="Trees [0] 1/-1/-1->0->-1 [1] -1/-1/-1->0->1",
    ),
    Shape(
        keep=graph.keep_tree,
        first=("Tree",),
        pattern=re.compile(r"Tree (\d+)\s*:\s*(-?\d+)\s*->\s*(-?\d+)\s*->\s*(-?\d+)/(-?\d+)/(-?\d+)"),
        versions="2.8 to 2.30 (GRAPH)",
        example="Tree 0 : -1 -> 0 -> 1/-1/-1",
    ),
    Shape(
        keep=graph.keep_channels,
        first=(NUMBER,),
        pattern=re.compile(
            r"(?P<coll>\d+) coll channels,(?: (?P<collnet>\d+) collnet channels,)?(?: (?P<nvls>\d+) nvls channels,)?"
            r" (?P<p2p>\d+) p2p channels, (?P<per>\d+) p2p channels per peer"
        ),
        versions="2.7 to 2.30 (nvls from 2.17, collnet from 2.20)",
        example="24 coll channels, 24 collnet channels, 16 nvls channels, 32 p2p channels, 32 p2p channels per peer",
    ),
    Shape(
        keep=graph.keep_graph,
        first=("Pattern",),
        pattern=re.compile(
            r"Pattern (?P<pattern>\d+), crossNic \d+, nChannels (?P<channels>\d+), (?:bw|speed) (?P<intra>[\d.]+)/"
            r"(?P<inter>[\d.]+),(?: nvl\w* \w+,)? type (?P<intra_path>\w+)(?:/(?P<inter_path>\w+))?"
        ),
        versions="2.5 to 2.30 (GRAPH)",
        example="Pattern 4, crossNic 0, nChannels 12, bw 20.000000/20.000000, type NVL/PIX, sameChannels 1",
    ),
    Shape(
        keep=graph.keep_topology,
        first=("+",),
        pattern=re.compile(r"\+ (?P<kind>[A-Z0-9]+)\[(?P<rate>[\d.]+)\] - (?P<target>\S+)"),
        versions="2.5 to 2.30 (GRAPH)",
        example="+ PCI[24.0] - GPU/7000 (0)",
    ),
    Shape(
        keep=graph.keep_nvls_available,
        first=("NVLS",),
        pattern=re.compile(r"NVLS multicast support is (?P<no>not )?available on dev (?P<device>\d+)"),
        versions="2.17 to 2.30",
        example="NVLS multicast support is available on dev 0",
    ),
    Shape(
        keep=graph.keep_nvls_head,
        first=("NVLS",),
        pattern=re.compile(r"NVLS Head\s+\d+:(?P<ranks>(?:\s+\d+)+)"),
        versions="2.17 to 2.30",
        example="NVLS Head  0:  0  8 16",
    ),
    Shape(
        keep=graph.count_multicast_group,
        first=("NVLS",),
        pattern=re.compile(r"NVLS Created Multicast group"),
        versions="2.17 to 2.30",
        example="NVLS Created Multicast group 0x7f00 nranks 8 size 2097152 on rank 0",
        repeats=True,
    ),
    Shape(
        keep=graph.keep_p2p_summary,
        first=("Check",),
        pattern=re.compile(r"Check P2P Type "),
        versions="2.24 to 2.30",
        example="Check P2P Type isAllDirectP2p 1 directMode 0 isAllCudaP2p 1",
    ),
    Shape(
        keep=graph.keep_fabric,
        first=("MNNVL",),
        pattern=re.compile(r"MNNVL busId \w+ fabric UUID (?P<uuid>[0-9a-f.]+) cliqueId \w+ state (?P<state>\d+)"),
        versions="2.20 to 2.30",
        example="MNNVL busId 0x901000 fabric UUID 3143b15bc2cd192b.28cc9b5473fb5b93 cliqueId 0x7ffe state 1",
    ),
    # ---- networks and plugins
    Shape(
        keep=networks.keep_devices,
        first=("NET/*",),
        pattern=re.compile(r"NET/(?P<network>[^:\s]+)\s*: Using (?P<devices>\[\d+\].*)"),
        versions="2.4 to 2.30",
        example="NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/IB/SHARP [RO]; OOB eth0:192.0.2.1<0>",
    ),
    Shape(
        keep=networks.keep_plugin,
        first=("*/Plugin",),
        pattern=re.compile(
            r"(?P<kind>[A-Z]+)/Plugin ?: (?:Loaded (?:(?P<coll>coll)\w*|\w+) plugin |Using (?:\w+ plugin )?)"
            r"(?P<name>(?!internal)[^(]*\w)"
        ),
        versions="2.13 to 2.30",
        example="TUNER/Plugin: Using nccl_ofi_tuner (v3)",
    ),
    Shape(
        keep=networks.keep_missing_plugin,
        first=("*/Plugin",),
        pattern=re.compile(
            r"(?P<kind>[A-Z]+)/Plugin ?: (?:Could not find|No plugin found|dlerror=|Plugin load .*returned)"
        ),
        versions="2.4 to 2.30",
        example="TUNER/Plugin: Could not find: libnccl-tuner.so. Using internal tuner plugin.",
    ),
    Shape(
        keep=networks.keep_bootstrap,
        first=("Bootstrap",),
        pattern=re.compile(r"Bootstrap\s*: Using (?:\[\d+\])?(?P<interface>[^:\s]+)"),
        versions="2.5 to 2.30",
        example="Bootstrap: Using eth0:192.0.2.1<0>",
    ),
    Shape(
        keep=networks.keep_network,
        first=("Using",),
        pattern=re.compile(r"Using network (?P<network>.+?)\s*$"),
        versions="2.5 to 2.30",
        example="Using network AWS Libfabric",
    ),
    Shape(
        keep=networks.keep_assigned,
        first=("Assigned", "Initialized"),
        pattern=re.compile(r"(?P<verb>Assigned|Initialized) (?P<kind>\w+) plugin (?P<name>.+?)(?: to comm)?\s*$"),
        versions="2.27 to 2.30",
        example="Assigned NET plugin IB to comm",
    ),
    Shape(
        keep=networks.keep_p2p_plugin,
        first=("P2P",),
        pattern=re.compile(r"P2P plugin (?:v\d+ )?(?P<name>\S+)"),
        versions="2.8 to 2.30 (plugin of HPC-X)",
        example="P2P plugin IBext_v8",
    ),
    # ---- the job
    Shape(
        keep=jobs.keep_version,
        first=("NCCL", "RCCL"),
        pattern=re.compile(r"[NR]CCL version\s*:?\s*(?P<version>\d+\.\d+(?:\.\d+)?[\w.+\-]*)"),
        versions="2.4 to 2.30",
        example="NCCL version 2.27.5+cuda12.9",
    ),
    Shape(
        keep=jobs.keep_switch,
        first=(VARIABLE,),
        pattern=re.compile(r"(?P<name>(?:NCCL|RCCL)_\w+) set (?:by \w+ )?to (?P<value>.*?)\s*$"),
        versions="2.4 to 2.30",
        example="NCCL_P2P_DISABLE set by environment to 1.",
        repeats=True,
    ),
    Shape(
        keep=jobs.keep_switch,
        first=("NET/*",),
        pattern=re.compile(r"NET/OFI Setting (?P<name>NCCL_\w+) environment variable to (?P<value>.*?)\s*$"),
        versions="2.12 to 2.30 (plugin of AWS)",
        example="NET/OFI Setting NCCL_TOPO_FILE environment variable to /proc/self/fd/150",
        repeats=True,
    ),
    Shape(
        keep=jobs.keep_invalid_switch,
        first=("Invalid",),
        pattern=re.compile(
            r"Invalid value (?P<value>.*?) for (?P<name>NCCL_\w+), using default (?P<default>.+?)\.?\s*$"
        ),
        versions="2.4 to 2.30",
        example="Invalid value on for NCCL_P2P_DISABLE, using default -2.",
    ),
    Shape(
        keep=jobs.keep_communicator,
        part="comm 0x",
        pattern=re.compile(
            r"\bcomm (?P<address>0x[0-9a-fA-F]+|0x\.\.\.) rank (?P<rank>\d+) n[rR]anks (?P<ranks>\d+)"
            r"(?: nNodes (?P<nodes>\d+) localRanks (?P<local>\d+) localRank \d+)?"
            r"(?: cudaDev (?P<cuda>-?\d+))?(?: nvmlDev (?P<nvml>-?\d+))?(?: busId (?P<bus>\w+))?"
            r"(?:.*? commId (?P<id>0x\w+))?"
        ),
        versions="2.4 to 2.30 (commId from 2.16, nvmlDev from 2.18.3, nRanks from 2.20)",
        example="ncclCommInitRank comm 0x5639 rank 0 nranks 8 cudaDev 0 nvmlDev 0 busId 18 commId 0xd - Init COMPLETE",
        repeats=True,
    ),
    Shape(
        keep=jobs.keep_choice,
        part=" Bytes -> Algo ",
        pattern=re.compile(
            r"(?:(?P<op>\w+): )?(?P<bytes>\d+) Bytes -> Algo (?P<algorithm>\w+) proto (?P<protocol>\w+)"
        ),
        versions="2.4 to 2.30 (TUNING)",
        example="AllReduce: 33554432 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..31}",
        repeats=True,
    ),
    Shape(
        keep=notices.keep_result,
        part=" -> ",
        pattern=re.compile(r"(?P<where>[^\s:]+:\d+) -> (?P<code>[1-6])\b(?! ->)"),
        versions="2.4 to 2.30",
        example="misc/socket.cc:567 -> 2 (Operation now in progress)",
        repeats=True,
    ),
)


def _by_first() -> Mapping[str, tuple[Shape, ...]]:
    words = {word for shape in SHAPES for word in shape.first}
    return {word: tuple(shape for shape in SHAPES if word in shape.first) for word in words}


BY_FIRST = _by_first()
BY_PART = tuple(shape for shape in SHAPES if shape.part)


def shapes_of(text: str) -> tuple[Shape, ...]:
    """The shapes that a message may have, by its first word; those that are found by a part if it has none."""
    first = text.split(" ", 1)[0].rstrip(":")
    found = BY_FIRST.get(first)
    if found is None:
        if first.isdigit():
            first = NUMBER
        elif first.startswith(("NCCL_", "RCCL_")):
            first = VARIABLE
        elif first.endswith("/Plugin"):
            first = "*/Plugin"
        elif first.startswith("NET/"):
            first = "NET/*"
        found = BY_FIRST.get(first, ())
    return (*found, *(shape for shape in BY_PART if shape.part in text))
