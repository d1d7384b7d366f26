"""Before the first step: the model as it is split computes the loss that transformers computes without us.

It catches what no single sentinel looks for: garbage in a buffer, a weight under the wrong name, a wrong mask. Rank 0
loads the plain model on the CPU in fp32, so only models small enough to load twice are compared.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardwise.errors import PlanMismatchError
from shardwise.levers.precision.apply import compute_dtype
from shardwise.trainer.attention import is_adopted
from shardwise.trainer.data.collate import IGNORE_INDEX, Batch
from shardwise.trainer.evaluate import forward_only, losses_of
from shardwise.trainer.model import Skeleton
from shardwise.trainer.step import Stepper

MAX_PARAMETERS = 500_000_000
"""Larger models are not loaded a second time."""
MAX_TOKENS = 256
"""Of the row that is compared."""
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""Relative difference of the loss that rounding explains, by compute dtype; wrong buffers give a multiple of it."""

QUANTIZED_TOLERANCE = 0.15
"""The same where weights have 4 bits or products 8: small models lose some percent; wrong bytes give a multiple."""


def check_first_loss(skeleton: Skeleton, folder: str, batch: Batch, stepper: Stepper) -> str | None:
    """Compares the losses of one row; every rank must call it with the same batch.

    Args:
        skeleton: The model with its values, before the first step.
        folder: Where its weights came from.
        batch: One micro-batch, the same on every rank, one document a row.
        stepper: What computes the split model's loss.

    Returns:
        A sentence for the user; None if the model is too large to be compared.

    Raises:
        PlanMismatchError: The losses differ by more than rounding explains.
    """
    strategy, mesh = stepper.strategy, stepper.mesh
    if sum(parameter.numel() for parameter in skeleton.template.parameters()) > MAX_PARAMETERS:
        return None
    most = MAX_TOKENS - MAX_TOKENS % strategy.tp  # sequence parallel cuts a row into equal parts
    input_ids, labels = batch.input_ids[:1, :most], batch.labels[:1, :most]  # [1, T]
    num_tokens = int((labels[:, 1:] != IGNORE_INDEX).sum())
    if num_tokens == 0:
        return None
    row = Batch(input_ids=input_ids, labels=labels, position_ids=batch.position_ids[:1, :most])
    with forward_only(skeleton.model):
        summed = losses_of(stepper, [row]).cpu()
    if mesh.pipeline is not None:  # only the last stages know it
        dist.all_reduce(summed, group=mesh.control)
        summed *= mesh.num_stages / dist.get_world_size(mesh.control)
    ours = summed.item() / num_tokens
    theirs = [_plain_loss(skeleton, folder, input_ids, labels) if mesh.is_first else 0.0]
    dist.broadcast_object_list(theirs, src=0, group=mesh.control)
    tolerance = TOLERANCES[compute_dtype(strategy)]
    if strategy.tuning == "qlora" or strategy.precision == "fp8":
        tolerance = QUANTIZED_TOLERANCE
    if not math.isclose(ours, theirs[0], rel_tol=tolerance, abs_tol=tolerance):
        raise PlanMismatchError(
            f"The split model's loss on the first row is {ours:.4f}, transformers' own is {theirs[0]:.4f}; rounding "
            f"explains {100 * tolerance:.1f} %. The model was not built as its files say."
        )
    return f"First loss {ours:.4f}, by transformers alone {theirs[0]:.4f}"


@torch.no_grad()
def _plain_loss(skeleton: Skeleton, folder: str, input_ids: torch.Tensor, labels: torch.Tensor) -> float:
    """Mean loss of one row by transformers' model on the CPU in fp32: [1, T], [1, T] -> number."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # the run has a line of its own
    attention: Any = "sdpa" if is_adopted(skeleton.template) else skeleton.template.config._attn_implementation
    plain = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, local_files_only=True
    )
    logits = plain(input_ids=input_ids.cpu()).logits  # [1, T, V]
    return F.cross_entropy(logits[0, :-1], labels[0, 1:].cpu(), ignore_index=IGNORE_INDEX).item()
