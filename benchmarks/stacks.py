"""How other training stacks differ from our engine, as far as memory is concerned: physical differences with a reason.

A case of tests/golden/cases.jsonl names the stack it was measured on. The planner's formulas price what all stacks
share (weights, gradients, moments, activations, loss); what a stack does differently is written here once for all its
cases. There is no constant for a single case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardwise.axes import fully_shard
from shardwise.axes.replicate import cost as replicate
from shardwise.axes.shard import cost as shard
from shardwise.levers.adapters import cost as adapters
from shardwise.levers.checkpointing import cost as checkpointing
from shardwise.levers.loss import cost as loss
from shardwise.levers.offload import cost as offload
from shardwise.levers.optimizer import cost as optimizer
from shardwise.planner.compute import head_gradient_bytes
from shardwise.planner.memory import runtime
from shardwise.planner.uncertainty import usable_bytes
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.memory import ALWAYS, CACHED, STEP, Category, Instant, MemoryBreakdown, Term, span
from shardwise.vocabulary.placement import NF4_BYTES, NF4_DOUBLE_BYTES, Group, Placement, adapted
from shardwise.vocabulary.units import MIB

Modules = Literal["plain", "ddp", "fully_shard", "fsdp1", "deepspeed"]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What carried a case."""

    modules: Modules
    """plain: torch modules on one card, autocast where precision is mixed. ddp: the same in DistributedDataParallel.
    fully_shard, fsdp1, deepspeed: blocks wrapped, embedding and head left to the root."""
    kernels: Literal["torch", "liger", "litgpt"] = "torch"
    """liger: fused norms and gated activation, which keep what compiled code keeps."""
    loss: Literal["plain", "compiled", "torchtune_chunked", "hf_before_4_45"] = "plain"
    optimizer_in_backward: bool = False
    activation_offload: bool = False
    adapters: Literal["shared_input", "own_copies"] = "shared_input"
    """own_copies: fp32 adapters under autocast, as PEFT trains them by default: every adapter casts its own input."""
    nf4: Literal["double", "single"] = "double"
    own_embedding: bool = False
    """The embedding is a group of its own, as in our engine (torchtune's recipes: custom_sharded_layers)."""
    waits_each_step: bool = False
    """The host waits for the card after each step (transformers' Trainer)."""
    clips_with_copy: bool = False
    """accelerate clips DTensors through a second copy of the local gradients (huggingface/transformers#46113)."""


LOGIT_BYTES = {
    "compiled": 8,  # bf16 logits and their gradient, fp32 log-softmax; the compiler makes no second fp32 copy
    "hf_before_4_45": 18,  # logits.float() and its shifted contiguous copy (4 + 4) on top of bf16 2, softmax 4, grad 4
    "torchtune_chunked": 2.5,  # bf16 logits whole (2); gradients of an eighth of them at a time (4 / 8), compiled
}
"""Bytes a logit at the instant of the loss, where a stack's code differs from today's Hugging Face code."""


@dataclass(frozen=True, kw_only=True)
class PeerPlacement(Placement):
    """A Placement whose embedding lies in the root group, as most peers wrap models."""

    own_embedding: bool = False

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Blocks and the root."""
        if self.own_embedding:
            return super().groups
        blocks = tuple(group for group in super().groups if group.site == "block")
        others = [group for group in super().groups if group.site != "block"]
        root = Group(
            site="root",
            count=1,
            trainable=sum(group.trainable for group in others),
            frozen=sum(group.frozen for group in others),
        )
        return (*blocks, root)


def breakdown(place: PeerPlacement, stack: Stack, cluster: Cluster) -> MemoryBreakdown:
    """All terms of a case on its stack."""
    terms = [*_states(place, stack), *offload.stores(place), *_moments(place), *adapters.stores(place)]
    terms += [*_activations(place, stack), *_loss(place, stack)]
    if stack.clips_with_copy:
        local = place.trainable * place.master_bytes / place.strategy.dp_shard
        terms.append(_term(Category.TEMPORARY, "gradients copied for clipping", local, (Instant.OPTIMIZER,)))
    kept = tuple(term for term in terms if term.bytes)
    side_streams = stack.modules not in ("plain", "ddp")
    used = MemoryBreakdown(terms=kept + runtime(place, cluster, kept, side_streams=side_streams))
    return used if stack.modules != "fsdp1" else _with_leftovers(used, cluster)


LEFTOVER_BYTES = 900 * MIB
"""Freed blocks that loading and flattening leave in the allocator under FSDP1; from the 19 readings of reserved memory
of `fsdpqlora`. Our engine makes weights where they stay and leaves none."""


def _with_leftovers(used: MemoryBreakdown, cluster: Cluster) -> MemoryBreakdown:
    room = max(0, usable_bytes(cluster) - used.device_bytes)
    return MemoryBreakdown(
        terms=tuple(
            dataclasses.replace(term, bytes=term.bytes + min(room, LEFTOVER_BYTES)) if term.name == CACHED else term
            for term in used.terms
        )
    )


def _moments(place: PeerPlacement) -> Iterator[Term]:
    """Other stacks leave embedding and head to the 8-bit optimizer, which our engine keeps out of it, and page all."""
    if place.strategy.optimizer == "paged_adamw_8bit":
        return
    tables = sum(group.trainable for group in place.groups if group.site != "block")
    for term in optimizer.stores(place):
        if place.strategy.optimizer == "adamw_8bit" and term.category is Category.OPTIMIZER:
            less = tables * (2 * optimizer.FLOAT_BYTES - 2 * optimizer.QUANTIZED_BYTES)
            yield dataclasses.replace(term, bytes=round(term.bytes - less / place.strategy.dp_shard))
        else:
            yield term


def _states(place: PeerPlacement, stack: Stack) -> tuple[Term, ...]:
    if stack.modules not in ("plain", "ddp"):
        terms = list(_head_first(place, replicate.stores(place) + shard.stores(place)))
        if place.strategy.offload == "optimizer":  # DeepSpeed keeps the shards in compute dtype on the card
            size = place.element_bytes * place.trainable / place.strategy.dp_shard
            terms.append(_term(Category.PARAMETER, "trainable weights", size, ALWAYS))
        return tuple(terms)
    terms = list(fully_shard.weights(place))
    if stack.nf4 == "single" and place.quantized:
        extra = place.quantized * (NF4_BYTES - NF4_DOUBLE_BYTES)
        terms.append(_term(Category.PARAMETER, "single quantized scales", extra, ALWAYS))
    if place.trains_all and place.master_bytes != place.element_bytes:
        copies = place.element_bytes * place.trainable
        during = span(Instant.FORWARD, Instant.BACKWARD_LAST)
        terms.append(_term(Category.TEMPORARY, "casts that autocast keeps", copies, during))
    whole = place.trainable * place.master_bytes
    if stack.optimizer_in_backward:
        largest = max(place.model.embedding_parameters, place.model.block_parameters) * place.master_bytes
        terms.append(_term(Category.GRADIENT, "gradient of one tensor", largest, (Instant.LOSS, Instant.REDUCE_LAST)))
        return tuple(terms)
    late = (Instant.BACKWARD_LAST, Instant.REDUCE_LAST, Instant.OPTIMIZER)
    always = STEP if place.strategy.accumulation > 1 else late
    terms.append(_term(Category.GRADIENT, "gradients", whole, always))
    if stack.modules == "ddp":
        terms.append(_term(Category.GRADIENT, "buckets of DistributedDataParallel", whole, ALWAYS))
    return tuple(terms)


def _head_first(place: PeerPlacement, terms: tuple[Term, ...]) -> Iterator[Term]:
    """Where the root holds embedding and head, only the head's gradient exists until backward reaches the embedding."""
    untied = not place.own_embedding and not place.model.tie_word_embeddings and place.trains_all
    for term in terms:
        if term.name == "root gradients" and untied:
            embedding = place.element_bytes * place.model.embedding_parameters
            before = tuple(instant for instant in term.alive if instant is not Instant.REDUCE_LAST)
            yield dataclasses.replace(term, bytes=term.bytes - embedding, alive=before)
            yield dataclasses.replace(term, alive=(Instant.REDUCE_LAST,))
        else:
            yield term


def _activations(place: PeerPlacement, stack: Stack) -> tuple[Term, ...]:
    fused = stack.kernels == "liger" or place.strategy.compile_blocks
    as_saved = dataclasses.replace(place, strategy=dataclasses.replace(place.strategy, compile_blocks=fused))
    terms = list(checkpointing.stores(as_saved))
    if stack.adapters == "own_copies":
        terms += _own_copies(place)
    if stack.activation_offload:
        kept = 2 * place.tokens * place.model.hidden_size * place.element_bytes
        terms = [term if term.name != "saved activations" else dataclasses.replace(term, bytes=kept) for term in terms]
    return tuple(terms)


def _own_copies(place: PeerPlacement) -> list[Term]:
    """Each adapter's own cast of its input, beyond the inputs that are shared already."""
    targets = adapted(place.model, place.job.lora)
    if place.job.lora.dropout > 0:
        return []  # dropout gives each adapter its own copy already
    own = sum(linear.in_features for linear in targets)
    names = {linear.name: linear.in_features for linear in targets}
    shared = max((names.get(name, 0) for name in ("q_proj", "k_proj", "v_proj")), default=0)
    shared += max((names.get(name, 0) for name in ("gate_proj", "up_proj")), default=0) + names.get("down_proj", 0)
    each = round(place.tokens * place.element_bytes * (own - shared))
    if place.strategy.checkpointing != "none":
        during = (Instant.BACKWARD_FIRST, Instant.BACKWARD_LAST)
        return [_term(Category.ACTIVATION, "adapters' own inputs", each, during)]
    during = span(Instant.FORWARD, Instant.BACKWARD_FIRST)
    return [_term(Category.ACTIVATION, "adapters' own inputs", each * place.num_blocks, during)]


def extra_traffic_bytes(place: Placement, stack: Stack) -> float:
    """Memory traffic of one micro-batch that our engine does not have (negative: that only our engine has).

    own_copies: each adapter's input is cast to fp32 and, by autocast, back (2 + 4 + 4 + 2 bytes), again where it is
    recomputed; its gradient alike.
    plain, ddp: no copies of gradients into a reduction and out of it; ddp has its buckets, filled and read.
    liger: the head's gradient is a running sum over chunks, read and written by the product of each.
    """
    moved = 0.0
    if stack.adapters == "own_copies":
        each = 12.0 * place.tokens * sum(linear.in_features for linear in adapted(place.model, place.job.lora))
        moved += each * place.num_blocks * (3 if place.strategy.checkpointing == "full" else 2)
    if stack.modules in ("plain", "ddp"):
        last = 1 / place.strategy.accumulation
        moved -= last * sum(
            group.count * fully_shard.gradient_traffic_bytes(place, group, first=True, last=True)
            for group in place.groups
        )
        moved += last * 4 * place.master_bytes * place.trainable * (stack.modules == "ddp")
    if stack.kernels == "liger" and place.trains_all:
        chunks = -(-place.tokens // _liger_chunk(place))
        moved += 2.0 * place.element_bytes * place.model.embedding_parameters * chunks - head_gradient_bytes(place)
    return moved


def _liger_chunk(place: Placement) -> int:
    """Tokens of a chunk of Liger's fused loss: logits about as large as the hidden states, a power of two."""
    pieces = -(-place.model.vocab_size // place.model.hidden_size)
    return 1 << max(0, -(-place.tokens // pieces) - 1).bit_length()


LIGER_LOGIT_BYTES = 12
"""Of a logit of one chunk: bf16, its gradient, and fp32 copies inside the loop."""


HOST_WAIT_SECONDS = 0.025
"""A step of a stack whose host reads the loss, counts tokens and logs before it prepares the next step, while the card
waits: the median difference of five pairs of rows with and without transformers' Trainer on one machine, equal
kernels (10 to 50 ms)."""


def _loss(place: PeerPlacement, stack: Stack) -> tuple[Term, ...]:
    terms = loss.stores(place)
    if place.strategy.loss == "fused":
        return _liger_loss(place, terms)
    if stack.loss == "plain":
        return terms
    if stack.loss == "torchtune_chunked" and place.trains_all:
        head = place.element_bytes * place.model.embedding_parameters
        terms += (_term(Category.TEMPORARY, "head gradient", head, (Instant.LOSS,)),)
    logits = LOGIT_BYTES[stack.loss] * place.tokens * place.model.vocab_size
    return tuple(dataclasses.replace(term, bytes=round(logits)) if term.name == "logits" else term for term in terms)


def _liger_loss(place: PeerPlacement, terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """Logits of one chunk and the head's gradient, both in compute dtype."""
    logits = LIGER_LOGIT_BYTES * _liger_chunk(place) * place.model.vocab_size
    kept = [term for term in terms if term.name == "last hidden states"]
    kept.append(_term(Category.TEMPORARY, "logits", logits, (Instant.LOSS,)))
    if place.trains_all:
        head = place.element_bytes * place.model.embedding_parameters
        kept.append(_term(Category.TEMPORARY, "head gradient", head, (Instant.LOSS,)))
    return tuple(kept)


def _term(category: Category, name: str, num_bytes: float, alive: tuple[Instant, ...]) -> Term:
    return Term(category=category, name=name, bytes=round(num_bytes), alive=alive, source="benchmarks/stacks.py")
