"""Head and cross-entropy as one function, which knows its gradients when it knows its loss.

[Note: gradients in forward] The gradient of a summed cross-entropy by the logits is softmax minus one-hot: nothing of
the backward pass is needed for it. So for a few thousand tokens at a time the logits are made, replaced by their
gradient, and multiplied into the gradients of hidden states and head. That is three products of the head's size (two
where it is frozen); a head that is computed again in backward takes one more. Backward multiplies by the incoming
gradient, a number, and casts.

The head's gradient is summed over the chunks in fp32. As an input of this function the head is a parameter like any
other: autograd hands its gradient on, `fully_shard` reduces it, and a tied embedding adds its own.

Shapes: N tokens, C tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.levers.loss.cost import fused_chunk

IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True)
class LogitRule:
    """What a model does to its logits before the softmax."""

    scale: float = 1.0
    """Factor (Cohere, Granite)."""
    softcap: float | None = None
    """Bound c of c * tanh(logit / c) (Gemma)."""

    def __call__(self, logits: Tensor) -> Tensor:
        """The model's logits, from those of its head: [..., V] -> [..., V]."""
        scaled = logits if self.scale == 1 else logits * self.scale
        return scaled if self.softcap is None else torch.tanh(scaled / self.softcap) * self.softcap


@dataclass(frozen=True, kw_only=True)
class _Settings:
    rule: LogitRule
    compiled: bool
    wants_hidden: bool
    wants_weight: bool
    wants_bias: bool

    @property
    def wants_gradient(self) -> bool:
        return self.wants_hidden or self.wants_weight or self.wants_bias


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rule: LogitRule, *, compiled: bool
) -> Tensor:
    """Cross-entropy of `hidden @ weight.T + bias`, summed over the tokens whose target is not -100, in fp32 or finer.

    Args:
        hidden: Last hidden states. [N, H]
        weight: The head. [V, H]
        bias: The head's, if it has one. [V]
        targets: Token ids. [N]
        rule: What the model does to its logits.
        compiled: Whether softmax and gradient of a chunk are one compiled kernel.

    Returns:
        The loss: [].
    """
    learns = torch.is_grad_enabled()
    settings = _Settings(
        rule=rule,
        compiled=compiled,
        wants_hidden=learns and hidden.requires_grad,
        wants_weight=learns and weight.requires_grad,
        wants_bias=learns and bias is not None and bias.requires_grad,
    )
    function: Any = _LinearCrossEntropy.apply
    return function(hidden, weight, bias, targets, settings)


def fine_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of softmax and sums: fp32, or fp64 where the model computes in it."""
    return torch.promote_types(dtype, torch.float32)


class _LinearCrossEntropy(torch.autograd.Function):
    """See [Note: gradients in forward]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: _Settings
    ) -> Tensor:
        """Loss of all chunks, and the gradients of what is trained: [N, H], [V, H], [V], [N] -> []."""
        gradients = _Gradients(hidden, weight, bias, settings)
        total = hidden.new_zeros((), dtype=fine_dtype(hidden.dtype))
        one_chunk = _one_chunk(settings.rule, with_gradient=settings.wants_gradient, compiled=settings.compiled)
        size = fused_chunk(len(hidden), len(weight), hidden.element_size(), compiled=settings.compiled)
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            logits = F.linear(hidden[part], weight, bias)  # [C, V]
            if settings.compiled:
                torch._dynamo.maybe_mark_dynamic(logits, 0)  # pyright: ignore[reportPrivateUsage]
            total += one_chunk(logits, targets[part])
            gradients.add(part, logits, hidden[part])
        ctx.gradients = gradients
        return total

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        """Hands the gradients over, times the incoming one: [] -> [N, H], [V, H], [V]."""
        gradients: _Gradients | None = ctx.gradients
        if gradients is None:
            raise RuntimeError("the fused loss gives its gradients once; a second backward needs a second forward")
        ctx.gradients = None
        return (*gradients.times(incoming[0]), None, None)


class _Gradients:
    """Gradients of a sum over chunks, while they are added up."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: _Settings) -> None:
        self._weight = weight
        self._fine = fine_dtype(weight.dtype)
        self._hidden_gradient = torch.empty_like(hidden) if settings.wants_hidden else None
        self._wants_weight = settings.wants_weight
        self._weight_gradient: Tensor | None = None
        self._bias_gradient = (
            torch.zeros_like(bias, dtype=self._fine) if settings.wants_bias and bias is not None else None
        )
        self._num_tokens = len(hidden)

    def add(self, part: slice, logit_gradient: Tensor, hidden: Tensor) -> None:
        """One chunk more: gradient by its logits [C, V], its hidden states [C, H]."""
        if self._hidden_gradient is not None:
            torch.mm(logit_gradient, self._weight, out=self._hidden_gradient[part])
        if self._bias_gradient is not None:
            self._bias_gradient += logit_gradient.sum(0, dtype=self._fine)
        if not self._wants_weight:
            return
        if len(hidden) == self._num_tokens:  # one chunk needs no sum
            self._weight_gradient = logit_gradient.t() @ hidden
        elif self._weight_gradient is None:
            self._weight_gradient = torch.empty_like(self._weight, dtype=self._fine)
            add_product(self._weight_gradient, logit_gradient.t(), hidden, keep=False)
        else:
            add_product(self._weight_gradient, logit_gradient.t(), hidden, keep=True)

    def times(self, factor: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of hidden states, weight and bias, times a number, in their dtypes."""
        dtype = self._weight.dtype
        hidden = None if self._hidden_gradient is None else self._hidden_gradient.mul_(factor)
        return hidden, _times(self._weight_gradient, factor, dtype), _times(self._bias_gradient, factor, dtype)


def _times(tensor: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    if tensor is None:
        return None
    if tensor.dtype == dtype:
        return tensor.mul_(factor)
    return torch.mul(tensor, factor, out=torch.empty_like(tensor, dtype=dtype))  # product and cast in one kernel


def add_product(total: Tensor, left: Tensor, right: Tensor, *, keep: bool) -> None:
    """Total = left @ right, or total += left @ right where it is to keep what it holds; total may be finer.

    Args:
        total: Written in place. [M, K]
        left: [M, C]
        right: [C, K]
        keep: Whether what total holds stays in the sum.
    """
    beta = 1 if keep else 0
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
    elif left.device.type == "cuda" and sums_in_fp32(left.dtype, left.device):
        # The product leaves its fp32 accumulators as they are: no rounding and no second pass over the total.
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    elif keep:
        total += left @ right
    else:
        total.copy_(left @ right)


@functools.cache
def sums_in_fp32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this card's library adds a product of 16-bit matrices to an fp32 one; asked once, by trying it."""
    left = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.full((16, 16), 2.0**-10, device=device)
    try:
        torch.addmm(total, left, left, out_dtype=torch.float32, beta=1, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 16 + 2.0**-10).all())


@functools.cache
def _one_chunk(rule: LogitRule, *, with_gradient: bool, compiled: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def one_chunk(logits: Tensor, targets: Tensor) -> Tensor:
        return chunk_loss(logits, targets, rule, with_gradient=with_gradient)

    return torch.compile(one_chunk) if compiled else one_chunk


def chunk_loss(logits: Tensor, targets: Tensor, rule: LogitRule, *, with_gradient: bool) -> Tensor:
    """Summed loss of a chunk; its logits are overwritten by their gradient: [C, V], [C] -> []."""
    fine = logits.to(fine_dtype(logits.dtype))
    if rule.scale != 1:
        fine = fine * rule.scale
    bounded = None if rule.softcap is None else torch.tanh(fine / rule.softcap)
    if bounded is not None and rule.softcap is not None:
        fine = bounded * rule.softcap
    learned = targets != IGNORE_INDEX  # [C]
    targets = torch.where(learned, targets, 0)[:, None]  # [C, 1]
    logsumexp = torch.logsumexp(fine, -1, keepdim=True)  # [C, 1]
    losses = torch.where(learned, (logsumexp - fine.gather(-1, targets)).squeeze(-1), 0)
    if with_gradient:
        gradient = (fine - logsumexp).exp_()
        if torch.compiler.is_compiling():  # a comparison melts into the kernel; a scatter would write all of it out
            hit = torch.arange(logits.shape[-1], device=logits.device) == targets
            gradient = gradient - hit.to(gradient.dtype)
        else:
            gradient.scatter_add_(-1, targets, torch.full_like(targets, -1, dtype=gradient.dtype))
        if bounded is not None:
            gradient.mul_(1 - bounded.square())
        if rule.scale != 1:
            gradient.mul_(rule.scale)
        logits.copy_(gradient.masked_fill_(~learned[:, None], 0))
    return losses.sum()
