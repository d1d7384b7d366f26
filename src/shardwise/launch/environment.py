"""What a launcher has put into the environment.

All of them end in the same facts: which rank this process is, of how many, and where they meet.

    torchrun                RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
    Slurm, one task a rank  SLURM_STEP_ID SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_NODELIST
    Kubeflow and others     PET_NNODES PET_NODE_RANK PET_MASTER_ADDR PET_MASTER_PORT: no rank yet, but several machines
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.errors import UsageError

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_FIRST_SLURM_PORT, _NUM_SLURM_PORTS = 20_000, 10_000


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """This process's place among the ranks."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Ranks on this machine."""
    master_addr: str
    """Where the ranks meet: the machine of rank 0."""
    master_port: int
    launcher: Literal["torchrun", "slurm"]

    def variables(self) -> dict[str, str]:
        """The same facts under the names that torch.distributed reads (`init_method="env://"`)."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


@dataclass(frozen=True, kw_only=True)
class NodeEnvironment:
    """This machine's place among several, as `PET_*` tells it; ranks are still to be started."""

    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """0: any free port, which only works on one machine."""


def rank_environment(environ: Mapping[str, str]) -> RankEnvironment | None:
    """The rank that a launcher has made of this process; None if no launcher has.

    Args:
        environ: The environment, mostly `os.environ`.

    Raises:
        UsageError: The launcher's variables contradict each other, are incomplete or are no numbers; all of them.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_torchrun(environ)
    if "SLURM_STEP_ID" in environ and environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return _from_slurm(environ)
    return None


def node_environment(environ: Mapping[str, str]) -> NodeEnvironment:
    """This machine's place among several, from PET_* (Kubeflow, torchrun's defaults); one machine if nothing is set.

    Raises:
        UsageError: A variable is no number, or several machines have no place to meet.
    """
    problems: list[str] = []
    num_nodes = _number(environ, "PET_NNODES", problems, default=1, least=1)
    node_rank = _number(environ, "PET_NODE_RANK", problems, default=0)
    port = _number(environ, "PET_MASTER_PORT", problems, default=0)
    address = environ.get("PET_MASTER_ADDR", "127.0.0.1")
    if num_nodes > 1 and not ("PET_MASTER_ADDR" in environ and port):
        problems.append(
            f"PET_NNODES is {num_nodes}, but PET_MASTER_ADDR and PET_MASTER_PORT do not say where the machines meet. "
            "Set both, or unset PET_NNODES."
        )
    if not 0 <= node_rank < max(num_nodes, 1):
        problems.append(f"PET_NODE_RANK is {node_rank}; with PET_NNODES {num_nodes} it must be 0 to {num_nodes - 1}.")
    if problems:
        raise UsageError(*problems)
    return NodeEnvironment(num_nodes=num_nodes, node_rank=node_rank, master_addr=address, master_port=port)


def first_host(nodelist: str) -> str:
    """The first machine of a Slurm node list, such as `node07` of `node[07-09,12],gpu3`.

    Raises:
        UsageError: The list is not one.
    """
    match = re.match(r"([^\[\],\s]+)(?:\[([0-9]+)[^\]]*\]([^,\[\]\s]*))?(?:,|$)", nodelist)
    if match is None:
        raise UsageError(f"The Slurm node list {nodelist!r} cannot be read. Set MASTER_ADDR to the first machine.")
    return match[1] + (match[2] or "") + (match[3] or "")


def _from_torchrun(environ: Mapping[str, str]) -> RankEnvironment:
    missing = [name for name in _TORCHRUN if name not in environ]
    if missing:
        raise UsageError(
            f"The environment holds a part of torchrun's variables, but not {', '.join(missing)}. Start with torchrun, "
            "or unset RANK and WORLD_SIZE and let shardwise start its own ranks."
        )
    problems: list[str] = []
    world_size = _number(environ, "WORLD_SIZE", problems, least=1)
    local_rank = _number(environ, "LOCAL_RANK", problems)
    found = RankEnvironment(
        rank=_number(environ, "RANK", problems),
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE", problems, default=max(world_size, 1), least=1),
        master_addr=environ["MASTER_ADDR"],
        master_port=_number(environ, "MASTER_PORT", problems, least=1),
        launcher="torchrun",
    )
    return _checked(found, problems)


def _from_slurm(environ: Mapping[str, str]) -> RankEnvironment:
    problems: list[str] = []
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS", problems, least=1)
    local_size = re.match(r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    address = environ.get("MASTER_ADDR") or first_host(
        environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    )
    # Every rank must come to the same port without talking: the job's number decides, as far from others as it goes.
    job_port = _FIRST_SLURM_PORT + _number(environ, "SLURM_JOB_ID", problems, default=0) % _NUM_SLURM_PORTS
    found = RankEnvironment(
        rank=_number(environ, "SLURM_PROCID", problems),
        world_size=world_size,
        local_rank=_number(environ, "SLURM_LOCALID", problems),
        local_world_size=int(local_size[0]) if local_size else world_size,
        master_addr=address,
        master_port=_number(environ, "MASTER_PORT", problems, default=job_port, least=1),
        launcher="slurm",
    )
    return _checked(found, problems)


def _checked(found: RankEnvironment, problems: list[str]) -> RankEnvironment:
    if not problems:
        if found.rank >= found.world_size:
            problems.append(f"The rank is {found.rank}, but there are {found.world_size} ranks: it must be below.")
        if found.local_rank >= found.local_world_size:
            problems.append(
                f"The local rank is {found.local_rank}, but this machine has {found.local_world_size} ranks."
            )
        if not 1 <= found.master_port <= 65535:
            problems.append(f"MASTER_PORT is {found.master_port}; a port is 1 to 65535.")
    if problems:
        raise UsageError(*problems)
    return found


def _number(
    environ: Mapping[str, str], name: str, problems: list[str], *, default: int | None = None, least: int = 0
) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        shown = "not set" if text is None else repr(text[:40])
        problems.append(f"{name} is {shown}; it must be a whole number from {least}. The launcher sets it.")
        return least
    return int(text)
