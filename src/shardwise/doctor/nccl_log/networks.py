"""Networks: the adapters and interfaces that were found, the one that was taken, and plugins."""

from __future__ import annotations

import re

from shardwise.doctor.nccl_log.collector import Collector, Origin
from shardwise.doctor.nccl_log.records import LogDevice, LogDevices, LogPlugin

_ENTRY = re.compile(r"\[(?P<index>\d+)\](?P<rest>[^\s;]+)")
_MERGED = re.compile(r"\[(\d+)\]=\{(\s*\[\d+\]\s*)([^\s,}]+)[^}]*\}")
"""Ports of one adapter that NCCL 2.19 to 2.22 take as one device; the first of them stands for all."""
_VERBS = re.compile(r"(?P<name>[^:]+):(?P<port>\d+)/(?P<layer>\w+(?:/SHARP)?)")
_OUT_OF_BAND = re.compile(r"; OOB (?P<interface>[^:\s]+)")
_LIBRARY = re.compile(r"[\w./\-]*\blib[\w.\-]+?\.so")
_ZONE = re.compile(r"<\d*>$")


def keep_devices(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps the list of devices of one network."""
    listed, _, _ = match["devices"].partition("; OOB")
    devices = [_device(int(entry["index"]), entry["rest"]) for entry in _ENTRY.finditer(_MERGED.sub(r"[\1]\3", listed))]
    out_of_band = _OUT_OF_BAND.search(match["devices"])
    collector.keep("devices", LogDevices(
        host=origin.host,
        network=match["network"],
        devices=tuple(devices),
        relaxed_ordering="[RO]" in match["devices"],
        out_of_band=out_of_band["interface"] if out_of_band else "",
    ))  # fmt: skip


def _device(index: int, text: str) -> LogDevice:
    if verbs := _VERBS.fullmatch(text):
        return LogDevice(index=index, name=verbs["name"], port=int(verbs["port"]), layer=verbs["layer"])
    name, _, address = text.partition(":")
    return LogDevice(index=index, name=name, address=_ZONE.sub("", address))


def keep_bootstrap(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps the interface over which the ranks find each other."""
    collector.keep("bootstrap", (origin.host, match["interface"]))


def keep_network(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps the network that was taken."""
    collector.keep("networks", (origin.host, match["network"]))


def keep_assigned(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps a plugin that a communicator got; a network plugin is the network that was taken."""
    if match["kind"] != "NET":
        _keep_plugin(collector, origin, match["kind"], match["name"], loaded=True)
    elif match["verb"] == "Assigned":
        collector.keep("networks", (origin.host, match["name"]))


def keep_p2p_plugin(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps the point-to-point part of a vendor's network plugin."""
    _keep_plugin(collector, origin, "P2P", match["name"], loaded=True)


def keep_plugin(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps a plugin that was loaded."""
    kind = "COLLNET" if match["coll"] else match["kind"]
    _keep_plugin(collector, origin, kind, match["name"], loaded=True)


def keep_missing_plugin(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps a plugin that was looked for in vain."""
    library = _LIBRARY.search(match.string)
    _keep_plugin(collector, origin, match["kind"], library[0] if library else "", loaded=False)


def _keep_plugin(collector: Collector, origin: Origin, kind: str, name: str, *, loaded: bool) -> None:
    collector.keep("plugins", LogPlugin(host=origin.host, kind=kind, name=name, loaded=loaded))
