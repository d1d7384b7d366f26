"""What an optimizer of ours does with parameters of which this rank may hold a part.

[Note: local updates] AdamW, LAMB and their like treat each element on its own, apart from LAMB's norms. So they work on
the local part of every parameter, gradient and state, and know nothing of meshes. States are kept as DTensors placed
like their parameter, so that a checkpoint can cut them otherwise for another number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

CHUNK_ELEMENTS = 16 * 2**20
"""Elements that are updated by one row of kernels; their fp32 copies exist at the same time."""

# Kernels for a list of tensors; torch exports no public names for them.
foreach_add_: Any = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
foreach_addcdiv_: Any = torch._foreach_addcdiv_  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
foreach_addcmul_: Any = torch._foreach_addcmul_  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
foreach_copy_: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
foreach_div: Any = torch._foreach_div  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
foreach_div_: Any = torch._foreach_div_  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
foreach_lerp_: Any = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
foreach_mul_: Any = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
foreach_norm: Any = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
foreach_sqrt: Any = torch._foreach_sqrt  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]


@dataclass(frozen=True, kw_only=True)
class AdamStep:
    """The numbers of one step of Adam for one group of parameters."""

    step: int
    """From 1."""
    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float

    @classmethod
    def of(cls, group: dict[str, Any], step: int) -> AdamStep:
        """From an optimizer's group."""
        beta1, beta2 = group["betas"]
        return cls(
            step=step,
            learning_rate=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            epsilon=group["eps"],
            weight_decay=group["weight_decay"],
        )

    @property
    def correction1(self) -> float:
        """The first moment is divided by this, because it starts from 0."""
        return 1 - self.beta1**self.step

    @property
    def correction2(self) -> float:
        """The root of the second moment is divided by the root of this."""
        return 1 - self.beta2**self.step


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a parameter's gradient, which must be there."""
    assert parameter.grad is not None, "no gradient"
    return local(parameter.grad)


def placed_like(parameter: nn.Parameter, part: Tensor, shape: Sequence[int]) -> Tensor:
    """A local part of a state as a tensor of the whole shape, placed like its parameter.

    Made without `from_local`, which would move a part that waits in host memory to the mesh's device.
    """
    if not isinstance(parameter, DTensor):
        return part
    whole = torch.empty(tuple(shape), dtype=part.dtype, device="meta")
    meta = TensorMeta(shape=whole.shape, stride=whole.stride(), dtype=part.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    make: Any = DTensor
    return make(part, spec, requires_grad=False)


def chunks(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Those parameters of which this rank holds a part, a bounded number of elements at a time."""
    chunk: list[nn.Parameter] = []
    room = CHUNK_ELEMENTS
    for parameter in parameters:
        if not local(parameter).numel():
            continue
        if chunk and local(parameter).numel() > room:
            yield chunk
            chunk, room = [], CHUNK_ELEMENTS
        chunk.append(parameter)
        room -= local(parameter).numel()
    if chunk:
        yield chunk


def as_exact(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in fp32, or as they are if they are no less exact."""
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def update_moments(
    step: AdamStep, gradients: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor]
) -> None:
    """Adam's running averages of gradients and of their squares, in place."""
    foreach_lerp_(first, gradients, 1 - step.beta1)
    foreach_mul_(second, step.beta2)
    foreach_addcmul_(second, gradients, gradients, 1 - step.beta2)


def adamw_(step: AdamStep, weights: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    """AdamW's update of weights by moments that are up to date, in place (arXiv:1711.05101)."""
    roots = foreach_sqrt(second)
    foreach_div_(roots, math.sqrt(step.correction2))
    foreach_add_(roots, step.epsilon)
    foreach_mul_(weights, 1 - step.learning_rate * step.weight_decay)
    foreach_addcdiv_(weights, first, roots, -step.learning_rate / step.correction1)


class LocalAdam(torch.optim.Optimizer):
    """What our optimizers of Adam's kind share ([Note: local updates]).

    Args:
        groups: Parameters, sharded or not, with `weight_decay`.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def make_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The moments that a parameter starts with: of its own dtype."""
        return {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}

    def begin(self, group: dict[str, Any]) -> tuple[list[nn.Parameter], AdamStep]:
        """A group's parameters that have a gradient, and the numbers of this step.

        Makes and counts up the state of each, on every rank, whether or not it holds a part.
        """
        found = [parameter for parameter in group["params"] if parameter.grad is not None]
        number = 0
        for parameter in found:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state.update(self.make_state(parameter))
            state["step"] += 1
            number = max(number, int(state["step"].item()))
        return found, AdamStep.of(group, number)

    def moments(self, parameters: Sequence[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's parts of both moments."""
        states = [self.state[parameter] for parameter in parameters]
        return [local(state["exp_avg"]) for state in states], [local(state["exp_avg_sq"]) for state in states]

    def update_exactly(self, step: AdamStep, chunk: Sequence[nn.Parameter]) -> None:
        """AdamW with moments that are kept in fp32."""
        first, second = self.moments(chunk)
        update_moments(step, as_exact([local_gradient(parameter) for parameter in chunk]), first, second)
        kept = [local(parameter) for parameter in chunk]
        weights = as_exact(kept)
        adamw_(step, weights, first, second)
        if weights[0] is not kept[0]:
            foreach_copy_(kept, weights)
