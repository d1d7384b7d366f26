"""Activations: what a block saves for its backward, and what checkpointing leaves of it.

[Note: saved activations]
Bytes a token of one block, eager Hugging Face code, sdpa or flash attention; E bytes an element (2 in bf16), h hidden,
f feed-forward, ad and gd widths of query and key/value heads, a query heads:

    norm           fp32 copy of the input (4h), normalized (E h), result = input of the next matrices (E h)
    attention      q and k after rotation, v, output (E (2 ad + 2 gd)), logsumexp (4 a)
    feed-forward   gate, act(gate), up, product (E 4 f)
    q/k norm       each head's fp32 copy and normalized value ((4 + E) (ad + gd))

A compiled block keeps the inputs of its matrices and recomputes the elementwise rest: the norm's input and result
(E 2h), q, k, v, output, gate, up, product (E 3 f).

DoRA multiplies the result of each adapted matrix and that of its adapter by a factor that trains, and keeps both.

A frozen matrix needs no input for its backward, so under LoRA the normalized value, the result of a norm and the
product fall away; the last two stay where an adapter reads them. Dropout gives every adapter its own copy of its input,
and a mask of one byte.

In fp8 a compiled block quantizes the inputs of its matrices from what it keeps anyway, so results of norms and the
product fall away; the quantized weights of a block (1 byte) stay from its forward to its backward.

Checkpointing in full keeps the block's input (E h); its recomputation ends with the last value that the backward
reads (torch's `early_stop`), which is the last matrix's input, so that product is not repeated; nor is it in a
compiled block, where nothing uses it. In eager code an adapter beside that matrix comes after it. Selective also
keeps attention's output and logsumexp and the outputs of every second matrix product, adapters' included, counted
from the first; a compiled block drops what its backward does not read, which is the last matrix's output.

Source: saved tensors counted on CPU, equal to the byte for Llama and Qwen3 shapes; the compiled form from the slope of
peak memory over micro-batches on H200, full and LoRA (`docs/accuracy.md`); selective as `apply.py` chooses.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.levers.precision.cost import quantizes as reaches
from shardwise.vocabulary.memory import Category, Instant, Term, span
from shardwise.vocabulary.model import ModelShape
from shardwise.vocabulary.placement import Placement, adapted, splits_input

SOURCE = "[Note: saved activations]"
_SAVED = span(Instant.FORWARD, Instant.BACKWARD_FIRST)


def quantizes(place: Placement) -> bool:
    """True where products run in fp8."""
    return place.strategy.precision == "fp8"


def stores(place: Placement) -> tuple[Term, ...]:
    """Saved activations of all blocks in flight, the block that is being recomputed, and passing values."""
    each = round(place.tokens * kept_per_token(place))
    blocks, in_flight = place.num_blocks, place.micro_batches_in_flight
    inside = round(place.tokens * recomputed_per_token(place))
    passing = round(place.tokens * passing_per_token(place))
    total = round(each * blocks * in_flight)
    terms = [
        _activation("saved activations", total, _SAVED, f"{blocks} blocks x {place.tokens:,} tokens"),
        _activation("saved activations", total - each, (Instant.REDUCE_FIRST,), "of all blocks but the last"),
        _activation("saved activations", total - each * (blocks - 1), (Instant.BACKWARD_LAST,), "one block"),
        _activation("passing values", passing, _COMPUTING, "gradients and results inside one block"),
    ]
    if quantizes(place) and place.strategy.checkpointing == "none":
        reached = sum(linear.matrix_parameters for linear in place.model.linears if reaches(linear))
        weights = blocks * reached // place.strategy.tp
        terms.append(_activation("quantized weights", weights, _SAVED, "1 B an element, kept for backward"))
    if inside:
        terms.append(_activation("recomputed block", inside, _RECOMPUTED, f"{place.tokens:,} tokens of one block"))
    return tuple(terms)


_COMPUTING = (Instant.FORWARD, Instant.BACKWARD_FIRST, Instant.BACKWARD_LAST, Instant.EVALUATION)
_RECOMPUTED = (Instant.BACKWARD_FIRST, Instant.BACKWARD_LAST)


def _activation(name: str, num_bytes: int, alive: tuple[Instant, ...], formula: str) -> Term:
    return Term(category=Category.ACTIVATION, name=name, bytes=num_bytes, alive=alive, formula=formula, source=SOURCE)


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """Shares of a block's forward that run again in backward."""

    matrices: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0


def recomputed(place: Placement) -> Recomputed:
    """What the backward of a block computes again."""
    kind = place.strategy.checkpointing
    if kind == "none":
        return Recomputed()
    products = _products(place)
    total = sum(product.elements for product in products)
    if kind == "full":
        ends = products if place.strategy.compile_blocks else products[-1:]
        last = sum(product.elements for product in ends if product.is_last)
        return Recomputed(matrices=1.0 - last / total, attention=1.0, elementwise=1.0)
    again = sum(product.elements for product in products[1::2])
    return Recomputed(matrices=again / total, elementwise=1.0)


def kept_per_token(place: Placement) -> float:
    """Bytes a token that one block keeps from its forward to its backward."""
    boundary = place.element_bytes * place.model.hidden_size / _sequence_split(place)
    if place.strategy.checkpointing == "full":
        return boundary
    if place.strategy.checkpointing == "none":
        return saved_per_token(place)
    return boundary + place.once("checkpointing.selected", _selected_per_token)


def _selected_per_token(place: Placement) -> float:
    """What selective checkpointing keeps besides a block's input."""
    model, tp = place.model, place.strategy.tp
    attention = (place.element_bytes * model.query_size + 4 * model.num_attention_heads) / tp
    products = _products(place)[::2]
    if place.strategy.compile_blocks:
        products = [product for product in products if not product.is_last]
    return attention + place.element_bytes * sum(product.out_features for product in products)


def recomputed_per_token(place: Placement) -> float:
    """Bytes a token of one block that its backward makes again before it reads them."""
    if place.strategy.checkpointing == "none":
        return 0.0
    if place.strategy.checkpointing == "full":
        return saved_per_token(place)
    boundary = place.element_bytes * place.model.hidden_size / _sequence_split(place)
    return max(0.0, saved_per_token(place) - kept_per_token(place) + boundary)


@dataclass(frozen=True, kw_only=True)
class _Product:
    """One matrix product of a block, as selective checkpointing counts them."""

    elements: float
    """Of the matrix, for one token, on this rank."""
    out_features: float
    is_last: bool = False


def _products(place: Placement) -> list[_Product]:
    """The products of a block in their order; an adapter's two follow its matrix."""
    return place.once("checkpointing.products", _work_out_products)


def _work_out_products(place: Placement) -> list[_Product]:
    tp, lora = place.strategy.tp, place.job.lora
    with_adapter = set() if place.trains_all else {linear.name for linear in adapted(place.model, lora)}
    products: list[_Product] = []
    for linear in place.model.linears:
        split_out = 1 if splits_input(linear) or linear.site == "router" else tp
        rows = linear.active_copies
        elements = rows * linear.matrix_parameters / (1 if linear.site == "router" else tp)
        is_last = linear is place.model.linears[-1]
        out = rows * linear.out_features / split_out
        products.append(_Product(elements=elements, out_features=out, is_last=is_last))
        if linear.name in with_adapter:
            products.append(_Product(elements=lora.r * linear.in_features / tp, out_features=lora.r))
            up = _Product(elements=lora.r * linear.out_features / tp, out_features=out, is_last=is_last)
            products.append(up)
    return products


def saved_per_token(place: Placement) -> float:
    """Bytes a token that the backward of one block reads; see [Note: saved activations]."""
    return place.once("checkpointing.saved", _work_out_saved)


def _work_out_saved(place: Placement) -> float:
    return _norms(place) + _attention(place) + _feed_forward(place) + _adapters(place)


def _sequence_split(place: Placement) -> int:
    """Norms and residuals are split along the sequence under sequence parallel, whole otherwise."""
    return place.strategy.tp if place.strategy.sequence_parallel else 1


def _norms(place: Placement) -> float:
    model, element, compiled = place.model, place.element_bytes, place.strategy.compile_blocks
    result = element if place.trains_all and not (compiled and quantizes(place)) else 0
    each = element + result if compiled else 4 + 2 * result
    heads = 0.0
    if model.qk_norm:
        width = (model.query_size + model.key_value_size) / place.strategy.tp
        heads = width * (element if compiled else 4 + element)
    return model.norms_per_block * model.hidden_size * each / _sequence_split(place) + heads


def _attention(place: Placement) -> float:
    model, tp = place.model, place.strategy.tp
    flash = (
        place.element_bytes * 2 * (model.query_size + model.key_value_size) / tp + 4 * model.num_attention_heads / tp
    )
    if place.job.attention != "eager":
        return flash + 8
    scores = (2 * place.element_bytes + 1) * model.num_attention_heads * place.job.sequence_length / tp
    return flash + scores


def _feed_forward(place: Placement) -> float:
    model, element = place.model, place.element_bytes
    compiled = place.strategy.compile_blocks
    tensors = (2 if compiled else 3) + (1 if place.trains_all and not (compiled and quantizes(place)) else 0)
    width = tensors * model.intermediate_size * element / place.strategy.tp
    if not model.is_mixture:
        return width
    routed = model.num_experts_per_tok
    return routed * (width + element * model.hidden_size) + 4 * model.num_experts


def _adapters(place: Placement) -> float:
    """Inputs that adapters read and frozen matrices would not have kept."""
    if place.trains_all:
        return 0.0
    lora, element, tp = place.job.lora, place.element_bytes, place.strategy.tp
    targets = adapted(place.model, lora)
    narrow = sum(element * lora.r for _ in targets)
    if lora.use_dora:
        narrow += sum(2 * element * linear.out_features / (1 if splits_input(linear) else tp) for linear in targets)
    if lora.dropout > 0:
        return narrow + sum((element + 1) * linear.in_features for linear in targets)
    read = {linear.name: linear.in_features for linear in targets}
    shared = max((read.get(name, 0) for name in ("q_proj", "k_proj", "v_proj")), default=0)
    shared += max((read.get(name, 0) for name in ("gate_proj", "up_proj")), default=0)
    return narrow + element * (shared + read.get("down_proj", 0) / tp)


def passing_per_token(place: Placement) -> float:
    """Bytes a token of values that live only while one operation of a block runs."""
    model, element, tp = place.model, place.element_bytes, place.strategy.tp
    feed_forward = 3 * model.intermediate_size * element / tp * max(1, model.num_experts_per_tok)
    return element * 2 * model.hidden_size + feed_forward


def forward_flops(model: ModelShape, tokens: int, sequence: int) -> float:
    """FLOPs of one block's forward: 2 a matrix element and token, and causal attention."""
    return tokens * (2 * model.active_block_parameters + attention_flops_per_token(model, sequence))


def attention_flops_per_token(model: ModelShape, sequence: int) -> float:
    """FLOPs a token of one block's attention scores and values, forward, causal (half of the square).

    A windowed layer sees at most its window; the average over the model's layers is taken.
    """
    seen = sequence / 2
    if model.sliding_window is not None and model.num_windowed_layers:
        share = model.num_windowed_layers / model.num_hidden_layers
        window = min(model.sliding_window, sequence)
        windowed = window - window * window / (2 * sequence)
        seen = share * windowed + (1 - share) * seen
    return 4 * model.query_size * seen
