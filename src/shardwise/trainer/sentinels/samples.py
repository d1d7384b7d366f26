"""Data: every step computes the samples that were planned, each once, and learns from at least one token.

Each rank sends three numbers of its step along with its loss, so the check costs no message: how many samples it had,
how many learned tokens, and the sum of a hash of its sample numbers. A sample that two ranks share, or that none has,
changes the sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from shardwise.errors import PlanMismatchError, TrainingError
from shardwise.trainer.data.batches import BatchPlan
from shardwise.trainer.data.collate import Batch
from shardwise.trainer.mesh import RankMesh
from shardwise.trainer.sentinels.words import name_ranks, some
from shardwise.vocabulary.strategy import Strategy

_HASH = 2_654_435_761
"""Odd, near 2**32 / golden ratio: neighbors get far values."""


@dataclass(frozen=True, kw_only=True)
class StepData:
    """What a step has computed on, of one rank or of all."""

    num_samples: int
    num_supervised: int
    hash_sum: int
    """Below 2**52 for a million samples, so that it travels as fp64."""


def data_of(batches: Sequence[Batch]) -> StepData:
    """What this rank has."""
    return StepData(
        num_samples=sum(len(batch.sample_ids) for batch in batches),
        num_supervised=sum(batch.num_supervised_tokens for batch in batches),
        hash_sum=_hash_sum([sample for batch in batches for sample in batch.sample_ids]),
    )


def planned_data(plan: BatchPlan, step: int) -> StepData:
    """What all ranks together should have."""
    samples = plan.sample_ids(step)
    return StepData(
        num_samples=len(samples), num_supervised=plan.num_supervised_tokens(step), hash_sum=_hash_sum(samples)
    )


def _hash_sum(samples: Sequence[int]) -> int:
    numbers = np.asarray(samples, dtype=np.uint64)
    return int(((numbers + np.uint64(1)) * np.uint64(_HASH) % np.uint64(2**32)).sum())


def check_data(step: int, found: StepData, planned: StepData, own: Sequence[int], mesh: RankMesh) -> None:
    """Compares a step with its plan; every rank gives the same `found`, so all come to the same end.

    Args:
        step: The optimizer step, from 0.
        found: Of all data-parallel ranks together.
        planned: What they should have had.
        own: This rank's samples in that step, to find the one that is wrong.
        mesh: All ranks, and how many of them see the same data.

    Raises:
        TrainingError: A sample is missing or there twice, or other tokens were learned than were planned.
    """
    if found == planned:
        return
    everyone: list[Any] = [None] * dist.get_world_size(mesh.control)
    dist.all_gather_object(everyone, sorted(own), group=mesh.control)
    holders: dict[int, set[int]] = {}
    for rank, samples in enumerate(everyone):
        for sample in samples:
            holders.setdefault(sample, set()).add(rank)
    twice = [sample for samples in everyone for sample, count in Counter(samples).items() if count > 1]
    shared = [f"{sample} on {name_ranks(ranks)}" for sample, ranks in holders.items() if len(ranks) > mesh.copies]
    raise TrainingError(
        f"Step {step + 1} was planned with {planned.num_samples} samples and {planned.num_supervised} learned tokens, "
        f"but the ranks have computed {found.num_samples} and {found.num_supervised}. "
        f"Samples on several ranks: {some(shared) or 'none'}; twice on one rank: "
        f"{some([str(sample) for sample in twice]) or 'none'}. The ranks do not read the same plan; check that all "
        "machines have the same data files and versions."
    )


def check_effective_batch(plan: BatchPlan, strategy: Strategy) -> None:
    """Before step 0: the batch that will be computed is the one that the strategy states.

    Raises:
        PlanMismatchError: It is another.
    """
    options = plan.options
    found = (options.micro_batch, options.num_ranks, options.global_batch)
    planned = (strategy.micro_batch_size, strategy.data_parallel, strategy.global_batch_size)
    names = ("micro-batch", "number of data-parallel ranks", "global batch")
    problems = [
        f"The {name} is {is_}, but the strategy says {should}: the learning rate was chosen for another batch."
        for name, is_, should in zip(names, found, planned, strict=True)
        if is_ != should
    ]
    num_micro_steps = plan.num_micro_steps(0)
    if not problems and num_micro_steps > strategy.accumulation:
        problems.append(f"Step 1 has {num_micro_steps} micro-batches a rank, planned are {strategy.accumulation}.")
    if problems:
        raise PlanMismatchError(*problems)
