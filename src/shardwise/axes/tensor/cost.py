"""Tensor: every matrix split over the cards of one node; two all_reduces a block in each direction.

q, k, v, gate and up are split along out_features, o and down along in_features, so that a block needs one sum after
attention and one after the feed-forward layer, forward and backward (Megatron-LM, arXiv:1909.08053). With sequence
parallel each all_reduce becomes an all_gather and a reduce_scatter: the same bytes, and norms are split too
(arXiv:2205.05198).

[Note: messages of tensor parallel] In one micro-batch, each of the size of the hidden states:

                 without sequence parallel                     with it
    embedding    1 all_reduce forward                          1 reduce_scatter forward, 1 all_gather backward
    a block      2 all_reduces forward, 2 backward             2 of both forward, 2 of both backward
    head         1 all_reduce backward                         1 all_gather forward, 1 reduce_scatter backward

Checkpointing computes a block again, but not the sum that ends it, unless a norm keeps that (Gemma 2 and 3): 1 (or 2)
all_reduces a block more; with sequence parallel 2 all_gathers and 1 (or 2) reduce_scatters. Under LoRA no gradient is
summed in front of the first adapter. Once a step the gradients of what each rank holds whole but sees a part of are
summed in one message (norms under sequence parallel, norms of queries and keys always, one half of each adapter), and
the square of the gradient's norm in another. The loss sends a little of its own (`levers/loss`).
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.vocabulary.cluster import Cluster, CollectiveOp
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.placement import Placement, adapted, splits_input
from shardwise.vocabulary.plan import Refusal
from shardwise.vocabulary.strategy import Axis, Strategy
from shardwise.vocabulary.timeline import Collective, Pass, Site
from shardwise.vocabulary.units import format_bandwidth

SOURCE = "Megatron-LM, arXiv:1909.08053 and 2205.05198; [Note: messages of tensor parallel]"
MIN_BANDWIDTH_BYTES_PER_S = 40e9
"""One way. Below this the sums after attention and feed-forward take longer than the block (`docs/planner.md`)."""


def legal(job: Job, cluster: Cluster, strategy: Strategy) -> tuple[Refusal, ...]:
    """Heads and widths must divide, and the group must sit on a fast wire inside one node."""
    tp, model = strategy.tp, job.model
    if tp == 1:
        return ()
    refusals = [Refusal(strategy=strategy, rule=rule, message=message) for rule, message in problems(strategy)]
    if model.is_mixture:
        message = f"{model.name} routes tokens to experts, which tensor parallel does not split; shard the data instead"
        refusals.append(Refusal(strategy=strategy, rule="tensor_splits_dense", message=message))
    for count, what in (
        (model.num_attention_heads, "attention heads"),
        (model.num_key_value_heads, "key/value heads"),
        (model.intermediate_size, "intermediate_size"),
        (model.vocab_size, "rows of the vocabulary"),
    ):
        if count % tp:
            ways = ", ".join(str(d) for d in range(2, min(count, cluster.gpus_per_node) + 1) if count % d == 0)
            message = f"{model.name} has {count:,} {what}, which tp {tp} does not divide" + (
                f"; {ways} do" if ways else ""
            )
            refusals.append(Refusal(strategy=strategy, rule="heads_divide_by_tp", message=message))
    if tp > cluster.gpus_per_node:
        message = f"tp {tp} would cross nodes of {cluster.gpus_per_node} cards: every block would wait for the network"
        refusals.append(Refusal(strategy=strategy, rule="tensor_inside_node", message=message))
    link = cluster.intra_node
    if link.bandwidth_bytes_per_s < MIN_BANDWIDTH_BYTES_PER_S and cluster.gpu.architecture != "cpu":
        message = (
            f"tensor parallel sends four sums a block; {link.name} carries "
            f"{format_bandwidth(link.bandwidth_bytes_per_s)} one way, and training needs "
            f"{format_bandwidth(MIN_BANDWIDTH_BYTES_PER_S)} or more; shard the data instead"
        )
        refusals.append(Refusal(strategy=strategy, rule="no_tensor_on_slow_wire", message=message))
    return tuple(refusals)


def problems(strategy: Strategy) -> Iterator[tuple[str, str]]:
    """What tensor parallel cannot be combined with, whatever the model: rule and sentence."""
    if strategy.tp == 1:
        return
    if strategy.loss == "fused":
        message = f"the fused loss needs the whole vocabulary on a card, and tp {strategy.tp} splits it; use chunked"
        yield "fused_loss_is_whole", message
    if strategy.precision == "fp8":
        yield (
            "no_fp8_in_tensor",
            "torchao's fp8 layers are not split over tp by this engine; use bf16, or shard the data",
        )
    if strategy.tuning == "qlora":
        yield "packed_weights_are_whole", "4-bit weights cannot be split over tp; use lora, or ZeRO-3 with qlora"
    if strategy.offload != "none":
        yield "no_offload_in_tensor", "offloading is not combined with tp; use more shards instead"


def sends(place: Placement) -> tuple[Collective, ...]:
    """[Note: messages of tensor parallel]."""
    if place.strategy.tp == 1:
        return ()
    messages = (*_block_sums(place), *_end_sums(place), *_once_a_step(place))
    return tuple(message for message in messages if message.count and message.bytes)


def _block_sums(place: Placement) -> Iterator[Collective]:
    blocks, split = place.num_blocks, place.strategy.sequence_parallel
    recomputes = place.strategy.checkpointing != "none"
    sums_again = 0 if not recomputes else (2 if place.model.norms_per_block > 2 else 1)
    passes: tuple[tuple[Pass, int, int], ...] = (
        ("forward", 2, 2),
        ("backward", 2 + (2 if recomputes else 0), 2 + sums_again),
    )
    for during, gathers, sums in passes:
        needless = _sums_without_gradient(place) if during == "backward" else 0
        if split:
            yield _hidden(place, "all_gather", blocks * gathers, during, "block")
            yield _hidden(place, "reduce_scatter", blocks * sums - needless, during, "block")
        else:
            yield _hidden(place, "all_reduce", blocks * sums - needless, during, "block")


def _sums_without_gradient(place: Placement) -> int:
    """Sums of a micro-batch's backward that lead to nothing that trains: in front of the first adapter."""
    if place.trains_all or not place.is_first:
        return 0
    return 1 if any(linear.site == "attention" for linear in adapted(place.model, place.job.lora)) else 2


def _end_sums(place: Placement) -> Iterator[Collective]:
    """Of the embedding and of the head."""
    split = place.strategy.sequence_parallel
    if place.is_first:
        yield _hidden(place, "reduce_scatter" if split else "all_reduce", 1, "forward", "embedding")
        yield _hidden(place, "all_gather", 1 if split and place.trains_all else 0, "backward", "embedding")
    if place.is_last:
        yield _hidden(place, "all_gather", 1 if split else 0, "forward", "root")
        yield _hidden(place, "reduce_scatter" if split else "all_reduce", 1, "backward", "root")


def _hidden(place: Placement, op: CollectiveOp, per_micro_batch: int, during: Pass, site: Site) -> Collective:
    return Collective(
        op=op,
        axis=Axis.TP,
        ranks=place.strategy.tp,
        bytes=place.tokens * place.model.hidden_size * place.element_bytes,
        count=per_micro_batch * place.strategy.accumulation,
        site=site,
        during=during,
        hides_behind="nothing",
        name=f"{op} of hidden states",
        formula=f"{place.element_bytes} B x {place.tokens:,} tokens x {place.model.hidden_size}",
        source=SOURCE,
    )


def _once_a_step(place: Placement) -> Iterator[Collective]:
    partial = partial_elements(place)
    sizes = {
        "all_reduce of partial gradients": (
            place.master_bytes * -(-partial // place.strategy.dp_shard),
            f"{place.master_bytes} B x {partial:,} / {place.strategy.dp_shard}",
        ),
        "all_reduce of the gradient's norm": (4, "one fp32 number"),
    }
    for name, (num_bytes, formula) in sizes.items():
        yield Collective(
            op="all_reduce",
            axis=Axis.TP,
            ranks=place.strategy.tp,
            bytes=num_bytes,
            count=1,
            site="step",
            during="optimizer",
            every="step",
            hides_behind="nothing",
            name=name,
            formula=formula,
            source="axes/tensor/apply.py, [Note: partial gradients]; trainer/step.py, [Note: true norm]",
        )


def partial_elements(place: Placement) -> int:
    """Elements on this rank whose gradients are partial sums over tp, before sharding."""
    model = place.model
    if not place.trains_all:
        r = place.job.lora.r
        halves = (r * (linear.out_features if splits_input(linear) else linear.in_features)
                  for linear in adapted(model, place.job.lora))  # fmt: skip
        return place.num_blocks * sum(halves)
    of_heads = 2 * model.head_dim if model.qk_norm else 0
    if not place.strategy.sequence_parallel:
        return place.num_blocks * of_heads
    return place.num_blocks * model.norm_parameters_per_block + (model.hidden_size if place.is_last else 0)
