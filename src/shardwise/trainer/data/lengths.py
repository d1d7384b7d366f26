"""The length distribution of a tokenized set, as the planner reads it."""

from __future__ import annotations

import numpy as np

from shardwise.trainer.data.store import TokenizedSet
from shardwise.vocabulary.job import SequenceLengths

NUM_QUANTILES = 41
"""From the shortest to the longest in steps of 2.5 %."""


def sequence_lengths(tokenized: TokenizedSet) -> SequenceLengths:
    """Lengths after truncation, in tokens."""
    lengths = tokenized.lengths
    quantiles = np.quantile(lengths, np.linspace(0, 1, NUM_QUANTILES), method="nearest")
    return SequenceLengths(
        num_sequences=len(lengths),
        total_tokens=int(lengths.sum()),
        supervised_tokens=int(tokenized.supervised_counts.sum()),
        longest=int(lengths.max()),
        mean=float(lengths.mean()),
        p50=int(np.quantile(lengths, 0.5, method="nearest")),
        p95=int(np.quantile(lengths, 0.95, method="nearest")),
        quantiles=tuple(int(value) for value in quantiles),
    )
