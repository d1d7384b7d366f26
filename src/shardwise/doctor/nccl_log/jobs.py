"""The job: versions, communicators, switches in force, choices of algorithm."""

from __future__ import annotations

import re

from shardwise.doctor.nccl_log.collector import Collector, Origin
from shardwise.doctor.nccl_log.records import LogCommunicator, LogNotice, LogSwitch

_NUMBER = re.compile(r"-?\d+\.")


def keep_version(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps the version that a host prints."""
    collector.keep("versions", (origin.host, match["version"]))


def keep_communicator(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps what a line says of one rank of one communicator."""

    def number(name: str) -> int | None:
        return int(match[name]) if match[name] else None

    collector.keep_communicator(LogCommunicator(
        host=origin.host,
        pid=origin.pid,
        address=match["address"],
        rank=int(match["rank"]),
        num_ranks=int(match["ranks"]),
        num_nodes=number("nodes"),
        local_ranks=number("local"),
        cuda_device=number("cuda"),
        nvml_device=number("nvml"),
        bus_id=match["bus"] or "",
        comm_id=match["id"] or "",
        complete="Init COMPLETE" in match.string,
    ))  # fmt: skip


def keep_switch(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps a variable that NCCL took; it ends the sentence with a dot only after a number."""
    value = match["value"]
    if _NUMBER.fullmatch(value):
        value = value[:-1]
    collector.keep("switches", LogSwitch(host=origin.host, pid=origin.pid, name=match["name"], value=value))


def keep_invalid_switch(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Tells a value that NCCL did not understand."""
    values = tuple(match.groupdict().items())
    collector.keep_notice(LogNotice(kind="invalid_switch_value", host=origin.host, text=match.string, values=values))


def keep_choice(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Counts a choice of algorithm and protocol for a size."""
    collector.keep_choice(
        (match["op"] or "").encode(), int(match["bytes"]), match["algorithm"].encode(), match["protocol"].encode()
    )
