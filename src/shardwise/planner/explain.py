"""The arithmetic of a plan with the user's own numbers, line by line: headline beside calibrated, and why not the rest.

Every figure is computed by the function that the plan rests on; the lines only say what went into it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from shardwise.levers.loss import cost as loss
from shardwise.planner import headline, reasons
from shardwise.planner.explain_step import explain_step, explain_wire
from shardwise.planner.memory import breakdown
from shardwise.planner.uncertainty import (
    ACCEPTED_PROBABILITY,
    MOVING_SPREAD,
    STATIC_SPREAD,
    memory_spread,
    needed_bytes,
    usable_bytes,
)
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.memory import Instant, Level, MemoryBreakdown, Term
from shardwise.vocabulary.placement import NF4_DOUBLE_BYTES, Placement
from shardwise.vocabulary.plan import Candidate, Plan
from shardwise.vocabulary.units import GLUE, format_count, format_gb, format_number, glued, some

WIDTH = 120
MEANINGS = {
    "trainable weights": "what the optimizer moves, in its own precision",
    "frozen weights": "what is read only",
    "accumulated gradients": "the sum so far over micro-batches",
    "gathered weights": "whole copies in compute precision, from their forward to their backward",
    "gathered root": "norm, head and what else is no block: stays gathered",
    "gathered block": "the block at work, whole",
    "all_gather output": "where the next gather lands",
    "reduction input": "gradients in the wire's precision, on their way",
    "saved activations": "what backward will read",
    "passing values": "live while one operation runs",
    "recomputed block": "made again by checkpointing",
    "logits": "one number for each token and word of the vocabulary",
    "last hidden states": "input of the final norm and head",
    "unpacked matrix": "a 4-bit matrix in 16 bits while it is used",
    "allocator slack": "fragments of torch's allocator",
    "cached blocks": "freed memory that torch keeps until it is needed",
    "CUDA context": "taken before the first tensor",
    "communicators": "NCCL's buffers",
}
"""What a term is, for readers who meet it for the first time."""


def explain(plan: Plan, width: int = WIDTH) -> str:
    """The whole derivation as text; of the recommended strategy, or of the smallest if none fits.

    Args:
        plan: The answer.
        width: Columns.
    """
    candidate = plan.recommended or (plan.candidates[0] if plan.candidates else None)
    sections = [_model(plan.job), _job(plan.job, candidate), _headline(plan)]
    if candidate is not None:
        sections += [
            _memory(plan, candidate),
            list(explain_wire(plan, candidate)),
            list(explain_step(plan, candidate)),
        ]
    sections += [_so(plan), _refused(plan), _advice(plan), _facts(plan)]
    return "\n\n".join("\n".join(_wrapped(section, width)) for section in sections if section) + "\n"


def _wrapped(lines: Iterable[str], width: int) -> Iterator[str]:
    """Long lines go on below, further in; a command stays whole, so that it can be copied."""
    for line in lines:
        if len(line) <= width or line.lstrip().startswith("$ "):
            yield line
            continue
        inside = len(line) - len(line.lstrip()) + 4
        wrapped = textwrap.wrap(
            glued(line), max(width, 40), subsequent_indent=" " * inside, break_on_hyphens=False, break_long_words=False
        )
        yield from (part.replace(GLUE, " ") for part in wrapped)


def _model(job: Job) -> list[str]:
    model = job.model
    linears = ", ".join(
        f"{linear.name} {linear.in_features}x{linear.out_features}"
        + (f" x {linear.copies}" if linear.copies > 1 else "")
        for linear in model.linears
    )
    lines = [
        f"THE MODEL  {model.name}",
        f"  one block     {linears}: {model.block_parameters:,} parameters, norms and biases included",
        f"  all blocks    {model.num_hidden_layers} x {model.block_parameters:,} = "
        f"{model.num_hidden_layers * model.block_parameters:,}",
        f"  the rest      embedding {model.embedding_parameters:,}, head "
        + ("tied to it" if model.tie_word_embeddings else f"{model.head_parameters:,}")
        + f", final norm {model.hidden_size:,}",
        f"  together      {model.num_parameters:,} parameters ({format_count(model.num_parameters)})",
    ]
    if model.is_mixture:
        lines.append(
            f"  of these      {model.num_active_parameters:,} take part in one token: {model.num_experts_per_tok} of "
            f"{model.num_experts} experts; all are stored"
        )
    return lines


def _job(job: Job, candidate: Candidate | None) -> list[str]:
    lines = ["THE JOB"]
    if candidate is not None:
        strategy = candidate.strategy
        lines.append(
            f"  one step      micro-batch {strategy.micro_batch_size} x accumulation {strategy.accumulation} x "
            f"{some(strategy.data_parallel, 'data-parallel rank')} = {strategy.global_batch_size:,} sequences of up to "
            f"{job.sequence_length:,} tokens"
        )
        if strategy.tuning != "full":
            place = Placement(job=job, strategy=strategy)
            lines.append(
                f"  adapters      rank {job.lora.r}: {place.trainable * strategy.tp:,} weights are trained, "
                f"{100 * place.trainable * strategy.tp / job.model.num_parameters:.2g} % as many as the model has"
            )
    lengths = job.lengths
    if lengths is not None and candidate is not None:
        typical = job.typical_length(candidate.strategy.micro_batch_size)
        lines.append(
            f"  the data      {some(lengths.num_sequences, 'sequence')} of {lengths.mean:,.0f} tokens on average, half "
            f"of them up to {lengths.p50:,}, 95 % up to {lengths.p95:,}, the longest {lengths.longest:,}"
        )
        lines.append(
            f"                memory counts the longest; time counts {typical:,.0f} tokens a row, the mean with a "
            "micro-batch's padding"
            if not job.packing
            else f"                packed into rows of {job.sequence_length:,} tokens"
        )
    return lines if len(lines) > 1 else []


def _headline(plan: Plan) -> list[str]:
    lines = [
        "ON THE BACK OF AN ENVELOPE (headline bandwidth, no latency; calibrated is what the planner counts, as below)",
        f"  a full fine-tune keeps {headline.WEIGHT_BYTES} B weights + {headline.GRADIENT_BYTES} B gradients + "
        f"{headline.OPTIMIZER_BYTES} B optimizer (fp32 master, two moments) = {headline.STATIC_BYTES} B a parameter",
    ]
    for row in plan.headline:
        calibrated = "" if row.calibrated is None else f"; calibrated: {format_number(row.calibrated)} {row.unit}"
        lines.append(f"  {row.name}: {row.formula} = {format_number(row.value)} {row.unit}{calibrated}")
    return lines


# ---------------------------------------------------------------------------------------------------------- memory


def _memory(plan: Plan, candidate: Candidate) -> list[str]:
    memory, peak = candidate.memory, candidate.memory.peak_instant
    place = _fullest(plan, candidate)
    lines = [
        f"MEMORY OF ONE CARD under {reasons.named(candidate.strategy)}, at its peak ({_words(peak)}); GB are 1e9 bytes"
    ]
    totals: tuple[tuple[Level, int, str], ...] = (
        ("allocated", memory.allocated_bytes, "allocated: what torch hands out"),
        ("reserved", memory.reserved_bytes, "reserved: what torch's allocator holds"),
        ("device", memory.device_bytes, f"device: what the driver counts, of {_card(plan)}"),
    )
    for level, total, words in totals:
        alive = [term for term in memory.terms if term.level == level and peak in term.alive and term.bytes]
        sign = " " if level == "allocated" else "+"
        for term in sorted(alive, key=lambda each: -each.bytes):
            lines.append(f"  {sign} {format_gb(term.bytes, 2):>9}  {term.name:<22} {_formula(term, place)}")
        lines.append(f"  = {format_gb(total, 2):>9}  {words}")
    return [*lines, *_fitting(plan, memory), _other_instants(memory)]


def _fullest(plan: Plan, candidate: Candidate) -> Placement:
    """The pipeline stage whose memory the candidate tells."""
    last = candidate.strategy.pp - 1
    places = [Placement(job=plan.job, strategy=candidate.strategy, stage=stage) for stage in sorted({0, last})]
    return max(places, key=lambda place: breakdown(place, plan.cluster).needed_bytes)


def _formula(term: Term, place: Placement) -> str:
    """The arithmetic of a term with its numbers, and what it is."""
    formula = term.formula
    tokens = place.tokens
    blocks = place.num_blocks * place.micro_batches_in_flight
    if term.name == "saved activations" and Instant.FORWARD in term.alive:
        each = term.bytes / (blocks * tokens)
        formula = f"{blocks:g} blocks x {tokens:,} tokens x {each:,.0f} B a token and block"
    elif term.name == "logits":
        vocabulary = -(-place.model.vocab_size // place.strategy.tp)
        formula = f"{loss.chunk_tokens(place):,} tokens at once x {vocabulary:,} words x {loss.per_logit(place)} B" + (
            " (as they are, fp32 copy, log-softmax, gradients, never all at once)" if loss.per_logit(place) > 8 else ""
        )
    elif term.name == "frozen weights" and place.quantized:
        rest = place.frozen - place.quantized
        packed = f"{NF4_DOUBLE_BYTES:.3f} B (NF4) x {place.quantized:,}"
        formula = f"({packed} + {place.element_bytes} B x {rest:,}) {_divided(place)}"
    elif term.name == "frozen weights":
        formula = f"{place.element_bytes} B x {place.frozen:,} {_divided(place)}"
    meaning = MEANINGS.get(term.name, "")
    return f"{formula.strip()}: {meaning}" if meaning else formula


def _divided(place: Placement) -> str:
    return f"/ {place.strategy.dp_shard}" if place.shards_frozen else "/ 1"


def _fitting(plan: Plan, memory: MemoryBreakdown) -> Iterator[str]:
    """Whether it fits, and how sure that is."""
    needed, spread, usable = needed_bytes(memory), memory_spread(memory), usable_bytes(plan.cluster)
    total = plan.cluster.gpu.cuda_memory_bytes or plan.cluster.gpu.memory_bytes
    candidate = plan.recommended or plan.candidates[0]
    cached = f", without {format_gb(memory.device_bytes - needed)} of cached blocks that are given back" * (
        memory.device_bytes > needed
    )
    yield (
        f"  it fits if what is needed ({format_gb(needed)}{cached}) stays within {format_gb(usable)} (the card less "
        f"{format_gb(total - usable)} kept free)"
    )
    yield (
        f"  and is unlikely to exceed {format_gb(total)}: its spread is {STATIC_SPREAD:.0%} of weights, gradients and "
        f"moments and {MOVING_SPREAD:.0%} of the rest, {format_gb(spread)}, so the chance is "
        f"{reasons.chance(candidate.probability_of_oom)} (at most {ACCEPTED_PROBABILITY:.0%})"
    )


def _other_instants(memory: MemoryBreakdown) -> str:
    counted = ", ".join(f"{_words(instant)} {format_gb(memory.at(instant))}" for instant in Instant)
    return f"  allocated at each instant: {counted}"


def _words(instant: Instant) -> str:
    return instant.value.replace("_", " ")


def _card(plan: Plan) -> str:
    gpu = plan.cluster.gpu
    return f"{format_gb(gpu.cuda_memory_bytes or gpu.memory_bytes)} of {gpu.name}"


# ---------------------------------------------------------------------------------------------------------- the answer


def _so(plan: Plan) -> list[str]:
    return ["SO", f"  {plan.reason}", *(f"  Rule: {rule}." for rule in plan.rules)]


def _refused(plan: Plan) -> list[str]:
    groups = reasons.grouped_refusals(plan.refusals)
    return ["REFUSED", *(f"  {names}: {refusal.message}." for names, refusal in groups)] if groups else []


def _advice(plan: Plan) -> list[str]:
    if not plan.advice:
        return []
    lines = ["WOULD HELP, from the smallest change to the largest" if plan.recommended is None else "WORTH KNOWING"]
    for advice in plan.advice:
        price = f" Price: {advice.price}." if advice.price else ""
        lines.append(f"  {advice.message}{price}")
        lines += [f"    $ {advice.command}"] if advice.command else []
    return lines


def _facts(plan: Plan) -> list[str]:
    rows: Sequence[str] = [f"  {fact.name}: {fact.value} ({fact.source})" for fact in plan.facts]
    return ["WHAT IT RESTS ON", *rows] if rows else []
