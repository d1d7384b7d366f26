"""What the optimizer keeps, and the bytes that its step moves."""

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
QUANTIZED_BYTES = 1 + 4 / 256
"""One byte and one fp32 scale for 256 elements (bitsandbytes and torchao block size)."""


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
    """Device memory traffic of one step: read parameter, gradient and moments; write parameter and moments."""
    states = state_bytes_per_parameter(place.strategy.optimizer, place.master_bytes)
    passes = 2 * states + 3 * place.master_bytes
    if place.strategy.optimizer == "lamb":
        passes += 2 * place.master_bytes
    clipping = place.master_bytes
    return (passes + clipping) * place.trainable / place.strategy.dp_shard
