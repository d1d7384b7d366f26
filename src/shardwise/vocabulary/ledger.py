"""Ledger: predicted, simulated and measured side by side, term by term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["memory", "time", "wire", "count"]


@dataclass(frozen=True, kw_only=True)
class LedgerRow:
    """One quantity, seen up to three times."""

    kind: Kind
    name: str
    """Such as `parameter`, `allocated`, `step` or `exposed wire`."""
    unit: Literal["bytes", "seconds", "messages", "tokens/s"]
    predicted: float | None = None
    simulated: float | None = None
    measured: float | None = None
    note: str = ""
    """What is and is not counted."""

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured; None where either is missing or nothing was measured."""
        if self.predicted is None or not self.measured:
            return None
        return (self.predicted - self.measured) / self.measured


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What was said before the run and what came out."""

    strategy_name: str
    rows: tuple[LedgerRow, ...]
    rank: int = 0
    versions: dict[str, str] | None = None

    def row(self, kind: Kind, name: str) -> LedgerRow | None:
        """The row of this kind and name, if there is one."""
        return next((row for row in self.rows if row.kind == kind and row.name == name), None)
