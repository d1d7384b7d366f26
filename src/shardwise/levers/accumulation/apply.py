"""Accumulation: micro-batches of one step are summed, then normalized once by the step's supervised tokens.

[Note: one mean] The loss of a step is the mean over all supervised tokens of all its micro-batches on all ranks, not a
mean of means: a short answer weighs as much a token as a long one, however the batch is cut. The number of tokens is
known from the batch plan, so nothing is counted over the wire.
"""

from __future__ import annotations

from shardwise.vocabulary.strategy import Strategy


def loss_scale(strategy: Strategy, num_supervised_tokens: int) -> float:
    """What a micro-batch's summed loss is multiplied with before backward.

    `fully_shard` averages gradients over the data-parallel ranks; multiplying by their number makes it the sum.

    Args:
        strategy: For the number of data-parallel ranks.
        num_supervised_tokens: Of the whole step, over all ranks and micro-batches.
    """
    return strategy.data_parallel / max(num_supervised_tokens, 1)
