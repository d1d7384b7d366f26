"""Tensor: every matrix split over the cards of one node; two all_reduces a block in each direction.

q, k, v, gate and up are split along out_features, o and down along in_features, so that a block needs one sum after
attention and one after the feed-forward layer, forward and backward (Megatron-LM, arXiv:1909.08053). With sequence
parallel each all_reduce becomes an all_gather and a reduce_scatter: the same bytes, and norms are split too
(arXiv:2205.05198).
"""

from __future__ import annotations

from shardwise.vocabulary.cluster import Cluster, CollectiveOp
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.plan import Refusal
from shardwise.vocabulary.strategy import Axis, Strategy
from shardwise.vocabulary.timeline import Collective, Pass
from shardwise.vocabulary.units import format_bandwidth

SOURCE = "Megatron-LM, arXiv:1909.08053 and 2205.05198"
MIN_BANDWIDTH_BYTES_PER_S = 40e9
"""One way. Below this the sums after attention and feed-forward take longer than the block (`docs/planner.md`)."""


def legal(job: Job, cluster: Cluster, strategy: Strategy) -> tuple[Refusal, ...]:
    """Heads and widths must divide, and the group must sit on a fast wire inside one node."""
    tp, model = strategy.tp, job.model
    if tp == 1:
        return ()
    refusals: list[Refusal] = []
    for count, what in (
        (model.num_attention_heads, "attention heads"),
        (model.num_key_value_heads, "key/value heads"),
        (model.intermediate_size, "intermediate_size"),
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


def sends(place: Placement) -> tuple[Collective, ...]:
    """The sums of every block, of the embedding and of the loss."""
    strategy = place.strategy
    if strategy.tp == 1:
        return ()
    hidden = place.tokens * place.model.hidden_size * place.element_bytes
    messages: list[Collective] = []
    recomputed = strategy.checkpointing == "full"
    for during in ("forward", "backward"):
        sums = 2 + (2 if during == "backward" and recomputed else 0)
        ops: tuple[CollectiveOp, ...] = (
            ("all_gather", "reduce_scatter") if strategy.sequence_parallel else ("all_reduce",)
        )
        messages.extend(_message(place, op, hidden, place.num_blocks * sums, during) for op in ops)
    if place.is_first:
        messages.append(_message(place, "all_reduce", hidden, 1, "forward", "embedding"))
    if place.is_last:
        messages.append(_message(place, "all_reduce", hidden, 1, "backward", "root"))
    return tuple(messages)


def _message(
    place: Placement, op: CollectiveOp, num_bytes: int, per_micro_batch: int, during: Pass, site: str = "block"
) -> Collective:
    return Collective(
        op=op,
        axis=Axis.TP,
        ranks=place.strategy.tp,
        bytes=num_bytes,
        count=per_micro_batch * place.strategy.accumulation,
        site="block" if site == "block" else ("embedding" if site == "embedding" else "root"),
        during=during,
        hides_behind="nothing",
        name=f"{op} of hidden states",
        formula=f"{place.element_bytes} B x {place.tokens:,} tokens x {place.model.hidden_size}",
        source=SOURCE,
    )
