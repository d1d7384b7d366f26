"""The phrases that the terminal page and the HTML page share, so that they never say different things."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwise.planner import reasons
from shardwise.planner.uncertainty import usable_bytes
from shardwise.vocabulary.cluster import Cluster, Link
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.ledger import LedgerRow
from shardwise.vocabulary.memory import Category, Instant
from shardwise.vocabulary.plan import Candidate, Headline, Plan, Refusal
from shardwise.vocabulary.strategy import Strategy
from shardwise.vocabulary.units import (
    GB,
    GIB,
    KB,
    MB,
    MICROSECOND,
    MILLISECOND,
    TB,
    format_bandwidth,
    format_bytes,
    format_count,
    format_number,
    format_percent,
    format_rate,
    format_seconds,
)

TIGHT = 0.02
"""A plan that fits with a higher chance than this of running out is called tight."""
INSTANTS = {
    Instant.LOAD: "while loading",
    Instant.FORWARD: "at the end of forward",
    Instant.LOSS: "in the loss",
    Instant.BACKWARD_FIRST: "at the start of backward",
    Instant.REDUCE_FIRST: "while the last block's gradients are reduced",
    Instant.BACKWARD_LAST: "at the end of backward",
    Instant.REDUCE_LAST: "while the root's gradients are reduced",
    Instant.OPTIMIZER: "in the optimizer's step",
    Instant.EVALUATION: "in evaluation",
    Instant.SAVE: "while saving",
}
OPTIMIZERS = {
    "adamw": "AdamW", "adamw_bf16_states": "AdamW with bf16 states", "adamw_8bit": "8-bit AdamW",
    "paged_adamw_8bit": "paged 8-bit AdamW", "lamb": "LAMB", "sgd": "SGD",
}  # fmt: skip
TUNINGS = {"full": "full fine-tune", "lora": "LoRA", "qlora": "QLoRA", "any": "full fine-tune or adapters"}


CATEGORY_HEADS = {
    Category.PARAMETER: "param",
    Category.GRADIENT: "grad",
    Category.OPTIMIZER: "optim",
    Category.ACTIVATION: "act",
    Category.TEMPORARY: "temp",
    Category.RUNTIME: "run",
}
"""Heads of narrow columns."""


# ---------------------------------------------------------------------------------------------------- numbers


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A unit of bytes and decimals that suit the largest of several sizes, so that a table has one unit."""

    unit: int
    name: str
    places: int

    @staticmethod
    def of(*sizes: float) -> Scale:
        """For these sizes: one decimal from 10 of a unit on, else two."""
        largest = max(sizes, default=0.0)
        for unit, name in ((TB, "TB"), (GB, "GB"), (MB, "MB"), (KB, "KB")):
            if largest >= unit:
                return Scale(unit=unit, name=name, places=1 if largest >= 10 * unit else 2)
        return Scale(unit=1, name="B", places=0)

    def number(self, size: float) -> str:
        """Without the unit: `21.3`."""
        return f"{size / self.unit:,.{self.places}f}"

    def text(self, size: float) -> str:
        """With the unit: `21.3 GB`."""
        return f"{self.number(size)} {self.name}"


def table_scale(candidates: Sequence[Candidate]) -> Scale:
    """The one for a table of candidates."""
    return Scale.of(*(candidate.memory.needed_bytes for candidate in candidates))


def format_size(num_bytes: float) -> str:
    """A size by itself, to three digits: `21.3 GB`, `4.28 MB`."""
    return Scale.of(num_bytes).text(num_bytes)


def bytes_interval(value: float, interval: tuple[float, float]) -> str:
    """`21.3 GB (19.8–23.1)`; without the bracket where the interval is a point."""
    scale = Scale.of(value)
    low, high = scale.number(interval[0]), scale.number(interval[1])
    return scale.text(value) if low == high else f"{scale.text(value)} ({low}–{high})"


def seconds_interval(value: float, interval: tuple[float, float]) -> str:
    """`1.92 s (1.73–2.17)`, all three in one unit and to three digits of the value."""
    for unit, name in ((MICROSECOND, "us"), (MILLISECOND, "ms"), (1.0, "s")):
        scaled = value / unit
        if scaled < 1000 or name == "s":
            places = 0 if scaled >= 100 else 1 if scaled >= 10 else 2
            return _with_interval(scaled, (interval[0] / unit, interval[1] / unit), name, places)
    raise AssertionError("unreachable: seconds take every value")


def _with_interval(value: float, interval: tuple[float, float], unit: str, places: int) -> str:
    low, high = (f"{edge:,.{places}f}" for edge in interval)
    text = f"{value:,.{places}f} {unit}"
    return text if low == high else f"{text} ({low}–{high})"


def format_quantity(value: float | None, unit: str) -> str:
    """A ledger's or a headline's figure in a unit that suits it; `-` for unknown."""
    if value is None:
        return "-"
    if unit == "bytes":
        return format_bytes(value)
    if unit == "seconds":
        return format_seconds(value)
    if unit == "tokens/s":
        return f"{format_rate(value)} tokens/s"
    if unit == "messages":
        return f"{value:,.0f}"
    return f"{format_number(value)} {unit}"


def format_error(row: LedgerRow) -> str:
    """`-3.6 %`, `exact`, or empty where nothing was measured."""
    error = row.error
    if error is None:
        return "exact" if row.measured == 0 and row.predicted == 0 else ""
    if error == 0:
        return "exact"
    return "under 0.1 %" if abs(error) < 0.0005 else f"{100 * error:+.1f} %"


# ---------------------------------------------------------------------------------------------------- nouns


def describe_model(job: Job) -> str:
    """`qwen2.5-7b, 7.62B parameters in 28 blocks`."""
    model = job.model
    active = f" ({format_count(model.num_active_parameters)} active)" if model.is_mixture else ""
    return f"{model.name}, {format_count(model.num_parameters)} parameters{active} in {model.num_hidden_layers} blocks"


def describe_cluster(cluster: Cluster) -> str:
    """The cards and the wires: `2 x rtx-5090 (34.2 GB = 31.8 GiB each), pcie5-x8 at 31.5 GB/s one way (datasheet)`."""
    cards = f"{cluster.gpus_per_node} × {cluster.gpu.name}"
    if cluster.num_nodes > 1:
        cards = f"{cluster.num_nodes} nodes × {cards}"
    memory = cluster.gpu.memory_bytes
    text = f"{cards} ({format_size(memory)} = {memory / GIB:.1f} GiB{' each' if cluster.num_gpus > 1 else ''})"
    if cluster.gpus_per_node > 1:
        text += f", {describe_link(cluster.intra_node)}"
    if cluster.num_nodes > 1 and cluster.inter_node is not None:
        text += f", between nodes {describe_link(cluster.inter_node)} a card" + (
            f", {format_bandwidth(cluster.inter_node.bandwidth_bytes_per_s * cluster.gpus_per_node)} a machine"
        ) * (cluster.gpus_per_node > 1)
    return text


def describe_link(link: Link) -> str:
    """`pcie5-x8 at 31.5 GB/s one way (datasheet)`."""
    return f"{link.name} at {format_bandwidth(link.bandwidth_bytes_per_s)} one way ({link.source})"


def describe_job(job: Job) -> str:
    """`full fine-tune, 32 sequences x 2,048 tokens = 65,536 tokens a step, bf16, AdamW`.

    Where a data set was looked at, its rows differ: their usual length and the longest are told instead of a product.
    """
    sequences = f"{job.global_batch_size:,} sequences"
    if job.lengths is None or job.packing:
        batch = f"{sequences} × {job.sequence_length:,} tokens = {job.tokens_per_step:,} tokens a step"
    else:
        mean = job.lengths.mean
        batch = (
            f"{sequences} a step, {mean:,.0f} tokens long on average (≈ {job.global_batch_size * mean:,.0f} tokens) "
            f"and {job.sequence_length:,} at most"
        )
    return f"{TUNINGS[job.tuning]}, {batch}, {job.precision}, {OPTIMIZERS[job.optimizer]}"


def describe_batch(strategy: Strategy, job: Job) -> str:
    """The effective batch in words: `2 x 8 x 4 GPUs = 64 sequences = 131,072 tokens`."""
    sequences = strategy.global_batch_size
    text = (
        f"micro-batch {strategy.micro_batch_size} × accumulation {strategy.accumulation} × {strategy.data_parallel} "
        f"data-parallel rank{'s' if strategy.data_parallel > 1 else ''} = {sequences:,} sequences"
    )
    if job.lengths is None or job.packing:
        return f"{text} = {sequences * job.sequence_length:,} tokens"
    padded = job.typical_length(strategy.micro_batch_size)
    return (
        f"{text} ≈ {sequences * padded:,.0f} tokens, padding to each micro-batch's longest row included; memory is "
        f"counted for rows of {job.sequence_length:,}"
    )


def describe_settings(strategy: Strategy) -> str:
    """What the strategy's name does not say: `2 × 8, no checkpointing, chunked loss`."""
    checkpointing = (
        "no checkpointing" if strategy.checkpointing == "none" else f"{strategy.checkpointing} checkpointing"
    )
    parts = [f"{strategy.micro_batch_size} × {strategy.accumulation}", checkpointing]
    if strategy.loss != "plain":
        parts.append(f"{strategy.loss} loss")
    if strategy.compile_blocks:
        parts.append("compiled")
    if strategy.offload != "none":
        parts.append(f"{strategy.offload} offloaded")
    if strategy.sequence_parallel:
        parts.append("sequence parallel")
    if strategy.keep_unsharded:
        parts.append("whole gradients kept")
    if strategy.pp > 1:
        chunks = f" × {strategy.virtual_stages}" if strategy.virtual_stages > 1 else ""
        parts.append(f"{strategy.pipeline_schedule}{chunks}")
    return ", ".join(parts)


def full_name(strategy: Strategy) -> str:
    """Tuning and split: `LoRA, DDP` or `ZeRO-2`."""
    return reasons.named(strategy)


def grouped_refusals(refusals: Sequence[Refusal]) -> list[tuple[str, Refusal]]:
    """Refusals that say the same thing told once, with the names of all strategies they concern."""
    return reasons.grouped_refusals(refusals)


def wire_bytes(candidate: Candidate) -> int:
    """Bytes that one rank sends in one optimizer step."""
    return sum(collective.wire_bytes for collective in candidate.collectives)


def verdict(candidate: Candidate, usable: int) -> str:
    """`fits`, `tight: 12 % chance to run out`, or `needs 7.2 GB more`.

    Args:
        candidate: What is judged.
        usable: Bytes of one card that a plan may use (`planner.uncertainty.usable_bytes`).
    """
    runs_out = f"{reasons.chance(candidate.probability_of_oom)} chance to run out"
    if candidate.fits:
        return "fits" if candidate.probability_of_oom <= TIGHT else f"tight: {runs_out}"
    missing = candidate.memory.needed_bytes - usable
    return f"needs {format_size(missing)} more" if missing > 0 else f"too close: {runs_out}"


def sentence_about(candidate: Candidate, plan: Plan) -> tuple[str, str]:
    """Two lines about a candidate: its memory, and its time."""
    memory, usable = candidate.memory, format_size(usable_bytes(plan.cluster))
    text = f"{bytes_interval(memory.needed_bytes, candidate.memory_interval_bytes)} of {usable} usable on each card"
    if memory.cached_bytes > 0:
        text += f" ({format_size(memory.device_bytes)} with cached blocks, which are given back when they are needed)"
    text += (
        f", peak {INSTANTS[memory.peak_instant]}; {reasons.chance(candidate.probability_of_oom)} chance to run out of "
        f"the {format_size(plan.cluster.gpu.cuda_memory_bytes or plan.cluster.gpu.memory_bytes)} card"
    )
    time = (
        f"{seconds_interval(candidate.step.seconds, candidate.step_interval_seconds)} a step, "
        f"{format_rate(candidate.tokens_per_s)} tokens/s over all cards, MFU "
        f"{format_percent(candidate.model_flops_utilization)}"
    )
    return text, time


def nothing(plan: Plan) -> str:
    """The verdict of a plan that recommends nothing."""
    return "Nothing fits." if plan.candidates else "Nothing can run as asked."


# ---------------------------------------------------------------------------------------------------- choices


def leaders(candidates: Sequence[Candidate], taken: Candidate | None, limit: int = 12) -> list[Candidate]:
    """The best candidate of each split and tuning, in the plan's order, and always the one that was taken."""
    best: dict[tuple[str, str], Candidate] = {}
    for candidate in candidates:
        best.setdefault((candidate.strategy.tuning, candidate.strategy.name), candidate)
    if taken is not None:
        best[(taken.strategy.tuning, taken.strategy.name)] = taken
    return list(best.values())[:limit]


def memory_by_category(candidate: Candidate) -> dict[Category, int]:
    """Bytes at the peak by category; they add up to what is needed: cached blocks, which are given back, left out."""
    totals = candidate.memory.by_category()
    return {**totals, Category.RUNTIME: totals[Category.RUNTIME] - candidate.memory.cached_bytes}


def other_refusals(plan: Plan, shown: Sequence[Candidate]) -> list[Refusal]:
    """Refusals without those that a table of candidates says already: it does not fit."""
    named = {candidate.strategy for candidate in shown}
    return [r for r in plan.refusals if not (r.rule == "does_not_fit" and r.strategy in named)]


def headline_rows(headlines: Iterable[Headline]) -> list[tuple[str, str, str, str]]:
    """Name, headline, calibrated, formula of each envelope figure."""
    return [
        (line.name, format_quantity(line.value, line.unit), format_quantity(line.calibrated, line.unit), line.formula)
        for line in headlines
    ]
