"""One optimizer step: micro-batches forward and backward, one norm, one update.

[Note: no waiting] The host never waits for the card inside a step. Loss and norm stay on the card until the next step
is under way; a step whose norm is not finite is skipped by the fused optimizer itself, which reads the flag on the
card. Only optimizers without that flag make the host look at the norm.

[Note: true norm] Clipping uses the norm of the whole gradient: squares of the local parts, summed over dp_shard by one
all_reduce of one number, and over tp and the stages of a pipeline by another each. Replicas hold the same parts, so
dp_replicate is not summed over; a weight that two stages share counts on one of them, and what every rank of tp holds
whole on the first.

[Note: empty micro-batch] A rank without samples still forwards and backwards a dummy, because the others gather and
reduce with it; its labels are all -100, so its loss and gradients are zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.axes.pipeline.apply import chunks_of
from shardwise.axes.tensor.apply import as_residual, is_split, partial_parameters, sum_partial_gradients
from shardwise.levers.accumulation.apply import loss_scale
from shardwise.trainer.attention import bounds_for
from shardwise.trainer.data.collate import Batch, document_causal_mask
from shardwise.trainer.mesh import RankMesh
from shardwise.trainer.model import Skeleton
from shardwise.trainer.parallelize import before_micro_batch
from shardwise.trainer.pipeline_step import Passes, Pipeline
from shardwise.vocabulary.strategy import Strategy

# One kernel for a list of tensors; torch exports no public name for them.
foreach_mul_: Any = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
foreach_norm: Any = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepOutcome:
    """What a step leaves on the device; reading it waits for the step."""

    loss: Tensor
    """This rank's share of the step's mean loss a supervised token, 0 on stages without the loss: the sum over ranks is
    the loss, counted as often as ranks share a tensor (`RankMesh.loss_copies`). []"""
    grad_norm: Tensor
    """Norm of the whole gradient before clipping. []"""
    skipped: Tensor
    """1 if the norm was not finite and nothing was updated. []"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Stepper:
    """What every step of a run needs."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    strategy: Strategy
    mesh: RankMesh
    max_grad_norm: float
    """0 turns clipping off; the norm is computed all the same."""
    attention: str = "sdpa"
    pipeline: Pipeline | None = None
    """What drives the stages; None without a pipeline."""

    def run(
        self,
        batches: Iterable[Batch],
        num_batches: int,
        num_tokens: int,
        *,
        after_backward: Callable[[], None] | None = None,
    ) -> StepOutcome:
        """One optimizer step.

        Args:
            batches: This rank's micro-batches, on the device.
            num_batches: How many they are; equal on every rank.
            num_tokens: Supervised tokens of the step over all ranks.
            after_backward: Called while the step's gradients exist.
        """
        loss = self.backward(batches, num_batches, num_tokens)
        if self.mesh.tensor is not None:
            sum_partial_gradients(self._partial, self.mesh.tensor.get_group())
        if after_backward is not None:
            after_backward()
        norm = self.clip()
        skipped = self._update(norm)
        # Offloaded gradients have their norm on the host.
        return StepOutcome(loss=loss, grad_norm=norm.to(loss.device), skipped=skipped.to(loss.device))

    def backward(self, batches: Iterable[Batch], num_batches: int, num_tokens: int) -> Tensor:
        """Forward and backward of every micro-batch; returns this rank's share of the loss: []."""
        scale = loss_scale(self.strategy, num_tokens)
        if self.pipeline is not None:
            return self.pipeline.backward(list(batches), scale) / max(num_tokens, 1)
        total: Tensor | None = None
        for index, batch in enumerate(batches):
            before_micro_batch(self.model, self.strategy, is_last=index == num_batches - 1)
            loss = summed_loss(self.model, batch, self.attention)
            (loss * scale).backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None, "a step without a micro-batch"
        return total / max(num_tokens, 1)

    @functools.cached_property
    def _partial(self) -> list[nn.Parameter]:
        return partial_parameters(self.model)

    def clip(self) -> Tensor:
        """Scales all gradients so that their norm is at most max_grad_norm; returns the norm before: []."""
        gradients = local_gradients(self.optimizer)
        norm = global_norm(local_gradients(self.optimizer, counts=self._counts_here), self.mesh)
        if self.max_grad_norm > 0:
            factor = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            foreach_mul_(gradients, factor.to(gradients[0].dtype))
        return norm

    def _counts_here(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts a parameter's gradient ([Note: true norm])."""
        if self.pipeline is not None and parameter is self.pipeline.counted_elsewhere():
            return False
        return self.mesh.tensor_rank == 0 or is_split(parameter)

    def _update(self, norm: Tensor) -> Tensor:
        skipped = (~torch.isfinite(norm)).to(torch.float32)
        optimizer: Any = self.optimizer
        if all(group.get("fused") for group in optimizer.param_groups):
            optimizer.grad_scale = None
            optimizer.found_inf = skipped
            optimizer.step()
        elif not skipped.item():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return skipped


def summed_loss(model: nn.Module, batch: Batch, attention: str) -> Tensor:
    """Cross-entropy summed over the supervised tokens of one micro-batch, in fp32: []."""
    return model(**model_inputs(batch, attention), loss_labels=batch.labels, loss_rows=batch.loss_rows)


def pipeline_of(skeleton: Skeleton, mesh: RankMesh, strategy: Strategy, attention: str) -> Pipeline | None:
    """What drives the stages of a wrapped model; None without a pipeline. Every rank must call it."""
    if strategy.pp == 1:
        return None

    def forward(chunk: nn.Module, batch: Batch, hidden: Tensor | None) -> Tensor:
        inputs = model_inputs(batch, attention)
        if hidden is not None:
            del inputs["input_ids"]
            inputs["inputs_embeds"] = hidden if mesh.tensor is None else as_residual(hidden, mesh.tensor, strategy)
        if chunk is last:
            inputs |= {"loss_labels": batch.labels, "loss_rows": batch.loss_rows}
        return chunk(**inputs)

    def before_backward(chunk: nn.Module, is_last: bool) -> None:
        before_micro_batch(chunk, strategy, is_last=is_last)

    last = chunks_of(skeleton.model)[-1] if mesh.is_last_stage else None
    return Pipeline(skeleton, mesh, strategy, Passes(forward=forward, before_backward=before_backward))


def model_inputs(batch: Batch, attention: str) -> dict[str, Any]:
    """What the model's forward takes.

    Rows of one document need no mask: attention is causal and padding lies behind. Several documents a row are kept
    apart by a mask, or by their bounds where the attention takes bounds.
    """
    inputs: dict[str, Any] = {"input_ids": batch.input_ids}
    if batch.document_ids is None:
        return inputs
    inputs["position_ids"] = batch.position_ids
    if batch.cu_seqlens is not None:
        return inputs | bounds_for(batch.cu_seqlens, batch.max_seqlen)
    mask = document_causal_mask(batch.document_ids)
    if attention == "eager":
        return inputs | {"attention_mask": torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -1e9)}
    return inputs | {"attention_mask": mask}


def local_gradients(
    optimizer: torch.optim.Optimizer, *, counts: Callable[[nn.Parameter], bool] | None = None
) -> list[Tensor]:
    """This rank's part of every gradient, or of those that count, in the order of the optimizer's parameters."""
    parameters: list[nn.Parameter] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [one.grad for one in parameters if one.grad is not None and (counts is None or counts(one))]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def global_norm(gradients: Sequence[Tensor], mesh: RankMesh) -> Tensor:
    """The 2-norm of a gradient of which every rank of dp_shard holds a part ([Note: true norm]): []."""
    exact = torch.promote_types(gradients[0].dtype, torch.float32)
    norms = foreach_norm([gradient for gradient in gradients if gradient.numel()], 2, dtype=exact)
    square = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=exact, device=gradients[0].device)
    shards = mesh.data.get_group(mesh.data.ndim - 1)
    if dist.get_world_size(shards) > 1:
        dist.all_reduce(square, group=shards)
    if mesh.tensor is not None:
        dist.all_reduce(square, group=mesh.tensor.get_group())
    if mesh.pipeline is not None:
        dist.all_reduce(square, group=mesh.pipeline.get_group())
    return square.sqrt()
