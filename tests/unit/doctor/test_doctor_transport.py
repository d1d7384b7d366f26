"""The transport that NCCL takes, by version, processor, path and switches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from machines.builder import Card, Port, Rank, Spec, below_switch, build, one_root, own_root
from machines.catalog import a6000, eight_h100, rtx3090

from shardwise.doctor.switches import gather_switches
from shardwise.doctor.thresholds import nvlink_headline
from shardwise.doctor.transport import Prediction, default_level, parse_level, predict
from shardwise.facts.machine import read_machine
from shardwise.facts.machine.record import Reading, Unreadable


def predictions(
    spec: Spec, tmp_path: Path, version: Reading[tuple[int, int, int]] = (2, 27, 5),
    switches: Mapping[str, str] | None = None, pids: tuple[int, ...] = (),
) -> tuple[Prediction, ...]:  # fmt: skip
    machine = read_machine(build(tmp_path, spec), pids=pids)
    found = predict(machine, gather_switches(machine, switches or {}, [], None), version)
    assert not isinstance(found, Unreadable)
    return found


@pytest.mark.parametrize(
    ("version", "vendor", "gpus", "level"),
    [
        ((2, 22, 3), "AuthenticAMD", 8, "SYS"),
        ((2, 22, 3), "GenuineIntel", 2, "PXB"),
        ((2, 22, 3), "ARM", 2, "PXB"),
        ((2, 23, 0), "AuthenticAMD", 2, "SYS"),
        ((2, 23, 0), "AuthenticAMD", 3, "PXB"),
        ((2, 30, 7), "GenuineIntel", 2, "PXB"),
        ((2, 30, 7), "Zhaoxin", 2, "PXB"),
    ],
)
def test_the_rule_that_changed_in_2_23(version: tuple[int, int, int], vendor: str, gpus: int, level: str) -> None:
    assert default_level(version, vendor, gpus) == level


@pytest.mark.parametrize(
    ("text", "level"),
    [("NVL", "NVL"), ("PHB", "PHB"), ("0", "LOC"), ("1", "PIX"), ("2", "PXB"), ("3", "PHB"), ("4", "SYS"), ("9", "SYS"),
     ("NODE", None), ("sys", None), ("", None)],
)  # fmt: skip
def test_levels_by_name_and_number(text: str, level: str | None) -> None:
    assert parse_level(text) == level


@pytest.mark.parametrize(
    ("version", "switches", "transport", "reason"),
    [
        ((2, 21, 5), {}, "P2P", "direct"),
        ((2, 26, 2), {}, "SHM", "level_rule"),
        ((2, 26, 2), {"NCCL_P2P_LEVEL": "PHB"}, "P2P", "direct"),
        ((2, 26, 2), {"NCCL_P2P_LEVEL": "3"}, "P2P", "direct"),
        ((2, 26, 2), {"NCCL_P2P_LEVEL": "nonsense"}, "SHM", "level_rule"),
        ((2, 21, 5), {"NCCL_P2P_LEVEL": "PIX"}, "SHM", "switch"),
        ((2, 21, 5), {"NCCL_P2P_DISABLE": "1"}, "SHM", "switch"),
        ((2, 21, 5), {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, "NET", "switch"),
        ((2, 21, 5), {"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "SYS"}, "SHM", "switch"),
    ],
)
def test_four_cards_on_an_epyc(
    version: tuple[int, int, int], switches: dict[str, str], transport: str, reason: str, tmp_path: Path
) -> None:
    found = predictions(Spec(cards=[a6000(i) for i in range(4)]), tmp_path, version, switches)
    assert {(p.transport, p.reason) for p in found} == {(transport, reason)}
    assert len(found) == 6


def test_nvlink_needs_no_version_and_survives_every_default(tmp_path: Path) -> None:
    unknown = Unreadable(why="unknown")
    spec = Spec(cards=[rtx3090(0, links=True), rtx3090(1, links=True)], cpu="intel")
    (found,) = predictions(spec, tmp_path, unknown)
    assert (found.transport, found.joined_by_nvlink) == ("P2P", True)


def test_version_is_needed_where_it_decides(tmp_path: Path) -> None:
    machine = read_machine(build(tmp_path, Spec(cards=[a6000(i) for i in range(4)], nccl="")))
    answer = predict(machine, gather_switches(machine, {}, [], None), Unreadable(why="no NCCL"))
    assert isinstance(answer, Unreadable)


def test_mixed_paths_below_and_above_a_switch(tmp_path: Path) -> None:
    cards = [Card(name="NVIDIA A40", place=below_switch(i % 2, switch=i // 2), numa=i // 2) for i in range(4)]
    found = {(p.pair.a, p.pair.b): p for p in predictions(Spec(cards=cards), tmp_path)}
    assert found[0, 1].transport == found[2, 3].transport == "P2P"
    assert found[0, 2].transport == "SHM"
    assert [found[key].pair.path for key in ((0, 1), (0, 2))] == [2, 6]


def test_split_shm_mounts_leave_only_the_network(tmp_path: Path) -> None:
    ranks = [Rank(pid=10 + i, shm=f"0:{i}", environment={"LOCAL_RANK": str(i)}) for i in range(2)]
    (found,) = predictions(Spec(cards=[a6000(0), a6000(1)], ranks=ranks), tmp_path, pids=(10,))
    assert (found.transport, found.reason) == ("NET", "shm_mounts")


def test_an_adapter_faster_than_the_path_wins(tmp_path: Path) -> None:
    cards = [Card(name="NVIDIA L40S", place=below_switch(0, switch=i)) for i in range(2)]
    ports = [Port(device=f"mlx5_{i}", place=below_switch(5, switch=i), rate="400 Gb/sec (4X NDR)") for i in range(2)]
    (found,) = predictions(Spec(cards=cards, ports=ports), tmp_path)
    assert (found.transport, found.reason) == ("NET", "faster_network")
    (kept,) = predictions(Spec(cards=cards, ports=ports), tmp_path, switches={"NCCL_NET_DISABLE_INTRA": "1"})
    assert kept.transport == "P2P"


def test_driver_refusal(tmp_path: Path) -> None:
    cards = [Card(name="NVIDIA GeForce RTX 4090", place=one_root(i)) for i in range(2)]
    (found,) = predictions(Spec(cards=cards, p2p_all=2), tmp_path)
    assert (found.transport, found.reason, found.p2p_possible) == ("SHM", "driver", False)


def test_eight_h100_all_over_nvlink(tmp_path: Path) -> None:
    found = predictions(eight_h100(), tmp_path)
    assert len(found) == 28
    assert all(p.transport == "P2P" and p.joined_by_nvlink and p.pair.num_nvlinks == 18 for p in found)


def test_paths_from_sysfs_alone(tmp_path: Path) -> None:
    cards = [Card(name="A", place=below_switch(0)), Card(name="B", place=below_switch(1)),
             Card(name="C", place=own_root(5)), Card(name="D", place=own_root(6, numa=1), numa=1),
             Card(name="E", place=one_root(0)), Card(name="F", place=one_root(1))]  # fmt: skip
    machine = read_machine(build(tmp_path, Spec(cards=cards, nvml=False)))
    order = {card.name: card.index for card in (() if isinstance(machine.gpus, Unreadable) else machine.gpus)}
    paths = {frozenset((pair.a, pair.b)): pair.pci_path for pair in machine.pairs}

    def path(a: str, b: str) -> str:
        found = paths[frozenset((order[a], order[b]))]
        return "unreadable" if isinstance(found, Unreadable) else found.name

    assert [path("A", "B"), path("E", "F"), path("A", "C"), path("C", "D")] == ["PIX", "PHB", "NODE", "SYS"]


def test_nvlink_that_only_the_p2p_status_tells(tmp_path: Path) -> None:
    """Sandboxes hide the links themselves; the pair is still joined, and as wide as the model has links."""
    root = build(tmp_path, eight_h100())
    plain = json.loads((root / "answers.json").read_text())
    for card in plain["nvml"]["gpus"]:
        card["nvlinks"] = {"unreadable": "not supported here"}
    for pair in plain["nvml"]["pairs"]:
        pair["nvlink"] = 0
    (root / "answers.json").write_text(json.dumps(plain))
    machine = read_machine(root)
    found = predict(machine, gather_switches(machine, {}, [], None), (2, 27, 5))
    assert not isinstance(found, Unreadable)
    assert all(p.joined_by_nvlink for p in found)
    assert isinstance(found[0].pair.num_nvlinks, Unreadable)
    assert nvlink_headline(found[0].pair, machine) == 450e9  # the model's links at the catalogue's rate
