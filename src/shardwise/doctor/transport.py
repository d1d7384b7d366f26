"""Which transport NCCL takes between two cards of one machine, predicted from what it would look at.

Follows ncclTopoCheckP2p, ncclTopoCheckNet, p2pCanConnect and shmCanConnect of NCCL 2.10 to 2.30. Each prediction names
the one reason that decided it, so that every lost transport has exactly one cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.doctor.switches import Switches
from shardwise.doctor.thresholds import model_network_rate, model_path_rate
from shardwise.facts.machine.pci import pci_path
from shardwise.facts.machine.record import GpuPair, Machine, P2pStatus, PathType, Reading, Unreadable

Predicted = Literal["P2P", "SHM", "NET"]
Reason = Literal[
    "direct",
    "switch",
    "level_rule",
    "driver",
    "shm_mounts",
    "faster_network",
]
"""What decided: nothing stands against P2P; a variable; the default P2P level of this version and CPU; the driver's
refusal; different mounts of /dev/shm; an adapter that is faster than the path between the cards."""

_LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
_OLD_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")
_RULE_CHANGED = (2, 23, 0)
_CAUTIOUS_CPUS = ("GenuineIntel", "Zhaoxin", "ARM")
_NCCL_PATH = {
    PathType.SELF: "LOC",
    PathType.NVLINK: "NVL",
    PathType.PIX: "PIX",
    PathType.PXB: "PXB",
    PathType.PHB: "PHB",
    PathType.NODE: "PHB",  # NCCL has no NODE: two root complexes of one NUMA node meet at its CPU
    PathType.SYS: "SYS",
}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The transport of one pair, and why."""

    pair: GpuPair
    transport: Predicted
    reason: Reason
    switch: str = ""
    """The variable that decided, where one did."""
    level: str = ""
    """P2P level in force."""
    p2p_possible: bool
    """Whether the driver would let the two reach each other."""
    joined_by_nvlink: bool


def level_order(name: str) -> int:
    """The rank of a path type in NCCL's order, nearest first."""
    return _LEVELS.index(name)


def parse_level(text: str) -> str | None:
    """The level that NCCL understands by a value of NCCL_P2P_LEVEL or NCCL_NET_GDR_LEVEL; None if it ignores it."""
    if text in _LEVELS:
        return text
    if text[:1].isdigit():
        digits = text[: len(text) - len(text.lstrip("0123456789"))]
        return _OLD_LEVELS[min(int(digits), len(_OLD_LEVELS) - 1)]
    return None


def default_level(version: tuple[int, int, int], cpu_vendor: str, num_gpus: int) -> str:
    """The P2P level without a variable: the rule that changed in NCCL 2.23."""
    if version < _RULE_CHANGED:
        return "PXB" if cpu_vendor in _CAUTIOUS_CPUS else "SYS"
    return "SYS" if cpu_vendor == "AuthenticAMD" and num_gpus <= 2 else "PXB"


def predict(machine: Machine, switches: Switches, version: Reading[tuple[int, int, int]]) -> Reading[
    tuple[Prediction, ...]
]:  # fmt: skip
    """The transport of every pair of cards, for a communicator over all cards of the machine.

    Args:
        machine: The machine.
        switches: Variables in force.
        version: NCCL's version.

    Returns:
        One prediction per pair; unreadable where a deciding reading is missing.
    """
    if isinstance(machine.gpus, Unreadable):
        return machine.gpus
    found: list[Prediction] = []
    for pair in machine.pairs:
        prediction = _predict_pair(machine, switches, version, pair)
        if isinstance(prediction, Unreadable):
            return prediction
        found.append(prediction)
    return tuple(found)


def _predict_pair(
    machine: Machine, switches: Switches, version: Reading[tuple[int, int, int]], pair: GpuPair
) -> Reading[Prediction]:
    if isinstance(pair.path, Unreadable):
        return pair.path
    statuses = (pair.read, pair.write)
    unread = next((status for status in statuses if isinstance(status, Unreadable)), None)
    if unread is not None:
        return unread
    allowed = all(status == P2pStatus.OK for status in statuses)
    path = _NCCL_PATH[pair.path]
    level = _level(machine, switches, version, path)
    if isinstance(level, Unreadable):
        return level
    in_force, set_by = level
    near = level_order(path) <= level_order(in_force)

    def answer(transport: Predicted, reason: Reason, switch: str = "") -> Prediction:
        return Prediction(pair=pair, transport=transport, reason=reason, switch=switch, level=in_force,
                          p2p_possible=allowed, joined_by_nvlink=path == "NVL")  # fmt: skip

    shm_off = switches.is_on("NCCL_SHM_DISABLE")
    if _split_shm(machine):
        return answer("NET", "shm_mounts")
    if not switches.is_on("NCCL_NET_DISABLE_INTRA") and _network_is_faster(machine, pair):
        return answer("NET", "faster_network")
    if near and allowed:
        return answer("P2P", "direct")
    without_shm: Predicted = "NET" if shm_off else "SHM"
    if not allowed:
        return answer(without_shm, "switch" if shm_off else "driver", "NCCL_SHM_DISABLE" if shm_off else "")
    if set_by:
        return answer(without_shm, "switch", set_by)
    return answer(without_shm, "switch" if shm_off else "level_rule", "NCCL_SHM_DISABLE" if shm_off else "")


def _level(
    machine: Machine, switches: Switches, version: Reading[tuple[int, int, int]], path: str
) -> Reading[tuple[str, str]]:
    """(level in force, the variable that set it or empty). NVLink is within every default, so it needs no version."""
    if switches.is_on("NCCL_P2P_DISABLE"):
        return "LOC", "NCCL_P2P_DISABLE"
    wanted = parse_level(switches.value("NCCL_P2P_LEVEL"))
    if wanted is not None:
        return wanted, "NCCL_P2P_LEVEL"
    if level_order(path) <= level_order("PXB"):
        return "PXB", ""
    vendor = machine.cpu.vendor
    if isinstance(vendor, Unreadable):
        return vendor
    if vendor in _CAUTIOUS_CPUS:
        return "PXB", ""
    if isinstance(version, Unreadable):
        return version
    num_gpus = 0 if isinstance(machine.gpus, Unreadable) else len(machine.gpus)
    return default_level(version, vendor, num_gpus), ""


def _split_shm(machine: Machine) -> bool:
    """Whether the ranks that were looked at have different mounts of /dev/shm."""
    mounts = {process.shm_device for process in machine.processes if not isinstance(process.shm_device, Unreadable)}
    return len(mounts) > 1


def _network_is_faster(machine: Machine, pair: GpuPair) -> bool:
    """Whether both cards have an active adapter at PXB or nearer that beats their path, in NCCL's own figures."""
    if isinstance(machine.gpus, Unreadable) or isinstance(machine.ib_ports, Unreadable):
        return False
    between = model_path_rate(pair, machine)
    if between is None:
        return False
    fastest: list[float] = []
    for index in (pair.a, pair.b):
        card = machine.gpus[index]
        rates = [0.0]
        for port in machine.ib_ports:
            path = pci_path(machine.pci, card.address, port.pci_address) if port.pci_address else None
            near = isinstance(path, PathType) and path <= PathType.PXB
            if near and port.active and not isinstance(port.rate_bits_per_s, Unreadable):
                rates.append(model_network_rate(port.rate_bits_per_s))
        fastest.append(max(rates))
    return min(fastest) > between
