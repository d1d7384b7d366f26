"""Job: what the user wants, and nothing about how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.vocabulary.limits import Amount, Count, LoraRank, Positive, Share, Tokens
from shardwise.vocabulary.model import ModelShape

Tuning = Literal["full", "lora", "qlora"]
TuningWish = Literal["full", "lora", "qlora", "any"]
Precision = Literal["bf16", "bf16_pure", "fp32", "fp8"]
"""bf16: fp32 master weights, bf16 compute. bf16_pure: bf16 weights without masters. fp8: as bf16, with fp8 products."""
OptimizerName = Literal["adamw", "adamw_bf16_states", "adamw_8bit", "paged_adamw_8bit", "lamb", "sgd"]
Attention = Literal["sdpa", "flash", "eager"]
ReduceDtype = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters, in PEFT's words."""

    r: LoraRank = 16
    alpha: Count = 32
    dropout: Share = 0.0
    target_modules: tuple[str, ...] = ("all-linear",)
    """Last parts of module names, or `all-linear` for every matrix of the blocks (not the head)."""
    adapter_dtype: Literal["fp32", "bf16"] = "fp32"
    use_dora: bool = False
    """Train the length of each row of a weight apart from its direction (arXiv:2402.09353)."""
    use_rslora: bool = False
    """Scale adapters by alpha / sqrt(r) instead of alpha / r (arXiv:2312.03732)."""


@dataclass(frozen=True, kw_only=True)
class SequenceLengths:
    """The length distribution of a data set after truncation, in tokens."""

    num_sequences: Count
    total_tokens: Tokens
    supervised_tokens: Tokens
    longest: Count
    mean: Positive
    p50: Count
    p95: Count
    quantiles: tuple[int, ...] = ()
    """Lengths at equal steps of probability from the shortest to the longest, both included; at least two or none."""

    def expected_width(self, micro_batch_size: int, global_batch_size: int) -> float:
        """Mean tokens of a padded row when each step's sequences are grouped by length into micro-batches.

        The k-th of n sorted sequences is taken at probability k / (n + 1); a micro-batch is as wide as its longest.
        """
        if len(self.quantiles) < 2:
            return self.mean if micro_batch_size == 1 else float(self.longest)
        groups = max(1, global_batch_size // micro_batch_size)
        at = (self._quantile((i + 1) * micro_batch_size / (global_batch_size + 1)) for i in range(groups))
        return sum(at) / groups

    def _quantile(self, probability: float) -> float:
        position = min(max(probability, 0.0), 1.0) * (len(self.quantiles) - 1)
        low = min(int(position), len(self.quantiles) - 2)
        return self.quantiles[low] + (position - low) * (self.quantiles[low + 1] - self.quantiles[low])


@dataclass(frozen=True, kw_only=True)
class Job:
    """A fine-tune: the model, the data's size, the wishes."""

    model: ModelShape
    tuning: TuningWish = "full"
    sequence_length: Count = 2048
    """Tokens of one sequence, padded or packed to this."""
    global_batch_size: Count = 32
    """Sequences of one optimizer step over all cards (accumulation included)."""
    precision: Precision = "bf16"
    reduce_dtype: ReduceDtype = "fp32"
    """Dtype in which gradients cross the wire under sharding."""
    optimizer: OptimizerName = "adamw"
    lora: LoraSettings = LoraSettings()
    attention: Attention = "sdpa"
    packing: bool = False
    lengths: SequenceLengths | None = None
    """Of the user's data set, if it was looked at."""
    num_train_epochs: Positive = 1.0
    max_steps: Count | None = None
    learning_rate: Amount = 2e-5
    price_per_gpu_hour: Positive | None = None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all cards, padding included, if every sequence is as long as may be."""
        return self.global_batch_size * self.sequence_length

    def typical_length(self, micro_batch_size: int) -> float:
        """Tokens that a row of a micro-batch takes on average, padding included: what decides time.

        Memory is decided by `sequence_length`, the longest that may come.
        """
        if self.lengths is None or self.packing:
            return float(self.sequence_length)
        return self.lengths.expected_width(micro_batch_size, self.global_batch_size)
