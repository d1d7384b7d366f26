"""The arithmetic of a plan with the user's own numbers, line by line: headline beside calibrated."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.planner import headline
from shardwise.planner.wire import collective_seconds
from shardwise.vocabulary.memory import Instant, MemoryBreakdown
from shardwise.vocabulary.plan import Candidate, Plan
from shardwise.vocabulary.strategy import Strategy
from shardwise.vocabulary.timeline import Collective
from shardwise.vocabulary.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_gb,
    format_percent,
    format_seconds,
)


def explain(plan: Plan) -> str:
    """The whole derivation as text; of the recommended strategy, or of the smallest if none fits."""
    candidate = plan.recommended or (plan.candidates[-1] if plan.candidates else None)
    sections = [_model(plan), _headline(plan)]
    if candidate is not None:
        sections += [_memory(plan, candidate), _wire(plan, candidate), _time(plan, candidate)]
    sections.append([f"So: {plan.reason}", *(f"Rule: {rule}." for rule in plan.rules)])
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _model(plan: Plan) -> list[str]:
    model = plan.job.model
    linears = ", ".join(f"{linear.name} {linear.in_features}x{linear.out_features}" for linear in model.linears)
    lines = [
        f"THE MODEL  {model.name}",
        f"  one block     {linears}: {model.block_parameters:,} parameters, norms included",
        f"  all blocks    {model.num_hidden_layers} x {model.block_parameters:,} = "
        f"{model.num_hidden_layers * model.block_parameters:,}",
        f"  the rest      embedding {model.embedding_parameters:,}, head "
        + ("tied to it" if model.tie_word_embeddings else f"{model.head_parameters:,}")
        + f", final norm {model.hidden_size:,}",
        f"  together      {model.num_parameters:,} parameters ({format_count(model.num_parameters)})",
    ]
    if model.is_mixture:
        lines.append(f"  of these      {model.num_active_parameters:,} take part in one token")
    return lines


def _headline(plan: Plan) -> list[str]:
    lines = [
        "ON THE BACK OF AN ENVELOPE",
        f"  a full fine-tune keeps {headline.WEIGHT_BYTES} B weights + {headline.GRADIENT_BYTES} B gradients + "
        f"{headline.OPTIMIZER_BYTES} B optimizer = {headline.STATIC_BYTES} B a parameter",
    ]
    lines += [f"  {row.name}: {row.formula} = {row.value:,.4g} {row.unit}" for row in plan.headline]
    return lines


def _memory(plan: Plan, candidate: Candidate) -> list[str]:
    memory, peak = candidate.memory, candidate.memory.peak_instant
    lines = [f"MEMORY OF ONE CARD under {candidate.strategy.name}, at its peak ({_words(peak)})"]
    alive = [term for term in memory.terms if peak in term.alive and term.bytes]
    for term in sorted(alive, key=lambda each: -each.bytes):
        lines.append(f"  {format_gb(term.bytes, 2):>10}  {term.name:<22} {term.formula}")
    lines += [
        f"  {format_gb(memory.allocated_bytes, 2):>10}  allocated (torch hands out)",
        f"  {format_gb(memory.reserved_bytes, 2):>10}  reserved (its allocator holds)",
        f"  {format_gb(memory.device_bytes, 2):>10}  device (the driver counts), of {_card(plan)}",
    ]
    return lines + list(_other_instants(memory))


def _other_instants(memory: MemoryBreakdown) -> Iterator[str]:
    counted = ", ".join(f"{_words(instant)} {format_gb(memory.at(instant))}" for instant in Instant)
    yield f"  allocated at each instant: {counted}"


def _words(instant: Instant) -> str:
    return instant.value.replace("_", " ")


def _card(plan: Plan) -> str:
    gpu = plan.cluster.gpu
    return f"{format_gb(gpu.cuda_memory_bytes or gpu.memory_bytes)} of {gpu.name}"


def _wire(plan: Plan, candidate: Candidate) -> list[str]:
    if not candidate.collectives:
        return ["THE WIRE", "  nothing crosses it"]
    lines = [f"THE WIRE under {candidate.strategy.name}, one optimizer step"]
    lines += [_message(plan, candidate.strategy, message) for message in candidate.collectives]
    link = plan.cluster.intra_node
    lines.append(
        f"  {link.name}: {format_bandwidth(link.bandwidth_bytes_per_s)} one way, of which large messages attain "
        f"{format_percent(link.attained_fraction)}"
        + (" (measured)" if link.curves else f" ({link.attained_source or link.source})")
    )
    return lines


def _message(plan: Plan, strategy: Strategy, message: Collective) -> str:
    seconds = collective_seconds(plan.cluster, strategy, message)
    hidden = "may hide behind compute" if message.hides_behind == "compute" else "nothing hides it"
    return (
        f"  {message.count:>5} x {message.op:<14} {message.site:<9} of {format_bytes(message.bytes):>9} "
        f"over {message.ranks} ranks, {format_seconds(seconds):>8} each = {format_seconds(seconds * message.count)}; "
        + hidden
    )


def _time(plan: Plan, candidate: Candidate) -> list[str]:
    step, job = candidate.step, plan.job
    parts = (
        ("compute", step.compute_seconds, "blocks, loss, optimizer"),
        ("exposed wire", step.exposed_wire_seconds, f"of {format_seconds(step.wire_seconds)} on the wire"),
        ("bubble", step.bubble_seconds, "pipeline stages waiting for each other"),
        ("host", step.host_seconds, "the card waiting for its host"),
    )
    lines = [f"ONE OPTIMIZER STEP of {job.tokens_per_step:,} tokens"]
    lines += [f"  {format_seconds(seconds):>9}  {name:<13} {note}" for name, seconds, note in parts if seconds]
    low, high = candidate.step_interval_seconds
    lines += [
        f"  {format_seconds(step.seconds):>9}  the step ({format_seconds(low)} to {format_seconds(high)})",
        f"  {candidate.tokens_per_s:,.0f} tokens/s, MFU {format_percent(candidate.model_flops_utilization, 1)} of the "
        "cards' dense peak (recomputation not counted)",
    ]
    return lines
