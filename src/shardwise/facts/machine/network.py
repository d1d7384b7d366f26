"""Network interfaces, InfiniBand and RoCE ports, and whether verbs can be used, from sysfs."""

from __future__ import annotations

import re

from shardwise.facts.machine.record import GidEntry, IbPort, NetInterface, Reading, Unreadable, Verbs
from shardwise.facts.machine.system import Answers, Tree

_COUNTERS = {
    "counters": ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_xmit_discards"),
    "hw_counters": ("rnr_nak_retry_err", "packet_seq_err", "out_of_sequence", "local_ack_timeout_err"),
}
_NUM_GIDS = 8
_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


def read_interfaces(tree: Tree, answers: Answers) -> Reading[tuple[NetInterface, ...]]:
    """Every interface, in the order of the kernel's index (the order in which NCCL meets them)."""
    names = tree.names("/sys/class/net")
    if isinstance(names, Unreadable):
        return names
    found = [(_index(tree, name), _read_interface(tree, answers, name)) for name in names if name != "bonding_masters"]
    return tuple(interface for _, interface in sorted(found, key=lambda pair: pair[0]))


def _index(tree: Tree, name: str) -> int:
    text = tree.text(f"/sys/class/net/{name}/ifindex")
    return int(text) if isinstance(text, str) and text.isdigit() else 1 << 20


def _read_interface(tree: Tree, answers: Answers, name: str) -> NetInterface:
    folder = f"/sys/class/net/{name}"
    state = tree.text(f"{folder}/operstate")
    mtu = tree.text(f"{folder}/mtu")
    device = tree.link(f"{folder}/device") if tree.exists(f"{folder}/device") else ""
    address = "" if isinstance(device, Unreadable) else device.rsplit("/", 1)[-1]
    return NetInterface(
        name=name,
        operstate="unknown" if isinstance(state, Unreadable) else state,
        speed_bits_per_s=_interface_speed(tree, folder),
        mtu=mtu if isinstance(mtu, Unreadable) else int(mtu),
        addresses=answers.addresses.get(name, ()),
        has_device=bool(address),
        pci_address=address if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d", address) else "",
        is_bond=tree.exists(f"{folder}/bonding"),
    )


def _interface_speed(tree: Tree, folder: str) -> Reading[float | None]:
    """Mbit/s in the file; -1, or an error on reading, where the driver knows none."""
    text = tree.text(f"{folder}/speed")
    if isinstance(text, Unreadable):
        return text if text.command and "Permission" in text.why else None
    try:
        megabits = int(text)
    except ValueError:
        return None
    return megabits * 1e6 if megabits > 0 else None


def read_ib_ports(tree: Tree) -> Reading[tuple[IbPort, ...]]:
    """Every port of every adapter; empty where the kernel has none."""
    if not tree.exists("/sys/class/infiniband"):
        return () if tree.exists("/sys/class") else Unreadable(why="/sys/class: is not there", command="ibv_devinfo")
    devices = tree.names("/sys/class/infiniband")
    if isinstance(devices, Unreadable):
        return devices
    found: list[IbPort] = []
    for device in devices:
        ports = tree.names(f"/sys/class/infiniband/{device}/ports")
        for port in () if isinstance(ports, Unreadable) else ports:
            if port.isdigit():
                found.append(_read_port(tree, device, int(port)))
    return tuple(found)


def _read_port(tree: Tree, device: str, port: int) -> IbPort:
    folder = f"/sys/class/infiniband/{device}/ports/{port}"
    place = tree.link(f"/sys/class/infiniband/{device}/device")
    counters: dict[str, int] = {}
    for group, names in _COUNTERS.items():
        for name in names:
            text = tree.text(f"{folder}/{group}/{name}")
            if isinstance(text, str) and text.isdigit():
                counters[name] = int(text)
    return IbPort(
        device=device,
        port=port,
        state=_state(tree, f"{folder}/state"),
        physical_state=_state(tree, f"{folder}/phys_state"),
        rate_bits_per_s=_rate(tree, f"{folder}/rate"),
        link_layer=_text(tree, f"{folder}/link_layer"),
        lid=_hexadecimal(tree, f"{folder}/lid"),
        subnet_manager_lid=_hexadecimal(tree, f"{folder}/sm_lid"),
        gids=_gids(tree, folder),
        counters=counters,
        pci_address="" if isinstance(place, Unreadable) else place.rsplit("/", 1)[-1],
    )


def _text(tree: Tree, path: str) -> str:
    text = tree.text(path)
    return "" if isinstance(text, Unreadable) else text


def _state(tree: Tree, path: str) -> str:
    """`ACTIVE` from `4: ACTIVE`."""
    return _text(tree, path).rpartition(":")[2].strip()


def _rate(tree: Tree, path: str) -> Reading[float]:
    """bits/s from `400 Gb/sec (4X NDR)`."""
    text = tree.text(path)
    if isinstance(text, Unreadable):
        return text
    match = re.match(r"([\d.]+) Gb/sec", text)
    return Unreadable(why=f"{path}: {text!r} is no rate", command="ibstat") if match is None else float(match[1]) * 1e9


def _hexadecimal(tree: Tree, path: str) -> Reading[int]:
    text = tree.text(path)
    if isinstance(text, Unreadable):
        return text
    try:
        return int(text, 16)
    except ValueError:
        return Unreadable(why=f"{path}: {text!r} is no number")


def _gids(tree: Tree, folder: str) -> tuple[GidEntry, ...]:
    found: list[GidEntry] = []
    for index in range(_NUM_GIDS):
        address = tree.text(f"{folder}/gids/{index}")
        if isinstance(address, Unreadable):
            break
        if address != _NO_GID:
            found.append(GidEntry(index=index, address=address, kind=_text(tree, f"{folder}/gid_attrs/types/{index}"),
                                  interface=_text(tree, f"{folder}/gid_attrs/ndevs/{index}")))  # fmt: skip
    return tuple(found)


def read_verbs(tree: Tree, answers: Answers) -> Verbs:
    """Library and device nodes."""
    names = tree.names("/dev/infiniband")
    nodes = () if isinstance(names, Unreadable) else tuple(f"/dev/infiniband/{n}" for n in names if "uverbs" in n)
    refused = tuple(node for node in nodes if node in answers.refused_devices)
    return Verbs(library=answers.verbs_library, devices=nodes, refused=refused)
