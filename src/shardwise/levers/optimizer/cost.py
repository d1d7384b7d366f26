"""What the optimizer keeps, and the bytes that its step moves.

[Note: traffic of an update]
Reads and writes of one element, kernel by kernel, each from memory:

    clipping           the norm reads the gradient, scaling reads and writes it: 3
    adamw              one fused kernel: reads weight, gradient and moments, writes all but the gradient: 7
    8-bit              one kernel: weight twice, gradient, codes of two moments twice; it searches the code tables for
                       longer than it waits for memory
    adamw_bf16_states  moments cast to fp32 and back (8 B each way, the second also rounded: 16 B), averages 8, roots,
                       two divisions and update 12: about 30 fp32 values
    lamb               averages 8, direction 12 and 3 for decay, norms 2, scaling 2, update 3
    sgd                decay 2, update 3

Source: `apply*.py`, whose foreach operations are one kernel each.
"""

from __future__ import annotations

from shardwise.vocabulary.job import OptimizerName
from shardwise.vocabulary.memory import TRAINED, Category, Instant, Term
from shardwise.vocabulary.placement import Placement

_STATES = {
    "adamw": ("two moments", 2),
    "adamw_bf16_states": ("two bf16 moments", 2),
    "adamw_8bit": ("two 8-bit moments", 2),
    "paged_adamw_8bit": ("two 8-bit moments, paged", 2),
    "lamb": ("two moments", 2),
    "sgd": ("nothing", 0),
}
FLOAT_BYTES = 4
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


def stores(place: Placement) -> tuple[Term, ...]:
    """Moments, from the first step on; on the host where they are offloaded or paged out."""
    strategy = place.strategy
    per_parameter = state_bytes_per_parameter(strategy.optimizer, place.master_bytes)
    if strategy.offload != "none" or strategy.optimizer == "paged_adamw_8bit":
        return ()
    local = place.trainable / strategy.dp_shard
    terms = [
        Term(
            category=Category.OPTIMIZER,
            name=_STATES[strategy.optimizer][0],
            bytes=round(per_parameter * local),
            alive=TRAINED,
            formula=f"{per_parameter:g} B x {place.trainable:,} / {strategy.dp_shard}",
            source="torch.optim.AdamW: exp_avg and exp_avg_sq",
        )
    ]
    if strategy.optimizer == "lamb":
        terms.append(
            Term(
                category=Category.TEMPORARY,
                name="update direction",
                bytes=round(place.master_bytes * local),
                alive=(Instant.OPTIMIZER,),
                formula="the whole update exists before its norm is known",
                source="LAMB, arXiv:1904.00962",
            )
        )
    return tuple(terms)


def step_traffic_bytes(place: Placement) -> float:
    """Device memory traffic of one step, with what clipping moves before it; see [Note: traffic of an update]."""
    master = place.master_bytes
    narrow = 0.0 if master == FLOAT_BYTES else 1.0
    match place.strategy.optimizer:
        case "adamw":
            update = 7.0 * master
        case "adamw_8bit" | "paged_adamw_8bit":
            update = (3.0 * master + 2 * 2 * QUANTIZED_BYTES) * QUANTIZED_SLOWDOWN
        case "adamw_bf16_states":
            update = 30 * FLOAT_BYTES + narrow * (3 * master + 3 * FLOAT_BYTES)
        case "lamb":
            update = (8 + 12 + 3 + 2 + 2 + 3) * master
        case "sgd":
            update = 5.0 * master
    clipping = 3 * master
    return (update + clipping) * place.trainable / place.strategy.dp_shard
