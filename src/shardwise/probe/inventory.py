"""What is there to measure: visible cards, memory that is free for new programs, switches in force.

Standard library only, no CUDA context. The machine itself is read by `shardwise.facts.machine`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from shardwise.vocabulary.units import KIB

_SWITCH_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_")
_SWITCHES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF",
             "PYTORCH_CUDA_ALLOC_CONF")  # fmt: skip


def switches_in_force(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that change what is measured."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name in _SWITCHES or name.startswith(_SWITCH_PREFIXES)
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
