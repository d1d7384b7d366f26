"""Puts a `Machine` together."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import UsageError
from shardwise.facts.machine import host, network
from shardwise.facts.machine.child import read_nvml
from shardwise.facts.machine.nvml import ancestor_path, both_ways, nvml_card
from shardwise.facts.machine.pci import GENERATION_BY_GT, pci_path, read_pci
from shardwise.facts.machine.record import (
    GpuCard,
    GpuPair,
    Limits,
    Machine,
    NvLink,
    P2pStatus,
    PathType,
    PciDevice,
    Reading,
    Unreadable,
)
from shardwise.facts.machine.system import ANSWERS_FILE, Answers, Tree, live_answers, read_answers, write_answers

_NO_NVML = Unreadable(why="NVML was not asked", command="pip install nvidia-ml-py")


def read_machine(root: Path | str = "/", *, pids: tuple[int, ...] = (), record_to: Path | None = None) -> Machine:
    """Reads this machine, or a recording of one. Needs no root, no torch and no CUDA context; changes nothing.

    Args:
        root: `/`, or the directory of a recording (a tree with `answers.json` in it).
        pids: Running ranks, or launchers of ranks, to look at.
        record_to: New directory for a recording of everything that is read.

    Returns:
        The machine; what could not be read is `Unreadable` in its place.

    Raises:
        UsageError: If the recording cannot be read, or cannot be written.
    """
    tree = Tree(Path(root), copy_to=record_to)
    answers = _answers(Path(root))
    machine = _assemble(tree, answers, pids)
    if record_to is not None:
        record_to.mkdir(parents=True, exist_ok=True)
        write_answers(answers, record_to / ANSWERS_FILE)
    return machine


def _answers(root: Path) -> Answers:
    if root == Path("/"):
        return live_answers(read_nvml())
    try:
        return read_answers(root / ANSWERS_FILE)
    except (OSError, ValueError, TypeError, json.JSONDecodeError) as error:
        raise UsageError(f"{root} is no recording of a machine ({error}). Give a directory that was recorded, or leave "
                         "it out to look at this machine.") from error  # fmt: skip


def _assemble(tree: Tree, answers: Answers, pids: tuple[int, ...]) -> Machine:
    environment = dict(answers.environment)
    cpu = host.read_cpu(tree)
    driver = host.read_driver(tree)
    cards = _cards(tree, answers)
    ib_ports = network.read_ib_ports(tree)
    interfaces = network.read_interfaces(tree, answers)
    wanted = [card.address for card in (() if isinstance(cards, Unreadable) else cards)]
    wanted += [port.pci_address for port in (() if isinstance(ib_ports, Unreadable) else ib_ports)]
    wanted += [found.pci_address for found in (() if isinstance(interfaces, Unreadable) else interfaces)]
    pci = read_pci(tree, filter(None, wanted))
    cards = cards if isinstance(cards, Unreadable) else tuple(_with_sysfs(card, pci) for card in cards)
    processes = host.read_processes(tree, pids)
    return Machine(
        hostname=answers.hostname,
        root=str(tree.root),
        user_is_root=answers.user_is_root,
        cpu=cpu,
        kernel=tree.text("/proc/sys/kernel/osrelease"),
        kernel_command_line=tree.text("/proc/cmdline"),
        container=host.container(tree, environment),
        virtual_machine=host.virtual_machine(tree, cpu),
        virtual_topology_file=tree.exists("/var/run/nvidia-topologyd/virtualTopology.xml"),
        driver=driver,
        gpus=cards,
        pairs=() if isinstance(cards, Unreadable) else _pairs(cards, pci, answers),
        pci=pci,
        iommu=host.read_iommu(tree),
        shm=host.read_shared_memory(tree, answers),
        interfaces=interfaces,
        ib_ports=ib_ports,
        verbs=network.read_verbs(tree, answers),
        modules=host.read_modules(tree),
        legacy_peer_memory=host.legacy_peer_memory(tree),
        limits=Limits(
            memlock_bytes=answers.memlock_bytes, open_files=answers.open_files, stack_bytes=answers.stack_bytes
        ),
        affinity=answers.affinity,
        cpu_quota=host.cpu_quota(tree),
        host_memory_bytes=host.host_memory(tree),
        conf_files=host.read_conf_files(tree, answers.home, environment),
        nccl=host.read_nccl(tree, answers, processes),
        net_plugins=host.net_plugins(tree, environment),
        packages=answers.packages,
        kernel_log=answers.kernel_log,
        processes=processes,
    )


def _cards(tree: Tree, answers: Answers) -> Reading[tuple[GpuCard, ...]]:
    """From NVML; without it from the driver's own folder, with everything that only NVML knows unreadable."""
    if not isinstance(answers.nvml, Unreadable):
        return tuple(nvml_card(index, data) for index, data in enumerate(answers.nvml["gpus"]))
    folders = tree.names("/proc/driver/nvidia/gpus")
    if isinstance(folders, Unreadable):
        return Unreadable(why=f"no NVIDIA GPU can be seen ({answers.nvml.why}; {folders.why})", command="nvidia-smi")
    cards: list[GpuCard] = []
    for index, address in enumerate(folders):
        text = tree.text(f"/proc/driver/nvidia/gpus/{address}/information")
        model = None if isinstance(text, Unreadable) else re.search(r"^Model:\s*(.+)$", text, re.MULTILINE)
        cards.append(_card_without_nvml(index, address, model[1].strip() if model else "unknown", answers.nvml))
    return tuple(cards)


def _card_without_nvml(index: int, address: str, name: str, why: Unreadable) -> GpuCard:
    return GpuCard(
        index=index, address=address, name=name, uuid=why, compute_capability=why, memory_bytes=why, bar1_bytes=why,
        pcie_gen=why, pcie_gen_max=why, pcie_gen_card=why, pcie_width=why, pcie_width_max=why, pcie_replays=why,
        nvlinks=why, nvlink_traffic_bytes=why, fabric_state=why, fabric_status=why, slowdown_reasons=why,
        processes=why,
    )  # fmt: skip


def _with_sysfs(card: GpuCard, pci: dict[str, PciDevice]) -> GpuCard:
    """Fills from sysfs what NVML left open and sysfs knows as well."""
    device = pci.get(card.address)
    if device is None:
        return card
    changes: dict[str, Any] = {}
    for name, found in (("pcie_width", device.width), ("pcie_width_max", device.width_max)):
        if isinstance(getattr(card, name), Unreadable) and not isinstance(found, Unreadable):
            changes[name] = found
    for name, speed in (("pcie_gen", device.speed_gt), ("pcie_gen_card", device.speed_gt_max)):
        if isinstance(getattr(card, name), Unreadable) and not isinstance(speed, Unreadable):
            changes[name] = GENERATION_BY_GT.get(speed, Unreadable(why=f"{speed} GT/s is no known generation"))
    return replace(card, **changes) if changes else card


def _pairs(cards: tuple[GpuCard, ...], pci: dict[str, PciDevice], answers: Answers) -> tuple[GpuPair, ...]:
    asked = {} if isinstance(answers.nvml, Unreadable) else {
        (pair["a"], pair["b"]): pair for pair in answers.nvml["pairs"]
    }  # fmt: skip
    why = answers.nvml if isinstance(answers.nvml, Unreadable) else _NO_NVML
    pairs: list[GpuPair] = []
    for first in cards:
        for second in cards[first.index + 1 :]:
            told = asked.get((first.index, second.index), {"ancestor": why, "read": [why], "write": [why]})
            pairs.append(_pair(first, second, told, pci))
    return tuple(pairs)


def _pair(first: GpuCard, second: GpuCard, told: dict[str, Any], pci: dict[str, PciDevice]) -> GpuPair:
    over_pci = ancestor_path(told["ancestor"])
    if isinstance(over_pci, Unreadable):
        over_pci = pci_path(pci, first.address, second.address)
    links = shared_nvlinks(first, second)
    joined = isinstance(links, int) and links > 0
    if not joined and told.get("nvlink") == P2pStatus.OK:
        joined = True
        links = Unreadable(
            why="NVML says that NVLink joins the two, but shows no links", command="nvidia-smi nvlink -s"
        )
    statuses = [*told["read"], *told["write"]]
    known = [int(status) for status in statuses if not isinstance(status, Unreadable)]
    links_matter = isinstance(over_pci, Unreadable)
    return GpuPair(
        a=first.index,
        b=second.index,
        path=PathType.NVLINK if joined else links if isinstance(links, Unreadable) and links_matter else over_pci,
        pci_path=over_pci,
        num_nvlinks=links,
        read=both_ways(told["read"]),
        write=both_ways(told["write"]),
        one_way=len(known) == len(statuses) and 0 in known and any(known),
    )  # fmt: skip


def shared_nvlinks(first: GpuCard, second: GpuCard) -> Reading[int]:
    """Active links between two cards; through switches, as many as the card with fewer has."""
    if isinstance(first.nvlinks, Unreadable):
        return first.nvlinks
    if isinstance(second.nvlinks, Unreadable):
        return second.nvlinks
    direct = sum(link.active and link.remote == second.address for link in first.nvlinks)
    if direct:
        return direct
    return min(_links_to_switches(first, first.nvlinks), _links_to_switches(second, second.nvlinks))


def _links_to_switches(card: GpuCard, links: tuple[NvLink, ...]) -> int:
    """Active links to NVSwitches; on a card of a ready fabric also those whose other end NVML does not tell."""
    fabric = card.fabric_state == "completed"
    return sum(
        link.active and (link.remote_is_switch is True or (fabric and isinstance(link.remote_is_switch, Unreadable)))
        for link in links
    )
