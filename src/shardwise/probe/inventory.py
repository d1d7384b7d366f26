"""What is there to measure: visible cards, memory that is free for new programs, switches in force.

Standard library only, no CUDA context. The machine itself is read by `shardwise.facts.machine`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from shardwise.facts.machine.record import GpuCard, Machine, P2pStatus, Reading, Unreadable
from shardwise.probe.findings import Adapter, CardRecord, Inventory, Network, PairPath
from shardwise.vocabulary.units import KIB, MIB

T = TypeVar("T")
_SWITCH_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_")
_SWITCHES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF",
             "PYTORCH_CUDA_ALLOC_CONF")  # fmt: skip
_LABELS = ("NCCL_VERSION",)
"""Set by container images to say what they hold; NCCL reads them not."""


def switches_in_force(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that change what is measured."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name in _SWITCHES or (name.startswith(_SWITCH_PREFIXES) and name not in _LABELS)
    }


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that new programs can take: the kernel's MemAvailable, or what a container's limit leaves if less.

    Raises:
        OSError: If the kernel does not say.
    """
    kernel = _meminfo(root, "MemAvailable")
    limit, used = _cgroup_memory(root)
    return kernel if limit is None else max(0, min(kernel, limit - used))


def total_memory_bytes(root: Path = Path("/")) -> int:
    """The machine's memory, or a container's limit if that is lower."""
    kernel = _meminfo(root, "MemTotal")
    limit, _ = _cgroup_memory(root)
    return kernel if limit is None else min(kernel, limit)


def _meminfo(root: Path, name: str) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * KIB
    raise OSError(f"/proc/meminfo has no {name}")


def _cgroup_memory(root: Path) -> tuple[int | None, int]:
    """Limit (None if there is none) and use of this container's control group, version 2 or 1.

    Page cache counts as used here, though the kernel would give it back: the honest side to err on.
    """
    for limit_file, use_file in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit = (root / limit_file).read_text().strip()
            used = int((root / use_file).read_text())
        except (OSError, ValueError):
            continue
        # Version 1 writes "no limit" as a number near 2^63.
        return (None, used) if limit == "max" or int(limit) > 2**60 else (int(limit), used)
    return None, 0


def num_usable_cpus() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model(root: Path = Path("/")) -> str:
    """The processor's name; empty if the kernel does not say."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def driver_version(root: Path = Path("/")) -> str:
    """The NVIDIA kernel driver's version; empty without one."""
    try:
        return (root / "sys/module/nvidia/version").read_text().strip()
    except OSError:
        return ""


def has_nvidia_device(root: Path = Path("/")) -> bool:
    """Whether the driver offers any card; asks nothing of it."""
    return any((root / "dev").glob("nvidia[0-9]*")) or (root / "dev/dxg").exists()


def used_device_memory() -> dict[str, int]:
    """Memory in use by card (uuid without `GPU-`), whole MiB, without a context of ours; empty if nvidia-smi fails."""
    command = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=10.0, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, used = line.partition(",")
        if used.strip().isdigit():
            found[name.strip().removeprefix("GPU-")] = int(used) * MIB
    return found


def take_inventory(machine: Machine) -> Inventory:
    """What a machine holds, from how `facts.machine` read it."""
    cards = () if isinstance(machine.gpus, Unreadable) else machine.gpus
    networks = _known(machine.interfaces) or ()
    ports = _known(machine.ib_ports) or ()
    parts = {"cards": machine.gpus, "network interfaces": machine.interfaces, "InfiniBand": machine.ib_ports,
             "driver": machine.driver.version, "memory": machine.host_memory_bytes}  # fmt: skip
    return Inventory(
        host=machine.hostname,
        cpu=machine.cpu.model or machine.cpu.architecture,
        num_cpus=machine.cpu.num_cpus,
        num_numa_nodes=_known(machine.cpu.num_numa_nodes),
        memory_bytes=_known(machine.host_memory_bytes),
        kernel=_known(machine.kernel) or "",
        driver=_known(machine.driver.version) or "",
        container=machine.container,
        virtual_machine=_known(machine.virtual_machine) or "",
        cards=tuple(_card_record(card) for card in cards),
        pairs=_pair_paths(machine),
        networks=tuple(
            Network(
                name=each.name,
                state=each.operstate,
                bits_per_s=_known(each.speed_bits_per_s),
                mtu=_known(each.mtu),
                has_device=each.has_device,
            )
            for each in networks
        ),
        adapters=tuple(
            Adapter(
                device=port.device,
                port=port.port,
                state=port.state,
                layer=port.link_layer,
                bits_per_s=_known(port.rate_bits_per_s),
            )
            for port in ports
        ),
        versions=dict(machine.packages),
        unreadable=tuple(_excuse(name, part) for name, part in parts.items() if isinstance(part, Unreadable)),
    )


def _excuse(name: str, reading: Unreadable) -> str:
    return f"{name}: {reading.why}" + (f" (try: {reading.command})" if reading.command else "")


def _card_record(card: GpuCard) -> CardRecord:
    links = _known(card.nvlinks)
    active = None if links is None else [link for link in links if link.active]
    speeds = None if active is None else [_known(link.speed_bytes_per_s) for link in active]
    return CardRecord(
        index=card.index,
        name=card.name,
        uuid=_known(card.uuid),
        memory_bytes=_known(card.memory_bytes),
        pcie_generation=_known(card.pcie_gen),
        pcie_generation_max=_known(card.pcie_gen_max),
        pcie_width=_known(card.pcie_width),
        pcie_width_max=_known(card.pcie_width_max),
        num_nvlinks=None if links is None else len(links),
        num_active_nvlinks=None if active is None else len(active),
        nvlink_bytes_per_s=_total(speeds),
        slowdowns=_known(card.slowdown_reasons) or (),
    )


def _pair_paths(machine: Machine) -> tuple[PairPath, ...]:
    """How every two cards of a machine are joined."""
    return tuple(
        PairPath(
            first=pair.a,
            second=pair.b,
            path=None if (path := _known(pair.path)) is None else path.name,
            num_nvlinks=_known(pair.num_nvlinks),
            peer_access=_both_granted(pair.read, pair.write),
        )
        for pair in machine.pairs
    )


def _both_granted(read: Reading[P2pStatus], write: Reading[P2pStatus]) -> bool | None:
    reading, writing = _known(read), _known(write)
    return None if reading is None or writing is None else reading == writing == P2pStatus.OK


def _known(reading: Reading[T]) -> T | None:
    return None if isinstance(reading, Unreadable) else reading


def _total(speeds: list[float | None] | None) -> float | None:
    """The sum; None if any is unknown or there is nothing to add."""
    known = [speed for speed in speeds or [] if speed is not None]
    return sum(known) if known and len(known) == len(speeds or []) else None
