"""Placement: what of a model one rank works on, before data-parallel sharding divides it.

Every `cost.py` reads the same Placement, so that pipeline and tensor degrees are applied in one place and no axis can
forget another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from shardwise.vocabulary.job import Job, LoraSettings
from shardwise.vocabulary.model import LinearShape, ModelShape
from shardwise.vocabulary.strategy import Strategy
from shardwise.vocabulary.timeline import Site

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "bf16_pure": 2, "fp8": 2}
"""Of parameters and activations in compute, by precision (fp8 is quantized inside the products only)."""
MASTER_BYTES = {"fp32": 4, "bf16": 4, "bf16_pure": 2, "fp8": 4}
"""Of the trainable parameters as the optimizer sees them, by precision."""
ADAPTER_BYTES = {"fp32": 4, "bf16": 2}
NF4_BYTES = 0.5 + 4 / 64
"""bitsandbytes NF4: half a byte and one fp32 scale for 64 elements."""
NF4_DOUBLE_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""With double quantization of the scales, as the engine packs."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters that are gathered and reduced together; `count` equal groups."""

    site: Site
    count: int
    trainable: int
    """Elements of one group that the optimizer moves."""
    frozen: int
    """Elements of one group that it does not."""

    @property
    def elements(self) -> int:
        """All elements of one group."""
        return self.trainable + self.frozen


Figure = TypeVar("Figure")
_OF_THE_SPLIT = (
    "num_blocks", "block_elements", "adapter_elements", "groups", "trainable", "frozen", "quantized", "frozen_bytes",
)  # fmt: skip
"""Properties of a Placement that do not depend on micro-batch, accumulation, checkpointing and loss."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The part of `job.model` on one rank of pipeline stage `stage`."""

    job: Job
    strategy: Strategy
    stage: int = 0

    def variant(self, strategy: Strategy) -> Placement:
        """The same part under a strategy that differs in micro-batch, accumulation, checkpointing or loss only.

        What follows from mesh, stage and tuning alone is not counted again.
        """
        other = Placement(job=self.job, strategy=strategy, stage=self.stage)
        known = self.__dict__
        other.__dict__.update({name: known[name] for name in _OF_THE_SPLIT if name in known})
        other.__dict__["_worked_out"] = self._worked_out
        return other

    @cached_property
    def _worked_out(self) -> dict[str, Any]:
        return {}

    def once(self, name: str, work_out: Callable[[Placement], Figure]) -> Figure:
        """A figure that follows from mesh, stage and tuning alone, worked out once for all variants of a split.

        Args:
            name: Of the figure, the same for the same `work_out`.
            work_out: Makes it. Must not read micro-batch, accumulation, checkpointing or loss.
        """
        known = self._worked_out
        if name not in known:
            known[name] = work_out(self)
        figure: Figure = known[name]
        return figure

    @property
    def model(self) -> ModelShape:
        """The whole model's shape."""
        return self.job.model

    @property
    def is_first(self) -> bool:
        """Holds the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Holds the final norm and the head."""
        return self.stage == self.strategy.pp - 1

    @cached_property
    def num_blocks(self) -> int:
        """Blocks of this stage, all its chunks together."""
        layers, pp, chunks = self.model.num_hidden_layers, self.strategy.pp, self.strategy.virtual_stages
        return sum(len(blocks_of_chunk(layers, pp * chunks, self.stage + pp * turn)) for turn in range(chunks))

    @property
    def tokens(self) -> int:
        """Tokens of the largest micro-batch: what decides memory."""
        return self.strategy.micro_batch_size * self.job.sequence_length

    @property
    def typical_sequence(self) -> int:
        """Tokens of a row of a usual micro-batch: what decides time."""
        return max(1, round(self.job.typical_length(self.strategy.micro_batch_size)))

    @property
    def typical_tokens(self) -> int:
        """Tokens of a usual micro-batch, padding included: what decides time."""
        return self.strategy.micro_batch_size * self.typical_sequence

    @property
    def element_bytes(self) -> int:
        """Of one activation or gathered parameter."""
        return ELEMENT_BYTES[self.strategy.precision]

    @property
    def master_bytes(self) -> int:
        """Of one trainable parameter as the optimizer sees it."""
        if self.strategy.tuning == "full":
            return MASTER_BYTES[self.strategy.precision]
        return ADAPTER_BYTES[self.job.lora.adapter_dtype]

    @property
    def reduce_bytes(self) -> int:
        """Of one gradient element on the wire."""
        if self.strategy.precision == "fp32":
            return 4
        return 4 if self.strategy.reduce_dtype == "fp32" else 2

    @property
    def trains_all(self) -> bool:
        """True for a full fine-tune."""
        return self.strategy.tuning == "full"

    @cached_property
    def block_elements(self) -> int:
        """Elements of one block's base weights on this tensor rank (matrices split, norms whole)."""
        model, tp = self.model, self.strategy.tp
        matrices = sum(_split(linear, tp) for linear in model.linears)
        return matrices + model.norm_parameters_per_block

    @cached_property
    def adapter_elements(self) -> int:
        """Elements of one block's adapters on this tensor rank; 0 for a full fine-tune."""
        if self.trains_all:
            return 0
        return sum(
            adapter_parameters(linear, self.job.lora, self.strategy.tp) for linear in adapted(self.model, self.job.lora)
        )

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The parameter groups of this rank, in the order of the forward pass.

        Blocks each; the embedding alone where it is not tied to a head on the same rank; the root holds what is left,
        if anything. As the engine wraps them.
        """
        model, tp = self.model, self.strategy.tp
        table = -(-model.embedding_parameters // tp)
        groups: list[Group] = []
        separate = self.is_first and (not model.tie_word_embeddings or self.strategy.pp > 1)
        if separate:
            groups.append(self._group("embedding", 1, table))
        groups.append(self._group("block", self.num_blocks, self.block_elements, self.adapter_elements))
        root = (table if self.is_first and not separate else 0) + (model.hidden_size if self.is_last else 0)
        if self.is_last and (not model.tie_word_embeddings or not self.is_first):
            root += table
        if root:
            groups.append(self._group("root", 1, root))
        return tuple(groups)

    def _group(self, site: Site, count: int, base: int, adapters: int = 0) -> Group:
        if self.trains_all:
            return Group(site=site, count=count, trainable=base, frozen=0)
        return Group(site=site, count=count, trainable=adapters, frozen=base)

    def group(self, site: Site) -> Group | None:
        """The group of a site, if this rank has it."""
        return next((group for group in self.groups if group.site == site), None)

    @cached_property
    def trainable(self) -> int:
        """Elements on this rank that the optimizer moves, before sharding."""
        return sum(group.count * group.trainable for group in self.groups)

    @cached_property
    def frozen(self) -> int:
        """Elements on this rank that it does not move, before sharding."""
        return sum(group.count * group.frozen for group in self.groups)

    @cached_property
    def quantized(self) -> int:
        """Frozen elements held in 4 bits (the matrices of the blocks), before sharding; 0 unless QLoRA."""
        if self.strategy.tuning != "qlora":
            return 0
        return self.num_blocks * sum(_split(linear, self.strategy.tp) for linear in self.model.linears)

    def frozen_bytes_of(self, group: Group) -> float:
        """Bytes of one group's frozen weights: under QLoRA blocks' matrices are packed; the rest is as in compute."""
        packed = self.quantized / self.num_blocks if group.site == "block" and self.num_blocks else 0.0
        return packed * NF4_DOUBLE_BYTES + (group.frozen - packed) * self.element_bytes

    @cached_property
    def frozen_bytes(self) -> float:
        """Bytes of all frozen weights on this rank, before sharding."""
        return sum(group.count * self.frozen_bytes_of(group) for group in self.groups)

    @property
    def shards_frozen(self) -> bool:
        """Frozen weights are sharded under stage 3 only; below, they are replicated and never cross the wire."""
        return self.strategy.zero_stage == 3

    @property
    def micro_batches_in_flight(self) -> float:
        """Micro-batches whose activations this stage holds at once (1 without a pipeline).

        1F1B warms up with one for each later stage. Interleaved chunks are 1/v of a stage each;
        2 (p - 1 - stage) + (v - 1) p + 1 of them are in flight (arXiv:2104.04473). Zero bubble warms up with half as
        many and keeps them for the gradients of weights, which come late: p micro-batches on every stage. As torch's
        schedules have it; `tests/distributed/test_pipeline.py` counts.
        """
        strategy = self.strategy
        if strategy.pp == 1:
            return 1
        if strategy.pipeline_schedule == "gpipe":
            return strategy.accumulation
        if strategy.pipeline_schedule == "zero_bubble":
            return min(strategy.accumulation, strategy.pp)
        if strategy.pipeline_schedule == "interleaved_1f1b":
            chunks = 2 * (strategy.pp - 1 - self.stage) + (strategy.virtual_stages - 1) * strategy.pp + 1
            return min(strategy.accumulation, chunks / strategy.virtual_stages)
        return min(strategy.accumulation, strategy.pp - self.stage)

    @property
    def losses_in_flight(self) -> int:
        """Micro-batches whose loss waits for its backward at once: all under GPipe, otherwise one."""
        strategy = self.strategy
        return strategy.accumulation if strategy.pp > 1 and strategy.pipeline_schedule == "gpipe" else 1


def blocks_of_chunk(num_layers: int, num_chunks: int, chunk: int) -> range:
    """The blocks of one chunk of a pipeline, by number; the first chunks take one more where layers do not divide.

    Chunk c lies on stage c modulo pp; without interleaving a stage is one chunk.
    """
    base, rest = divmod(num_layers, num_chunks)
    start = chunk * base + min(chunk, rest)
    return range(start, start + base + (1 if chunk < rest else 0))


def adapted(model: ModelShape, lora: LoraSettings) -> tuple[LinearShape, ...]:
    """The matrices of a block that get adapters. Experts of a mixture are fused parameters and get none."""
    everything = "all-linear" in lora.target_modules
    return tuple(
        linear
        for linear in model.linears
        if linear.copies == 1 and (everything or linear.name in lora.target_modules) and linear.site != "router"
    )


def adapter_parameters(linear: LinearShape, lora: LoraSettings, tp: int = 1) -> int:
    """Elements of A [r, in] and B [out, r], and DoRA's lengths [out]; the side that the base matrix splits is split."""
    down, up = lora.r * linear.in_features, lora.r * linear.out_features
    lengths = linear.out_features if lora.use_dora else 0
    return -(-down // tp) + up + lengths if splits_input(linear) else down + -(-(up + lengths) // tp)


def splits_input(linear: LinearShape) -> bool:
    """True for matrices that tensor parallel splits along in_features (row-wise: o_proj, down_proj)."""
    return linear.name in ("o_proj", "down_proj")


def _split(linear: LinearShape, tp: int) -> int:
    """Elements of a matrix (and bias) on one tensor rank."""
    if linear.site == "router":
        return linear.num_parameters
    matrix = -(-linear.copies * linear.matrix_parameters // tp)
    bias = linear.copies * linear.out_features if linear.bias else 0
    return matrix + (bias if splits_input(linear) else -(-bias // tp))
