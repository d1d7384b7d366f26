"""Seconds of a block, the loss and the optimizer on one card.

[Note: three limits of a kernel]
A kernel is limited by arithmetic, by memory traffic or by the host that launches it. Matrices and attention are
arithmetic: FLOPs over the rate attained at their size. The rest of a block is traffic: bytes over bandwidth. Both run
one after the other on the card; the host launches ahead and limits only where its time is longer.

Rates come from the cluster file where `probe` measured them. Otherwise a share of the data sheet's peak is assumed, by
architecture, and the plan says so.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.axes.fully_shard import gradient_traffic_bytes, managed_bytes
from shardwise.levers.checkpointing.cost import attention_flops_per_token, recomputed
from shardwise.levers.loss.cost import chunk_tokens
from shardwise.levers.offload.cost import update_seconds
from shardwise.levers.optimizer.cost import step_traffic_bytes
from shardwise.levers.precision.cost import COMPUTE_DTYPE, quantizes
from shardwise.vocabulary.cluster import Cluster, RatePoint
from shardwise.vocabulary.placement import Placement, adapted, splits_input

MATMUL_SHARE = {"volta": 0.8, "turing": 0.8, "ampere": 0.85, "ada": 0.85, "hopper": 0.75, "blackwell": 0.75}
"""Share of the data sheet's dense peak that a large bf16 product attains; Hopper and Blackwell are limited by power."""
FP8_SHARE = 0.6
"""The same for a large fp8 product with one scale a tensor; casts are counted apart."""
FP8_CAST_BYTES = 5
"""Traffic of quantizing one bf16 element: read for the largest value, read again, written in one byte."""
NF4_UNPACK_BYTES = 2.5
"""Traffic of unpacking one 4-bit weight: half a byte read, two written."""
NF4_UNPACK_SHARE = 0.33
"""Share of attained bandwidth that the unpacking kernel reaches (table lookups); from steps with and without NF4 of a
7B and a 13B on A100 (litgpt's table in docs/accuracy.md's cases: 0.14 and 0.22 s, 0.19 and 0.38 s)."""
ATTENTION_SHARE = {"volta": 0.3, "turing": 0.3, "ampere": 0.55, "ada": 0.5, "hopper": 0.38, "blackwell": 0.3}
"""The same for causal attention (flash kernels of torch's sdpa), counting half of the square."""
ATTENTION_BACKWARD_FLOPS = 2.5
"""Backward FLOPs over forward FLOPs: five products instead of two."""
FLOAT_BYTES = 4
TRAFFIC_SHARE = 0.85
"""Share of memory bandwidth that elementwise kernels attain."""
SMALL_SIDE = 256
"""A product whose (tokens x in x out) has this cube root attains half of the large rate."""
LAUNCH_SECONDS = 6e-6
"""Host time of one kernel in eager code, Python included."""
KERNELS_EAGER, KERNELS_COMPILED = 34, 14
"""Kernels of one block's forward."""
HOOK_SECONDS = 150e-6
"""Host time of fully_shard's hooks around one block, each direction."""
CPU_KERNEL_SECONDS = 15e-6
"""Overhead of one operation on a CPU, eager."""


@dataclass(frozen=True, kw_only=True)
class ComputeTimes:
    """Seconds on the compute lane for one micro-batch, and for one optimizer step."""

    block_forward: float
    block_backward: float
    """With what checkpointing computes again."""
    head: float
    """Final norm, head and loss, forward and backward."""
    embedding: float
    optimizer: float
    host_per_block: float
    """Host time of one block, forward and backward together."""
    gather_copy: float
    """Out of the all_gather's output into whole parameters, one block; or the cast that takes its place."""
    outer_gather_copy: float
    """The same for embedding and root together."""
    gradients: Mapping[bool, Mapping[bool, GradientTimes]]
    """What `fully_shard` does with gradients, by whether the micro-batch is the first and whether it is the last."""


@dataclass(frozen=True, kw_only=True)
class GradientTimes:
    """Seconds of copying and adding gradients in one micro-batch."""

    block: float
    """Of each block."""
    outer: float
    """Of embedding and root together, at the end."""


@dataclass(frozen=True, kw_only=True)
class BlockTimes:
    """Seconds of one block, on whatever pipeline stage it lies."""

    forward: float
    backward: float
    host: float


def block_times(place: Placement, cluster: Cluster) -> BlockTimes:
    """Times of one block of this rank's part of the model, for one micro-batch."""
    rates = Rates.of(cluster, COMPUTE_DTYPE[place.strategy.precision])
    matrices, attention = _matrix_seconds(place, cluster, rates), _attention_seconds(place, rates)
    traffic = _traffic_bytes(place) / rates.traffic
    weight_gradients = 1.0 if place.trains_all else _adapter_share(place)
    backward = matrices * (1 + weight_gradients) + _attention_backward(place, rates, attention) + 2 * traffic
    again = recomputed(place)
    backward += matrices * again.matrices + attention * again.attention + traffic * again.elementwise
    return BlockTimes(
        forward=matrices + attention + traffic, backward=backward, host=_host_seconds(place, cluster)
    )  # fmt: skip


def compute_times(place: Placement, cluster: Cluster, block: BlockTimes | None = None) -> ComputeTimes:
    """Times of this rank's part of the model for one micro-batch.

    Args:
        place: The rank.
        cluster: Its card.
        block: Of the same strategy, if it is known.
    """
    block = block or block_times(place, cluster)
    rates = Rates.of(cluster, COMPUTE_DTYPE[place.strategy.precision])
    return ComputeTimes(
        block_forward=block.forward,
        block_backward=block.backward,
        head=head_seconds(place, cluster) if place.is_last else 0.0,
        embedding=_embedding_bytes(place) / rates.traffic if place.is_first else 0.0,
        optimizer=step_traffic_bytes(place) / rates.traffic
        if place.strategy.offload == "none"
        else update_seconds(place, cluster),
        host_per_block=block.host,
        gather_copy=_gather_copy_bytes(place, inner=True) / rates.traffic,
        outer_gather_copy=_gather_copy_bytes(place, inner=False) / rates.traffic,
        gradients=_gradients(place, rates),
    )


def _gradients(place: Placement, rates: Rates) -> Mapping[bool, Mapping[bool, GradientTimes]]:
    """Of the micro-batches that there are."""
    steps = place.strategy.accumulation
    kinds = {(True, steps == 1), (False, True), (False, False)} if steps > 2 else {(True, steps == 1), (False, True)}
    found: dict[bool, dict[bool, GradientTimes]] = {True: {}, False: {}}
    for first, last in kinds:
        found[first][last] = _gradient_times(place, rates, first=first, last=last)
    return found


def _gather_copy_bytes(place: Placement, *, inner: bool) -> float:
    """Traffic of fully_shard's copy-out: read and written in compute dtype; masters read where cast.

    Args:
        place: The rank.
        inner: Of one block, else of embedding and root together.
    """
    groups = [group for group in place.groups if (group.site == "block") == inner]
    if place.strategy.dp_shard > 1:
        return 2.0 * sum(managed_bytes(place, group) for group in groups)
    if place.master_bytes == place.element_bytes:
        return 0.0
    return float(sum(group.trainable for group in groups) * (place.master_bytes + place.element_bytes))


def _gradient_times(place: Placement, rates: Rates, *, first: bool, last: bool) -> GradientTimes:
    inner, outer = 0.0, 0.0
    for group in place.groups:
        moved = gradient_traffic_bytes(place, group, first=first, last=last)
        if group.site == "block":
            inner += moved
        else:
            outer += moved
    return GradientTimes(block=inner / rates.traffic, outer=outer / rates.traffic)


def _embedding_bytes(place: Placement) -> float:
    """Rows looked up and their gradients; the table's gradient is zeroed, and added to the head's if tied."""
    rows = 4.0 * place.typical_tokens * place.model.hidden_size * place.element_bytes
    if not place.trains_all:
        return rows
    table = place.model.embedding_parameters / place.strategy.tp * place.element_bytes
    return rows + table * (4 if place.model.tie_word_embeddings and place.is_last else 1)


class Rates:
    """Attained rates of one card in one dtype."""

    def __init__(self, cluster: Cluster, dtype: str) -> None:
        gpu, measured = cluster.gpu, cluster.measurements
        architecture = gpu.architecture if gpu.architecture in MATMUL_SHARE else "ampere"
        self.measured = tuple(measured.matmul_flops.get(dtype, ()))
        self.assumed = not self.measured
        share = FP8_SHARE if dtype == "fp8" else MATMUL_SHARE[architecture]
        self.matmul_peak = gpu.peak_flops.get(dtype, min(gpu.peak_flops.values())) * share
        self.attention_points = {name: tuple(points) for name, points in measured.attention_flops.items()}
        attention_dtype = "bf16" if dtype == "fp8" else dtype
        attention_peak = gpu.peak_flops.get(attention_dtype, min(gpu.peak_flops.values()))
        self.attention_peak = attention_peak * ATTENTION_SHARE[architecture]
        copied = measured.copy_bytes_per_s
        self.traffic = copied if copied else gpu.memory_bandwidth_bytes_per_s * TRAFFIC_SHARE

    @classmethod
    def of(cls, cluster: Cluster, dtype: str) -> Rates:
        """The same, made once for a cluster; those of the last few are kept."""
        for known, of_dtype, rates in _KNOWN_RATES:
            if known is cluster and of_dtype == dtype:
                return rates
        rates = cls(cluster, dtype)
        _KNOWN_RATES.append((cluster, dtype, rates))
        return rates

    def matmul(self, rows: int, inner: int, columns: int) -> float:
        """FLOP/s of a product [rows, inner] x [inner, columns]."""
        side = (rows * inner * columns) ** (1 / 3)
        if self.measured:
            return interpolate(self.measured, side)
        return self.matmul_peak * side / (side + SMALL_SIDE)

    def attention(self, sequence: int, which: str = "forward") -> float:
        """FLOP/s of causal attention, counting half of the square."""
        points = self.attention_points.get(which, ())
        return interpolate(points, sequence) if points else self.attention_peak * sequence / (sequence + SMALL_SIDE)


_KNOWN_RATES: deque[tuple[Cluster, str, Rates]] = deque(maxlen=4)


def interpolate(points: Sequence[RatePoint], size: float) -> float:
    """The rate at `size`, log-log between the measured points, constant outside them."""
    if size <= points[0].size:
        return points[0].rate
    for low, high in itertools.pairwise(points):
        if size <= high.size:
            share = math.log(size / low.size) / math.log(high.size / low.size)
            return low.rate * (high.rate / low.rate) ** share
    return points[-1].rate


def _matrix_seconds(place: Placement, cluster: Cluster, rates: Rates) -> float:
    """Forward of one block's matrices, adapters included."""
    tp, seconds = place.strategy.tp, 0.0
    quantized = place.strategy.precision == "fp8"
    for linear in place.model.linears:
        rows = place.typical_tokens * linear.active_copies
        per_copy = max(1, rows // max(1, linear.copies)) if linear.copies > 1 else rows
        own = rates if not quantized or quantizes(linear) else Rates.of(cluster, "bf16")
        cut_input = splits_input(linear)
        inner = max(1, linear.in_features // (tp if cut_input else 1))
        rate = own.matmul(per_copy, inner, max(1, linear.out_features // (1 if cut_input else tp)))
        seconds += 2 * rows * linear.matrix_parameters / tp / rate
    if not place.trains_all:
        for linear in adapted(place.model, place.job.lora):
            narrow = 2 * place.typical_tokens * place.job.lora.r * (linear.in_features + linear.out_features)
            wide = 3 if place.strategy.compile_blocks else 6  # written, scaled, added: in one kernel or in three
            bytes_moved = place.typical_tokens * place.element_bytes * (linear.in_features + wide * linear.out_features)
            seconds += (
                max(
                    narrow / rates.matmul(place.typical_tokens, linear.in_features, place.job.lora.r),
                    bytes_moved / rates.traffic,
                )
                / tp
            )
    if place.strategy.precision == "fp8":
        seconds += FP8_CAST_BYTES * _quantized_elements(place) / rates.traffic
    if place.strategy.tuning == "qlora":
        seconds += NF4_UNPACK_BYTES * place.quantized / place.num_blocks / (rates.traffic * NF4_UNPACK_SHARE)
    return seconds


def _quantized_elements(place: Placement) -> float:
    """Elements that the fp8 products of one block's forward quantize: inputs and weights (backward: gradients)."""
    reached = [linear for linear in place.model.linears if quantizes(linear)]
    inputs = sum(linear.in_features for linear in reached)
    weights = sum(linear.matrix_parameters for linear in reached)
    return (place.typical_tokens * inputs + weights) / place.strategy.tp


def _adapter_share(place: Placement) -> float:
    """Weight gradients of adapters, relative to all matrices."""
    adapters = place.adapter_elements
    return adapters / (place.model.active_block_parameters / place.strategy.tp + adapters)


def _attention_backward(place: Placement, rates: Rates, forward: float) -> float:
    """Backward of one block's attention: at its measured rate (counted as twice the forward's FLOPs), else by FLOPs."""
    if place.job.attention == "eager" or "backward" not in rates.attention_points:
        return forward * ATTENTION_BACKWARD_FLOPS
    sequence = place.typical_sequence
    return 2 * forward * rates.attention(sequence) / rates.attention(sequence, "backward")


def _attention_seconds(place: Placement, rates: Rates) -> float:
    sequence = place.typical_sequence
    flops = place.typical_tokens * attention_flops_per_token(place.model, sequence) / place.strategy.tp
    seconds = flops / rates.attention(sequence)
    if place.job.attention == "eager":
        scores = place.typical_tokens * sequence * place.model.num_attention_heads / place.strategy.tp
        seconds = 2 * flops / rates.matmul(sequence, place.model.head_dim, sequence)
        seconds += 6 * scores * place.element_bytes / rates.traffic
    return seconds


def _traffic_bytes(place: Placement) -> float:
    """Bytes that norms, rotation, residuals and the gated activation move in one block's forward.

    Counted operation by operation over Hugging Face's eager Llama code; compiled code reads and writes each once.
    """
    model, tp = place.model, place.strategy.tp
    h, f = model.hidden_size, model.intermediate_size * max(1, model.num_experts_per_tok) / tp
    heads = (model.query_size + model.key_value_size) / tp
    h /= tp if place.strategy.sequence_parallel else 1
    unit = place.element_bytes / 2
    if place.strategy.compile_blocks:
        per_token = unit * (8 * model.norms_per_block * h + 4 * heads + 6 * f)
    else:
        norm = _eager_norm_bytes(place)
        per_token = norm * model.norms_per_block * h + unit * (12 * h + 20 * heads + 10 * f)
        per_token += norm * heads if model.qk_norm else 0
    return place.typical_tokens * per_token


def head_seconds(place: Placement, cluster: Cluster) -> float:
    """Head and loss, forward and backward, and the final norm, which no block compiles."""
    precision = place.strategy.precision
    rates = Rates.of(cluster, "bf16" if precision == "fp8" else COMPUTE_DTYPE[precision])
    vocab, tokens, hidden = place.model.vocab_size / place.strategy.tp, place.typical_tokens, place.model.hidden_size
    rate = rates.matmul(max(1, min(tokens, chunk_tokens(place))), hidden, place.model.vocab_size)
    products = 2 + place.trains_all + (place.strategy.loss == "chunked")
    moved = logit_traffic_bytes(place) * tokens * vocab + 3 * _eager_norm_bytes(place) * tokens * hidden
    moved += head_gradient_bytes(place)
    return products * 2 * tokens * hidden * vocab / rate + moved / rates.traffic


def logit_traffic_bytes(place: Placement) -> float:
    """Bytes moved for one logit besides its products, kernel by kernel.

    Cross-entropy of torch: fp32 copy; log-softmax of a row too long for shared memory reads it three times and writes
    it; the gradient is filled with zeros; its backward reads three and writes one; the result is cast back. Chunked:
    the forward twice. Fused and compiled: written by the product, read twice, overwritten by its gradient; in eager
    code about eleven fp32 values.
    """
    element = place.element_bytes
    if place.strategy.loss == "fused":
        return 5.0 * element if place.strategy.compile_blocks else 11.0 * FLOAT_BYTES
    cast = 0 if element == FLOAT_BYTES else element + FLOAT_BYTES
    forward, backward = cast + 4 * FLOAT_BYTES, 5 * FLOAT_BYTES + cast
    return float((2 if place.strategy.loss == "chunked" else 1) * forward + backward)


def head_gradient_bytes(place: Placement) -> float:
    """Adding up the head's gradient over chunks: by autograd, two values read and one written, or by the product."""
    if place.strategy.loss == "plain" or not place.trains_all:
        return 0.0
    usual = max(1, min(chunk_tokens(place), place.typical_tokens))
    chunks = -(-place.typical_tokens // usual)
    each = 3 * place.element_bytes if place.strategy.loss == "chunked" else 2 * FLOAT_BYTES
    return float((chunks - 1) * each * place.model.embedding_parameters / place.strategy.tp)


def _eager_norm_bytes(place: Placement) -> float:
    """Traffic of one element of a norm's forward in eager code, operation by operation."""
    return 28 + 4.0 * place.element_bytes


def _host_seconds(place: Placement, cluster: Cluster) -> float:
    kernels = KERNELS_COMPILED if place.strategy.compile_blocks else KERNELS_EAGER
    if not place.trains_all:
        kernels += 5 * len(adapted(place.model, place.job.lora))
    passes = 3 + recomputed(place).elementwise
    if cluster.gpu.architecture == "cpu":
        return passes * kernels * CPU_KERNEL_SECONDS
    launch = cluster.measurements.launch_gap_seconds or LAUNCH_SECONDS
    return passes * kernels * launch + 2 * HOOK_SECONDS


def model_flops_per_token(place: Placement) -> float:
    """FLOPs a token for MFU: 6 a matrix parameter (4 under LoRA) and causal attention in as many passes.

    Recomputation is not counted. Source: PaLM, arXiv:2204.02311, appendix B, with the causal half of the square.
    """
    model = place.model
    attention = model.num_hidden_layers * attention_flops_per_token(model, place.typical_sequence)
    passes = 3.0 if place.trains_all else 2.0
    return passes * (2 * model.matmul_parameters + attention)
