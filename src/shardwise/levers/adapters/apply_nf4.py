"""QLoRA's frozen matrices: 4-bit NormalFloat with doubly quantized scales (arXiv:2305.14314), by bitsandbytes' kernels.

[Note: one row of bytes] A packed matrix is one frozen uint8 parameter that holds everything needed to unpack it:

    offset of the scales       fp32, one
    scales of the scales       fp32, one for 256 scales
    scales                     1 byte for 64 elements
    elements                   half a byte each, row by row

So it is sharded, gathered, kept and counted like any frozen parameter, scales included, and what crosses the wire are
bytes: packed in a floating-point dtype they may come out changed, because some of them are NaNs, which arithmetic
rewrites (bitsandbytes#1945). The fp32 numbers come first so that they are aligned.

Shapes: out and in are those of the matrix, B rows of input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import MissingExtraError

BLOCK, SCALE_BLOCK = 64, 256
"""Elements with one scale, and scales with one scale, as in the paper and in bitsandbytes."""
PACKED = "packed_weight"
"""The parameter's name, in place of `weight`."""
_NUMBER = 4
"""Bytes of an fp32."""


def load_bitsandbytes() -> Any:
    """The functional module of bitsandbytes.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        import bitsandbytes.functional as functional
    except ImportError as error:
        raise MissingExtraError("QLoRA", "qlora", "bitsandbytes") from error
    return functional


def _layout(num_elements: int) -> tuple[int, int, int]:
    """Where scales and elements begin in the bytes, and how many bytes there are."""
    num_scales = -(-num_elements // BLOCK)
    scales_at = _NUMBER * (1 + -(-num_scales // SCALE_BLOCK))
    elements_at = scales_at + num_scales
    return scales_at, elements_at, elements_at + -(-num_elements // 2)


def num_packed_bytes(num_elements: int) -> int:
    """Bytes of a packed matrix."""
    return _layout(num_elements)[2]


def pack(weight: Tensor) -> Tensor:
    """A whole matrix in NF4, as [Note: one row of bytes] says: [out, in] -> [bytes], uint8, on the same device."""
    library = load_bitsandbytes()
    codes, state = library.quantize_4bit(
        weight.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4", quant_storage=torch.uint8
    )
    numbers = torch.cat([state.offset.float().reshape(1), state.state2.absmax.float().reshape(-1)])
    packed = torch.cat([numbers.view(torch.uint8), state.absmax.reshape(-1), codes.reshape(-1)])
    assert packed.numel() == num_packed_bytes(weight.numel()), "bitsandbytes packs otherwise than we count"
    return packed


def unpack(packed: Tensor, scale_map: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The matrix that the bytes stand for: [bytes], [256] -> [out, in]."""
    scales_at, elements_at, _ = _layout(shape.numel())
    numbers = packed[:scales_at].view(torch.float32)  # [1 + scales of scales]
    operators: Any = torch.ops.bitsandbytes
    scales = operators.dequantize_blockwise(
        packed[scales_at:elements_at], numbers[1:].contiguous(), scale_map, SCALE_BLOCK, torch.float32
    )
    codes = packed[elements_at:].view(-1, 1)
    # As one row: bitsandbytes' kernel for processors (0.50) starts blocks anew in each row, which packing does not.
    flat = operators.dequantize_4bit(codes, scales + numbers[0], BLOCK, "nf4", [shape.numel()], dtype)
    return flat.view(shape)


class _Product(torch.autograd.Function):
    """x times the unpacked matrix, which is unpacked again in backward instead of being kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, scale_map: Tensor, bias: Tensor | None, shape: torch.Size
    ) -> Tensor:
        """Product in the input's dtype: [B, in] -> [B, out]."""
        ctx.save_for_backward(packed, scale_map)
        ctx.shape = shape
        return F.linear(x, unpack(packed, scale_map, shape, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None, None]:
        """Gradient of the input alone: [B, out] -> [B, in]."""
        packed, scale_map = ctx.saved_tensors
        [gradient] = gradients
        return gradient @ unpack(packed, scale_map, ctx.shape, gradient.dtype), None, None, None, None


class Nf4Linear(nn.Module):
    """A frozen linear layer whose matrix is kept in 4 bits.

    Args:
        linear: The layer that it stands for; its matrix is not read, its bias is kept as it is.
    """

    packed_weight: nn.Parameter
    scale_map: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, linear.weight.dtype
        empty = torch.empty(num_packed_bytes(self.shape.numel()), dtype=torch.uint8, device=linear.weight.device)
        self.packed_weight = nn.Parameter(empty, requires_grad=False)
        self.register_parameter("bias", linear.bias)
        # The meaning of a scale's byte; equal for all, and in no file.
        self.register_buffer("scale_map", load_bitsandbytes().create_dynamic_map(), persistent=False)

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        return torch.Size((self.out_features, self.in_features))

    @property
    def weight(self) -> Tensor:
        """The matrix, unpacked in the dtype that the layer had; for DoRA, which needs the lengths of its rows."""
        return unpack(self.packed_weight, self.scale_map, self.shape, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        product: Any = _Product.apply
        return product(x, self.packed_weight, self.scale_map, self.bias, self.shape)

    def unpacked(self, packed: Tensor, dtype: torch.dtype) -> nn.Linear:
        """A plain layer with the whole matrix, made from all its bytes; without the bias."""
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        weight = unpack(packed, self.scale_map.to(packed.device), self.shape, dtype)
        plain.weight = nn.Parameter(weight, requires_grad=False)
        return plain

    def extra_repr(self) -> str:
        """As torch's own layer says it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, nf4"


def apply(model: nn.Module) -> None:
    """Replaces every frozen linear layer but the head, in place. Their bytes come later, by `pack`.

    Raises:
        MissingExtraError: bitsandbytes is not installed.
    """
    untyped: Any = model
    head = untyped.get_output_embeddings()
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, nn.Linear) and module is not head and not module.weight.requires_grad:
                setattr(parent, name, Nf4Linear(module))


def packed_layers(model: nn.Module) -> dict[str, Nf4Linear]:
    """Every packed layer by its name in the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Nf4Linear)}
