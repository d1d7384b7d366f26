"""Wire and time of one optimizer step, message by message and part by part, as a derivation to read."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardwise.planner import reasons
from shardwise.planner.compute import compute_times, model_flops_per_token
from shardwise.planner.timeline import sends
from shardwise.planner.wire import GroupShape, collective_seconds, group_shape, link_seconds
from shardwise.vocabulary.cluster import Cluster, Link
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.plan import Candidate, Plan
from shardwise.vocabulary.timeline import Collective, bus_factor
from shardwise.vocabulary.units import (
    format_bandwidth,
    format_bytes,
    format_flops,
    format_percent,
    format_rate,
    format_seconds,
    some,
)

TERA = 1e12


# ------------------------------------------------------------------------------------------------------------ the wire


def explain_wire(plan: Plan, candidate: Candidate) -> Iterator[str]:
    """Every message of a step: its bytes, its seconds, and the wire that carries it."""
    if not candidate.collectives:
        yield "THE WIRE"
        yield "  nothing crosses it"
        return
    cluster, strategy = plan.cluster, candidate.strategy
    yield f"THE WIRE under {reasons.named(strategy)}, one optimizer step"
    shapes: set[GroupShape] = set()
    for message in candidate.collectives:
        shape = group_shape(cluster, strategy, message.axis)
        shape = GroupShape(ranks=2, nodes=min(2, shape.nodes)) if message.op == "send" else shape
        shapes.add(shape)
        yield from _message(cluster, candidate, message, shape)
    sent = sum(message.wire_bytes for message in candidate.collectives)
    yield f"  one rank sends {format_bytes(sent)} in all"
    if any(shape.nodes == 1 or shape.per_node > 1 for shape in shapes):
        yield f"  inside a machine: {_link(cluster.intra_node)}"
    if any(shape.nodes > 1 for shape in shapes) and cluster.inter_node is not None:
        yield f"  between machines, each card's share: {_link(cluster.inter_node)}"


def _message(cluster: Cluster, candidate: Candidate, message: Collective, shape: GroupShape) -> Iterator[str]:
    seconds = collective_seconds(cluster, candidate.strategy, message)
    hidden = "may hide behind compute" if message.hides_behind == "compute" else "nothing hides it"
    place = f"{message.site} in {message.during}" if message.site != "step" else "once a step"
    formula = f"{message.formula} = " if message.formula else ""
    where = "" if shape.nodes == 1 else f" on {some(shape.nodes, 'machine')}"
    yield (
        f"  {message.count:>5} x {message.op}, {place}: {formula}{format_bytes(message.bytes)} over "
        f"{message.ranks} ranks{where}"
    )
    yield (
        f"          {_arithmetic(cluster, message, shape)} = {format_seconds(seconds)}; all "
        f"{format_seconds(seconds * message.count)}; {hidden}"
    )


def _arithmetic(cluster: Cluster, message: Collective, shape: GroupShape) -> str:
    """Where the seconds of one message come from."""
    inside = cluster.intra_node
    if shape.nodes == 1:
        return _on_link(inside, message, shape.ranks, message.bytes)
    network, part = cluster.inter_node or inside, round(message.bytes / shape.per_node)
    across = _on_link(network, message, shape.nodes, part)
    if shape.per_node == 1:
        return across
    slower = link_seconds(network, message.op, shape.nodes, part)
    within = link_seconds(inside, message.op, shape.per_node, message.bytes)
    if slower >= within:
        return f"each card's part {across} (inside the machine {format_seconds(within)} beside it)"
    local = _on_link(inside, message, shape.per_node, message.bytes)
    return f"inside the machine {local} (between machines {format_seconds(slower)} beside it)"


def _on_link(link: Link, message: Collective, ranks: int, num_bytes: int) -> str:
    if link.curves:
        return f"measured table of {link.name} for {message.op} of {format_bytes(num_bytes)} over {ranks}"
    factor = bus_factor(message.op, ranks)
    passes = {"all_reduce": f"2 x {ranks - 1}/{ranks}", "send": "1", "broadcast": "1"}
    share = passes.get(message.op, f"{ranks - 1}/{ranks}")
    assert factor > 0, "a message to nobody"
    return (
        f"{format_seconds(link.latency_seconds * max(1.0, math.log2(ranks)))} + {format_bytes(num_bytes)} x {share} / "
        f"({format_bandwidth(link.bandwidth_bytes_per_s)} x {format_percent(link.attained_fraction)})"
    )


def _link(link: Link) -> str:
    if link.curves:
        return f"{link.name}, measured"
    return (
        f"{link.name}, {format_bandwidth(link.bandwidth_bytes_per_s)} one way ({link.source}), of which large messages "
        f"attain {format_percent(link.attained_fraction)} ({link.attained_source or link.source})"
    )


# ------------------------------------------------------------------------------------------------------------ the step


def explain_step(plan: Plan, candidate: Candidate) -> Iterator[str]:
    """Ideal time from FLOPs, then what the step is made of."""
    step, strategy = candidate.step, candidate.strategy
    place = _timed_place(plan, candidate)
    tokens = strategy.global_batch_size * plan.job.typical_length(strategy.micro_batch_size)
    yield f"ONE OPTIMIZER STEP of {tokens:,.0f} tokens"
    yield from _ideal(plan, candidate, place, tokens)
    yield from _compute(plan, candidate, place)
    parts = (
        (step.exposed_wire_seconds, "exposed wire", f"of {format_seconds(step.wire_seconds)} on the wire"),
        (step.bubble_seconds, "bubble", "pipeline stages waiting for each other"),
        (step.host_seconds, "host", "the card waiting for its host"),
    )
    for seconds, name, note in parts:
        if seconds:
            yield f"  + {format_seconds(seconds):>11}  {name:<13} {note}"
    low, high = candidate.step_interval_seconds
    yield (
        f"  = {format_seconds(step.seconds):>11}  the step (5th to 95th percentile: {format_seconds(low)} to "
        f"{format_seconds(high)})"
    )
    yield (
        f"  {tokens:,.0f} tokens / {format_seconds(step.seconds)} = {format_rate(candidate.tokens_per_s)} tokens/s; "
        f"MFU {format_percent(candidate.model_flops_utilization, 1)}, ideal over real (recomputation is not counted)"
    )


def _timed_place(plan: Plan, candidate: Candidate) -> Placement:
    """The pipeline stage whose step the candidate tells: the one with these messages."""
    last = candidate.strategy.pp - 1
    places = [Placement(job=plan.job, strategy=candidate.strategy, stage=stage) for stage in sorted({0, last})]
    return next((place for place in places if sends(place) == candidate.collectives), places[0])


def _ideal(plan: Plan, candidate: Candidate, place: Placement, tokens: float) -> Iterator[str]:
    """The back of the envelope: FLOPs over the peak."""
    dtype = "bf16" if candidate.strategy.precision != "fp32" else "fp32"
    peak = plan.cluster.gpu.peak_flops.get(dtype)
    if not peak:
        return
    passes, ranks = (6 if place.trains_all else 4), candidate.strategy.num_ranks
    matrices = plan.job.model.matmul_parameters
    per_token = model_flops_per_token(place)
    ideal = per_token * tokens / (peak * ranks)
    why = "" if place.trains_all else " (frozen weights need no gradient of their own)"
    yield (
        f"  ideal: {passes} x {matrices:,} matrix elements{why} + {format_flops(per_token - passes * matrices)} for "
        f"attention = {format_flops(per_token)} a token"
    )
    yield (
        f"         x {tokens:,.0f} tokens / ({ranks} x {peak / TERA:,.4g} TFLOP/s) = {format_seconds(ideal)}, if "
        "nothing were lost"
    )


def _compute(plan: Plan, candidate: Candidate, place: Placement) -> Iterator[str]:
    """The compute lane: blocks, loss, embedding, optimizer, and what the wire's copies and contention add."""
    times, steps = compute_times(place, plan.cluster), candidate.strategy.accumulation
    many = f"{some(steps, 'micro-batch', 'micro-batches')} x "
    blocks = place.num_blocks
    again = ", with what checkpointing computes again" if candidate.strategy.checkpointing != "none" else ""
    rows = [
        (blocks * times.block_forward * steps, "forward",
         f"{many}{blocks} blocks x {format_seconds(times.block_forward)}"),
        (blocks * times.block_backward * steps, "backward",
         f"{many}{blocks} blocks x {format_seconds(times.block_backward)}{again}"),
        (times.head * steps, "loss", f"{many}{format_seconds(times.head)}: final norm, head and loss, both ways"),
        (times.embedding * steps, "embedding", f"{many}{format_seconds(times.embedding)}"),
        (times.optimizer, "optimizer", "once"),
    ]  # fmt: skip
    rest = candidate.step.compute_seconds - sum(row[0] for row in rows)
    rows.append(
        (rest, "around it", "copies of gathered weights and gradients, and compute slowed by messages beside it")
    )
    for seconds, name, note in rows:
        if seconds > 1e-6:
            yield f"    {format_seconds(seconds):>11}  {name:<13} {note}"
    yield f"  = {format_seconds(candidate.step.compute_seconds):>11}  compute"
