"""The PCI tree from sysfs: devices, the bridges above them, and the path between two of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from shardwise.facts.machine.record import AcsControl, PathType, PciDevice, Reading, Unreadable
from shardwise.facts.machine.system import Tree

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_EXTENDED_CAPABILITIES = 0x100
_ACS_CAPABILITY = 0x0D
_ACS_CONTROL_OFFSET = 6
GENERATION_BY_GT = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""PCIe generation by GT/s."""


def read_pci(tree: Tree, wanted: Iterable[str]) -> dict[str, PciDevice]:
    """The wanted devices and every bridge above them, by address. Addresses that sysfs does not know are left out."""
    found: dict[str, PciDevice] = {}
    pending = list(dict.fromkeys(wanted))
    while pending:
        address = pending.pop()
        if address in found:
            continue
        device = _read_device(tree, address)
        if device is not None:
            found[address] = device
            pending.extend(device.upstream)
    return found


def _read_device(tree: Tree, address: str) -> PciDevice | None:
    folder = f"/sys/bus/pci/devices/{address}"
    place = tree.link(folder)
    if isinstance(place, Unreadable):
        return None
    parts = place.strip("/").split("/")
    upstream = tuple(part for part in parts[:-1] if _ADDRESS.fullmatch(part))
    bridge = next((part for part in parts if part.startswith("pci")), "")
    group, kind, size = _iommu(tree, folder)
    return PciDevice(
        address=address,
        vendor=_text_or_empty(tree, f"{folder}/vendor"),
        class_code=_text_or_empty(tree, f"{folder}/class"),
        upstream=upstream,
        host_bridge=bridge,
        numa_node=_numa_node(tree, folder),
        speed_gt=_speed(tree, f"{folder}/current_link_speed"),
        speed_gt_max=_speed(tree, f"{folder}/max_link_speed"),
        width=_whole(tree, f"{folder}/current_link_width"),
        width_max=_whole(tree, f"{folder}/max_link_width"),
        iommu_group=group,
        iommu_type=kind,
        iommu_group_size=size,
        acs=_acs(tree, folder, address),
        corrected_errors=_corrected_errors(tree, folder),
        local_cpus=_cpus(tree, f"{folder}/local_cpulist"),
    )


def _text_or_empty(tree: Tree, path: str) -> str:
    text = tree.text(path)
    return "" if isinstance(text, Unreadable) else text


def _numa_node(tree: Tree, folder: str) -> Reading[int | None]:
    node = _whole(tree, f"{folder}/numa_node")
    return node if isinstance(node, Unreadable) or node >= 0 else None


def _whole(tree: Tree, path: str) -> Reading[int]:
    text = tree.text(path)
    if isinstance(text, Unreadable):
        return text
    try:
        return int(text)
    except ValueError:
        return Unreadable(why=f"{path}: {text!r} is no number")


def _speed(tree: Tree, path: str) -> Reading[float]:
    text = tree.text(path)
    if isinstance(text, Unreadable):
        return text
    match = re.match(r"([\d.]+) ?GT/s", text)
    return Unreadable(why=f"{path}: {text!r} is no link speed") if match is None else float(match[1])


def _cpus(tree: Tree, path: str) -> Reading[frozenset[int]]:
    text = tree.text(path)
    return text if isinstance(text, Unreadable) else parse_cpu_list(text)


def parse_cpu_list(text: str) -> frozenset[int]:
    """The kernel's list format, such as `0-31,64-95`."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        cpus.update(range(int(low), int(high or low) + 1))
    return frozenset(cpus)


def _iommu(tree: Tree, folder: str) -> tuple[Reading[str | None], Reading[str | None], int]:
    """(group, its domain type, how many devices it holds)."""
    if not tree.exists(f"{folder}/iommu_group"):
        return None, None, 0
    place = tree.link(f"{folder}/iommu_group")
    if isinstance(place, Unreadable):
        return place, place, 0
    group = place.rsplit("/", 1)[-1]
    members = tree.names(f"/sys/kernel/iommu_groups/{group}/devices")
    kind = tree.text(f"/sys/kernel/iommu_groups/{group}/type")
    return group, kind, 0 if isinstance(members, Unreadable) else len(members)


def _corrected_errors(tree: Tree, folder: str) -> Reading[int | None]:
    if not tree.exists(f"{folder}/aer_dev_correctable"):
        return None
    text = tree.text(f"{folder}/aer_dev_correctable")
    if isinstance(text, Unreadable):
        return text
    match = re.search(r"TOTAL_ERR_COR (\d+)", text)
    return Unreadable(why=f"{folder}/aer_dev_correctable: no total in it") if match is None else int(match[1])


def _acs(tree: Tree, folder: str, address: str) -> Reading[AcsControl | None]:
    """From the extended configuration space, which the kernel shows in full to root only."""
    command = f"sudo lspci -vvv -s {address} | grep ACSCtl"
    config = tree.data(f"{folder}/config", command)
    if isinstance(config, Unreadable):
        return config
    if len(config) <= _EXTENDED_CAPABILITIES:
        return Unreadable(why=f"{folder}/config: only {len(config)} bytes are shown without root", command=command)
    offset, seen = _EXTENDED_CAPABILITIES, set[int]()
    while offset and offset not in seen and offset + 4 <= len(config):
        seen.add(offset)
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == _ACS_CAPABILITY:
            control = int.from_bytes(config[offset + _ACS_CONTROL_OFFSET : offset + _ACS_CONTROL_OFFSET + 2], "little")
            return AcsControl(
                source_validation=bool(control & 0x01),
                request_redirect=bool(control & 0x04),
                completion_redirect=bool(control & 0x08),
                upstream_forward=bool(control & 0x10),
            )
        offset = header >> 20
    return None


def pci_path(pci: Mapping[str, PciDevice], a: str, b: str) -> Reading[PathType]:
    """How two devices are joined, by the common part of their places in the tree."""
    first, second = pci.get(a), pci.get(b)
    if first is None or second is None:
        missing = a if first is None else b
        return Unreadable(why=f"/sys/bus/pci/devices/{missing}: is not there", command="nvidia-smi topo -m")
    if first.host_bridge == second.host_bridge:
        shared = 0
        for above, other in zip(first.upstream, second.upstream, strict=False):
            if above != other:
                break
            shared += 1
        if shared == 0:
            return PathType.PHB
        bridges = (len(first.upstream) - shared) + (len(second.upstream) - shared)
        return PathType.PIX if bridges <= 2 else PathType.PXB
    nodes = (first.numa_node, second.numa_node)
    for node in nodes:
        if isinstance(node, Unreadable):
            return node
    return PathType.NODE if nodes[0] == nodes[1] else PathType.SYS
