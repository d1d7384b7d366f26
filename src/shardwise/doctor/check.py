"""What a check is: a function from a scene to findings and gaps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardwise.doctor.findings import Answer
from shardwise.doctor.scene import Scene


@dataclass(frozen=True, kw_only=True)
class Check:
    """One cause that is looked for."""

    id: str
    title: str
    reads: tuple[str, ...]
    """Where it looks, for the documentation and the report."""
    look: Callable[[Scene], Iterator[Answer]]
    of_log: bool = False
    """Whether it can judge a log that was written elsewhere, without this machine."""
