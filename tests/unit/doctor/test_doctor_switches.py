"""Where switches are set, which are in force, and names that are nearly right."""

from __future__ import annotations

from pathlib import Path

import pytest
from machines.builder import Rank, Spec, build

from shardwise.doctor.nccl_log import parse_nccl_log
from shardwise.doctor.switches import gather_switches, misspelt, read_environment_file, variables
from shardwise.errors import UsageError
from shardwise.facts.machine import read_machine

DOCKER = "# a comment\nNCCL_P2P_DISABLE=1\nNCCL_IB_HCA==mlx5_0:1\nHOME=/root\n#NCCL_ALGO=Ring\n"
BASH = """#!/bin/bash
#SBATCH --export=ALL,NCCL_SOCKET_IFNAME=eth0
export NCCL_DEBUG=INFO NCCL_ALGO="Ring"
NCCL_PROTO=Simple torchrun train.py --env-file x
mpirun -x NCCL_P2P_LEVEL=SYS -x PATH python train.py
docker run -e NCCL_SHM_DISABLE=1 image
export NCCL_BUFFSIZE=${SIZE:-4194304}
export NCCL_NTHREADS=512
unset NCCL_NTHREADS
"""
YAML = """
spec:
  containers:
    - env:
        - name: NCCL_IB_DISABLE
          value: "1"
        - name: OTHER
          value: "2"
        - {name: NCCL_NET, value: Socket}
      environment:
        NCCL_CROSS_NIC: "0"
"""
DOCKERFILE = "FROM x\nENV NCCL_P2P_DISABLE=1 NCCL_DEBUG=WARN\nENV NCCL_ALGO Tree\n"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (DOCKER, {"NCCL_P2P_DISABLE": "1", "NCCL_IB_HCA": "=mlx5_0:1"}),
        (BASH, {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple",
                "NCCL_P2P_LEVEL": "SYS", "NCCL_SHM_DISABLE": "1", "NCCL_BUFFSIZE": "${SIZE:-4194304}"}),
        (YAML, {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_CROSS_NIC": "0"}),
        (DOCKERFILE, {"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "WARN", "NCCL_ALGO": "Tree"}),
        ('{"env": {"NCCL_P2P_DISABLE": "1", "NCCL_ALGO": "Ring"}}', {"NCCL_P2P_DISABLE": "1", "NCCL_ALGO": "Ring"}),
        ("", {}),
    ],
)  # fmt: skip
def test_environment_files(text: str, wanted: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "job").write_text(text)
    assert {setting.name: setting.value for setting in read_environment_file(tmp_path / "job")} == wanted


def test_environment_file_tells_the_line_and_the_last_value_wins(tmp_path: Path) -> None:
    (tmp_path / "job.env").write_text("NCCL_ALGO=Ring\nNCCL_PROTO=LL\nNCCL_ALGO=Tree\n")
    found = {setting.name: (setting.value, setting.source) for setting in read_environment_file(tmp_path / "job.env")}
    assert found["NCCL_ALGO"] == ("Tree", "job.env:3")


@pytest.mark.parametrize("content", [None, b"\0\1\2"])
def test_unreadable_environment_file(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "x").write_bytes(content)
    with pytest.raises(UsageError, match="environment file"):
        read_environment_file(tmp_path / "x")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NCCL_SHM_DISABLED", "NCCL_SHM_DISABLE"),
        ("NCCL_P2P_DISABEL", "NCCL_P2P_DISABLE"),
        ("NCCL_IBDISABLE", "NCCL_IB_DISABLE"),
        ("NCLL_DEBUG_SUBSYS", "NCCL_DEBUG_SUBSYS"),
        ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
        ("NCCL_P2P_DISABLE", ""),
        ("NCCL_MY_PLUGINS_OWN_THING", ""),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", ""),
        ("PATH", ""),
    ],
)
def test_misspelt(name: str, meant: str) -> None:
    assert misspelt(name) == meant


def test_no_known_variable_looks_like_a_slip_of_another() -> None:
    assert len(variables()) > 150
    assert not [name for name in variables() if misspelt(name)]


def test_order_of_sources(tmp_path: Path) -> None:
    ranks = [Rank(pid=7, environment={"NCCL_PROTO": "LL", "NCCL_NTHREADS": "64"})]
    machine = read_machine(
        build(tmp_path / "m", Spec(ranks=ranks, conf="NCCL_PROTO=Simple\nNCCL_CROSS_NIC=1\n")), pids=(7,)
    )
    (tmp_path / "e").write_text("NCCL_PROTO=LL128\nNCCL_BUFFSIZE=1\n")
    log = parse_nccl_log("node-a:7:7 [0] NCCL INFO NCCL_NTHREADS set by environment to 128.\n")
    switches = gather_switches(machine, {"NCCL_ALGO": "Ring"}, [tmp_path / "e"], log)
    assert {name: setting.value for name, setting in switches.in_force.items()} == {
        "NCCL_NTHREADS": "128",  # what NCCL says it took
        "NCCL_PROTO": "LL",  # the rank's own environment before the file and the conf file
        "NCCL_BUFFSIZE": "1",
        "NCCL_CROSS_NIC": "1",  # a conf file fills in
    }  # the shell's NCCL_ALGO does not count once a rank is known
    assert gather_switches(read_machine(tmp_path / "m"), {"NCCL_ALGO": "Ring"}, [], None).value("NCCL_ALGO") == "Ring"


@pytest.mark.parametrize(
    ("value", "on"), [("1", True), ("0x1", True), ("0", False), ("", False), ("2", False), ("yes", False)]
)
def test_yes_or_no_as_nccl_reads_it(value: str, on: bool, tmp_path: Path) -> None:
    machine = read_machine(build(tmp_path, Spec()))
    assert gather_switches(machine, {"NCCL_P2P_DISABLE": value}, [], None).is_on("NCCL_P2P_DISABLE") is on
