"""Wrapped as asked: what became sharded, replicated, ignored, and in which dtype it is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from shardwise.axes.fully_shard_apply import fsdp_modules
from shardwise.axes.pipeline.apply import layers_of
from shardwise.axes.tensor import apply as tensor
from shardwise.errors import PlanMismatchError
from shardwise.levers.adapters.apply_nf4 import PACKED
from shardwise.levers.precision.apply import compute_dtype, master_dtype
from shardwise.trainer.checkpoint.state import clean_name
from shardwise.trainer.mesh import RankMesh
from shardwise.trainer.model import Skeleton, aliases_of
from shardwise.trainer.parallelize import find_groups, plain_class
from shardwise.trainer.sentinels.words import MAX_NAMED
from shardwise.vocabulary.strategy import Axis, Strategy


def verify_wrapping(skeleton: Skeleton, mesh: RankMesh, strategy: Strategy) -> None:
    """Compares the real module with the strategy, class by class.

    Raises:
        PlanMismatchError: A module is wrapped otherwise than planned; each is named.
    """
    problems = _group_problems(skeleton, strategy) + _parameter_problems(skeleton.model, mesh, strategy)
    problems += _stage_problems(skeleton, mesh)
    if problems:
        more = [f"... and {len(problems) - MAX_NAMED} more."] if len(problems) > MAX_NAMED else []
        raise PlanMismatchError(*problems[:MAX_NAMED], *more)


def _group_problems(skeleton: Skeleton, strategy: Strategy) -> list[str]:
    manages_frozen = strategy.zero_stage == 3
    wanted: dict[int, str] = {}
    for groups in find_groups(skeleton):
        wanted[id(groups.root)] = "root"
        for site, module in groups.inner():
            if manages_frozen or any(parameter.requires_grad for parameter in module.parameters()):
                wanted[id(module)] = site
    names = {id(module): clean_name(name) or "the root" for name, module in skeleton.model.named_modules()}
    found = {id(module) for module in fsdp_modules(skeleton.model)}
    return [
        f"{names[key]} should be a group of its own ({wanted[key]}), but fully_shard has not wrapped it."
        for key in wanted.keys() - found
    ] + [f"{names[key]} is a group of its own, which was not planned." for key in found - wanted.keys()]


def _parameter_problems(model: nn.Module, mesh: RankMesh, strategy: Strategy) -> list[str]:
    problems: list[str] = []
    for name, parameter in model.named_parameters():
        wanted_dtype = master_dtype(strategy) if parameter.requires_grad else compute_dtype(strategy)
        if parameter.is_floating_point() and parameter.dtype != wanted_dtype:
            problems.append(f"{clean_name(name)} is stored in {parameter.dtype}, planned in {wanted_dtype}.")
        managed = parameter.requires_grad or strategy.zero_stage == 3
        problems.extend(
            _placement_problem(clean_name(name), parameter, _planned_placement(name, mesh, managed=managed))
        )
    return problems


def _stage_problems(skeleton: Skeleton, mesh: RankMesh) -> list[str]:
    """All stages together hold every parameter of the model; each layer lies on one stage, ties on both ends."""
    if mesh.pipeline is None:
        return []
    mine = {clean_name(name): parameter.numel() for name, parameter in skeleton.model.named_parameters()}
    everyone: list[Any] = [None] * dist.get_world_size(mesh.control)
    dist.all_gather_object(everyone, (mesh.stage, mine, layers_of(skeleton.model)), group=mesh.control)
    problems: list[str] = []
    holders: dict[str, set[int]] = {}
    for stage, names, layers in everyone:
        for name in (*names, *(f"layer {number}" for number in layers)):
            holders.setdefault(name, set()).add(stage)
    for name, _ in skeleton.template.named_parameters():
        if not any(plain == name for plain in map(_without_adapter, holders)):
            problems.append(f"{name} is on no stage of the pipeline.")
    shared = {name for names in aliases_of(skeleton.template) for name in names}
    for name, stages in sorted(holders.items()):
        if len(stages) > 1 and name not in shared:
            problems.append(
                f"{name} is on the stages {', '.join(map(str, sorted(stages)))} of the pipeline, not on one."
            )
    return problems


def _without_adapter(name: str) -> str:
    """The name that a base weight had before adapters came."""
    return name.replace(".base_layer.", ".").replace(f".{PACKED}", ".weight")


def _planned_placement(name: str, mesh: RankMesh, *, managed: bool) -> dict[str, tuple[int, str]]:
    """Degree and kind of placement along every axis that a parameter should know of."""
    planned: dict[str, tuple[int, str]] = {}
    if managed:
        for axis, degree in zip(mesh.data.mesh_dim_names or (), mesh.data.shape, strict=True):
            planned[axis] = (degree, "sharded" if axis == Axis.DP_SHARD else "replicated")
    split = tensor.planned_placement(clean_name(name)) if mesh.tensor is not None else None
    if mesh.tensor is not None and split is not None:
        planned[Axis.TP] = (mesh.tensor.size(), _in_words(split, Axis.TP))
    return planned


def _placement_problem(name: str, parameter: nn.Parameter, planned: Mapping[str, tuple[int, str]]) -> list[str]:
    """Sharded along dp_shard, replicated along dp_replicate, split along tp: as planned, over as many ranks."""
    found: dict[str, tuple[int, str]] = {}
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, degree, placed in zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True):
            found[axis] = (degree, _in_words(placed, axis))
    if found == planned:
        return []
    return [f"{name} should be {_described(planned)}, but is {_described(found)}."]


def _in_words(placement: Placement, axis: str) -> str:
    if placement.is_replicate():
        return "replicated"
    return f"split along dim {cast(Any, placement).dim}" if axis == Axis.TP else "sharded"


def _described(placed: Mapping[str, tuple[int, str]]) -> str:
    if not placed:
        return "a plain tensor, whole on each rank"
    return " and ".join(f"{words} over {axis} {degree}" for axis, (degree, words) in placed.items())


def wrapped_classes(model: nn.Module) -> dict[str, int]:
    """How many modules of each class became a group, for the words at the start of a run."""
    names = Counter[str]()
    for module in fsdp_modules(model):
        names[plain_class(module)] += 1
    return dict(names)
