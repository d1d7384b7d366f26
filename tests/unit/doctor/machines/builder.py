"""Writes a small fake machine: a tree of sysfs and proc files, and `answers.json` with what NVML and the kernel say.

The result is what `read_machine(root)` reads as a recording.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GIB = 2**30
_GT = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0}
_CPU = {"amd": "AuthenticAMD", "intel": "GenuineIntel", "arm": ""}
NO_NVML: dict[str, Any] = {
    "unreadable": "NVML: the package nvidia-ml-py is not installed",
    "command": "pip install nvidia-ml-py",
}


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU and its place: the addresses from the host bridge down, the card last."""

    name: str
    place: tuple[str, ...]
    numa: int = 0
    capability: tuple[int, int] = (8, 6)
    gen: int = 4
    gen_max: int = 4
    gen_card: int = 4
    width: int = 16
    width_max: int = 16
    links: tuple[dict[str, Any], ...] = ()
    fabric: tuple[int, int] = (0, 0)
    slowdowns: int = 0
    processes: tuple[int, ...] = ()
    corrected_errors: int = 0
    replays: int = 0
    bar1: int = 32 * GIB

    @property
    def address(self) -> str:
        return self.place[-1]


@dataclass(frozen=True, kw_only=True)
class Port:
    """One port of an adapter."""

    device: str
    place: tuple[str, ...]
    state: str = "4: ACTIVE"
    physical: str = "5: LinkUp"
    rate: str = "200 Gb/sec (4X HDR)"
    layer: str = "InfiniBand"
    gids: tuple[tuple[str, str], ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, kw_only=True)
class Net:
    name: str
    address: str = "192.0.2.5"
    speed: int = 10_000
    state: str = "up"
    physical: bool = True


@dataclass(frozen=True, kw_only=True)
class Rank:
    pid: int
    parent: int = 100
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    shm: str = "0:25"
    cpus: str = "0-31"
    library: str = "/venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A machine in one paragraph; everything else is an unremarkable healthy server."""

    cards: Sequence[Card] = ()
    cpu: str = "amd"
    num_cpus: int = 32
    bridges: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Overrides for bridges by address: width, width_max, gen, vendor, redirect."""
    p2p: Mapping[tuple[int, int], tuple[Sequence[int], Sequence[int]]] = field(
        default_factory=dict[tuple[int, int], tuple[Sequence[int], Sequence[int]]]
    )
    """Statuses (read both ways, write both ways) of pairs that are not OK."""
    p2p_all: int = 0
    iommu: str | None = None
    acs_readable: bool = True
    ports: Sequence[Port] = ()
    nets: Sequence[Net] = (Net(name="eth0"),)
    verbs: bool = True
    uverbs: bool = True
    modules: Sequence[str] = ("nvidia", "nvidia_uvm", "nvidia_peermem")
    legacy_peermem: bool = True
    open_driver: bool = True
    driver: str = "570.86.15"
    kernel: str = "6.8.0-51-generic"
    command_line: str = "BOOT_IMAGE=/vmlinuz root=/dev/sda1"
    shm_bytes: int = 64 * GIB
    nccl: str = "2.27.5"
    container: bool = False
    hypervisor: str = ""
    topology_file: bool = False
    memlock: int | None = None
    affinity: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    conf: str = ""
    ranks: Sequence[Rank] = ()
    kernel_log: Any = ()
    nvml: bool = True
    hostname: str = "node-a"
    nodes_without_cpus: Sequence[int] = ()
    cpu_max: str = "max 100000"
    governor: str = ""


def own_root(index: int, *, numa: int = 0, base: int = 0x20) -> tuple[str, ...]:
    """A slot of its own root complex, as on an EPYC."""
    bus = base + 0x20 * index
    return (f"pci0000:{bus:02x}", f"0000:{bus:02x}:01.1", f"0000:{bus + 1:02x}:00.0")


def one_root(index: int) -> tuple[str, ...]:
    """A slot below a root port of the one root complex of a desktop."""
    return ("pci0000:00", f"0000:00:01.{index}", f"0000:{index + 1:02x}:00.0")


def below_switch(index: int, *, switch: int = 0) -> tuple[str, ...]:
    """A slot below a PCIe switch."""
    bus = 0x10 + 0x40 * switch
    return (
        f"pci0000:{bus:02x}",
        f"0000:{bus:02x}:01.0",
        f"0000:{bus + 1:02x}:00.0",
        f"0000:{bus + 2:02x}:{index:02x}.0",
        f"0000:{bus + 3 + index:02x}:00.0",
    )


def chipset_slot() -> tuple[str, ...]:
    """A slot of an AMD chipset: root port, upstream and downstream port of the chipset, card."""
    return ("pci0000:00", "0000:00:02.1", "0000:05:00.0", "0000:06:04.0", "0000:0a:00.0")


def switched_links(
    count: int, *, down: Sequence[int] = (), version: int = 6, speed: float = 26.562e9
) -> tuple[dict[str, Any], ...]:
    """Links to NVSwitches. `version` is NVML's code: 6 is NVLink 4.0, 4 is 3.0."""
    return tuple(
        {
            "active": index not in down,
            "remote": "0000:00:00.0",
            "remote_is_switch": True,
            "version": version,
            "speed_bytes_per_s": speed,
            "errors": {},
        }
        for index in range(count)
    )


def bridged_links(count: int, peer: str, *, down: Sequence[int] = ()) -> tuple[dict[str, Any], ...]:
    """Links over a bridge to one other card."""
    return tuple(
        {
            "active": index not in down,
            "remote": peer,
            "remote_is_switch": False,
            "version": 5,
            "speed_bytes_per_s": 14.062e9,
            "errors": {},
        }
        for index in range(count)
    )


def build(root: Path, spec: Spec) -> Path:
    """Writes the machine below `root` and returns it."""
    for place, numa, device in _devices(spec):
        _write_chain(root, spec, place, numa, device)
    _write_proc(root, spec)
    _write_sys(root, spec)
    for port in spec.ports:
        _write_port(root, port)
    for index, net in enumerate(spec.nets, start=2):
        _write_net(root, index, net)
    for rank in spec.ranks:
        _write_rank(root, rank, spec)
    _write(root, "answers.json", json.dumps(_answers(spec)))
    return root


def _devices(spec: Spec) -> list[tuple[tuple[str, ...], int, dict[str, Any]]]:
    found: list[tuple[tuple[str, ...], int, dict[str, Any]]] = []
    for card in spec.cards:
        found.append(
            (
                card.place,
                card.numa,
                {
                    "vendor": "0x10de",
                    "class": "0x030200",
                    "gen": card.gen,
                    "gen_max": card.gen_card,
                    "width": card.width,
                    "width_max": card.width_max,
                    "errors": card.corrected_errors,
                },
            )
        )
    for port in spec.ports:
        found.append(
            (
                port.place,
                0,
                {"vendor": "0x15b3", "class": "0x020700", "gen": 4, "gen_max": 4, "width": 16, "width_max": 16},
            )
        )
    return found


def _write(root: Path, path: str, text: str) -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _link(root: Path, path: str, target: str) -> None:
    link, end = root / path.lstrip("/"), root / target.lstrip("/")
    link.parent.mkdir(parents=True, exist_ok=True)
    end.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(os.path.relpath(end, link.parent))


def _write_chain(root: Path, spec: Spec, place: tuple[str, ...], numa: int, device: dict[str, Any]) -> None:
    for depth in range(1, len(place)):
        address = place[depth]
        folder = "/sys/devices/" + "/".join(place[: depth + 1])
        last = depth == len(place) - 1
        own: dict[str, Any] = (
            device
            if last
            else {
                "vendor": "0x10b5" if depth > 1 else "0x1022",
                "class": "0x060400",
                "gen": device["gen_max"],
                "gen_max": device["gen_max"],
                "width": device["width"],
                "width_max": device["width_max"],
                **spec.bridges.get(address, {}),
            }
        )
        for name, text in (
            ("vendor", own["vendor"]),
            ("class", own["class"]),
            ("numa_node", str(numa)),
            ("current_link_speed", f"{_GT[own['gen']]} GT/s PCIe"),
            ("max_link_speed", f"{_GT[own['gen_max']]} GT/s PCIe"),
            ("current_link_width", str(own["width"])),
            ("max_link_width", str(own["width_max"])),
            ("local_cpulist", f"{numa * 16}-{numa * 16 + 15}"),
            ("aer_dev_correctable", f"RxErr 0\nTOTAL_ERR_COR {own.get('errors', 0)}"),
        ):
            _write(root, f"{folder}/{name}", text + "\n")
        (root / f"{folder}/config".lstrip("/")).write_bytes(
            _config(redirect=bool(own.get("redirect"))) if spec.acs_readable else b"\0" * 64
        )
        _link(root, f"/sys/bus/pci/devices/{address}", folder)
        if spec.iommu is not None:
            group = f"/sys/kernel/iommu_groups/{int(address[5:7], 16)}{address[-1]}{int(address[8:10], 16)}"
            _write(root, f"{group}/type", spec.iommu + "\n")
            _link(root, f"{group}/devices/{address}", folder)
            _link(root, f"{folder}/iommu_group", group)


def _config(*, redirect: bool) -> bytes:
    """4 KiB with one extended capability: ACS, its redirect bits on or off."""
    data = bytearray(4096)
    data[0x100:0x104] = (0x0D | (1 << 16)).to_bytes(4, "little")
    data[0x106:0x108] = (0x1C if redirect else 0x00).to_bytes(2, "little")
    return bytes(data)


def _write_proc(root: Path, spec: Spec) -> None:
    flags = "fpu hypervisor" if spec.hypervisor else "fpu"
    one = "processor\t: {n}\nvendor_id\t: {v}\nmodel name\t: Some CPU\nphysical id\t: 0\nflags\t\t: {f}\n"
    arm = "processor\t: {n}\nCPU implementer\t: 0x41\n"
    text = arm if spec.cpu == "arm" else one
    cpus = "\n".join(text.format(n=n, v=_CPU[spec.cpu], f=flags) for n in range(spec.num_cpus))
    _write(root, "/proc/cpuinfo", cpus)
    _write(root, "/proc/cmdline", spec.command_line + "\n")
    _write(
        root,
        "/proc/version",
        "Linux version 6.8.0 (WSL2 Microsoft)" if spec.hypervisor == "WSL" else "Linux version 6.8.0",
    )
    _write(root, "/proc/sys/kernel/osrelease", spec.kernel + "\n")
    _write(root, "/proc/meminfo", "MemTotal:       527951084 kB\n")
    _write(root, "/proc/self/mountinfo", "36 25 0:25 / /dev/shm rw - tmpfs tmpfs rw\n")
    _write(root, "/proc/1/cgroup", "0::/docker/abc\n" if spec.container else "0::/init.scope\n")
    if spec.container:
        _write(root, "/.dockerenv", "")
    kind = "NVIDIA UNIX Open Kernel Module for x86_64" if spec.open_driver else "NVIDIA UNIX x86_64 Kernel Module"
    _write(root, "/proc/driver/nvidia/version", f"NVRM version: {kind}  {spec.driver}  Release Build\n")
    for card in spec.cards:
        _write(root, f"/proc/driver/nvidia/gpus/{card.address}/information", f"Model: \t\t {card.name}\nIRQ: 1\n")
    if spec.conf:
        _write(root, "/etc/nccl.conf", spec.conf)
    if spec.topology_file:
        _write(root, "/var/run/nvidia-topologyd/virtualTopology.xml", "<system/>")


def _write_sys(root: Path, spec: Spec) -> None:
    for node in range(2 if any(card.numa for card in spec.cards) else 1):
        _write(root, f"/sys/devices/system/node/node{node}/cpulist", f"{node * 16}-{node * 16 + 15}\n")
    for node in spec.nodes_without_cpus:
        _write(root, f"/sys/devices/system/node/node{node}/cpulist", "\n")
    for name in ("dmi", "net"):
        (root / "sys/class" / name).mkdir(parents=True, exist_ok=True)
    if spec.hypervisor:
        _write(root, "/sys/class/dmi/id/sys_vendor", spec.hypervisor + "\n")
        _write(root, "/sys/class/dmi/id/product_name", "Virtual Machine\n")
    for module in spec.modules:
        (root / "sys/module" / module).mkdir(parents=True, exist_ok=True)
    if spec.legacy_peermem:
        _write(root, "/sys/kernel/mm/memory_peers/nv_mem/version", "1.3\n")
    if spec.iommu is not None:
        (root / "sys/class/iommu/ivhd0").mkdir(parents=True, exist_ok=True)
    (root / "dev/shm").mkdir(parents=True, exist_ok=True)
    for index in range(len(spec.ports) if spec.uverbs else 0):
        _write(root, f"/dev/infiniband/uverbs{index}", "")
    _write(root, "/sys/fs/cgroup/cpu.max", spec.cpu_max + "\n")
    if spec.governor:
        _write(root, "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", spec.governor + "\n")


def _write_port(root: Path, port: Port) -> None:
    folder = f"/sys/class/infiniband/{port.device}/ports/1"
    for name, text in (
        ("state", port.state),
        ("phys_state", port.physical),
        ("rate", port.rate),
        ("link_layer", port.layer),
        ("lid", "0x1"),
        ("sm_lid", "0x1"),
    ):
        _write(root, f"{folder}/{name}", text + "\n")
    for name, count in port.counters.items():
        _write(root, f"{folder}/counters/{name}", f"{count}\n")
    for index, (address, kind) in enumerate(port.gids):
        _write(root, f"{folder}/gids/{index}", address + "\n")
        _write(root, f"{folder}/gid_attrs/types/{index}", kind + "\n")
    _link(root, f"/sys/class/infiniband/{port.device}/device", "/sys/devices/" + "/".join(port.place))


def _write_net(root: Path, index: int, net: Net) -> None:
    folder = f"/sys/class/net/{net.name}"
    for name, text in (
        ("ifindex", str(index)),
        ("operstate", net.state),
        ("mtu", "1500"),
        ("speed", str(net.speed if net.physical else -1)),
    ):
        _write(root, f"{folder}/{name}", text + "\n")
    if net.physical:
        _link(root, f"{folder}/device", f"/sys/devices/pci0000:e0/0000:e0:01.0/0000:e1:00.{index}")


def _write_rank(root: Path, rank: Rank, spec: Spec) -> None:
    folder = f"/proc/{rank.pid}"
    _write(root, f"{folder}/environ", "\0".join(f"{name}={value}" for name, value in rank.environment.items()) + "\0")
    _write(root, f"{folder}/status", f"Name:\tpython\nPPid:\t{rank.parent}\nCpus_allowed_list:\t{rank.cpus}\n")
    _write(root, f"{folder}/mountinfo", f"36 25 {rank.shm} / /dev/shm rw - tmpfs tmpfs rw\n")
    _write(root, f"{folder}/maps", f"7f00-7f01 r-xp 00000000 08:01 12 {rank.library}\n")
    locked = "unlimited" if spec.memlock is None else str(spec.memlock)
    _write(
        root,
        f"{folder}/limits",
        f"Limit  Soft  Hard  Units\nMax locked memory         {locked}   {locked}  bytes\n"
        "Max open files            1048576  1048576  files\nMax stack size            8388608  unlimited  bytes\n",
    )
    site = rank.library.partition("/nvidia/nccl/lib/")[0]
    (root / site.lstrip("/") / f"nvidia_nccl_cu12-{spec.nccl}.dist-info").mkdir(parents=True, exist_ok=True)


def _answers(spec: Spec) -> dict[str, Any]:
    affinity = spec.num_cpus if spec.affinity is None else spec.affinity
    return {
        "hostname": spec.hostname,
        "home": "/home/someone",
        "shm_size_bytes": spec.shm_bytes,
        "shm_free_bytes": spec.shm_bytes,
        "memlock_bytes": spec.memlock,
        "open_files": 1_048_576,
        "stack_bytes": 8_388_608,
        "affinity": list(range(affinity)),
        "addresses": {net.name: [net.address] for net in spec.nets if net.address},
        "verbs_library": spec.verbs,
        "packages": {"torch": "2.9.1", "nvidia-nccl-cu12": spec.nccl} if spec.nccl else {},
        "environment": dict(spec.environment),
        "kernel_log": spec.kernel_log if isinstance(spec.kernel_log, dict) else list(spec.kernel_log),
        "nvml": {
            "driver": spec.driver,
            "gpus": [_nvml_card(card) for card in spec.cards],
            "pairs": [_nvml_pair(spec, a, b) for a in range(len(spec.cards)) for b in range(a + 1, len(spec.cards))],
        }
        if spec.nvml
        else NO_NVML,
    }


def _nvml_card(card: Card) -> dict[str, Any]:
    return {
        "address": card.address,
        "name": card.name,
        "uuid": f"GPU-{card.address}",
        "compute_capability": list(card.capability),
        "memory_bytes": 24 * GIB,
        "bar1_bytes": card.bar1,
        "pcie_gen": card.gen,
        "pcie_gen_max": card.gen_max,
        "pcie_gen_card": card.gen_card,
        "pcie_width": card.width,
        "pcie_width_max": card.width_max,
        "pcie_replays": card.replays,
        "nvlinks": list(card.links),
        "nvlink_traffic_bytes": 0,
        "fabric": {"state": card.fabric[0], "status": card.fabric[1]},
        "slowdowns": card.slowdowns,
        "processes": list(card.processes),
    }


def _nvml_pair(spec: Spec, a: int, b: int) -> dict[str, Any]:
    read, write = spec.p2p.get((a, b), ((spec.p2p_all,) * 2, (spec.p2p_all,) * 2))
    return {
        "a": a,
        "b": b,
        "ancestor": _ancestor(spec.cards[a], spec.cards[b]),
        "read": list(read),
        "write": list(write),
    }


def _ancestor(first: Card, second: Card) -> int:
    """NVML's level, from the places."""
    if first.place[0] != second.place[0]:
        return 40 if first.numa == second.numa else 50
    same = [above == other for above, other in zip(first.place, second.place, strict=False)]
    shared = (same.index(False) if False in same else len(same)) - 1
    if shared == 0:
        return 30
    return 10 if len(first.place) - 2 - shared + len(second.place) - 2 - shared <= 2 else 20
