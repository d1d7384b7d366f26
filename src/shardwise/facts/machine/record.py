"""What one machine looks like from inside: frozen records, each reading a value or an explicit `Unreadable`.

[Note: unreadable]
A reading that could not be taken is never left out, zero or None: it is an `Unreadable` with the reason and, where one
exists, the command that would read it with more rights. None means that the thing itself is absent (no IOMMU group,
no NUMA node), which is a reading too. Whoever judges a machine must answer for both.

Addresses of PCI devices are the kernel's (`0000:41:00.0`). Rates are one way, in bytes a second; sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """A reading that could not be taken."""

    why: str
    command: str = ""
    """Shell command that reads it with more rights or another tool; empty if there is none."""


Reading = T | Unreadable


class PathType(IntEnum):
    """How two PCI devices are joined, nearest first, in the words of `nvidia-smi topo -m`."""

    SELF = 0
    NVLINK = 1
    PIX = 2
    """At most one PCIe switch between them."""
    PXB = 3
    """Several PCIe switches, no host bridge."""
    PHB = 4
    """Through one host bridge, that is through the CPU's root complex."""
    NODE = 5
    """Through several host bridges of one NUMA node."""
    SYS = 6
    """Through the interconnect between NUMA nodes."""


class P2pStatus(IntEnum):
    """NVML's answer to whether one card may reach the other's memory."""

    OK = 0
    CHIPSET = 1
    GPU = 2
    TOPOLOGY = 3
    REGKEY = 4
    NOT_SUPPORTED = 5
    UNKNOWN = 6


@dataclass(frozen=True, kw_only=True)
class AcsControl:
    """Access control bits of a bridge that change where peer traffic goes."""

    source_validation: bool
    request_redirect: bool
    completion_redirect: bool
    upstream_forward: bool

    @property
    def redirects(self) -> bool:
        """Whether peer traffic is sent up to the root complex instead of straight across."""
        return self.request_redirect or self.completion_redirect or self.upstream_forward


@dataclass(frozen=True, kw_only=True)
class PciDevice:
    """One device of the PCI tree, from sysfs."""

    address: str
    vendor: str = ""
    """Such as 0x10de (NVIDIA), 0x8086 (Intel), 0x1022 (AMD), 0x1b21 (ASMedia)."""
    class_code: str = ""
    upstream: tuple[str, ...] = ()
    """Addresses of the bridges above it, from the root port down."""
    host_bridge: str = ""
    """Such as pci0000:40; devices below one host bridge share a root complex."""
    numa_node: Reading[int | None]
    """None where the machine has one node only or does not say (-1)."""
    speed_gt: Reading[float]
    """Transfers now, in GT/s: 2.5, 5, 8, 16, 32, 64 for generations 1 to 6. Low at idle is normal."""
    speed_gt_max: Reading[float]
    width: Reading[int]
    width_max: Reading[int]
    iommu_group: Reading[str | None]
    iommu_type: Reading[str | None]
    """Domain type of the group: DMA and DMA-FQ translate, identity passes through; None without a group."""
    iommu_group_size: int = 0
    """Devices in the group."""
    acs: Reading[AcsControl | None]
    """None for a device without the capability."""
    corrected_errors: Reading[int | None]
    """AER corrected errors since boot; None where the device does not count them."""
    local_cpus: Reading[frozenset[int]]


@dataclass(frozen=True, kw_only=True)
class NvLink:
    """One NVLink of one card."""

    index: int
    active: bool
    remote: Reading[str]
    """PCI address of the other end."""
    remote_is_switch: Reading[bool]
    generation: Reading[int]
    """2 on V100, 3 on A100, 4 on H100, 5 on B200."""
    speed_bytes_per_s: Reading[float]
    """Line rate, line coding included: above what the data sheet promises."""
    errors: Mapping[str, int] = field(default_factory=dict[str, int])
    """Counters by name (replay, recovery, crc_flit), those that are readable."""


@dataclass(frozen=True, kw_only=True)
class GpuCard:
    """One card, in the order of NVML (and of PCI addresses)."""

    index: int
    address: str
    name: str
    uuid: Reading[str]
    compute_capability: Reading[tuple[int, int]]
    memory_bytes: Reading[int]
    bar1_bytes: Reading[int]
    pcie_gen: Reading[int]
    pcie_gen_max: Reading[int]
    """Of card and slot together."""
    pcie_gen_card: Reading[int]
    """Of the card alone."""
    pcie_width: Reading[int]
    pcie_width_max: Reading[int]
    pcie_replays: Reading[int]
    nvlinks: Reading[tuple[NvLink, ...]]
    """Empty for a card without NVLink."""
    nvlink_traffic_bytes: Reading[int]
    """Bytes sent and received over NVLink since the driver was loaded."""
    fabric_state: Reading[str | None]
    """completed, in_progress, not_started; None for a card that belongs to no NVSwitch fabric."""
    fabric_status: Reading[int | None]
    """0 is success."""
    slowdown_reasons: Reading[tuple[str, ...]]
    """Why clocks are held down right now; empty if they are not."""
    processes: Reading[tuple[int, ...]]
    """Processes with a context on the card."""


@dataclass(frozen=True, kw_only=True)
class GpuPair:
    """Two cards of one machine, lower index first."""

    a: int
    b: int
    path: Reading[PathType]
    pci_path: Reading[PathType]
    """The path over PCI, also where NVLink joins them."""
    num_nvlinks: Reading[int]
    """Active links between the two, directly or through switches."""
    read: Reading[P2pStatus]
    """Worse of both directions."""
    write: Reading[P2pStatus]
    one_way: bool = False
    """Whether the driver allows one direction and refuses the other."""


@dataclass(frozen=True, kw_only=True)
class NetInterface:
    """One network interface, in the order of its kernel index."""

    name: str
    operstate: str = ""
    speed_bits_per_s: Reading[float | None]
    """None where the driver knows no speed (virtual, or link down)."""
    mtu: Reading[int]
    addresses: tuple[str, ...] = ()
    has_device: bool = False
    """Whether hardware stands behind it."""
    pci_address: str = ""
    is_bond: bool = False


@dataclass(frozen=True, kw_only=True)
class GidEntry:
    """One entry of a RoCE or InfiniBand address table."""

    index: int
    address: str
    kind: str = ""
    """IB/RoCE v1 or RoCE v2."""
    interface: str = ""


@dataclass(frozen=True, kw_only=True)
class IbPort:
    """One port of one InfiniBand or RoCE adapter."""

    device: str
    port: int
    state: str
    """Such as ACTIVE, INIT, DOWN."""
    physical_state: str
    rate_bits_per_s: Reading[float]
    link_layer: str
    """InfiniBand or Ethernet."""
    lid: Reading[int]
    subnet_manager_lid: Reading[int]
    gids: tuple[GidEntry, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    pci_address: str = ""

    @property
    def active(self) -> bool:
        """Whether the port can carry data."""
        return self.state == "ACTIVE"


@dataclass(frozen=True, kw_only=True)
class Verbs:
    """Whether this process could use the adapters."""

    library: Reading[bool]
    """Whether libibverbs can be loaded."""
    devices: tuple[str, ...] = ()
    """Device nodes under /dev/infiniband that carry verbs."""
    refused: tuple[str, ...] = ()
    """Those of them that this user may not open."""


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """The processors."""

    vendor: Reading[str]
    """AuthenticAMD, GenuineIntel, Zhaoxin, ARM, or as the kernel says it."""
    architecture: str = "x86_64"
    model: str = ""
    num_sockets: int = 1
    num_cpus: int = 0
    num_numa_nodes: Reading[int]
    nodes_without_cpus: tuple[int, ...] = ()
    governor: Reading[str | None]
    hypervisor: bool = False


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """/dev/shm as this process sees it."""

    size_bytes: Reading[int]
    free_bytes: Reading[int]
    device: Reading[str]
    """major:minor of the mount; two processes that differ here cannot share memory."""
    stale_bytes: int = 0
    """Bytes held by nccl-* segments that no process maps."""
    num_stale: int = 0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resource limits of a process; None is unlimited."""

    memlock_bytes: Reading[int | None]
    open_files: Reading[int | None]
    stack_bytes: Reading[int | None]


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The NVIDIA kernel driver."""

    version: Reading[str]
    open_module: Reading[bool]
    """Whether the open kernel modules are loaded (needed for DMA-BUF)."""


@dataclass(frozen=True, kw_only=True)
class Iommu:
    """Whether addresses of devices are translated."""

    units: Reading[tuple[str, ...]]
    """dmar* (Intel), ivhd* (AMD), smmu* (ARM); empty if off."""
    num_groups: Reading[int]


@dataclass(frozen=True, kw_only=True)
class ConfFile:
    """A NCCL conf file, in the order in which NCCL loads them (the environment wins, then the first file)."""

    path: str
    settings: Reading[tuple[tuple[str, str], ...]]


@dataclass(frozen=True, kw_only=True)
class NcclInstall:
    """A NCCL library found without loading it."""

    version: str
    found: str
    """How it was found: package, library file, process."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """A running rank, as far as its owner may see it."""

    pid: int
    environment: Reading[tuple[tuple[str, str], ...]]
    shm_device: Reading[str]
    limits: Limits
    affinity: Reading[frozenset[int]]
    nccl_library: Reading[str]
    """Path of the library that the process has mapped; empty if none."""
    local_rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Everything that can be read without root and without a CUDA context."""

    hostname: str
    root: str
    user_is_root: bool = False
    cpu: Cpu
    kernel: Reading[str]
    kernel_command_line: Reading[str]
    container: str = ""
    """docker, podman, kubernetes, lxc, or empty."""
    virtual_machine: Reading[str]
    """Product of the hypervisor, "WSL", or empty on bare metal."""
    virtual_topology_file: bool = False
    """Whether the topology file is there that NCCL loads by itself in a virtual machine."""
    driver: Driver
    gpus: Reading[tuple[GpuCard, ...]]
    pairs: tuple[GpuPair, ...] = ()
    pci: Mapping[str, PciDevice] = field(default_factory=dict[str, PciDevice])
    """GPUs, adapters and every bridge above them."""
    iommu: Iommu
    shm: SharedMemory
    interfaces: Reading[tuple[NetInterface, ...]]
    ib_ports: Reading[tuple[IbPort, ...]]
    """Empty without adapters."""
    verbs: Verbs
    modules: Reading[frozenset[str]]
    """Loaded kernel modules among those that matter here."""
    legacy_peer_memory: bool = False
    """Whether /sys/kernel/mm/memory_peers/nv_mem* exists, the only place where NCCL <= 2.22 looks."""
    limits: Limits
    affinity: Reading[frozenset[int]]
    cpu_quota: Reading[float | None]
    """Processors' worth of time a cgroup grants; None without a limit."""
    host_memory_bytes: Reading[int]
    conf_files: tuple[ConfFile, ...] = ()
    nccl: tuple[NcclInstall, ...] = ()
    net_plugins: tuple[str, ...] = ()
    """Paths of libnccl-net*.so found on the library path."""
    packages: Mapping[str, str] = field(default_factory=dict[str, str])
    """Versions of torch and its like, from package metadata."""
    kernel_log: Reading[tuple[str, ...]]
    """Lines about PCIe, IOMMU, GPUs and adapters."""
    processes: tuple[Process, ...] = ()
    """Ranks that were asked for, and their siblings."""

    def gpu_at(self, address: str) -> GpuCard | None:
        """The card at a PCI address."""
        cards = () if isinstance(self.gpus, Unreadable) else self.gpus
        return next((card for card in cards if card.address == address), None)
