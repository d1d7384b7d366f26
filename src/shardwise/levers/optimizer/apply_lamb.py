"""LAMB: Adam whose step is as long, layer by layer, as the weights allow (arXiv:1904.00962).

    update = moments' direction + weight_decay x weight
    weight -= learning_rate x |weight| / |update| x update

The norms are those of the whole matrix, of which a rank may hold a part: the squares of all matrices' parts are stacked
and summed over the ranks by one all_reduce, so a step costs one small message, not several a matrix. Vectors (norms,
biases) take Adam's step unscaled, as is usual: their norm says nothing about how far they may go.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.levers.optimizer.apply_local import (
    AdamStep,
    LocalAdam,
    chunks,
    foreach_add_,
    foreach_div,
    foreach_div_,
    foreach_mul_,
    foreach_norm,
    foreach_sqrt,
    local,
    local_gradient,
    update_moments,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Move:
    """Where a parameter will go, once the length of its step is known."""

    parameter: nn.Parameter
    direction: Tensor
    """This rank's part."""
    learning_rate: float


class Lamb(LocalAdam):
    """LAMB for parameters that may be sharded; the trust ratio is clipped nowhere."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient. Every rank must call it."""
        assert closure is None, "losses are computed by the step, not by the optimizer"
        moves: list[_Move] = []
        matrices: list[nn.Parameter] = []
        for group in self.param_groups:
            parameters, step = self.begin(group)
            matrices += [parameter for parameter in parameters if parameter.ndim >= 2]
            for chunk in chunks(parameters):
                moves += self._directions(step, chunk)
        ratios = trust_ratios(matrices, moves)
        for move in moves:
            if (ratio := ratios.get(move.parameter)) is not None:
                move.direction.mul_(ratio)
            local(move.parameter).sub_(move.direction, alpha=move.learning_rate)

    def _directions(self, step: AdamStep, chunk: list[nn.Parameter]) -> list[_Move]:
        first, second = self.moments(chunk)
        update_moments(step, [local_gradient(parameter) for parameter in chunk], first, second)
        roots = foreach_sqrt(second)
        foreach_div_(roots, step.correction2**0.5)
        foreach_add_(roots, step.epsilon)
        foreach_mul_(roots, step.correction1)
        directions = foreach_div(first, roots)
        foreach_add_(directions, [local(parameter) for parameter in chunk], alpha=step.weight_decay)
        return [
            _Move(parameter=parameter, direction=direction, learning_rate=step.learning_rate)
            for parameter, direction in zip(chunk, directions, strict=True)
        ]


def trust_ratios(matrices: list[nn.Parameter], moves: list[_Move]) -> dict[nn.Parameter, Tensor]:
    """|weight| / |direction| of each matrix; 1 where either is 0.

    Args:
        matrices: In the same order on every rank, whether or not it holds a part.
        moves: Of the parts that this rank holds.

    Returns:
        A number for each matrix. []
    """
    directions = {move.parameter: move.direction for move in moves}
    spread: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[nn.Parameter]] = defaultdict(list)
    for matrix in matrices:
        spread[_split_over(matrix)].append(matrix)
    ratios: dict[nn.Parameter, Tensor] = {}
    for (mesh, dims), several in spread.items():
        empty = local(several[0]).new_zeros(0)
        weights = [local(matrix) for matrix in several]
        found = foreach_norm([*weights, *(directions.get(matrix, empty) for matrix in several)], 2)
        squares = torch.stack(found).square()  # [2 x matrices]
        for dim in dims:
            assert mesh is not None, "only a DTensor is split"
            dist.all_reduce(squares, group=mesh.get_group(dim))
        weight, direction = squares.sqrt().chunk(2)  # [matrices] each
        both = (weight > 0) & (direction > 0)
        ratio = torch.where(both, weight / torch.where(both, direction, 1.0), 1.0)
        ratios.update(zip(several, ratio.unbind(), strict=True))
    return ratios


def _split_over(parameter: nn.Parameter) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """The mesh of a parameter and those of its axes along which ranks hold different parts."""
    if not isinstance(parameter, DTensor):
        return None, ()
    mesh = parameter.device_mesh
    placed = enumerate(parameter.placements)
    return mesh, tuple(dim for dim, place in placed if not place.is_replicate() and mesh.size(dim) > 1)
