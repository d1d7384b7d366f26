"""Joins a plan's candidate and a run's measurements into a Ledger, term by term."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from shardwise.vocabulary import codec
from shardwise.vocabulary.ledger import Ledger, LedgerRow
from shardwise.vocabulary.measured import CountedCollective, Measured
from shardwise.vocabulary.memory import Category, Instant, MemoryBreakdown
from shardwise.vocabulary.plan import Candidate
from shardwise.vocabulary.timeline import Collective

_STATES = (Category.PARAMETER, Category.OPTIMIZER)
"""Categories that are the same at every instant of a running step."""


def make_ledger(candidate: Candidate, measured: Measured) -> Ledger:
    """One row for each quantity that was predicted or measured."""
    rows = (*_memory(candidate, measured), *_time(candidate, measured), *_wire(candidate, measured))
    return Ledger(strategy_name=candidate.strategy.name, rows=rows, versions=dict(measured.versions))


def ledger_json(ledger: Ledger) -> str:
    """A ledger for a file. What no row has, such as a simulated figure where nothing was simulated, is left out."""
    data: dict[str, Any] = codec.to_data(ledger)
    if all(row.simulated is None for row in ledger.rows):
        for row in data["rows"]:
            row.pop("simulated", None)
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _memory(candidate: Candidate, measured: Measured) -> Iterator[LedgerRow]:
    memory, stored = candidate.memory, measured.stored_by_category or {}
    seen = measured.peak_by_category
    predicted = memory.by_category(_instant(memory, measured))
    for category in _STATES:
        yield _bytes(category.value, predicted[category], stored.get(category), "counted tensor by tensor")
    if seen is not None:
        for category in (each for each in Category if each not in _STATES and (predicted[each] or seen.get(each))):
            yield _bytes(category.value, predicted[category], seen.get(category), _where(measured))
    else:
        kept = sum(stored.get(category, 0) for category in _STATES)
        found = measured.allocated_bytes - kept if measured.allocated_bytes is not None and stored else None
        rest = memory.allocated_bytes - sum(predicted[category] for category in _STATES)
        yield _bytes("all else", rest, found, "gradients, activations and temporaries at the peak")
    yield _bytes("allocated", memory.allocated_bytes, measured.allocated_bytes, measured.memory_note)
    if measured.allocated_bytes is None or measured.reserved_bytes is not None:  # a CPU has neither of the two
        yield _bytes("reserved", memory.reserved_bytes, measured.reserved_bytes, "what torch's allocator holds")
        yield _bytes("device", memory.device_bytes, measured.device_bytes, "what the driver counts")


# The loss's own backward holds the logits' gradients, and the meter calls it backward.
_PHASES = {
    "forward": (Instant.FORWARD,),
    "loss": (Instant.LOSS,),
    "backward": (
        Instant.LOSS,
        Instant.BACKWARD_FIRST,
        Instant.REDUCE_FIRST,
        Instant.BACKWARD_LAST,
        Instant.REDUCE_LAST,
    ),
    "optimizer": (Instant.OPTIMIZER,),
}


def _where(measured: Measured) -> str:
    return f"at the measured peak, in {measured.peak_phase}" if measured.peak_phase else "at the peak"


def _instant(memory: MemoryBreakdown, measured: Measured) -> Instant | None:
    """The fullest predicted instant of the phase in which the measured peak was: like is compared with like."""
    return None if measured.peak_phase is None else max(_PHASES[measured.peak_phase], key=memory.at)


def _bytes(name: str, predicted: int, measured: int | None, note: str) -> LedgerRow:
    return LedgerRow(kind="memory", name=name, unit="bytes", predicted=predicted, measured=measured, note=note)


def _time(candidate: Candidate, measured: Measured) -> Iterator[LedgerRow]:
    step, seen = candidate.step, measured.step
    timed = "median after warm-up" if measured.tokens_per_s is not None else "the profiled step: no other was timed"
    parts = (
        ("step", step.seconds, seen.seconds if seen else None, timed),
        ("compute", step.compute_seconds, seen.compute_seconds if seen else None, "of one profiled step"),
        (
            "exposed wire",
            step.exposed_wire_seconds,
            seen.exposed_wire_seconds if seen else None,
            "of one profiled step",
        ),
        ("all wire", step.wire_seconds, seen.wire_seconds if seen else None, "hidden messages included"),
        ("host", step.host_seconds, seen.host_seconds if seen else None, "the card waiting for its host"),
    )
    for name, predicted, found, note in parts:
        if name == "host" and not predicted and not found:
            continue  # nothing was predicted and nothing was: no row is exact about nothing
        yield LedgerRow(kind="time", name=name, unit="seconds", predicted=predicted, measured=found, note=note)
    yield LedgerRow(
        kind="time",
        name="throughput",
        unit="tokens/s",
        predicted=candidate.tokens_per_s,
        measured=measured.tokens_per_s,
        note="over all ranks, padding included",
    )


def _wire(candidate: Candidate, measured: Measured) -> Iterator[LedgerRow]:
    """Messages of each op in one step: how many, and how many bytes."""
    for op in ("all_gather", "reduce_scatter", "all_reduce", "send"):
        predicted = [message for message in candidate.collectives if message.op == op]
        found = [message for message in measured.collectives if message.op == op]
        if predicted or found:
            counted = bool(measured.collectives) or not predicted
            yield LedgerRow(
                kind="count",
                name=f"{op} messages",
                unit="messages",
                predicted=sum(message.count for message in predicted),
                measured=sum(message.count for message in found) if counted else None,
                note="one optimizer step",
            )
            yield LedgerRow(
                kind="wire",
                name=f"{op} bytes",
                unit="bytes",
                predicted=_total(predicted),
                measured=_total(found) if counted else None,
                note="sum of message sizes as nccl-tests defines them",
            )


def _total(messages: list[Collective] | list[CountedCollective]) -> int:
    return sum(message.bytes * message.count for message in messages)
