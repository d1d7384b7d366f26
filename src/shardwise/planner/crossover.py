"""At which bandwidth the choice changes: the same candidates on a wire that is slower or faster.

[Note: scaled wire]
The wire that decides (between machines if there are several, else inside the one) is scaled in bandwidth and in its
measured tables; latency stays. Every rival's step is simulated again, which is quick and finds where to look. Rivals
are the best variants of each split on the wire as it is; on another one other variants may be better (a larger
micro-batch with checkpointing sends less often). So what was found is planned anew on both sides of the figure, and
told only if both plans agree with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.planner import rules, search
from shardwise.planner.pricing import price
from shardwise.vocabulary.cluster import Cluster, Link
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.plan import Candidate
from shardwise.vocabulary.timeline import bus_factor

SLOWER = (0.5, 0.1, 0.01)
FASTER = (2.0, 10.0)
HALVINGS = 4
"""Leaves the bandwidth known to within 10 %."""
MARGIN = 1.25
"""So far from the bandwidth that was found, on both sides, the plans must agree with it."""
MOST_CARDS = 64
"""Beyond that the two plans take too long."""
MOST_RIVALS = 6
"""By time, and as many by bytes on the wire."""


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """Where something changes."""

    bandwidth_bytes_per_s: float
    """Attained, one way, of one card."""
    other: Candidate | None = None
    """What is taken beyond that."""


def deciding_link(cluster: Cluster) -> Link:
    """The wire that decides: between machines where there are several."""
    return cluster.inter_node if cluster.num_nodes > 1 and cluster.inter_node else cluster.intra_node


def attained(link: Link) -> float:
    """Bytes a second, one way, that large messages reach on a link, as bus bandwidth."""
    tables = [curve for curve in link.curves if curve.points and curve.ranks > 1]
    if not tables:
        return link.bandwidth_bytes_per_s * link.attained_fraction
    longest = max(tables, key=lambda curve: curve.points[-1].bytes)
    last = longest.points[-1]
    return last.bytes * bus_factor(longest.op, longest.ranks) / last.seconds


def scaled(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with the deciding wire so many times as fast; see [Note: scaled wire]."""
    link = deciding_link(cluster)
    curves = tuple(
        dataclasses.replace(
            curve, points=tuple(dataclasses.replace(p, seconds=p.seconds / factor) for p in curve.points)
        )
        for curve in link.curves
    )
    faster = dataclasses.replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor, curves=curves)
    side = "inter_node" if link is cluster.inter_node else "intra_node"
    return dataclasses.replace(cluster, **{side: faster})


class Wires:
    """One choice on wires of other bandwidths; remembers what it has simulated."""

    def __init__(self, job: Job, cluster: Cluster, rivals: Sequence[Candidate]) -> None:
        self.job, self.cluster = job, cluster
        by_time = sorted(rivals, key=lambda each: each.step.seconds)[:MOST_RIVALS]
        by_wire = sorted(rivals, key=lambda each: each.step.wire_seconds)[:MOST_RIVALS]
        self.rivals = [each for each in rivals if any(each is kept for kept in (*by_time, *by_wire))]
        self._simulated: dict[float, list[Candidate]] = {}

    def on(self, factor: float) -> list[Candidate]:
        """The rivals on a wire so many times as fast."""
        if factor not in self._simulated:
            wire = scaled(self.cluster, factor)
            found = [price(self.job, wire, each.strategy, each.memory) for each in self.rivals]
            self._simulated[factor] = found
        return self._simulated[factor]

    def bandwidth(self, factor: float) -> float:
        """Attained bytes a second on that wire."""
        return factor * attained(deciding_link(self.cluster))


def where_choice_changes(
    wires: Wires, wishes: search.Wishes, best: Candidate, factors: Sequence[float]
) -> Crossover | None:
    """The nearest bandwidth in one direction at which another split would be recommended; None if there is none.

    Args:
        wires: The rivals on other wires.
        wishes: What the user decided, for the plans on both sides.
        best: What is taken on this one.
        factors: Bandwidths to look at, over the one there is, nearest first.
    """

    def stays(factor: float) -> bool:
        return rules.fastest_or_simpler(wires.on(factor)).strategy == best.strategy

    edge = _edge(stays, factors)
    if edge is None or wires.cluster.num_gpus > MOST_CARDS:
        return None
    job = dataclasses.replace(wires.job, tuning=best.strategy.tuning)
    out = edge.beyond / edge.inside
    step = MARGIN if out > 1 else 1 / MARGIN
    beyond, inside = (_planned(job, scaled(wires.cluster, factor), wishes) for factor in
                      (edge.middle * step, edge.middle / step))  # fmt: skip
    other = rules.fastest_or_simpler(wires.on(edge.beyond))
    agree = beyond is not None and beyond.strategy.name == other.strategy.name != best.strategy.name
    if not agree or inside is None or inside.strategy.name != best.strategy.name:
        return None
    return Crossover(bandwidth_bytes_per_s=wires.bandwidth(edge.middle), other=other)


def _planned(job: Job, cluster: Cluster, wishes: search.Wishes) -> Candidate | None:
    candidates, _ = search.survey(job, cluster, wishes)
    return rules.choose(job, cluster, candidates).candidate


def where_cards_stop_helping(wires: Wires, wishes: search.Wishes, alone_tokens_per_s: float) -> Crossover | None:
    """The bandwidth below which all cards together are no faster than one; None if they are on any wire looked at."""

    def helps(factor: float) -> bool:
        return max(each.tokens_per_s for each in wires.on(factor)) > alone_tokens_per_s

    edge = _edge(helps, SLOWER)
    if edge is None or wires.cluster.num_gpus > MOST_CARDS:
        return None
    job = dataclasses.replace(wires.job, tuning=wires.rivals[0].strategy.tuning)
    beyond = _planned(job, scaled(wires.cluster, edge.middle / MARGIN), wishes)
    if beyond is None or beyond.tokens_per_s > alone_tokens_per_s:
        return None
    return Crossover(bandwidth_bytes_per_s=wires.bandwidth(edge.middle))


@dataclass(frozen=True, kw_only=True)
class _Edge:
    """Between which factors something changes."""

    inside: float
    beyond: float

    @property
    def middle(self) -> float:
        return (self.inside * self.beyond) ** 0.5


def _edge(holds: Callable[[float], bool], factors: Sequence[float]) -> _Edge | None:
    """Where `holds` stops, by halving, after a look at `factors`."""
    inside = 1.0
    for beyond in factors:
        if not holds(beyond):
            break
        inside = beyond
    else:
        return None
    for _ in range(HALVINGS):
        middle = (inside * beyond) ** 0.5
        inside, beyond = (middle, beyond) if holds(middle) else (inside, middle)
    return _Edge(inside=inside, beyond=beyond)
