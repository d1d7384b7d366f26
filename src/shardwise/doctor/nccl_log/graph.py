"""Rings, trees, channel counts, and what NCCL's search saw of the machine."""

from __future__ import annotations

import re

from shardwise.doctor.nccl_log.collector import Collector, Origin
from shardwise.doctor.nccl_log.records import (
    LogChannels,
    LogGraph,
    LogNotice,
    LogRing,
    LogRingLink,
    LogTopologyLink,
    LogTree,
)

_BRANCH = re.compile(r"\[(\d+)\]\s+((?:-?\d+/){0,2}-?\d+)->(-?\d+)->((?:-?\d+/){0,2}-?\d+)")
_FABRIC_READY = 3
"""NVML_GPU_FABRIC_STATE_COMPLETED."""


def keep_ring(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps the order of the ranks on a channel."""
    ranks = tuple(int(rank) for rank in match["ranks"].split())
    count = match["count"]
    collector.keep(
        "rings", LogRing(channel=int(match["channel"]), num_channels=int(count) if count else None, ranks=ranks)
    )


def keep_ring_link(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps a rank's neighbors on a ring."""
    channel, previous, rank, following = (int(group) for group in match.groups())
    link = LogRingLink(channel=channel, previous_rank=previous, rank=rank, next_rank=following)
    collector.keep("ring_links", link)


def keep_trees(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps a rank's place in every tree of the line.

    NCCL 2.8 and later print down/down/down->rank->up; 2.4 up->rank->down/down/down; 2.5 to 2.7 both, with a bar between
    the two directions, in which the same tree is meant.
    """
    for channel, left, rank, right in _BRANCH.findall(match.string):
        down, up = (left, right) if "/" in left else (right, left)
        _keep_tree(collector, int(channel), int(rank), up=int(up), down=[int(child) for child in down.split("/")])


def keep_tree(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps a rank's place in one tree."""
    channel, up, rank, *down = (int(group) for group in match.groups())
    _keep_tree(collector, channel, rank, up=up, down=down)


def _keep_tree(collector: Collector, channel: int, rank: int, *, up: int, down: list[int]) -> None:
    children = tuple(child for child in down if child >= 0)
    collector.keep("trees", LogTree(channel=channel, rank=rank, up=up if up >= 0 else None, down=children))


def keep_channels(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps the channel counts of a communicator."""
    nvls, collnet = match["nvls"], match["collnet"]
    collector.keep("channels", LogChannels(
        host=origin.host,
        coll=int(match["coll"]),
        p2p=int(match["p2p"]),
        p2p_per_peer=int(match["per"]),
        nvls=int(nvls) if nvls else None,
        collnet=int(collnet) if collnet else None,
    ))  # fmt: skip


def keep_graph(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps one result of the search."""
    collector.keep("graphs", LogGraph(
        pattern=int(match["pattern"]),
        num_channels=int(match["channels"]),
        intra_gb_per_s=float(match["intra"]),
        inter_gb_per_s=float(match["inter"]),
        intra_path=match["intra_path"],
        inter_path=match["inter_path"] or "",
    ))  # fmt: skip


def keep_topology(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps one link of the machine as NCCL sees it."""
    link = LogTopologyLink(kind=match["kind"], gb_per_s=float(match["rate"]), target=match["target"])
    collector.keep("topology", link)


def keep_nvls_available(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps whether a card can do multicast."""
    collector.keep("nvls_available", (origin.host, int(match["device"]), match["no"] is None))


def keep_nvls_head(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps the ranks of a head."""
    collector.keep("nvls_heads", tuple(int(rank) for rank in match["ranks"].split()))


def count_multicast_group(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Counts a multicast group; the switches have a limited number."""
    collector.num_multicast_groups += 1


def keep_p2p_summary(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Keeps NCCL's own summary of P2P on the machine."""
    for word, value in re.findall(r"\b(\w*P2p\w*|directMode) (\d+)", match.string):
        collector.keep("p2p_summary", (word, value))


def keep_fabric(collector: Collector, match: re.Match[str], origin: Origin) -> None:
    """Tells a fabric of NVLink switches that is not ready."""
    if match["uuid"].strip("0.") and int(match["state"]) != _FABRIC_READY:
        values = (("state", match["state"]),)
        notice = LogNotice(kind="fabric_not_ready", host=origin.host, text=match.string, values=values)
        collector.keep_notice(notice)
