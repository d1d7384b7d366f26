"""Seconds of a collective on a group of cards.

[Note: which wire]
Groups are slices of the mesh (outer to inner: pp, dp_replicate, dp_shard, tp). A group whose cards lie in one node uses
the link inside the node. A group of n cards over k nodes, g in each, sends (k - 1)/k of the message through the node's
adapters, of which its g cards have g shares, and overlaps that with the traffic inside: the slower of the two counts.

Measured tables win over data sheets. Between their sizes time is straight in bytes; above them bandwidth stays,
below them time stays. A table for another number of ranks is scaled by bus bandwidth.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from shardwise.vocabulary.cluster import Cluster, CollectiveCurve, CollectiveOp, Link
from shardwise.vocabulary.strategy import Axis, Strategy
from shardwise.vocabulary.timeline import Collective, bus_factor


@dataclass(frozen=True, kw_only=True)
class GroupShape:
    """How the cards of one group lie."""

    ranks: int
    nodes: int
    """Machines that the group touches."""

    @property
    def per_node(self) -> int:
        """Cards of the group in one node."""
        return max(1, self.ranks // self.nodes)


def group_shape(cluster: Cluster, strategy: Strategy, axis: Axis) -> GroupShape:
    """Where the cards of one group of `axis` lie; see [Note: which wire]."""
    ranks, stride = strategy.tp, 1
    for other, degree in (
        (Axis.DP_SHARD, strategy.dp_shard), (Axis.DP_REPLICATE, strategy.dp_replicate), (Axis.PP, strategy.pp)
    ):  # fmt: skip
        if axis is Axis.TP:
            break
        stride *= ranks
        ranks = degree
        if other is axis:
            break
    return _shape(ranks, stride, cluster.gpus_per_node)


@functools.cache
def _shape(ranks: int, stride: int, per_node: int) -> GroupShape:
    """Of a group whose members are `stride` cards apart."""
    reach = stride * ranks
    nodes = 1 if reach <= per_node else min(ranks, math.ceil(reach / max(per_node, stride)))
    return GroupShape(ranks=ranks, nodes=nodes)


def collective_seconds(cluster: Cluster, strategy: Strategy, message: Collective) -> float:
    """Seconds of one message of `message`."""
    return shaped_seconds(cluster, group_shape(cluster, strategy, message.axis), message)


def shaped_seconds(cluster: Cluster, shape: GroupShape, message: Collective) -> float:
    """The same on a group whose shape is known."""
    if message.op == "send":
        shape = GroupShape(ranks=2, nodes=min(2, shape.nodes))
    return message_seconds(cluster, shape, message.op, message.bytes)


def message_seconds(cluster: Cluster, shape: GroupShape, op: CollectiveOp, num_bytes: int) -> float:
    """Seconds of one collective of `num_bytes` (nccl-tests' size) on a group of this shape."""
    if shape.ranks <= 1 or num_bytes <= 0:
        return 0.0
    if shape.nodes == 1:
        return link_seconds(cluster.intra_node, op, shape.ranks, num_bytes)
    network = cluster.inter_node or cluster.intra_node
    across = link_seconds(network, op, shape.nodes, round(num_bytes / shape.per_node))
    inside = link_seconds(cluster.intra_node, op, shape.per_node, num_bytes) if shape.per_node > 1 else 0.0
    return max(across, inside)


def link_seconds(link: Link, op: CollectiveOp, ranks: int, num_bytes: int) -> float:
    """Seconds on one link: from its measured table where it has one, else latency + bytes / attained bandwidth."""
    curve = _nearest_curve(link, op, ranks)
    if curve is not None:
        scale = bus_factor(op, ranks) / bus_factor(curve.op, curve.ranks)
        return _from_table(curve, num_bytes) * scale
    bandwidth = link.bandwidth_bytes_per_s * link.attained_fraction
    return link.latency_seconds * max(1.0, math.log2(ranks)) + num_bytes * bus_factor(op, ranks) / bandwidth


def _nearest_curve(link: Link, op: CollectiveOp, ranks: int) -> CollectiveCurve | None:
    """The table of this op with the nearest number of ranks; all_gather and reduce_scatter stand in for each other."""
    if not link.curves:
        return None
    stand_in: dict[CollectiveOp, CollectiveOp] = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
    wanted = (op, stand_in[op]) if op in stand_in else (op,)
    for name in (*wanted, "all_reduce"):
        curves = [curve for curve in link.curves if curve.op == name and curve.points and curve.ranks > 1]
        if curves:
            return min(curves, key=lambda curve: abs(math.log(curve.ranks / ranks)))
    return None


@functools.lru_cache(maxsize=65536)
def _from_table(curve: CollectiveCurve, num_bytes: int) -> float:
    return curve.seconds_at(num_bytes)
