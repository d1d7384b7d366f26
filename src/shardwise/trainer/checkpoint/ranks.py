"""The ranks of a checkpoint: a gloo group, or one process without torch.distributed.

A step that every rank takes alone and that may fail on any of them goes through `Ranks.together`: afterwards every
rank knows of every failure and raises the same error, so that none waits in a collective for one that has left.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist

from shardwise.errors import CheckpointError, ResourceError, ShardwiseError

T = TypeVar("T")


@dataclass(frozen=True)
class _Failure:
    """What went wrong on a rank, in a form that crosses the wire."""

    problems: tuple[str, ...]
    resource: bool


@dataclass(frozen=True)
class _Success(Generic[T]):
    value: T


class Ranks:
    """The processes that save or load together.

    Args:
        group: A group with a CPU backend (gloo); None for this process alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank: int = 0 if group is None else dist.get_rank(group)
        self.size: int = 1 if group is None else dist.get_world_size(group)

    @classmethod
    def create(cls, timeout_s: float = 1800.0) -> Ranks:
        """A gloo group over all ranks; every rank must call this. One process if torch.distributed is not running."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(None)
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        return cls(cast(dist.ProcessGroup, group))

    def close(self) -> None:
        """Give the group back."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank plans and finishes for all."""
        return self.rank == 0

    def all_gather(self, value: T) -> list[T]:
        """What every rank has, in the order of the ranks. Values are pickled between the run's own processes only."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather(self, value: T) -> list[T]:
        """What every rank has on the coordinator; an empty list elsewhere."""
        if self.group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_coordinator else None
        dist.gather_object(value, values, dst=dist.get_global_rank(self.group, 0), group=self.group)
        return values or []

    def scatter(self, values: Sequence[T]) -> T:
        """The coordinator's n-th value on rank n. Other ranks give an empty list."""
        if self.group is None:
            return values[0]
        received: list[Any] = [None]
        source = dist.get_global_rank(self.group, 0)
        given = list(values) if self.is_coordinator else None
        dist.scatter_object_list(received, given, src=source, group=self.group)
        return received[0]

    def together(self, work: Callable[[], T]) -> list[T]:
        """Do something on every rank and exchange the results.

        Raises:
            CheckpointError, ResourceError: It failed on some rank; the same error on every rank.
        """
        outcomes = self.all_gather(_attempt(work))
        _raise_failures(outcomes)
        return [outcome.value for outcome in outcomes if isinstance(outcome, _Success)]

    def agree(self, work: Callable[[], T]) -> T:
        """Do something on every rank; each keeps its own result, which may be anything.

        Raises:
            CheckpointError, ResourceError: It failed on some rank; the same error on every rank.
        """
        outcome = _attempt(work)
        _raise_failures(self.all_gather(outcome if isinstance(outcome, _Failure) else None))
        assert isinstance(outcome, _Success)
        return outcome.value

    def by_coordinator(self, work: Callable[[], T]) -> T:
        """Do something on the coordinator only; its result, or its error, reaches every rank."""
        outcome = self.together(lambda: work() if self.is_coordinator else None)[0]
        return cast(T, outcome)

    def plan(self, part: Callable[[], T], whole: Callable[[list[T]], Sequence[T]]) -> T:
        """Every rank makes its part, the coordinator makes the whole of them, each rank receives its own back."""
        parts = self.gather(_attempt(part))

        def combine() -> Sequence[T]:
            _raise_failures(parts)
            return whole([outcome.value for outcome in parts if isinstance(outcome, _Success)])

        planned: Sequence[_Success[T] | _Failure] = []
        if self.is_coordinator:
            outcome = _attempt(combine)
            failed = isinstance(outcome, _Failure)
            planned = [outcome] * self.size if failed else [_Success(value) for value in outcome.value]
        received = self.scatter(planned)
        _raise_failures([received])
        assert isinstance(received, _Success)
        return received.value


def _attempt(work: Callable[[], T]) -> _Success[T] | _Failure:
    try:
        return _Success(work())
    except ShardwiseError as error:
        return _Failure(error.problems, isinstance(error, ResourceError))
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
        where = f" ({error.filename})" if error.filename else ""
        way_out = " Free some space, or give another output_dir; the checkpoint before is untouched." if full else ""
        return _Failure((f"{error.strerror or error}{where}.{way_out}",), full)
    except Exception as error:
        return _Failure((f"{type(error).__name__}: {error}",), False)


def _raise_failures(outcomes: Sequence[object]) -> None:
    """Raise one error for all failures; the same problem on several ranks is said once, with its ranks."""
    ranks: dict[str, list[int]] = {}
    resource = False
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, _Failure):
            resource = resource or outcome.resource
            for problem in outcome.problems:
                ranks.setdefault(problem, []).append(rank)
    if not ranks:
        return
    alone = len(outcomes) == 1
    problems = [text if alone else f"{_name_ranks(where)}: {text}" for text, where in ranks.items()]
    raise ResourceError(*problems) if resource else CheckpointError(*problems)


def _name_ranks(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
