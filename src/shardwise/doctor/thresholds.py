"""The figures of `thresholds.yaml`: what each wire should reach, and the verdict on what it does."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, cast

import yaml

from shardwise.facts import catalog
from shardwise.facts.machine.pci import GENERATION_BY_GT
from shardwise.facts.machine.record import GpuCard, GpuPair, Machine, PathType, Unreadable
from shardwise.facts.machine.wires import bytes_per_s_of_one_link, nvlink_entry, pcie_entry
from shardwise.vocabulary.cluster import Link
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
    A pair that NVLink joins never falls back to the rate of PCIe: that would call an idle NVLink nearly healthy.
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


def nvlink_of(card: GpuCard) -> Link | None:
    """The catalogue's NVLink of a card."""
    capability = card.compute_capability
    return nvlink_entry(card.name, None if isinstance(capability, Unreadable) else capability)


def nvlink_rate(card: GpuCard) -> float | None:
    """One-way bytes a second of one NVLink of a card: the catalogue's, else the driver's line rate."""
    entry = nvlink_of(card)
    if entry is not None:
        return bytes_per_s_of_one_link(entry)
    links = () if isinstance(card.nvlinks, Unreadable) else card.nvlinks
    speeds = [link.speed_bytes_per_s for link in links if not isinstance(link.speed_bytes_per_s, Unreadable)]
    return min(speeds, default=None)


def nvlink_fraction(card: GpuCard) -> float:
    """Share of a card's NVLinks that large collectives typically reach as bus bandwidth."""
    entry = nvlink_of(card)
    return (catalog.link("nvlink4") if entry is None else entry).attained_fraction


def typical_rate(pair: GpuPair, machine: Machine, transport: str) -> float | None:
    """Bus bandwidth that large collectives typically reach between two cards over a transport, bytes a second.

    Headline and attained share are the link catalogue's, as the planner's are. None if nothing tells the link.
    """
    if isinstance(machine.gpus, Unreadable):
        return None
    if transport == "P2P" and pair.path == PathType.NVLINK:
        headline = nvlink_headline(pair, machine)
        return None if headline is None else headline * nvlink_fraction(machine.gpus[pair.a])
    if transport == "NET/Socket":
        loopback = catalog.link("loopback")
        return loopback.bandwidth_bytes_per_s * loopback.attained_fraction
    rates = [_typical_pcie(machine.gpus[index], machine, transport) for index in (pair.a, pair.b)]
    known = [rate for rate in rates if rate is not None]
    return min(known, default=None)


def _typical_pcie(card: GpuCard, machine: Machine, transport: str) -> float | None:
    headline = pcie_headline(card, machine)
    if headline is None or isinstance(card.pcie_gen_max, Unreadable) or isinstance(card.pcie_width, Unreadable):
        return None
    entry = pcie_entry(card.pcie_gen_max, card.pcie_width, through_host=transport != "P2P")
    return headline * entry.attained_fraction


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
