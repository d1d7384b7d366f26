"""What one message costs on a link, op by op, and what hides it: the question before any model is named."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.planner import headline
from shardwise.planner.timeline import CONTENTION, CONTENTION_ELSEWHERE
from shardwise.planner.wire import link_seconds
from shardwise.vocabulary.cluster import CollectiveOp, Link
from shardwise.vocabulary.timeline import bus_factor

OPS: tuple[CollectiveOp, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send")


@dataclass(frozen=True, kw_only=True)
class Passing:
    """One or several collectives of a size on a link."""

    name: str
    sent_bytes: int
    """What one rank sends, by a ring."""
    headline_seconds: float
    """Every byte once at the advertised bandwidth, no latency."""
    attained_seconds: float
    """By the measured table, or latency and the attained share of one direction."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A message beside compute."""

    headline_ratio: float
    """Headline wire time over compute time."""
    hides_by_rule: bool
    """By the rule of thumb: no more than 0.3."""
    exposed_seconds: float
    """What is left of the attained time when compute, slowed by the transfer, is over."""
    slowed_compute_seconds: float
    hidden_share: float = 0.0
    """Of the attained time, what compute covers."""


def slowdown(link: Link) -> float:
    """How much longer compute takes while messages pass on a link."""
    return CONTENTION.get(link.kind, CONTENTION_ELSEWHERE)


def hiding_compute_seconds(passing: Passing, link: Link) -> float:
    """Compute that hides a message wholly, if all of it overlaps: slowed by the transfer, it lasts as long."""
    return passing.attained_seconds / slowdown(link)


def rule_compute_seconds(passing: Passing) -> float:
    """Compute behind which the rule of thumb lets a message hide."""
    return passing.headline_seconds / headline.HIDDEN_SHARE


def passings(link: Link, num_bytes: int, ranks: int) -> tuple[Passing, ...]:
    """Every collective of this size, and what a group of a model costs under replication and under full sharding.

    Args:
        link: Between the ranks.
        num_bytes: Size as nccl-tests counts it: of the whole for all_gather and reduce_scatter, else of one rank.
        ranks: Members of the group.
    """
    found = [_passing(link, op, num_bytes, 2 if op == "send" else ranks) for op in OPS]
    by_name = {each.name: each for each in found}
    gather, scatter = by_name["all_gather"], by_name["reduce_scatter"]
    full = (gather, gather, scatter)
    return (
        *found,
        Passing(
            name="full sharding",
            sent_bytes=sum(each.sent_bytes for each in full),
            headline_seconds=sum(each.headline_seconds for each in full),
            attained_seconds=sum(each.attained_seconds for each in full),
        ),
    )


def _passing(link: Link, op: CollectiveOp, num_bytes: int, ranks: int) -> Passing:
    return Passing(
        name=op,
        sent_bytes=round(num_bytes * bus_factor(op, ranks)),
        headline_seconds=headline.transfer_seconds(num_bytes, link.headline_bandwidth_bytes_per_s),
        attained_seconds=link_seconds(link, op, ranks, num_bytes),
    )


def beside(passing: Passing, link: Link, compute_seconds: float) -> Beside:
    """What hides behind that much compute: by the rule of thumb, and by overlap with contention."""
    rule = headline.hiding(passing.headline_seconds, compute_seconds)
    factor = slowdown(link)
    wire = passing.attained_seconds
    slowed = min(compute_seconds * factor, compute_seconds + (factor - 1) * wire)
    exposed = max(0.0, wire - slowed)
    return Beside(
        headline_ratio=rule.ratio,
        hides_by_rule=rule.hides,
        exposed_seconds=exposed,
        slowed_compute_seconds=slowed,
        hidden_share=1 - exposed / wire if wire else 1.0,
    )
