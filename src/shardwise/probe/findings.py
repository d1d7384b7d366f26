"""What the ranks of a probe found out: the raw records, before they become a Cluster. Plain nouns, so they travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwise.vocabulary.cluster import Cluster, CollectiveOp
from shardwise.vocabulary.timeline import bus_factor

Scope = Literal["intra_node", "inter_node"]


@dataclass(frozen=True, kw_only=True)
class WireRecord:
    """One collective at one size over one way of grouping the ranks."""

    op: CollectiveOp
    grouping: str
    """Such as `all`, `blocks of 2` or `across nodes`."""
    scope: Scope
    ranks: int
    """Members of each group. All groups of the grouping ran at the same time, as the rows of a mesh do."""
    bytes: int
    """As nccl-tests defines the size: of all ranks' parts together for all_gather, reduce_scatter and all_to_all."""
    iterations: int
    seconds: float
    """Median over the iterations; in each iteration the slowest rank of the slowest group counts."""
    p95_seconds: float
    verified_elements: int
    """Elements on all ranks that were compared with what they must be; all of them were right."""

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes a second, as nccl-tests' algbw."""
        return self.bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second, as nccl-tests' busbw."""
        return self.algorithm_bandwidth * bus_factor(self.op, self.ranks)


@dataclass(frozen=True, kw_only=True)
class PairRecord:
    """One-way send and receive between two ranks, alone on the wire."""

    sender: int
    receiver: int
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RateRecord:
    """A rate of one rank: the slowest of all, measured while every rank did the same."""

    what: str
    """`matmul` (FLOP/s) or `attention forward`, `attention backward` (causal FLOP/s, the masked half not counted)."""
    dtype: str
    size: int
    """Side of the square product, or sequence length."""
    rate: float
    iterations: int


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """Something that was not measured, and why."""

    what: str
    why: str


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """Device memory outside of torch's allocator, in bytes; the largest over the ranks."""

    what: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Contention:
    """A matmul and an all_reduce at the same time, over each alone (1 is no loss)."""

    matmul_size: int
    dtype: str
    message_bytes: int
    matmul_slowdown: float
    wire_slowdown: float


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """Who a rank is."""

    rank: int
    node: int
    host: str
    device_name: str
    device_memory_bytes: int
    """GPU: what CUDA may use in all. CPU: the rank's even share of the memory that is free for new programs."""
    host_memory_bytes: int | None = None
    """Of the whole machine; a container's limit if that is lower."""
    num_threads: int = 1
    architecture: str = ""
    peer_access: bool | None = None
    """Whether CUDA lets this card reach every other card of its machine; None on CPU."""
    num_cpus: int = 1
    """Cores that the rank's process may use, shared with the other ranks."""
    load: float = 0.0
    """The machine's load average over the minute before the measurement."""


@dataclass(frozen=True, kw_only=True)
class CardRecord:
    """One card's own links. None where the driver does not say."""

    index: int
    """In the driver's order."""
    name: str
    uuid: str | None = None
    memory_bytes: int | None = None
    """As nvidia-smi prints it; CUDA programs may use a little less."""
    pcie_generation: int | None = None
    """Under load; idle cards train their link down."""
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    num_nvlinks: int | None = None
    num_active_nvlinks: int | None = None
    nvlink_bytes_per_s: float | None = None
    """Line rate of the active links together, one way."""
    slowdowns: tuple[str, ...] = ()
    """Why the driver held clocks down."""


@dataclass(frozen=True, kw_only=True)
class PairPath:
    """How two cards are joined, in the driver's order."""

    first: int
    second: int
    path: str | None = None
    """NVLINK, PIX, PXB, PHB, NODE or SYS, as `nvidia-smi topo -m` has it."""
    num_nvlinks: int | None = None
    peer_access: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Network:
    """One network interface."""

    name: str
    state: str
    bits_per_s: float | None = None
    mtu: int | None = None
    has_device: bool = False
    """Whether hardware stands behind it."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One port of an InfiniBand or RoCE adapter."""

    device: str
    port: int
    state: str
    layer: str
    bits_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What one machine holds, read without root, without torch and without a context on any card."""

    host: str
    cpu: str
    num_cpus: int
    num_numa_nodes: int | None = None
    memory_bytes: int | None = None
    kernel: str = ""
    driver: str = ""
    container: str = ""
    virtual_machine: str = ""
    cards: tuple[CardRecord, ...] = ()
    pairs: tuple[PairPath, ...] = ()
    networks: tuple[Network, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    unreadable: tuple[str, ...] = ()
    """What could not be read, why, and the command that would."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything that one probe measured. Empty or None where nothing was."""

    ranks: tuple[RankFacts, ...]
    wire: tuple[WireRecord, ...] = ()
    pairs: tuple[PairRecord, ...] = ()
    rates: tuple[RateRecord, ...] = ()
    memory: tuple[MemoryRecord, ...] = ()
    contention: Contention | None = None
    copy_bytes_per_s: float
    """Inside the device's memory, read and written bytes both counted."""
    host_to_device_bytes_per_s: float | None = None
    device_to_host_bytes_per_s: float | None = None
    launch_gap_seconds: float | None = None
    checkpoint_bytes_per_s: float | None = None
    skipped: tuple[Skipped, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    switches: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables in force that change the result."""
    inventories: tuple[Inventory, ...] = ()
    """One a machine; its cards were read while every card copied to and from host memory."""
    seconds: float = 0.0
    """From the start of the probe to the end of the last measurement."""
    phases: Mapping[str, float] = field(default_factory=dict[str, float])
    """Where that time went: start (of the ranks, to their first barrier), compute, disk, wire; and after it the end of
    the ranks, where this command had started them."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """t = latency + bytes / bandwidth for one collective, and how well each way of reading the table predicts."""

    op: CollectiveOp
    grouping: str
    ranks: int
    smallest_bytes: int
    largest_bytes: int
    latency_seconds: float
    bus_bandwidth_bytes_per_s: float
    line_error: float
    """Mean |predicted / measured - 1| of the line at sizes that were left out of its fit, from 1 MiB up if there are
    any."""
    table_error: float
    """The same for reading the table between its neighbors, straight in bytes."""


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """A probe's result in full: the Cluster that `plan` reads, and what it was made from."""

    cluster: Cluster
    findings: Findings
    fits: tuple[Fit, ...] = ()
