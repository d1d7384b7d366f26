from pathlib import Path

import pytest

from shardwise.facts.machine import read_machine
from shardwise.probe import inventory


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


MEMINFO = "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  600 kB\n"


def test_memory_without_a_container(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", MEMINFO)
    assert inventory.available_memory_bytes(tmp_path) == 600 * 1024
    assert inventory.total_memory_bytes(tmp_path) == 1000 * 1024


def test_a_containers_limit_is_the_memory_there_is(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", MEMINFO)
    write(tmp_path, "sys/fs/cgroup/memory.max", "500000\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", "200000\n")
    assert inventory.available_memory_bytes(tmp_path) == 300_000
    assert inventory.total_memory_bytes(tmp_path) == 500_000


@pytest.mark.parametrize(
    ("limit_file", "use_file", "no_limit"),
    [
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current", "max"),
        (
            "sys/fs/cgroup/memory/memory.limit_in_bytes",
            "sys/fs/cgroup/memory/memory.usage_in_bytes",
            "9223372036854771712",
        ),
    ],
)
def test_no_limit(tmp_path: Path, limit_file: str, use_file: str, no_limit: str) -> None:
    write(tmp_path, "proc/meminfo", MEMINFO)
    write(tmp_path, limit_file, no_limit)
    write(tmp_path, use_file, "5")
    assert inventory.available_memory_bytes(tmp_path) == 600 * 1024


def test_unknown_memory_is_an_error_not_a_guess(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal: 5 kB\n")
    with pytest.raises(OSError, match="MemAvailable"):
        inventory.available_memory_bytes(tmp_path)


def test_switches_are_those_that_change_a_result() -> None:
    environment = {"NCCL_P2P_DISABLE": "1", "OMP_NUM_THREADS": "2", "HOME": "/root", "GLOO_SOCKET_IFNAME": "eth0"}
    assert list(inventory.switches_in_force(environment)) == [
        "GLOO_SOCKET_IFNAME",
        "NCCL_P2P_DISABLE",
        "OMP_NUM_THREADS",
    ]


def test_devices(tmp_path: Path) -> None:
    assert not inventory.has_nvidia_device(tmp_path)
    write(tmp_path, "dev/nvidiactl", "")
    assert not inventory.has_nvidia_device(tmp_path)
    write(tmp_path, "dev/nvidia0", "")
    assert inventory.has_nvidia_device(tmp_path)


def test_this_machine_can_be_described() -> None:
    taken = inventory.take_inventory(read_machine())
    assert taken.host
    assert taken.num_cpus >= 1
    assert len(taken.pairs) == len(taken.cards) * (len(taken.cards) - 1) // 2
    assert taken.cards or any("cards" in excuse for excuse in taken.unreadable)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("echo 'GPU-aaaa, 5\nGPU-bbbb, 612'", {"aaaa": 5 * 2**20, "bbbb": 612 * 2**20}),
        ("echo 'GPU-aaaa, 5\nGPU-bbbb, [N/A]'", {"aaaa": 5 * 2**20}),
        ("exit 9", {}),
    ],
)
def test_memory_in_use_by_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, expected: dict[str, int]
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{answer}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert inventory.used_device_memory() == expected


def test_no_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert inventory.used_device_memory() == {}
