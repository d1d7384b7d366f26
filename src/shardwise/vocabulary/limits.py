"""Limits of numbers, written into their types, so that no reader of a file or of a flag can forget them.

    bandwidth_bytes_per_s: Rate        a float to everyone who computes; from 1 to 1e+21 to `codec`, which reads it

The lower ends are what the arithmetic needs: a bandwidth of 0 divides by zero, a negative time makes a negative step.
The upper ends lie far above anything that is built, and far below where an int no longer fits into a float.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, kw_only=True)
class Within:
    """The values that a number may take."""

    least: float
    most: float
    without_least: bool = False
    """`least` itself is refused."""
    without_most: bool = False
    """`most` itself is refused."""

    def broken_by(self, value: float) -> str | None:
        """The end that a value lies beyond, as a message says it: `at least 1`, `below 1`; None if it lies within."""
        if value < self.least or (self.without_least and value == self.least):
            return f"{'more than' if self.without_least else 'at least'} {_shown(self.least)}"
        if value > self.most or (self.without_most and value == self.most):
            return f"{'below' if self.without_most else 'at most'} {_shown(self.most)}"
        return None


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


MAX_GPUS = 65_536
"""More cards than any one training run has had; beyond it a typing error is likelier."""
Count = Annotated[int, Within(least=1, most=2**31 - 1)]
"""Sequences, tokens, steps, ranks: of something that is there."""
Degree = Annotated[int, Within(least=1, most=MAX_GPUS)]
"""Cards, machines, and the sides of a mesh."""
LoraRank = Annotated[int, Within(least=1, most=65_536)]
NotNegative = Annotated[int, Within(least=0, most=2**31 - 1)]
Seed = Annotated[int, Within(least=0, most=2**32 - 1)]
"""numpy takes no other."""
Bytes = Annotated[int, Within(least=0, most=2**60)]
Tokens = Annotated[int, Within(least=0, most=2**60)]
"""Of a whole data set."""
SomeBytes = Annotated[int, Within(least=1, most=2**60)]
"""Bytes that something divides by, or that a card must have."""
Predicted = Annotated[int, Within(least=0, most=10**24)]
"""Bytes or messages that a plan predicts, of a job however absurd."""
Rate = Annotated[float, Within(least=1.0, most=1e21)]
"""Bytes or FLOP a second."""
Seconds = Annotated[float, Within(least=1e-12, most=1e9)]
Delay = Annotated[float, Within(least=0.0, most=1e9)]
"""A time that may be 0: a limit that is off, a gap that nobody saw."""
Share = Annotated[float, Within(least=0.0, most=1.0, without_most=True)]
Fraction = Annotated[float, Within(least=0.0, most=1.0, without_least=True)]
Slowdown = Annotated[float, Within(least=1.0, most=1e6)]
"""A time with company over the time alone."""
Positive = Annotated[float, Within(least=0.0, most=1e9, without_least=True)]
Amount = Annotated[float, Within(least=0.0, most=1e9)]
"""What may be 0: a rate of learning, a norm, a decay."""
