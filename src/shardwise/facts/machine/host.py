"""Processors, kernel, container, /dev/shm, limits and running ranks, from /proc and /sys."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from shardwise.facts.machine.pci import parse_cpu_list
from shardwise.facts.machine.record import (
    ConfFile,
    Cpu,
    Driver,
    Iommu,
    Limits,
    NcclInstall,
    Process,
    Reading,
    SharedMemory,
    Unreadable,
)
from shardwise.facts.machine.system import Answers, Tree

_MODULES = ("nvidia", "nvidia_peermem", "nv_peer_mem", "gdrdrv", "nvidia_uvm", "mlx5_core", "mlx5_ib", "irdma", "efa")
_LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/lib",
                    "/usr/local/cuda/lib64", "/opt/amazon/ofi-nccl/lib", "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
                    "/opt/hpcx/nccl_rdma_sharp_plugin/lib")  # fmt: skip
_ARM_IMPLEMENTER = "CPU implementer"


def read_cpu(tree: Tree) -> Cpu:
    """The processors, from /proc/cpuinfo and the node folders."""
    info = tree.text("/proc/cpuinfo")
    text = "" if isinstance(info, Unreadable) else info
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    arm = _ARM_IMPLEMENTER in fields
    vendor: Reading[str] = "ARM" if arm else fields.get("vendor_id", "")
    if "Shanghai" in vendor or "CentaurHauls" in vendor:
        vendor = "Zhaoxin"
    if not vendor:
        vendor = (
            info if isinstance(info, Unreadable) else Unreadable(why="/proc/cpuinfo: no vendor_id", command="lscpu")
        )
    sockets = set(re.findall(r"^physical id\s*:\s*(\d+)", text, re.MULTILINE))
    nodes = tree.names("/sys/devices/system/node")
    numbers: Reading[list[int]] = nodes if isinstance(nodes, Unreadable) else [
        int(name[4:]) for name in nodes if re.fullmatch(r"node\d+", name)
    ]  # fmt: skip
    empty = () if isinstance(numbers, Unreadable) else tuple(
        number for number in numbers if tree.text(f"/sys/devices/system/node/node{number}/cpulist") == ""
    )  # fmt: skip
    governor_path = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
    return Cpu(
        vendor=vendor,
        architecture="aarch64" if arm else "x86_64",
        model=fields.get("model name", ""),
        num_sockets=max(len(sockets), 1),
        num_cpus=len(re.findall(r"^processor\s*:", text, re.MULTILINE)),
        num_numa_nodes=numbers if isinstance(numbers, Unreadable) else max(len(numbers), 1),
        nodes_without_cpus=empty,
        governor=tree.text(governor_path) if tree.exists(governor_path) else None,
        hypervisor="hypervisor" in fields.get("flags", "").split(),
    )


def container(tree: Tree, environment: dict[str, str]) -> str:
    """Which kind of container this is; empty outside one."""
    cgroup = tree.text("/proc/1/cgroup")
    text = "" if isinstance(cgroup, Unreadable) else cgroup
    if "kubepods" in text or "KUBERNETES_SERVICE_HOST" in environment:
        return "kubernetes"
    if tree.exists("/.dockerenv") or "docker" in text:
        return "docker"
    if tree.exists("/run/.containerenv") or "libpod" in text:
        return "podman"
    if "lxc" in text:
        return "lxc"
    return "container" if "containerd" in text else ""


def virtual_machine(tree: Tree, cpu: Cpu) -> Reading[str]:
    """The hypervisor's product, `WSL`, or empty on bare metal."""
    version = tree.text("/proc/version")
    if not isinstance(version, Unreadable) and "microsoft" in version.casefold():
        return "WSL"
    if isinstance(version, Unreadable) and cpu.num_cpus == 0:
        return version
    if not cpu.hypervisor:
        return ""
    words = [tree.text(f"/sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name")]
    return " ".join(word for word in words if not isinstance(word, Unreadable)) or "virtual machine"


def read_driver(tree: Tree) -> Driver:
    """Version and kind of the NVIDIA kernel module."""
    text = tree.text("/proc/driver/nvidia/version", "nvidia-smi")
    if isinstance(text, Unreadable):
        return Driver(version=text, open_module=text)
    match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    version: Reading[str] = match[1] if match else Unreadable(
        why="/proc/driver/nvidia/version: no version in it", command="nvidia-smi"
    )  # fmt: skip
    return Driver(version=version, open_module="Open Kernel Module" in text)


def read_iommu(tree: Tree) -> Iommu:
    """Units and groups; both empty where translation is off."""
    if tree.exists("/sys/class") and not tree.exists("/sys/class/iommu"):
        return Iommu(units=(), num_groups=0)
    units = tree.names("/sys/class/iommu")
    groups = tree.names("/sys/kernel/iommu_groups")
    missing = isinstance(groups, Unreadable) and not groups.command
    num_groups = 0 if missing else groups if isinstance(groups, Unreadable) else len(groups)
    return Iommu(units=units, num_groups=num_groups)


def read_shared_memory(tree: Tree, answers: Answers) -> SharedMemory:
    """Space, mount and left-over segments of /dev/shm."""
    names = tree.names("/dev/shm")
    segments = [] if isinstance(names, Unreadable) else [name for name in names if name.startswith("nccl-")]
    held = _mapped_segments(tree) if segments else frozenset[str]()
    stale = [name for name in segments if f"/dev/shm/{name}" not in held]
    return SharedMemory(
        size_bytes=answers.shm_size_bytes,
        free_bytes=answers.shm_free_bytes,
        device=shm_device(tree, "self"),
        num_stale=len(stale),
        stale_bytes=sum(tree.size(f"/dev/shm/{name}") for name in stale),
    )


def _mapped_segments(tree: Tree) -> frozenset[str]:
    """Segments that some visible process maps. Processes of other users stay hidden, so theirs may look stale."""
    processes = tree.names("/proc")
    found: set[str] = set()
    for name in () if isinstance(processes, Unreadable) else processes:
        if name.isdigit():
            maps = tree.text(f"/proc/{name}/maps")
            if not isinstance(maps, Unreadable):
                found.update(re.findall(r"/dev/shm/nccl-\S+", maps))
    return frozenset(found)


def shm_device(tree: Tree, pid: str) -> Reading[str]:
    """major:minor of the mount that holds /dev/shm for a process."""
    text = tree.text(f"/proc/{pid}/mountinfo", f"sudo cat /proc/{pid}/mountinfo")
    if isinstance(text, Unreadable):
        return text
    mounts = {fields[4]: fields[2] for fields in (line.split() for line in text.splitlines()) if len(fields) > 4}
    for path in ("/dev/shm", "/dev", "/"):
        if path in mounts:
            return mounts[path]
    return Unreadable(why=f"/proc/{pid}/mountinfo: no mount for /dev/shm")


def read_modules(tree: Tree) -> Reading[frozenset[str]]:
    """Those of the kernel modules of interest that are loaded."""
    names = tree.names("/sys/module")
    return names if isinstance(names, Unreadable) else frozenset(names) & frozenset(_MODULES)


def legacy_peer_memory(tree: Tree) -> bool:
    """Whether the old peer memory client is registered."""
    names = tree.names("/sys/kernel/mm/memory_peers")
    return not isinstance(names, Unreadable) and any(name.startswith("nv_mem") for name in names)


def cpu_quota(tree: Tree) -> Reading[float | None]:
    """Processors granted by cgroup v2, or v1."""
    text = tree.text("/sys/fs/cgroup/cpu.max")
    if not isinstance(text, Unreadable):
        quota, _, period = text.partition(" ")
        return None if quota == "max" or not period else int(quota) / int(period)
    quota_v1 = tree.text("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    period_v1 = tree.text("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    if isinstance(quota_v1, Unreadable) or isinstance(period_v1, Unreadable) or int(quota_v1) < 0:
        return None
    return int(quota_v1) / int(period_v1)


def host_memory(tree: Tree) -> Reading[int]:
    """Bytes of memory of the machine."""
    text = tree.text("/proc/meminfo")
    if isinstance(text, Unreadable):
        return text
    match = re.search(r"^MemTotal:\s+(\d+) kB", text, re.MULTILINE)
    return Unreadable(why="/proc/meminfo: no MemTotal", command="free -b") if match is None else int(match[1]) * 1024


def read_conf_files(tree: Tree, home: str, environment: dict[str, str]) -> tuple[ConfFile, ...]:
    """NCCL's conf files that exist, in the order in which NCCL loads them.

    NCCL_CONF_FILE replaces the file in the home directory; none of them overrides what is already set.
    """
    named = environment.get("NCCL_CONF_FILE", "")
    paths = [named or str(PurePosixPath(home or "/root") / ".nccl.conf"), "/etc/nccl.conf"]
    found: list[ConfFile] = []
    for path in paths:
        if tree.exists(path) or path == named:
            text = tree.text(path)
            found.append(ConfFile(path=path, settings=text if isinstance(text, Unreadable) else parse_conf(text)))
    return tuple(found)


def parse_conf(text: str) -> tuple[tuple[str, str], ...]:
    """NCCL's own reading of a conf file: NAME=value, a line that starts with # is skipped, nothing is stripped."""
    pairs = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
    return tuple((name, value) for name, equals, value in pairs if equals)


def read_nccl(tree: Tree, answers: Answers, processes: tuple[Process, ...]) -> tuple[NcclInstall, ...]:
    """NCCL libraries found without loading one, most telling first: of a running rank, of a package, of the system."""
    found: list[NcclInstall] = []
    for process in processes:
        library = process.nccl_library
        if isinstance(library, str) and library and (version := _library_version(tree, library)):
            found.append(NcclInstall(version=version, found=f"library of process {process.pid}: {library}"))
    for name, version in sorted(answers.packages.items()):
        if name.startswith("nvidia-nccl"):
            found.append(NcclInstall(version=version, found=f"package {name}"))
    for folder in _LIBRARY_FOLDERS:
        names = tree.names(folder)
        for name in () if isinstance(names, Unreadable) else names:
            if match := re.fullmatch(r"libnccl\.so\.(\d+\.\d+\.\d+)", name):
                found.append(NcclInstall(version=match[1], found=f"library {folder}/{name}"))
    unique = {(install.version, install.found): install for install in found}
    return tuple(unique.values())


def _library_version(tree: Tree, path: str) -> str:
    """From the name, from the package that it lies in, or from the version text inside the library."""
    if match := re.search(r"libnccl\.so\.(\d+\.\d+\.\d+)$", path):
        return match[1]
    site_packages, within, _ = path.partition("/nvidia/nccl/lib/")
    names = tree.names(site_packages) if within else ()
    for name in () if isinstance(names, Unreadable) else names:
        if match := re.fullmatch(r"nvidia_nccl_cu\d+-(\d+\.\d+\.\d+)\S*\.dist-info", name):
            return match[1]
    data = tree.data(path)
    if isinstance(data, Unreadable):
        return ""
    match = re.search(rb"NCCL version (\d+\.\d+\.\d+)", data)
    return match[1].decode() if match else ""


def net_plugins(tree: Tree, environment: dict[str, str]) -> tuple[str, ...]:
    """Network plugins that the loader could find."""
    folders = [*filter(None, environment.get("LD_LIBRARY_PATH", "").split(":")), *_LIBRARY_FOLDERS]
    found: list[str] = []
    for folder in dict.fromkeys(folders):
        names = tree.names(folder)
        for name in () if isinstance(names, Unreadable) else names:
            if name.startswith("libnccl-net") and name.endswith(".so"):
                found.append(f"{folder}/{name}")
    return tuple(found)


def read_processes(tree: Tree, pids: tuple[int, ...]) -> tuple[Process, ...]:
    """The ranks asked for; for a launcher its children, and for a rank its siblings, so that ranks can be compared."""
    family = _family(tree, pids)
    return tuple(_read_process(tree, pid) for pid in family)


def _family(tree: Tree, pids: tuple[int, ...]) -> tuple[int, ...]:
    if not pids:
        return ()
    names = tree.names("/proc")
    others = [] if isinstance(names, Unreadable) else [int(name) for name in names if name.isdigit()]
    parents = {pid: _parent(tree, pid) for pid in others}
    wanted: list[int] = []
    for pid in pids:
        children = [other for other in others if parents[other] == pid and _is_rank(tree, other)]
        if children:
            wanted.extend(children)
            continue
        wanted.append(pid)
        parent = parents.get(pid)
        if parent is not None and parent > 1 and _is_rank(tree, pid):
            wanted.extend(other for other in others if parents[other] == parent and _is_rank(tree, other))
    return tuple(dict.fromkeys(wanted))


def _parent(tree: Tree, pid: int) -> int | None:
    status = tree.text(f"/proc/{pid}/status")
    match = None if isinstance(status, Unreadable) else re.search(r"^PPid:\s*(\d+)", status, re.MULTILINE)
    return None if match is None else int(match[1])


def _is_rank(tree: Tree, pid: int) -> bool:
    environment = _environment(tree, pid)
    return not isinstance(environment, Unreadable) and any(
        name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID") for name, _ in environment
    )


def _environment(tree: Tree, pid: int) -> Reading[tuple[tuple[str, str], ...]]:
    text = tree.text(f"/proc/{pid}/environ", f"sudo cat /proc/{pid}/environ | tr '\\0' '\\n'")
    if isinstance(text, Unreadable):
        return text
    pairs = (entry.partition("=") for entry in text.split("\0"))
    return tuple((name, value) for name, equals, value in pairs if equals)


def _read_process(tree: Tree, pid: int) -> Process:
    environment = _environment(tree, pid)
    status = tree.text(f"/proc/{pid}/status")
    allowed = (
        None if isinstance(status, Unreadable) else re.search(r"^Cpus_allowed_list:\s*(\S+)", status, re.MULTILINE)
    )
    affinity: Reading[frozenset[int]]
    if isinstance(status, Unreadable):
        affinity = status
    elif allowed is None:
        affinity = Unreadable(why=f"/proc/{pid}/status: no Cpus_allowed_list", command=f"taskset -pc {pid}")
    else:
        affinity = parse_cpu_list(allowed[1])
    maps = tree.text(f"/proc/{pid}/maps", f"sudo grep libnccl /proc/{pid}/maps")
    library = None if isinstance(maps, Unreadable) else re.search(r"(/\S*libnccl\.so\S*)", maps)
    rank = None if isinstance(environment, Unreadable) else dict(environment).get("LOCAL_RANK")
    return Process(
        pid=pid,
        environment=environment,
        shm_device=shm_device(tree, str(pid)),
        limits=_process_limits(tree, pid),
        affinity=affinity,
        nccl_library=maps if isinstance(maps, Unreadable) else library[1] if library else "",
        local_rank=int(rank) if rank is not None and rank.isdigit() else None,
    )


def _process_limits(tree: Tree, pid: int) -> Limits:
    text = tree.text(f"/proc/{pid}/limits")

    def limit(name: str) -> Reading[int | None]:
        if isinstance(text, Unreadable):
            return text
        match = re.search(rf"^{name}\s+(\S+)", text, re.MULTILINE)
        if match is None:
            return Unreadable(why=f"/proc/{pid}/limits: no {name!r}")
        return None if match[1] == "unlimited" else int(match[1])

    return Limits(
        memlock_bytes=limit("Max locked memory"),
        open_files=limit("Max open files"),
        stack_bytes=limit("Max stack size"),
    )
