"""The same questions on the back of an envelope: headline bandwidth, no latency, every byte counted once.

Decimal units. These figures are what articles and courses print; the calibrated answer stands beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.plan import Candidate, Headline
from shardwise.vocabulary.strategy import Strategy, ZeroStage
from shardwise.vocabulary.units import GB, MILLISECOND

WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 2, 12
"""bf16 weights and gradients; fp32 master and two Adam moments."""
STATIC_BYTES = WEIGHT_BYTES + GRADIENT_BYTES + OPTIMIZER_BYTES
DDP_PASSES, FSDP_PASSES = 2, 3
"""A ring all_reduce is a reduce_scatter and an all_gather; full sharding adds a second all_gather."""
FULL_STAGE = 3
CHECKPOINTING_EXTRA_COMPUTE = 0.33
"""One more forward, about a third of a step."""
HIDDEN_SHARE = 0.3
"""Rule of thumb: a collective above this share of the compute beside it cannot be hidden."""


def static_bytes_per_parameter(cards: int = 1, stage: ZeroStage = 0) -> float:
    """Bytes a parameter on one card: ZeRO divides optimizer (1), gradients (2) and weights (3). arXiv:1910.02054."""
    optimizer = OPTIMIZER_BYTES / (cards if stage >= 1 else 1)
    gradients = GRADIENT_BYTES / (cards if stage >= 2 else 1)
    return optimizer + gradients + WEIGHT_BYTES / (cards if stage >= 3 else 1)


def static_bytes(parameters: float, cards: int = 1, stage: ZeroStage = 0) -> float:
    """Weights, gradients and optimizer on one card."""
    return parameters * static_bytes_per_parameter(cards, stage)


def transfer_seconds(num_bytes: float, headline_bytes_per_s: float) -> float:
    """Time to move bytes once at the headline bandwidth."""
    return num_bytes / headline_bytes_per_s


def gradient_bytes(parameters: float) -> float:
    """One bf16 gradient."""
    return GRADIENT_BYTES * parameters


def gathered_bytes_received(total_bytes: float, cards: int) -> float:
    """What one card receives in an all_gather."""
    return total_bytes * (cards - 1) / cards


def activation_bytes(batch: int, sequence: int, hidden: int, element_bytes: int = 2) -> int:
    """One tensor of hidden states."""
    return batch * sequence * hidden * element_bytes


def checkpointed_step_seconds(forward: float, backward: float) -> float:
    """A step with activation checkpointing."""
    return (forward + backward) * (1 + CHECKPOINTING_EXTRA_COMPUTE)


def effective_batch(cards: int, micro_batch: int, accumulation: int) -> int:
    """Sequences of one optimizer step."""
    return cards * micro_batch * accumulation


def solve_degree(gpus: int, **degrees: int) -> int:
    """The one degree that is left when all others are given.

    Raises:
        ValueError: If the given degrees do not divide the cards.
    """
    product = 1
    for degree in degrees.values():
        product *= degree
    if gpus % product:
        raise ValueError(
            f"{gpus} cards do not divide by {product} ({', '.join(f'{k} {v}' for k, v in degrees.items())})"
        )
    return gpus // product


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What one card holds, term by term, as an envelope counts it."""

    static: float
    gather_buffer: float = 0.0
    """One gathered layer under full sharding."""
    activations: float = 0.0
    """Never divided by sharding: every card runs its own batch."""

    @property
    def total(self) -> float:
        """All terms together, bytes."""
        return self.static + self.gather_buffer + self.activations

    @property
    def largest(self) -> str:
        """The name of the largest term."""
        terms = {"static": self.static, "gather_buffer": self.gather_buffer, "activations": self.activations}
        return max(terms, key=lambda name: terms[name])

    def fits(self, card_bytes: float) -> bool:
        """Whether the card has that much."""
        return self.total <= card_bytes


def all_reduces(micro_batches: int, accumulation: int) -> float:
    """Gradient reductions of replicas over so many micro-batches: one for each optimizer step."""
    return micro_batches / accumulation


def all_reduced(values: Sequence[float]) -> tuple[float, float]:
    """Sum and mean of what each card brings: what an all_reduce gives every card, and what the optimizer uses."""
    return sum(values), sum(values) / len(values)


def lanes_each(lanes: int, cards: int) -> int:
    """PCIe lanes of one card when cards share a processor's lanes."""
    return lanes // cards


@dataclass(frozen=True, kw_only=True)
class Hiding:
    """What a collective does to the compute beside it."""

    ratio: float
    """Wire time over compute time."""
    hides: bool
    """By the rule of thumb."""


def hiding(wire_seconds: float, compute_seconds: float) -> Hiding:
    """The 0.3 rule of thumb."""
    ratio = wire_seconds / compute_seconds
    return Hiding(ratio=ratio, hides=ratio <= HIDDEN_SHARE)


def headlines(job: Job, cluster: Cluster, recommended: Candidate | None) -> tuple[Headline, ...]:
    """The headline figures of a job, each beside the planner's own where there is one."""
    parameters, cards = job.model.num_parameters, cluster.num_gpus
    rows = [
        Headline(
            name="static memory, one card",
            value=static_bytes(parameters) / GB,
            unit="GB",
            formula=f"{_short(parameters)} x {STATIC_BYTES} B",
        )
    ]
    if cards > 1:
        rows += [_sharded(parameters, cards, stage) for stage in (1, 2, 3)]
        rows += _wire_rows(job, cluster, recommended)
    return tuple(rows)


def _short(parameters: int) -> str:
    """`7.62B`, `134.5M`."""
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def _sharded(parameters: int, cards: int, stage: ZeroStage) -> Headline:
    per_parameter = static_bytes_per_parameter(cards, stage)
    return Headline(
        name=f"static memory, ZeRO-{stage} over {cards} cards",
        value=parameters * per_parameter / GB,
        unit="GB",
        formula=f"{_short(parameters)} x {per_parameter:g} B",
    )


def _wire_rows(job: Job, cluster: Cluster, recommended: Candidate | None) -> list[Headline]:
    """One gradient over the wire that decides, and the passes of a step, beside what the planner counts."""
    moved = gradient_bytes(job.model.num_parameters)
    spans = cluster.num_nodes > 1 and cluster.inter_node is not None
    link = cluster.inter_node if spans and cluster.inter_node is not None else cluster.intra_node
    bandwidth = link.headline_bandwidth_bytes_per_s * (cluster.gpus_per_node if spans else 1)
    over = f"{moved / GB:.2f} GB / {bandwidth / GB:g} GB/s headline" + (" of a machine" if spans else "")
    once = transfer_seconds(moved, bandwidth)
    rows = [Headline(name=f"one gradient over {link.name}", value=once / MILLISECOND, unit="ms", formula=over)]
    if recommended is not None and (passes := wire_passes(recommended.strategy)):
        rows.append(
            Headline(
                name=f"wire of one step, {recommended.strategy.name}",
                value=passes * once / MILLISECOND,
                unit="ms",
                formula=f"{passes} passes x {over}",
                calibrated=recommended.step.wire_seconds / MILLISECOND,
            )
        )
    return rows


def wire_passes(strategy: Strategy) -> int:
    """How often a full fine-tune's weights or gradients cross the wire in one step; 0 where an envelope has no word.

    Replication: an all_reduce is two passes, once a step, as are stage 1's gather and reduction. Stage 2 pays its two
    every micro-batch, stage 3 gathers twice.
    """
    if strategy.tuning != "full" or strategy.tp > 1 or strategy.pp > 1 or strategy.dp_replicate > 1 < strategy.dp_shard:
        return 0
    if strategy.num_ranks == 1:
        return 0
    if strategy.zero_stage <= 1:
        return DDP_PASSES
    gathers = 2 if strategy.zero_stage == FULL_STAGE else 1
    reductions = 1 if strategy.keep_unsharded else strategy.accumulation
    return gathers * strategy.accumulation + reductions
