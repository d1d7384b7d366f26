"""The figures of `thresholds.yaml`: what each wire should reach, and the verdict on what it does."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, cast

import yaml

from shardwise.facts.machine.pci import GENERATION_BY_GT
from shardwise.facts.machine.record import GpuCard, GpuPair, Machine, PathType, Unreadable
from shardwise.vocabulary.units import GB

Verdict = Literal["good", "warn", "fail"]


@dataclass(frozen=True, kw_only=True)
class ExpectedLinks:
    """NVLinks that a model of card has."""

    links: int
    needs_bridge: bool


@cache
def _data() -> dict[str, Any]:
    text = resources.files("shardwise.doctor").joinpath("thresholds.yaml").read_text("utf-8")
    return cast("dict[str, Any]", yaml.safe_load(text))


def value(name: str) -> float:
    """A single figure."""
    return float(_data()[name]["value"])


def typical_fraction(link: str) -> float:
    """Share of the one-way headline that a large collective typically reaches."""
    return float(_data()["typical_fraction"][link]["value"])


def judge(rule: str, fraction: float) -> Verdict:
    """The verdict on a measured share."""
    limits = _data()["verdicts"][rule]
    if "fail" in limits and fraction < float(limits["fail"]):
        return "fail"
    return "warn" if fraction < float(limits["warn"]) else "good"


def limit(rule: str, which: str = "warn") -> float:
    """A limit of a verdict."""
    return float(_data()["verdicts"][rule][which])


def min_bytes(rule: str) -> int:
    """The size from which on a verdict may be given; smaller messages measure latency."""
    return int(_data()["verdicts"][rule]["min_bytes"])


def expected_links(name: str) -> ExpectedLinks | None:
    """NVLinks of a card by its name; None for a model that is not listed."""
    for card in _data()["nvlinks_of_card"]["cards"]:
        if card["name"] in name:
            return ExpectedLinks(links=int(card["links"]), needs_bridge=bool(card.get("bridge", False)))
    return None


def pcie_headline(card: GpuCard, machine: Machine) -> float | None:
    """One-way PCIe rate of the narrowest hop between a card and the root complex, in bytes a second.

    Counts what the hop can reach, not what it runs at while idle. None if generation or width cannot be read.
    """
    if isinstance(card.pcie_gen_max, Unreadable) or isinstance(card.pcie_width, Unreadable):
        return None
    rate = pcie_rate(card.pcie_gen_max, card.pcie_width)
    device = machine.pci.get(card.address)
    if machine.virtual_machine != "":
        return rate or None  # a hypervisor's bridges are made up
    for address in () if device is None else device.upstream:
        bridge = machine.pci.get(address)
        if bridge is None or isinstance(bridge.width, Unreadable) or isinstance(bridge.speed_gt_max, Unreadable):
            continue
        per_lane = lanes_rate(bridge.speed_gt_max)
        if per_lane and bridge.width:
            rate = min(rate, per_lane * bridge.width)
    return rate or None


def pcie_rate(generation: int, width: int) -> float:
    """One-way bytes a second of a PCIe link; 0 for an unknown generation."""
    return float(_data()["pcie_bytes_per_s_per_lane"]["values"].get(generation, 0.0)) * width


def lanes_rate(speed_gt: float) -> float:
    """Bytes a second of one lane at a transfer rate in GT/s; 0 for an unknown one."""
    return pcie_rate(GENERATION_BY_GT.get(speed_gt, 0), 1)


def nvlink_headline(pair: GpuPair, machine: Machine) -> float | None:
    """One-way NVLink rate between two cards, in bytes a second; None without NVLink, or if nothing tells it.

    Where the driver says that NVLink joins them but not by how many links, the model's number is taken.
    """
    if isinstance(machine.gpus, Unreadable) or pair.path != PathType.NVLINK:
        return None
    card = machine.gpus[pair.a]
    links = pair.num_nvlinks
    if isinstance(links, Unreadable):
        expected = expected_links(card.name)
        if expected is None:
            return None
        links = expected.links
    per_link = nvlink_rate(card)
    return None if per_link is None else links * per_link


def nvlink_rate(card: GpuCard) -> float | None:
    """One-way bytes a second of one NVLink of a card."""
    table = _data()["nvlink_bytes_per_s_per_link"]
    for name, rate in table["by_card"].items():
        if name in card.name:
            return float(rate)
    links = () if isinstance(card.nvlinks, Unreadable) else card.nvlinks
    versions = [link.version for link in links if not isinstance(link.version, Unreadable)]
    by_version = table["by_version"].get(versions[0]) if versions else None
    if by_version is not None:
        return float(by_version)
    speeds = [link.speed_bytes_per_s for link in links if not isinstance(link.speed_bytes_per_s, Unreadable)]
    return min(speeds, default=None)


def typical_rate(pair: GpuPair, machine: Machine, transport: str) -> float | None:
    """Bus bandwidth that large collectives typically reach between two cards over a transport, bytes a second."""
    if isinstance(machine.gpus, Unreadable):
        return None
    if transport == "P2P" and (nvlink := nvlink_headline(pair, machine)):
        return nvlink * typical_fraction("nvlink")
    if transport == "NET/Socket":
        return value("net_socket_intra_node_bytes_per_s")
    rates = [pcie_headline(machine.gpus[index], machine) for index in (pair.a, pair.b)]
    known = [rate for rate in rates if rate is not None]
    if not known:
        return None
    return min(known) * typical_fraction("pcie_p2p" if transport == "P2P" else "shm")


def model_path_rate(pair: GpuPair, machine: Machine) -> float | None:
    """NCCL's own figure for the path between two cards, bytes a second."""
    if isinstance(machine.gpus, Unreadable):
        return None
    nvlink = nvlink_headline(pair, machine)
    if nvlink is not None:
        return nvlink
    model = _data()["nccl_model"]
    rates: list[float] = []
    for card in (machine.gpus[pair.a], machine.gpus[pair.b]):
        if isinstance(card.pcie_gen_max, Unreadable) or isinstance(card.pcie_width_max, Unreadable):
            return None
        rates.append(float(model["pcie_gb_per_s_per_lane"].get(card.pcie_gen_max, 0.0)) * card.pcie_width_max)
    if not isinstance(pair.path, Unreadable) and pair.path.name == "SYS" and isinstance(machine.cpu.vendor, str):
        rates.append(float(model["between_sockets_gb_per_s"].get(machine.cpu.vendor, 10.0)))
    return min(rates) * GB


def model_network_rate(bits_per_s: float) -> float:
    """NCCL's own figure for an adapter, bytes a second."""
    return bits_per_s / 100e9 * float(_data()["nccl_model"]["network_gb_per_s_per_100g"]) * GB
