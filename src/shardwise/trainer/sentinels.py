"""What must hold, and is silently wrong elsewhere. Each check is cheap, runs in every run, and names the module.

wrapped as asked      what became sharded, replicated, ignored; in which dtype it is stored
buffers               equal to the CPU's after memory was given, and after the first step
ties                  tied weights still share memory
gradients             after the first backward every trained parameter has one, and no frozen one does
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.axes.fully_shard_apply import fsdp_modules
from shardwise.errors import PlanMismatchError, TrainingError
from shardwise.levers.precision.apply import compute_dtype, master_dtype
from shardwise.trainer.checkpoint.state import clean_name
from shardwise.trainer.mesh import RankMesh
from shardwise.trainer.model import Skeleton
from shardwise.trainer.parallelize import find_groups, plain_class
from shardwise.vocabulary.strategy import Axis, Strategy

_MAX_NAMED = 8
"""Modules that a message names, of however many differ."""


def verify_wrapping(skeleton: Skeleton, mesh: RankMesh, strategy: Strategy) -> None:
    """Compares the real module with the strategy, class by class.

    Raises:
        PlanMismatchError: A module is wrapped otherwise than planned; each is named.
    """
    problems = _group_problems(skeleton, strategy) + _parameter_problems(skeleton.model, mesh, strategy)
    if problems:
        more = [f"... and {len(problems) - _MAX_NAMED} more."] if len(problems) > _MAX_NAMED else []
        raise PlanMismatchError(*problems[:_MAX_NAMED], *more)


def _group_problems(skeleton: Skeleton, strategy: Strategy) -> list[str]:
    groups = find_groups(skeleton)
    manages_frozen = strategy.zero_stage == 3
    wanted = {id(groups.root): "root"}
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
        is_split = isinstance(parameter, DTensor)
        if managed and not is_split:
            problems.append(f"{clean_name(name)} is a plain tensor; fully_shard does not manage it.")
        elif is_split and not managed:
            problems.append(f"{clean_name(name)} is frozen and should be kept whole by each rank, but is managed.")
        elif isinstance(parameter, DTensor):
            problems.extend(_placement_problem(clean_name(name), parameter, mesh))
    return problems


def _placement_problem(name: str, parameter: DTensor, mesh: RankMesh) -> list[str]:
    """Sharded along dp_shard and replicated along dp_replicate, over as many ranks as planned."""
    planned = dict(zip(mesh.data.mesh_dim_names or (), mesh.data.shape, strict=True))
    placed = dict(zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True))
    degrees = dict(zip(parameter.device_mesh.mesh_dim_names or (), parameter.device_mesh.shape, strict=True))
    right = all(
        degrees.get(axis) == degree and isinstance(placed[axis], Shard if axis == Axis.DP_SHARD else Replicate)
        for axis, degree in planned.items()
    )
    return [] if right else [f"{name} is placed {placed} on {degrees}, planned on {planned}."]


def check_buffers(model: nn.Module, reference: Mapping[str, Tensor]) -> None:
    """Buffers hold what the CPU computed when the model was made ([Note: buffers] of model.py).

    Raises:
        PlanMismatchError: A buffer differs or is missing.
    """
    problems: list[str] = []
    found = {clean_name(name): buffer for name, buffer in model.named_buffers()}
    for name, wanted in reference.items():
        buffer = found.get(name)
        if buffer is None:
            problems.append(f"The buffer {name} is gone.")
        elif buffer.shape != wanted.shape or not torch.equal(buffer.detach().cpu().to(wanted.dtype), wanted):
            problems.append(f"The buffer {name} does not hold what the CPU computed for it.")
    if problems:
        raise PlanMismatchError(*problems)


def check_ties(model: nn.Module, aliases: Sequence[Sequence[str]]) -> None:
    """Parameters that were tied are still one.

    Raises:
        PlanMismatchError: They are two.
    """
    found = {clean_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    for names in aliases:
        first = found[names[0]]
        for other in names[1:]:
            if found[other] is not first and _address(found[other]) != _address(first):
                raise PlanMismatchError(f"{names[0]} and {other} were tied, and are two parameters now.")


def _address(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.data_ptr()


def check_gradients(model: nn.Module) -> None:
    """After the first backward: every trained parameter has a gradient, and no frozen one has.

    Raises:
        TrainingError: Otherwise; names the parameters.
    """
    named = [(clean_name(name), parameter) for name, parameter in model.named_parameters()]
    dead = [name for name, parameter in named if parameter.requires_grad and parameter.grad is None]
    leaking = [name for name, parameter in named if not parameter.requires_grad and parameter.grad is not None]
    problems: list[str] = []
    if dead:
        problems.append(f"{len(dead)} trained parameters got no gradient in the first step: {_some(dead)}.")
    if leaking:
        problems.append(f"{len(leaking)} frozen parameters got a gradient in the first step: {_some(leaking)}.")
    if problems:
        raise TrainingError(*problems)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")


def wrapped_classes(model: nn.Module) -> dict[str, int]:
    """How many modules of each class became a group, for the words at the start of a run."""
    names = Counter[str]()
    for module in fsdp_modules(model):
        names[plain_class(module)] += 1
    return dict(names)
