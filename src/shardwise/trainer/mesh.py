"""The grid of ranks: one named mesh, outer to inner pp, dp_replicate, dp_shard, tp; groups are slices of it.

An axis of degree 1 needs no group and gets none, but for dp_shard, which `fully_shard` needs even for one rank.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.errors import PlanMismatchError, ResourceError
from shardwise.vocabulary.restarts import restart_count
from shardwise.vocabulary.strategy import Axis, Strategy

TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, kw_only=True, eq=False)
class RankMesh:
    """This rank's place in the grid."""

    device: torch.device
    data: DeviceMesh
    """What `fully_shard` gets: (dp_shard,), or (dp_replicate, dp_shard) if there are replicas."""
    tensor: DeviceMesh | None
    """(tp,), or None if no tensor is split."""
    pipeline: DeviceMesh | None
    """(pp,), or None if no layers are split."""
    control: dist.ProcessGroup
    """All ranks over gloo: for words, counts and logged numbers, never for tensors of the step."""
    rank: int
    data_rank: int
    """Which data this rank sees, from 0 to dp_replicate x dp_shard - 1."""
    copies: int
    """Ranks that see the same data, because they share a model: tp x pp."""
    tensor_rank: int
    """Which part of every split tensor this rank holds, from 0 to tp - 1."""
    stage: int
    """Which stage of the pipeline this rank is, from 0 to pp - 1."""
    num_stages: int
    """pp."""

    @property
    def loss_copies(self) -> int:
        """Ranks that know the loss of the same data: tp, since of a pipeline only the last stage does."""
        return self.copies // self.num_stages

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks."""
        return self.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank's stage ends with the head and the loss."""
        return self.stage == self.num_stages - 1


def choose_device(local_rank: int) -> torch.device:
    """The card of this rank, or the CPU if the machine has none.

    Raises:
        ResourceError: More ranks on this machine than cards.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    num_cards = torch.cuda.device_count()
    if local_rank >= num_cards:
        raise ResourceError(
            f"This machine shows {num_cards} cards, but local rank {local_rank} needs one of its own. "
            "Start fewer ranks, or widen CUDA_VISIBLE_DEVICES."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def join_ranks(device: torch.device) -> None:
    """Starts torch.distributed from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; once a process.

    [Note: addresses of the dead] torch's elastic launcher keeps one store for all attempts, and since torch 2.13
    nothing in it keeps them apart: ranks that are started again find the addresses of the ranks before them, and wait
    for those. So each attempt after the first has keys of its own.
    """
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    attempt = restart_count(os.environ)
    if not attempt or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=TIMEOUT)
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    stores: Any = dist  # torch does not export their types
    kept = stores.TCPStore(os.environ["MASTER_ADDR"], port, world_size, is_master=False, timeout=TIMEOUT)
    fresh = stores.PrefixStore(f"shardwise-attempt-{attempt}", kept)
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=world_size, timeout=TIMEOUT)


def local_rank() -> int:
    """This process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def build_mesh(strategy: Strategy, device: torch.device) -> RankMesh:
    """Lays the ranks out as the strategy says. Every rank must call it.

    Raises:
        PlanMismatchError: The strategy needs another number of ranks.
    """
    if dist.get_world_size() != strategy.num_ranks:
        raise PlanMismatchError(
            f"The plan is for {strategy.num_ranks} ranks ({strategy.name}), but {dist.get_world_size()} are running."
        )
    axes = [axis for axis in Axis if strategy.degree(axis) > 1 or axis is Axis.DP_SHARD]
    world = init_device_mesh(
        device.type, tuple(strategy.degree(axis) for axis in axes), mesh_dim_names=tuple(str(axis) for axis in axes)
    )
    data_axes = tuple(str(axis) for axis in axes if axis in (Axis.DP_REPLICATE, Axis.DP_SHARD))
    data = world if len(data_axes) == len(axes) else world[data_axes]
    control: Any = dist.new_group(backend="gloo", timeout=TIMEOUT) if device.type == "cuda" else dist.group.WORLD
    tensor, pipeline = (_slice(world, axis, strategy) for axis in (Axis.TP, Axis.PP))
    return RankMesh(
        device=device,
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        control=control,
        rank=dist.get_rank(),
        data_rank=_flat_coordinate(data),
        copies=strategy.num_ranks // strategy.data_parallel,
        tensor_rank=_flat_coordinate(tensor) if tensor is not None else 0,
        stage=_flat_coordinate(pipeline) if pipeline is not None else 0,
        num_stages=strategy.pp,
    )


def _slice(world: DeviceMesh, axis: Axis, strategy: Strategy) -> DeviceMesh | None:
    """One axis of the grid; None if its degree is 1. A slice, so that `fully_shard` can lay it beside `data`."""
    return world[str(axis)] if strategy.degree(axis) > 1 else None


def _flat_coordinate(mesh: DeviceMesh) -> int:
    """This rank's number within a mesh, counted row by row."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is in no slice of its own mesh"
    number = 0
    for place, size in zip(coordinate, mesh.shape, strict=True):
        number = number * size + place
    return number
