"""The ways to group ranks that a mesh would use.

A mesh whose inner axis has degree g puts g neighboring ranks in a group (`blocks of g`); an axis outside of it takes
every n/g-th rank (`strides of g`). All groups of one way run at the same time, because in training they do.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.probe.findings import Scope


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """Disjoint groups of equal size that together hold every rank."""

    name: str
    scope: Scope
    groups: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        """Members of each group."""
        return len(self.groups[0])

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The group that holds `rank`."""
        return next(group for group in self.groups if rank in group)


def groupings(world_size: int, local_world_size: int, quick: bool) -> tuple[Grouping, ...]:
    """Every way to measure: most important first, each way once, no group of one rank.

    Args:
        world_size: Ranks in all.
        local_world_size: Ranks on each machine, numbered without a gap.
        quick: All ranks, and where they are not the same also pairs, one machine's ranks, and one rank of each machine.
    """
    num_nodes = world_size // local_world_size
    found: list[Grouping] = []

    def add(name: str, scope: Scope, groups: tuple[tuple[int, ...], ...]) -> None:
        if len(groups[0]) > 1 and all(set(groups) != set(known.groups) for known in found):
            found.append(Grouping(name=name, scope=scope, groups=groups))

    add("all", "inter_node" if num_nodes > 1 else "intra_node", (tuple(range(world_size)),))
    if num_nodes > 1:
        across = tuple(tuple(range(local, world_size, local_world_size)) for local in range(local_world_size))
        add("inside nodes", "intra_node", blocks(world_size, local_world_size))
        add("across nodes", "inter_node", across)
    degrees = [degree for degree in range(2, local_world_size) if local_world_size % degree == 0]
    for degree in [degree for degree in degrees if degree == 2 or not quick]:
        add(f"blocks of {degree}", "intra_node", blocks(world_size, degree))
        if not quick:
            add(f"strides of {degree}", "intra_node", _strides(world_size, local_world_size, degree))
    return tuple(found)


def blocks(world_size: int, degree: int) -> tuple[tuple[int, ...], ...]:
    """Neighbors: (0, 1), (2, 3), ..."""
    return tuple(tuple(range(first, first + degree)) for first in range(0, world_size, degree))


def _strides(world_size: int, local_world_size: int, degree: int) -> tuple[tuple[int, ...], ...]:
    """Every n/degree-th rank of a machine: for 4 ranks and degree 2, (0, 2), (1, 3)."""
    step = local_world_size // degree
    return tuple(
        tuple(first + offset + step * i for i in range(degree))
        for first in range(0, world_size, local_world_size)
        for offset in range(step)
    )
