"""The world as planned, before step 0: ranks, machines, cards, versions and clocks.

[Note: clocks] torch's elastic rendezvous compares wall clocks: a machine 15 s behind is taken for dead, and the others
may start without it. Logs and checkpoints of several machines are also ordered by their clocks.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise
from shardwise.errors import PlanMismatchError
from shardwise.trainer.checkpoint.state import versions
from shardwise.trainer.mesh import RankMesh
from shardwise.trainer.sentinels.words import name_ranks
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.strategy import Strategy
from shardwise.vocabulary.units import format_bytes, format_seconds

CLOCK_WARN_S, CLOCK_STOP_S = 2.0, 10.0
"""Between the earliest and the latest clock ([Note: clocks]); the exchange itself takes milliseconds."""
CARD_TOLERANCE = 0.9
"""A card may have this share of the planned memory: drivers and ECC take some."""
_MUST_AGREE = ("torch", "transformers", "peft", "shardwise")


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One rank, as it sees itself."""

    host: str
    machine: str = ""
    """Tells machines of one name apart: the kernel's id of this boot, where there is one."""
    clock: float
    """Seconds since 1970, read right after all ranks had met."""
    card: str = "cpu"
    card_bytes: int = 0
    versions: Mapping[str, str] = field(default_factory=dict[str, str])


def facts_of(mesh: RankMesh) -> RankFacts:
    """This rank's facts; every rank must call it, since clocks are read together."""
    known, card, card_bytes = {**versions(), "shardwise": shardwise.__version__}, "cpu", 0
    if mesh.device.type == "cuda":
        properties = torch.cuda.get_device_properties(mesh.device)
        card, card_bytes = properties.name, properties.total_memory
    dist.barrier(group=mesh.control)
    clock = time.time()
    return RankFacts(
        host=platform.node(), machine=_boot_id(), clock=clock, card=card, card_bytes=card_bytes, versions=known
    )


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def check_world(mesh: RankMesh, strategy: Strategy, cluster: Cluster | None) -> str:
    """Compares all ranks with each other and with the plan; every rank must call it.

    Args:
        mesh: This rank's place.
        strategy: How many ranks there should be.
        cluster: The machines that the plan was made for; None if there is no plan.

    Returns:
        A sentence about the world, warnings included.

    Raises:
        PlanMismatchError: It is not the one that was planned; all problems.
    """
    mine = facts_of(mesh)
    everyone: list[Any] = [None] * dist.get_world_size(mesh.control)
    dist.all_gather_object(everyone, mine, group=mesh.control)
    return judge_world(everyone, strategy, cluster)


def judge_world(ranks: Sequence[RankFacts], strategy: Strategy, cluster: Cluster | None) -> str:
    """The same from facts alone: what is wrong is raised, what is odd is said."""
    problems = [*_count_problems(ranks, strategy, cluster), *_version_problems(ranks), *_card_problems(ranks, cluster)]
    clocks = [rank.clock for rank in ranks]
    spread = max(clocks) - min(clocks)
    if spread > CLOCK_STOP_S:
        problems.append(f"{_clock_text(ranks, spread)}, more than {CLOCK_STOP_S:g} s. Set the clocks (chrony, ntpd).")
    if problems:
        raise PlanMismatchError(*problems)
    hosts = len({(rank.host, rank.machine) for rank in ranks})
    text = f"World: {len(ranks)} ranks on {hosts} {'machine' if hosts == 1 else 'machines'}, "
    text += ", ".join(f"{count} × {card}" for card, count in Counter(rank.card for rank in ranks).items())
    if hosts > 1:
        text += f", clocks within {format_seconds(spread)}"
    if spread > CLOCK_WARN_S:
        text += f". Warning: {_clock_text(ranks, spread)}; above 15 s torch's launcher loses machines"
    return text + "."


def _count_problems(ranks: Sequence[RankFacts], strategy: Strategy, cluster: Cluster | None) -> list[str]:
    if len(ranks) != strategy.num_ranks:
        return [f"{len(ranks)} ranks are running, but {strategy.name} was planned for {strategy.num_ranks}."]
    hosts = Counter((rank.host, rank.machine) for rank in ranks)
    if cluster is None or strategy.num_ranks != cluster.num_gpus:
        return []
    if len(hosts) != cluster.num_nodes:
        found = ", ".join(f"{count} on {host}" for (host, _), count in hosts.items())
        return [
            f"The plan is for {cluster.num_nodes} machines with {cluster.gpus_per_node} cards each, but the ranks are "
            f"{found}. Start the ranks on the planned machines, or plan again for these."
        ]
    return []


def _version_problems(ranks: Sequence[RankFacts]) -> list[str]:
    problems: list[str] = []
    for name in _MUST_AGREE:
        holders: dict[str, list[int]] = {}
        for number, rank in enumerate(ranks):
            holders.setdefault(rank.versions.get(name, "none"), []).append(number)
        if len(holders) > 1:
            told = ", ".join(f"{version} on {name_ranks(numbers)}" for version, numbers in holders.items())
            problems.append(f"The ranks have different versions of {name}: {told}. Install the same everywhere.")
    return problems


def _card_problems(ranks: Sequence[RankFacts], cluster: Cluster | None) -> list[str]:
    if cluster is None or cluster.gpu.architecture == "cpu":
        return []
    planned = cluster.gpu.cuda_memory_bytes or cluster.gpu.memory_bytes
    small = [number for number, rank in enumerate(ranks) if rank.card_bytes < CARD_TOLERANCE * planned]
    if not small:
        return []
    card = ranks[small[0]]
    return [
        f"The plan counts on {format_bytes(planned)} a card ({cluster.gpu.name}), but {name_ranks(small)} has "
        f"{format_bytes(card.card_bytes)} ({card.card}). Plan again for this machine."
    ]


def _clock_text(ranks: Sequence[RankFacts], spread: float) -> str:
    latest = max(rank.clock for rank in ranks)
    behind = [number for number, rank in enumerate(ranks) if latest - rank.clock > spread / 2]
    hosts = ", ".join(sorted({ranks[number].host for number in behind}))
    return f"the clock of {name_ranks(behind)} ({hosts}) is {format_seconds(spread)} behind"
