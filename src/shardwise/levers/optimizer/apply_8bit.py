"""AdamW with moments of 8 bits, by bitsandbytes' kernel on the part of each matrix that this rank holds.

[Note: blocks of a row] The kernel gives every 256 elements in a row of memory a scale of their own. Where the rows of a
matrix are a multiple of 256 long, no block crosses the end of a row, so matrices may be cut between any rows and the
moments come out the same: codes are kept as a uint8 tensor of the matrix's shape, scales as an fp32 tensor [rows,
columns / 256], both placed like the matrix. They are plain tensors, which a checkpoint stores and cuts anew; torchao's
8-bit states are not.

Kept in 32 bits: vectors, small matrices (adapters), rows of another length, and embedding and head, whose rows see
gradients of very different size: 8 bits would move them by a thousand times too much.

Paged moments live in managed memory, which the driver moves to the host when the card is full. On processors there is
nothing to page.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.errors import MissingExtraError
from shardwise.levers.optimizer.apply_local import (
    AdamStep,
    LocalAdam,
    chunks,
    local,
    local_gradient,
    placed_like,
)

BLOCK = 256
"""Elements with one scale, in bitsandbytes' kernel."""
LEAST_ELEMENTS = 4096
"""Smaller matrices are kept in 32 bits, as bitsandbytes does."""
LEAST_PAGED_ELEMENTS = 100_000
"""Smaller parts stay on the card, as in bitsandbytes."""


def load_bitsandbytes(feature: str) -> Any:
    """The functional module of bitsandbytes.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        import bitsandbytes.functional as functional
    except ImportError as error:
        raise MissingExtraError(feature, "qlora", "bitsandbytes") from error
    return functional


class AdamW8bit(LocalAdam):
    """AdamW with 8-bit moments ([Note: blocks of a row]).

    Args:
        groups: Parameters, sharded or not, with `weight_decay`; those with `eight_bit: False` are kept in 32 bits.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second.
        paged: Keep the moments in managed memory.

    Raises:
        MissingExtraError: bitsandbytes is not installed.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, *, paged: bool
    ) -> None:
        super().__init__(groups, lr, betas, eps)
        self._library = load_bitsandbytes("An 8-bit optimizer")
        self._paged = paged
        self._maps: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._in_8_bit = {
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if group.get("eight_bit", True) and fits_8_bit(parameter)
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient."""
        assert closure is None, "losses are computed by the step, not by the optimizer"
        pages = False
        for group in self.param_groups:
            parameters, step = self.begin(group)
            for chunk in chunks([parameter for parameter in parameters if parameter not in self._in_8_bit]):
                self.update_exactly(step, chunk)
            for parameter in parameters:
                if parameter in self._in_8_bit:
                    pages |= self._update_quantized(step, parameter)
        if pages:
            torch.cuda.synchronize()  # kernels on managed memory are not ordered with the host's use of it

    def make_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Codes and scales, or two moments of no less than fp32."""
        if parameter not in self._in_8_bit:
            exact = torch.promote_types(parameter.dtype, torch.float32)
            return {name: torch.zeros_like(parameter, dtype=exact) for name in ("exp_avg", "exp_avg_sq")}
        part = local(parameter)
        rows, columns = parameter.shape
        state: dict[str, Tensor] = {}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = placed_like(parameter, self._codes(part), parameter.shape)
            scales = torch.zeros((part.shape[0], part.shape[1] // BLOCK), dtype=torch.float32, device=part.device)
            state[name + "_scale"] = placed_like(parameter, scales, (rows, columns // BLOCK))
        return state

    def _update_quantized(self, step: AdamStep, parameter: nn.Parameter) -> bool:
        """Updates one matrix; returns whether its moments are paged."""
        state, weight = self.state[parameter], local(parameter)
        if not weight.numel():
            return False
        codes = [local(state[name]) for name in ("exp_avg", "exp_avg_sq")]
        scales = [local(state[name]).view(-1) for name in ("exp_avg_scale", "exp_avg_sq_scale")]
        paged = any(getattr(code, "is_paged", False) for code in codes)
        if paged:
            for code in codes:
                self._library.prefetch_tensor(code)
        first_map, second_map = self._maps_on(weight.device)
        self._library.optimizer_update_8bit_blockwise(
            "adam", local_gradient(parameter), weight, codes[0], codes[1], step.beta1, step.beta2, 0.0, 0.0,
            step.epsilon, step.step, step.learning_rate, first_map, second_map, scales[0], scales[1],
            weight_decay=step.weight_decay, gnorm_scale=1.0, skip_zeros=False,
        )  # fmt: skip
        return paged

    def _codes(self, part: Tensor) -> Tensor:
        """Room for the codes of one moment: managed memory if it is paged and worth it."""
        if not self._paged or not part.is_cuda or part.numel() < LEAST_PAGED_ELEMENTS:
            return torch.zeros(part.shape, dtype=torch.uint8, device=part.device)
        codes: Tensor = self._library.get_paged(*part.shape, dtype=torch.uint8, device=part.device)
        return codes.zero_()

    def _maps_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """What codes mean: for the first moment, which has a sign, and for the second, which has none. [256] each."""
        if device not in self._maps:
            make = self._library.create_dynamic_map
            self._maps[device] = (make(signed=True).to(device), make(signed=False).to(device))
        return self._maps[device]


def fits_8_bit(parameter: nn.Parameter) -> bool:
    """Whether the moments of a parameter can be kept in 8 bits, wherever it is cut between rows."""
    if parameter.ndim != 2 or parameter.numel() < LEAST_ELEMENTS:
        return False
    columns = parameter.shape[1]
    if isinstance(parameter, DTensor):
        placed = enumerate(parameter.placements)
        parts = math.prod(parameter.device_mesh.size(dim) for dim, place in placed if getattr(place, "dim", None) == 1)
        return columns % (parts * BLOCK) == 0
    return columns % BLOCK == 0
