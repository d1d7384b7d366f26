"""Was the plan right? In words, from what was predicted and what was measured."""

from __future__ import annotations

from shardwise.report.words import seconds_interval
from shardwise.vocabulary.ledger import Ledger
from shardwise.vocabulary.plan import Candidate
from shardwise.vocabulary.units import format_bytes, format_percent, format_seconds

BUSY_SHARE = 0.1
"""Of a machine's cores, taken by other programs: above this they may be why a step was slow."""


def verdict(candidate: Candidate, ledger: Ledger, others_share: float | None = None) -> tuple[str, ...]:
    """A sentence for time and one for memory; which of the two was wrong, and what may explain it.

    Args:
        candidate: What ran, as it was predicted.
        ledger: What came out.
        others_share: Share of the machine's cores that other programs took meanwhile, 0 to 1; None: not looked at.
    """
    return tuple(text for text in (_time(candidate, ledger, others_share), _memory(ledger)) if text)


def _time(candidate: Candidate, ledger: Ledger, others_share: float | None) -> str:
    row = ledger.row("time", "step")
    if row is None or row.measured is None:
        return "Time: no step was measured; a run needs a few more."
    low, high = candidate.step_interval_seconds
    predicted = seconds_interval(candidate.step.seconds, candidate.step_interval_seconds)
    text = f"Time: a step took {format_seconds(row.measured)}, predicted {predicted}: "
    if low <= row.measured <= high:
        return f"{text}the plan was right."
    edge, side = (low, "below") if row.measured < low else (high, "above")
    text += f"{format_percent(abs(row.measured - edge) / edge)} {side} its interval."
    if side == "above" and others_share is not None and others_share > BUSY_SHARE:
        share = format_percent(others_share)
        return f"{text} Other programs took {share} of this machine's cores meanwhile, which no plan knows."
    busy = "" if others_share is None else f" Other programs took {format_percent(others_share)} of its cores."
    return f"{text} The plan was wrong here: the ledger below says in which part.{busy}"


def _memory(ledger: Ledger) -> str:
    row = ledger.row("memory", "device") or ledger.row("memory", "allocated")
    if row is None or row.measured is None:
        row = ledger.row("memory", "allocated")
    if row is None or row.measured is None or row.predicted is None or row.error is None:
        return ""
    error, where = abs(row.error), "above" if row.error > 0 else "below"
    figures = f"{format_bytes(row.measured)} {row.name}, predicted {format_bytes(row.predicted)}"
    if error <= 0.05:
        return f"Memory: {figures}: the plan was right, {format_percent(error, 1)} {where} it."
    return f"Memory: {figures}: the plan was {format_percent(error)} {where} what came out."
