"""What the optimizer keeps, and the bytes that its step moves.

[Note: traffic of an update]
Reads and writes of one element, kernel by kernel, each from memory:

    clipping           the norm reads the gradient, scaling reads and writes it: 3
    adamw              one fused kernel: reads weight, gradient and moments, writes all but the gradient: 7
    8-bit              one kernel: weight twice, gradient, codes of two moments twice; it searches the code tables for
                       longer than it waits for memory. What stays in 32 bits: averages 8, update 12
    adamw_bf16_states  moments cast to fp32 and back (8 B each way, the second also rounded: 16 B), averages 8, roots,
                       two divisions and update 12: about 30 fp32 values
    lamb               averages 8, direction 12 and 3 for decay, norms 2, scaling 2, update 3
    sgd                decay 2, update 3

Source: `apply*.py`, whose foreach operations are one kernel each.

[Note: what stays in 32 bits]
An 8-bit optimizer keeps codes of one byte and an fp32 scale for 256 elements, for matrices of 4,096 elements or more
whose rows (on each part of a tensor split) are a multiple of 256 long. Embedding and head, vectors, experts (fused
parameters of three dims) and what does not fit keep two fp32 moments; of a 7B embedding and head alone are 8.7 GB.
Paging moves the codes, not the scales and not what stays in 32 bits (`apply_8bit.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.vocabulary.job import OptimizerName
from shardwise.vocabulary.memory import TRAINED, Category, Instant, Term
from shardwise.vocabulary.placement import Placement, adapted, splits_input
from shardwise.vocabulary.strategy import Axis
from shardwise.vocabulary.timeline import Collective

_STATES = {
    "adamw": ("two moments", 2),
    "adamw_bf16_states": ("two bf16 moments", 2),
    "adamw_8bit": ("two 8-bit moments", 2),
    "paged_adamw_8bit": ("two 8-bit moments, paged", 2),
    "lamb": ("two moments", 2),
    "sgd": ("nothing", 0),
}
_EIGHT_BIT = ("adamw_8bit", "paged_adamw_8bit")
FLOAT_BYTES = 4
BLOCK, LEAST_ELEMENTS = 256, 4096
"""Elements with one scale; smaller matrices are kept in 32 bits."""
QUANTIZED_BYTES = 1 + 4 / 256
"""One byte and one fp32 scale for 256 elements (bitsandbytes and torchao block size)."""

QUANTIZED_SLOWDOWN = 2.6
"""Time of the 8-bit kernel over that of its traffic: 47 ms for 1e9 elements on a V100, which moves their 16 B in 18 ms
(arXiv:2110.02861, table of update times)."""


def state_bytes_per_parameter(optimizer: OptimizerName, master_bytes: int) -> float:
    """Bytes an element of all moments. AdamW's moments have the dtype of the parameter that it moves."""
    _, moments = _STATES[optimizer]
    if optimizer == "adamw_bf16_states":
        return 2.0 * moments
    if optimizer in ("adamw_8bit", "paged_adamw_8bit"):
        return QUANTIZED_BYTES * moments
    return float(master_bytes * moments)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Elements on one rank, before sharding, by how their moments are kept."""

    in_8_bit: int
    exactly: int
    """In fp32, under an 8-bit optimizer; or as the optimizer's name says, under any other."""


def kept(place: Placement) -> Kept:
    """Which elements an 8-bit optimizer keeps in 8 bits; see [Note: what stays in 32 bits]."""
    return place.once("optimizer.kept", _work_out_kept)


def _work_out_kept(place: Placement) -> Kept:
    if place.strategy.optimizer not in _EIGHT_BIT:
        return Kept(in_8_bit=0, exactly=place.trainable)
    model, lora, tp = place.model, place.job.lora, place.strategy.tp
    in_8_bit = 0
    if place.trains_all:
        for linear in model.linears:
            parts = tp if splits_input(linear) else 1
            if linear.copies == 1 and _fits_8_bit(linear.out_features, linear.in_features, parts):
                in_8_bit += linear.matrix_parameters // (1 if linear.site == "router" else tp)
    else:
        for linear in adapted(model, lora):
            parts = tp if splits_input(linear) else 1
            if _fits_8_bit(lora.r, linear.in_features, parts):
                in_8_bit += lora.r * linear.in_features // parts
            if _fits_8_bit(linear.out_features, lora.r, 1):
                in_8_bit += lora.r * linear.out_features // (1 if parts > 1 else tp)
    in_8_bit *= place.num_blocks
    return Kept(in_8_bit=in_8_bit, exactly=place.trainable - in_8_bit)


def _fits_8_bit(rows: int, columns: int, parts: int) -> bool:
    """A matrix of which every part has rows of whole blocks."""
    return rows * columns >= LEAST_ELEMENTS and columns % (parts * BLOCK) == 0


def state_bytes(place: Placement) -> float:
    """Bytes of all moments of this rank, before sharding."""
    found, strategy = kept(place), place.strategy
    each = state_bytes_per_parameter(strategy.optimizer, place.master_bytes)
    if strategy.optimizer not in _EIGHT_BIT:
        return each * found.exactly
    return each * found.in_8_bit + 2 * FLOAT_BYTES * found.exactly


def paged_bytes(place: Placement) -> float:
    """Of those, what is managed memory, which the driver moves to the host when the card is full: the codes."""
    return 2.0 * kept(place).in_8_bit if place.strategy.optimizer == "paged_adamw_8bit" else 0.0


def stores(place: Placement) -> tuple[Term, ...]:
    """Moments, from the first step on; on the host where they are offloaded or paged out."""
    strategy = place.strategy
    if strategy.offload != "none":
        return ()
    found, shards = kept(place), strategy.dp_shard
    size = (state_bytes(place) - paged_bytes(place)) / shards
    formula = f"{state_bytes_per_parameter(strategy.optimizer, place.master_bytes):g} B x {found.exactly:,} / {shards}"
    if strategy.optimizer in _EIGHT_BIT:
        codes = f"{2 * QUANTIZED_BYTES - (2 if paged_bytes(place) else 0):.3g} B x {found.in_8_bit:,}"
        formula = f"({codes} + 8 B x {found.exactly:,}) / {shards}"
    terms = [
        Term(
            category=Category.OPTIMIZER,
            name=_STATES[strategy.optimizer][0],
            bytes=round(size),
            alive=TRAINED,
            formula=formula,
            source="torch.optim.AdamW: exp_avg and exp_avg_sq"
            if strategy.optimizer == "adamw"
            else "levers/optimizer, [Note: what stays in 32 bits]",
        )
    ]
    if strategy.optimizer == "lamb":
        terms.append(
            Term(
                category=Category.TEMPORARY,
                name="update direction",
                bytes=round(place.master_bytes * place.trainable / shards),
                alive=(Instant.OPTIMIZER,),
                formula="the whole update exists before its norm is known",
                source="LAMB, arXiv:1904.00962",
            )
        )
    return tuple(terms)


def sends(place: Placement) -> tuple[Collective, ...]:
    """LAMB's squared norms: two numbers for every matrix, summed over each axis along which matrices are split."""
    strategy = place.strategy
    if strategy.optimizer != "lamb":
        return ()
    matrices = _num_matrices(place)
    return tuple(
        Collective(
            op="all_reduce",
            axis=axis,
            ranks=degree,
            bytes=2 * FLOAT_BYTES * matrices,
            count=1,
            site="step",
            during="optimizer",
            every="step",
            hides_behind="nothing",
            name="all_reduce of LAMB's norms",
            formula=f"2 x {FLOAT_BYTES} B x {matrices} matrices",
            source="levers/optimizer/apply_lamb.py",
        )
        for axis, degree in ((Axis.DP_SHARD, strategy.dp_shard), (Axis.TP, strategy.tp))
        if degree > 1
    )


def _num_matrices(place: Placement) -> int:
    """Trained parameters of two or more dims on this rank."""
    model = place.model
    if not place.trains_all:
        return 2 * place.num_blocks * len(adapted(model, place.job.lora))
    experts = sum(linear.copies > 1 for linear in model.linears)
    of_block = sum(linear.copies == 1 for linear in model.linears) + (2 if experts else 0)  # gate and up are one
    tables = sum((place.is_first, place.is_last and not (model.tie_word_embeddings and place.is_first)))
    return place.num_blocks * of_block + tables


def step_traffic_bytes(place: Placement) -> float:
    """Device memory traffic of one step, with what clipping moves before it; see [Note: traffic of an update]."""
    master, found = place.master_bytes, kept(place)
    narrow = 0.0 if master == FLOAT_BYTES else 1.0
    match place.strategy.optimizer:
        case "adamw":
            moved = 7.0 * master * found.exactly
        case "adamw_8bit" | "paged_adamw_8bit":
            each = (3.0 * master + 2 * 2 * QUANTIZED_BYTES) * QUANTIZED_SLOWDOWN
            moved = each * found.in_8_bit + (20 * FLOAT_BYTES + narrow * 3 * master) * found.exactly
        case "adamw_bf16_states":
            moved = (30 * FLOAT_BYTES + narrow * (3 * master + 3 * FLOAT_BYTES)) * found.exactly
        case "lamb":
            moved = 30.0 * master * found.exactly
        case "sgd":
            moved = 5.0 * master * found.exactly
    clipping = 3 * master * place.trainable
    return (moved + clipping) / place.strategy.dp_shard
