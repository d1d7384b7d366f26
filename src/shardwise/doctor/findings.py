"""What a check may answer: findings, and gaps where it could not look."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal

from shardwise.facts.machine.record import Unreadable


class Severity(IntEnum):
    """How bad a finding is; higher is worse."""

    NOTE = 0
    """Worth knowing; changes no exit code: the machine is as fast as it can be, or a switch has no effect here."""
    RISK = 1
    """Costs nothing yet, but will under a stated condition."""
    LOSS = 2
    """Bandwidth is lost now."""
    FAULT = 3
    """Wrong data, a crash or a hang."""


class Certainty(IntEnum):
    """How sure a finding is; higher is surer."""

    POSSIBLE = 0
    """One of several explanations."""
    INFERRED = 1
    """Follows from what was read, by a rule."""
    READ = 2
    """The setting, state or log line itself was read."""
    MEASURED = 3
    """An experiment showed it."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One reading that speaks for the finding."""

    what: str
    value: str
    source: str
    """Where it was read: a file, NVML, the log."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bandwidth of the wire as it is and as it should be: one way, bus bandwidth of large collectives."""

    actual_bytes_per_s: float
    expected_bytes_per_s: float
    basis: Literal["measured", "typical"]
    """Typical figures come from the link catalogue and may be a third off."""

    @property
    def lost_bytes_per_s(self) -> float:
        """What is missing; 0 if nothing is."""
        return max(self.expected_bytes_per_s - self.actual_bytes_per_s, 0.0)

    def lost_seconds(self, wire_bytes: int) -> float:
        """Longer time on the wire for the bytes that one rank sends in a step: the loss if nothing hides it."""
        return max(wire_bytes / self.actual_bytes_per_s - wire_bytes / self.expected_bytes_per_s, 0.0)

    def least_lost_seconds(self, wire_bytes: int, compute_seconds: float) -> float:
        """The loss if all of the step's compute could hide the wire: what no overlap can take away."""
        now = max(wire_bytes / self.actual_bytes_per_s, compute_seconds)
        then = max(wire_bytes / self.expected_bytes_per_s, compute_seconds)
        return max(now - then, 0.0)


@dataclass(frozen=True, kw_only=True)
class AbTest:
    """Two commands that differ in the suspect only."""

    a: str
    """As it is."""
    b: str
    """With the fix."""
    expect: str
    """What is different if the finding is right."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause, with everything needed to believe it and to act on it."""

    check: str
    """Id of the check."""
    subject: str
    """What it is about: GPUs, an adapter, a variable."""
    severity: Severity
    certainty: Certainty
    headline: str
    evidence: tuple[Evidence, ...]
    fix: str
    proof: AbTest
    cost: Cost | None = None
    """None where the loss cannot be put as a bandwidth."""
    reference: str = ""
    """Public thread or source that describes the cause."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Something a check needed and could not read. Never healthy."""

    check: str
    what: str
    why: str
    command: str = ""
    """Command that reads it; empty if there is none."""
    essential: bool = True
    """Whether the check cannot judge without it; False if only corroboration is missing."""


Answer = Finding | Gap


def gap(check: str, what: str, problem: Unreadable, *, essential: bool = True) -> Gap:
    """A gap from a reading that failed."""
    return Gap(check=check, what=what, why=problem.why, command=problem.command, essential=essential)


def merge_equal(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Findings that differ in their subject and evidence only, told once with all subjects."""
    merged: dict[tuple[str, Severity, Certainty, str, str], Finding] = {}
    for finding in findings:
        key = (finding.check, finding.severity, finding.certainty, finding.headline, finding.fix)
        known = merged.get(key)
        if known is None:
            merged[key] = finding
        elif finding.subject not in known.subject.split(", "):
            costs = [cost for cost in (known.cost, finding.cost) if cost is not None]
            merged[key] = replace(
                known,
                subject=f"{known.subject}, {finding.subject}",
                evidence=(*known.evidence, *(each for each in finding.evidence if each not in known.evidence)),
                cost=max(costs, key=lambda cost: cost.lost_bytes_per_s, default=None),
            )
    return tuple(merged.values())
