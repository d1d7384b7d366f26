"""Rates and typical shares: the link catalogue's figures, whatever the driver hides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from machines.builder import Card, Spec, build, one_root, switched_links
from machines.catalog import a6000, eight_h100, h200_vm, rtx3090

from shardwise.doctor.diagnose import DoctorOptions, diagnose
from shardwise.doctor.findings import Cost
from shardwise.doctor.report import render_text, to_plain
from shardwise.doctor.thresholds import nvlink_headline, nvlink_rate, pcie_rate, typical_rate
from shardwise.facts import catalog
from shardwise.facts.machine import read_machine
from shardwise.facts.machine.record import Machine, Unreadable


def machine_of(spec: Spec, tmp_path: Path, **hidden: Any) -> Machine:
    """A machine, with readings of every link replaced."""
    root = build(tmp_path / "m", spec)
    plain = json.loads((root / "answers.json").read_text())
    for card in plain["nvml"]["gpus"]:
        for link in card["nvlinks"]:
            link.update(hidden)
    (root / "answers.json").write_text(json.dumps(plain))
    return read_machine(root)


HIDDEN = {"unreadable": "NVML field 90: code 3"}


@pytest.mark.parametrize("generation", [3, 4, 5])
@pytest.mark.parametrize("width", [4, 8, 16])
def test_pcie_rates_are_the_catalogues(generation: int, width: int) -> None:
    entry = catalog.link(f"pcie{generation}-x{width}")
    assert pcie_rate(generation, width) == pytest.approx(entry.bandwidth_bytes_per_s, rel=2e-3)


@pytest.mark.parametrize(
    "hidden", [{}, {"speed_bytes_per_s": HIDDEN}, {"speed_bytes_per_s": HIDDEN, "version": HIDDEN}]
)
def test_nvlink_is_as_fast_as_the_catalogue_says(hidden: dict[str, Any], tmp_path: Path) -> None:
    machine = machine_of(h200_vm(2), tmp_path, **hidden)
    (pair,) = machine.pairs
    entry = catalog.link("nvlink4")
    assert nvlink_headline(pair, machine) == entry.bandwidth_bytes_per_s == 450e9
    assert typical_rate(pair, machine, "P2P") == entry.bandwidth_bytes_per_s * entry.attained_fraction
    host = catalog.link("pcie5-x16-host")
    assert typical_rate(pair, machine, "SHM") == pytest.approx(
        host.bandwidth_bytes_per_s * host.attained_fraction, rel=2e-3
    )
    loopback = catalog.link("loopback")
    wanted = loopback.bandwidth_bytes_per_s * loopback.attained_fraction
    assert typical_rate(pair, machine, "NET/Socket") == wanted


@pytest.mark.parametrize(
    ("name", "capability", "per_link"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), 25e9),
        ("NVIDIA H800", (9, 0), 25e9),  # not in the catalogue: by its capability
        ("NVIDIA B200", (10, 0), 50e9),
        ("NVIDIA A30", (8, 0), 25e9),
        ("NVIDIA RTX A4500", (8, 6), 14.0625e9),
        ("NVIDIA H100 NVL", (9, 0), 25e9),
        ("Some card", (6, 0), 20e9),  # the driver's line rate is all there is
    ],
)
def test_rate_of_one_link(name: str, capability: tuple[int, int], per_link: float, tmp_path: Path) -> None:
    card = Card(name=name, place=one_root(0), capability=capability, links=switched_links(4, speed=20e9))
    machine = machine_of(Spec(cards=[card]), tmp_path)
    assert not isinstance(machine.gpus, Unreadable)
    assert nvlink_rate(machine.gpus[0]) == per_link


def test_bridges(tmp_path: Path) -> None:
    machine = machine_of(Spec(cards=[rtx3090(0, links=True), rtx3090(1, links=True)]), tmp_path)
    assert nvlink_headline(machine.pairs[0], machine) == 56.25e9
    alone = machine_of(Spec(cards=[a6000(0), a6000(1)]), tmp_path / "other")
    assert nvlink_headline(alone.pairs[0], alone) is None


def test_an_idle_nvlink_is_never_compared_with_pcie(tmp_path: Path) -> None:
    """A virtual machine that hides version and speed of the links: the loss is NVLink's all the same."""
    root = build(tmp_path / "m", h200_vm(2, environment={"NCCL_P2P_DISABLE": "1"}))
    plain = json.loads((root / "answers.json").read_text())
    for card in plain["nvml"]["gpus"]:
        for link in card["nvlinks"]:
            link.update(version=HIDDEN, speed_bytes_per_s=HIDDEN)
    (root / "answers.json").write_text(json.dumps(plain))
    options = DoctorOptions(root=root, wire_bytes_per_step=36 * 10**9, compute_seconds_per_step=0.5)
    found = diagnose(options, environment={"NCCL_P2P_DISABLE": "1"})
    (finding,) = found.findings
    cost = finding.cost
    assert cost is not None
    assert cost.basis == "typical"
    assert cost.expected_bytes_per_s == 360e9
    assert 20e9 < cost.actual_bytes_per_s < 30e9
    assert "instead of 360 GB/s" in render_text(found)
    told = to_plain(found)["findings"][0]["cost"]
    assert told["least_lost_seconds_per_step"] == pytest.approx(36e9 / cost.actual_bytes_per_s - 0.5)
    assert told["lost_seconds_per_step"] == pytest.approx(36e9 / cost.actual_bytes_per_s - 0.1)


def test_what_compute_can_hide_is_not_lost_for_sure() -> None:
    cost = Cost(actual_bytes_per_s=10e9, expected_bytes_per_s=100e9, basis="measured")
    assert cost.lost_seconds(10**10) == pytest.approx(0.9)
    assert cost.least_lost_seconds(10**10, 0.4) == pytest.approx(0.6)
    assert cost.least_lost_seconds(10**10, 2.0) == 0.0
    assert cost.least_lost_seconds(10**10, 0.0) == pytest.approx(0.9)


def test_dead_links_cost_their_share(tmp_path: Path) -> None:
    cards = [Card(name="NVIDIA H200", place=one_root(i), capability=(9, 0), gen=5, gen_max=5, gen_card=5,
                  links=switched_links(18, down=(0, 1) if i else ())) for i in range(2)]  # fmt: skip
    found = diagnose(DoctorOptions(root=build(tmp_path, Spec(cards=cards))), environment={})
    dead = next(finding for finding in found.findings if finding.check == "nvlink")
    assert dead.cost is not None
    assert dead.cost.lost_bytes_per_s == pytest.approx(2 / 18 * 360e9)


def test_all_cards_of_a_board_have_the_same_headline(tmp_path: Path) -> None:
    machine = machine_of(eight_h100(), tmp_path)
    assert {nvlink_headline(pair, machine) for pair in machine.pairs} == {450e9}
