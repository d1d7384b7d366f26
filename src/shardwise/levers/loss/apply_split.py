"""Cross-entropy where every rank of tp holds the logits of its own part of the vocabulary.

A rank finds, for each of its tokens, the largest of its logits, the sum of their exponentials and the target's logit if
it is among them. One all_gather of these three numbers a token gives every rank the same loss; the backward sends
nothing.

[Note: why not loss_parallel] torch's `loss_parallel` computes the same with three all_reduces, makes three more fp32
copies of the logits in its backward, and has to be switched on around every backward, also where a pipeline's schedule
calls it.

Shapes: N tokens, V/tp logits on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


def split_cross_entropy(logits: Tensor, targets: Tensor, group: dist.ProcessGroup, ignore_index: int) -> Tensor:
    """Cross-entropy in fp32 (or finer), summed over the tokens that are learned; the same on every rank.

    Args:
        logits: This rank's part; parts are equal and in the order of the ranks. [N, V/tp]
        targets: Of the whole vocabulary, or `ignore_index`. [N]
        group: The ranks of tp.
        ignore_index: Target of a token that is not learned.

    Returns:
        The sum. []
    """
    loss: Tensor = _SplitCrossEntropy.apply(logits, targets, group, ignore_index)
    return loss


def whole_hidden(hidden: Tensor, weight: DTensor, num_tokens: int) -> Tensor:
    """Hidden states of all tokens of each row, for a head that is split; their gradients are summed over tp once.

    Args:
        hidden: Of all tokens, or of this rank's part of each row (sequence parallel). [B, T or T/tp, H]
        weight: The head's.
        num_tokens: T.

    Returns:
        The states. [B, T, H]
    """
    here = Replicate() if hidden.shape[1] == num_tokens else Shard(1)
    spread = DTensor.from_local(hidden, weight.device_mesh, [here], run_check=False)
    return spread.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


# torch 2.13 has renamed it and warns of the name that torch 2.11 knows.
gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup, ignore_index: int) -> Tensor:
        fine = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)  # [N, V/tp]
        size = fine.shape[1]
        own = targets - dist.get_rank(group) * size
        mine = (own >= 0) & (own < size)  # [N]
        own = own.clamp(0, size - 1)[:, None]  # [N, 1]
        largest = fine.amax(dim=1)  # [N]
        at_target = torch.where(mine, fine.gather(1, own).squeeze(1), 0)
        fine.sub_(largest[:, None]).exp_()
        stats = torch.stack([largest, fine.sum(dim=1), at_target])  # [3, N]
        num_ranks, num_tokens = dist.get_world_size(group), len(targets)
        everyone = stats.new_empty((3 * num_ranks, num_tokens))
        gather(everyone, stats, group=group)
        everyone = everyone.view(num_ranks, 3, num_tokens)
        top = everyone[:, 0].amax(dim=0)
        total = (everyone[:, 1] * (everyone[:, 0] - top).exp()).sum(dim=0)
        learned = targets != ignore_index
        losses = total.log() + top - everyone[:, 2].sum(dim=0)
        fine.mul_(((largest - top).exp() / total)[:, None])  # the probabilities
        ctx.save_for_backward(fine, own, mine, learned)
        ctx.dtype = logits.dtype
        return torch.where(learned, losses, 0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        fine, own, mine, learned = ctx.saved_tensors
        fine.scatter_add_(1, own, -mine[:, None].to(fine.dtype))  # in place: nobody goes backward twice
        fine.mul_((learned * grads[0])[:, None])
        return fine.to(ctx.dtype), None, None, None
