"""What a NCCL log says, as records: one frozen dataclass for every kind of line that matters.

`shapes.py` says which line fills which of them. Ranks are ranks of the communicator that printed the line; a device id
is text as printed: a bus id in hex up to NCCL 2.18.1, the NVML index in decimal from 2.18.3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Transport = Literal["P2P", "SHM", "NET", "COLLNET"]
Direction = Literal["send", "receive"]
NoticeKind = Literal[
    "shm_full",
    "verbs_missing",
    "verbs_open_failed",
    "memlock",
    "p2p_refused_by_driver",
    "p2p_refused_nvlink",
    "p2p_refused_by_cuda",
    "legacy_ipc_unsupported",
    "cumem_host_fallback",
    "gdr_disabled_for_hca",
    "gdr_enabled",
    "gdr_disabled",
    "dmabuf_available",
    "ib_completion_timeout",
    "ib_completion_protection",
    "ib_completion_error",
    "ib_qp_timeout",
    "ib_setup_failed",
    "ib_async_event",
    "nvls_failure",
    "fabric_not_ready",
    "no_route",
    "connection_refused",
    "connection_timeout",
    "connection_closed",
    "stray_connection",
    "no_socket_interface",
    "iommu_not_passthrough",
    "no_ib_device",
    "net_plugin_missing",
    "cuda_failure",
    "out_of_memory",
    "knock_on",
    "switch_ignored",
    "invalid_switch_value",
    "affinity",
]
Result = Literal["cuda", "system", "internal", "argument", "usage", "remote"]
"""What a call of NCCL came back with: ncclUnhandledCudaError (1), ncclSystemError (2), ncclInternalError (3),
ncclInvalidArgument (4), ncclInvalidUsage (5), ncclRemoteError (6)."""


@dataclass(frozen=True, kw_only=True)
class LogEdge:
    """One connection from a rank to another, on one channel."""

    channel: int
    connection: int | None
    """Connection index after the slash; None where the version does not print it."""
    source_rank: int
    source_id: str
    target_rank: int
    target_id: str
    transport: Transport
    method: str
    """What follows the transport: CUMEM, IPC, direct pointer, direct/direct, or the network plugin."""
    device: int | None = None
    """Network device index (NET only)."""
    proxy_rank: int | None = None
    """Rank whose proxy sends, where PXN is used."""
    direction: Direction | None = None
    flags: tuple[str, ...] = ()
    """Trailing words in the order printed: read, CE, GDRDMA, GDRDMA(PCI), Shared."""
    through_rank: int | None = None
    """Intermediate GPU of an indirect P2P path."""
    host: str = ""
    """Host that printed the line: the sender's, or the receiver's for a `[receive]` line."""
    via: str = ""
    """The text after `via`, as printed."""

    @property
    def gpu_direct(self) -> bool:
        """Whether the network card reads or writes GPU memory itself."""
        return any(flag.startswith("GDRDMA") for flag in self.flags)


@dataclass(frozen=True, kw_only=True)
class LogRing:
    """The order of the ranks on one channel (cut short by NCCL on large jobs)."""

    channel: int
    num_channels: int | None
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LogRingLink:
    """One rank's neighbors on one ring (subsystem GRAPH)."""

    channel: int
    previous_rank: int
    rank: int
    next_rank: int


@dataclass(frozen=True, kw_only=True)
class LogTree:
    """One rank's place in the tree of one channel; None and the empty tuple where there is no neighbor."""

    channel: int
    rank: int
    up: int | None
    down: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LogChannels:
    """Channel counts of one communicator."""

    host: str
    coll: int
    p2p: int
    p2p_per_peer: int
    nvls: int | None = None
    collnet: int | None = None


@dataclass(frozen=True, kw_only=True)
class LogDevice:
    """One entry of a device list."""

    index: int
    name: str
    port: int | None = None
    layer: str = ""
    """IB, RoCE or IB/SHARP for verbs devices, empty for sockets."""
    address: str = ""
    """The address of a socket interface, as printed."""


@dataclass(frozen=True, kw_only=True)
class LogDevices:
    """The devices that one network found on one host."""

    host: str
    network: str
    devices: tuple[LogDevice, ...]
    relaxed_ordering: bool = False
    out_of_band: str = ""
    """Interface of the bootstrap connections, where the line names it."""


@dataclass(frozen=True, kw_only=True)
class LogSwitch:
    """A variable that NCCL says it took from the environment or from a conf file."""

    host: str
    pid: int | None
    name: str
    value: str


@dataclass(frozen=True, kw_only=True)
class LogCommunicator:
    """One rank's view of one communicator; None where no line said it."""

    host: str
    pid: int | None
    address: str
    rank: int
    num_ranks: int
    num_nodes: int | None = None
    local_ranks: int | None = None
    cuda_device: int | None = None
    nvml_device: int | None = None
    bus_id: str = ""
    comm_id: str = ""
    complete: bool = False
    """Whether `Init COMPLETE` was seen."""


@dataclass(frozen=True, kw_only=True)
class LogPlugin:
    """What a log says of a plugin."""

    host: str
    kind: str
    """NET, COLLNET, TUNER, PROFILER, ENV, GIN, RMA or P2P."""
    name: str
    """As printed: a name, or the file that was looked for."""
    loaded: bool
    """False if it was looked for and not found, which is usual where none is installed."""


@dataclass(frozen=True, kw_only=True)
class LogResult:
    """A call that came back with an error: a line `file.cc:12 -> 2`, or torch's `ncclSystemError: ...`."""

    host: str
    result: Result
    where: str
    """The first place that said so, which is nearest to the cause; or torch's words."""
    calls: int = 1


@dataclass(frozen=True, kw_only=True)
class LogTimeout:
    """A collective on which torch's watchdog gave up, as one rank saw it; None where no line said it."""

    rank: int
    sequence: int | None
    """Number of the collective; torch before 2.0 does not say it."""
    op: str = ""
    seconds: float | None = None
    enqueued: int | None = None
    """The last collective that this rank had called."""
    completed: int | None = None
    """The last one that had ended on it."""


@dataclass(frozen=True, kw_only=True)
class LogChoice:
    """Algorithm and protocol chosen for one size (subsystem TUNING)."""

    op: str
    """Empty for NCCL 2.20 to 2.22, which do not print it."""
    num_bytes: int
    algorithm: str
    protocol: str
    calls: int


@dataclass(frozen=True, kw_only=True)
class LogGraph:
    """One result of NCCL's graph search."""

    pattern: int
    num_channels: int
    intra_gb_per_s: float
    inter_gb_per_s: float
    intra_path: str
    inter_path: str


@dataclass(frozen=True, kw_only=True)
class LogTopologyLink:
    """One link of NCCL's own topology (subsystem GRAPH), such as PCI[24.0] - GPU/7000."""

    kind: str
    gb_per_s: float
    target: str


@dataclass(frozen=True, kw_only=True)
class LogWarning:
    """A WARN line; equal lines are counted, not repeated."""

    host: str
    origin: str
    """Source file and line, where printed."""
    message: str
    calls: int
    first_line: int
    known: bool = False
    """Whether a notice tells the same."""


@dataclass(frozen=True, kw_only=True)
class LogNotice:
    """A line, at any level, whose meaning is known."""

    kind: NoticeKind
    host: str
    text: str
    values: tuple[tuple[str, str], ...] = ()
    """Named parts of the line, such as ("status", "12")."""
    calls: int = 1
    first_line: int = 0

    def value(self, name: str) -> str:
        """The named part, or the empty string."""
        return dict(self.values).get(name, "")


@dataclass(frozen=True, kw_only=True)
class NcclLog:
    """Everything found in one log or in several logs of one run."""

    source: str
    num_bytes: int = 0
    num_lines: int = 0
    num_nccl_lines: int = 0
    versions: tuple[tuple[str, str], ...] = ()
    """(host, version), such as ("node-a", "2.21.5"); RCCL's carry their own number."""
    edges: tuple[LogEdge, ...] = ()
    rings: tuple[LogRing, ...] = ()
    ring_links: tuple[LogRingLink, ...] = ()
    trees: tuple[LogTree, ...] = ()
    channels: tuple[LogChannels, ...] = ()
    networks: tuple[tuple[str, str], ...] = ()
    """(host, network) as chosen, such as ("node-a", "IB")."""
    plugins: tuple[LogPlugin, ...] = ()
    devices: tuple[LogDevices, ...] = ()
    bootstrap: tuple[tuple[str, str], ...] = ()
    """(host, interface) of the bootstrap connections."""
    switches: tuple[LogSwitch, ...] = ()
    communicators: tuple[LogCommunicator, ...] = ()
    choices: tuple[LogChoice, ...] = ()
    graphs: tuple[LogGraph, ...] = ()
    topology: tuple[LogTopologyLink, ...] = ()
    nvls_available: tuple[tuple[str, int, bool], ...] = ()
    """(host, device, available)."""
    nvls_heads: tuple[tuple[int, ...], ...] = ()
    nvls_groups: int = 0
    """Multicast groups created."""
    p2p_summary: tuple[tuple[str, str], ...] = ()
    """(what, value) of `Check P2P Type` lines."""
    warnings: tuple[LogWarning, ...] = ()
    notices: tuple[LogNotice, ...] = ()
    results: tuple[LogResult, ...] = ()
    timeouts: tuple[LogTimeout, ...] = ()
    ends_mid_line: bool = False
    """Whether the last line has no end: the file is still being written, or was cut off."""
    num_unreadable_lines: int = 0
    """Lines with binary junk, or longer than the limit."""
    num_dropped: int = 0
    """Distinct records beyond the limit of what is kept."""

    @property
    def version(self) -> tuple[int, int, int] | None:
        """The lowest NCCL version seen, as numbers; None if no line said it."""
        numbers = [version_numbers(text) for _, text in self.versions]
        return min((number for number in numbers if number is not None), default=None)

    @property
    def num_nodes(self) -> int | None:
        """Nodes of the largest communicator, else the number of hosts that printed; None for an empty log."""
        said = [comm.num_nodes for comm in self.communicators if comm.num_nodes is not None]
        if said:
            return max(said)
        hosts = {edge.host for edge in self.edges if edge.host} | {comm.host for comm in self.communicators}
        return len(hosts) or None

    def notices_of(self, *kinds: NoticeKind) -> tuple[LogNotice, ...]:
        """The notices of the given kinds, in the order of the log."""
        return tuple(notice for notice in self.notices if notice.kind in kinds)


_NUMBERS = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


def version_numbers(text: str) -> tuple[int, int, int] | None:
    """(major, minor, patch) of text such as `2.21.5+cuda12.4`; None if it holds no version."""
    match = _NUMBERS.search(text)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3] or 0))
