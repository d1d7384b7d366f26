"""Which step is looked at how, and what comes out: vocabulary's Measured."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.trainer.checkpoint.state import versions
from shardwise.trainer.mesh import RankMesh
from shardwise.trainer.meter.memory import MemoryWatch, StepMemory, StoredBytes, stored_bytes
from shardwise.trainer.meter.times import StepClock, StepProfile
from shardwise.trainer.meter.wire import Tally, WireCount, counting_calls
from shardwise.vocabulary.measured import CountedCollective, Measured
from shardwise.vocabulary.memory import Category
from shardwise.vocabulary.strategy import Axis, Strategy
from shardwise.vocabulary.timeline import StepTimeline

WATCHED, PROFILED, FIRST_TIMED = 1, 2, 3
"""Steps of a start, from 0, that are looked at."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MeterOptions:
    """What is measured."""

    model: Any
    optimizer: torch.optim.Optimizer
    strategy: Strategy
    mesh: RankMesh
    enabled: bool = True
    """False: only the clock runs."""


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """Tokens of one step over all ranks."""

    real: int
    """Padding not counted."""
    padded: int
    """As the tensors are."""


@dataclass(frozen=True, kw_only=True)
class _CardPeaks:
    """Largest figures of one step on a card."""

    allocated: int
    reserved: int
    device: int


class Meter:
    """Looks at the steps of a run.

    Args:
        options: What is measured.
    """

    def __init__(self, options: MeterOptions) -> None:
        self._options = options
        self._num_seen = 0
        self._clocks: dict[int, StepClock] = {}
        self._tokens: dict[int, StepTokens] = {}
        self._memory: StepMemory | None = None
        self._stored: StoredBytes | None = None
        self._gradient_bytes = 0
        self._collectives: tuple[CountedCollective, ...] = ()
        self._profile = StepProfile(options.mesh.device, self._lane)
        self._peaks: list[_CardPeaks] = []

    @contextlib.contextmanager
    def step(self, step: int) -> Generator[StepClock]:
        """One optimizer step happens inside."""
        number, self._num_seen = self._num_seen, self._num_seen + 1
        clock = StepClock(self._options.mesh.device)
        self._reset_peaks()
        with self._look(number):
            clock.start()
            yield clock
            clock.stop()
        if number >= FIRST_TIMED or not self._options.enabled:
            self._clocks[step] = clock
            self._note_peaks()

    def note_tokens(self, step: int, tokens: StepTokens) -> None:
        """How many tokens a step had, once all ranks have said so."""
        self._tokens[step] = tokens

    def measured(self) -> Measured:
        """What was seen, of all ranks: memory of the fullest, times of the slowest. Every rank must call it."""
        mine = self._of_this_rank()
        everyone: list[Any] = [None] * dist.get_world_size(self._options.mesh.control)
        dist.all_gather_object(everyone, mine, group=self._options.mesh.control)
        return combine(everyone)

    @property
    def _on_card(self) -> bool:
        return self._options.mesh.device.type == "cuda"

    def _of_this_rank(self) -> Measured:
        peak = _largest(self._peaks)
        watched = self._memory
        allocated = peak.allocated if peak else watched.peak_bytes if watched else None
        timed = [step for step in self._clocks if step in self._tokens]
        seconds = [self._clocks[step].seconds() for step in timed]
        rates = list(zip(timed, seconds, strict=True))
        return Measured(
            strategy=self._options.strategy,
            peak_by_category=watched.by_category if watched else None,
            peak_phase=watched.phase if watched else None,
            stored_by_category=self._stored_by_category(),
            allocated_bytes=allocated,
            reserved_bytes=peak.reserved if peak else None,
            device_bytes=peak.device if peak else None,
            memory_note=self._memory_note(),
            step=self._step(seconds),
            tokens_per_s=statistics.median(self._tokens[step].padded / spent for step, spent in rates)
            if rates
            else None,
            real_tokens_per_s=statistics.median(self._tokens[step].real / spent for step, spent in rates)
            if rates
            else None,
            collectives=self._collectives,
            versions={**versions(), "device": self._device_name()},
        )

    def _device_name(self) -> str:
        return torch.cuda.get_device_name(self._options.mesh.device) if self._on_card else "cpu"

    def _memory_note(self) -> str:
        when = f"; the categories' peak is in {self._memory.phase}" if self._memory else ""
        if self._peaks:
            return (
                "allocated and reserved: torch.cuda's statistics over the timed steps; device: total - free of the "
                f"card, other processes included; categories: storages watched through one step{when}"
            )
        return f"storages watched through one step, without an allocator's rounding{when}"

    def _stored_by_category(self) -> dict[Category, int] | None:
        if self._stored is None:
            return None
        return {
            Category.PARAMETER: self._stored.parameters + self._stored.frozen + self._stored.buffers,
            Category.GRADIENT: self._gradient_bytes,
            Category.OPTIMIZER: self._stored.optimizer,
        }

    def _step(self, seconds: Sequence[float]) -> StepTimeline | None:
        """The median step, its parts in the proportions of the profiled one, which profiling makes a little longer."""
        profiled = self._profile.timeline
        if not seconds:
            return profiled
        median = statistics.median(seconds)
        if profiled is None:
            return StepTimeline(seconds=median, compute_seconds=median, exposed_wire_seconds=0.0)
        scale = median / profiled.seconds
        return dataclasses.replace(
            profiled,
            seconds=median,
            compute_seconds=profiled.compute_seconds * scale,
            exposed_wire_seconds=profiled.exposed_wire_seconds * scale,
            host_seconds=profiled.host_seconds * scale,
            wire_seconds=profiled.wire_seconds * scale,
            optimizer_seconds=profiled.optimizer_seconds * scale,
        )

    @contextlib.contextmanager
    def _look(self, number: int) -> Generator[None]:
        options = self._options
        if not options.enabled or number not in (WATCHED, PROFILED):
            yield
        elif number == PROFILED:
            with self._profile.profiling(options.optimizer):
                yield
        else:
            tally = Tally()
            hook = options.optimizer.register_step_pre_hook(self._note_gradients)
            if options.strategy.compile_blocks:
                with counting_calls(tally):
                    yield
            else:
                watch = MemoryWatch(options.model, options.optimizer, options.mesh.device)
                with watch.watching(), WireCount(tally):
                    yield
                self._memory = watch.result()
            hook.remove()
            self._collectives = tally.counts()
            self._stored = stored_bytes(options.model, options.optimizer)

    def _note_gradients(self, *_: object) -> None:
        self._gradient_bytes = stored_bytes(self._options.model).gradients

    def _lane(self, op: str) -> str:
        """The axis that carries an op: replicas are reduced, shards gathered and scattered, stages sent to."""
        if op == "send":
            return str(Axis.PP)
        names = self._options.mesh.data.mesh_dim_names or ("dp_shard",)
        return names[0] if op == "all_reduce" else names[-1]

    def _reset_peaks(self) -> None:
        if self._on_card:
            torch.cuda.reset_peak_memory_stats(self._options.mesh.device)

    def _note_peaks(self) -> None:
        if self._on_card:
            device = self._options.mesh.device
            free, total = torch.cuda.mem_get_info(device)
            self._peaks.append(
                _CardPeaks(
                    allocated=torch.cuda.max_memory_allocated(device),
                    reserved=torch.cuda.max_memory_reserved(device),
                    device=total - free,
                )
            )


def _largest(peaks: Sequence[_CardPeaks]) -> _CardPeaks | None:
    if not peaks:
        return None
    return _CardPeaks(
        allocated=max(peak.allocated for peak in peaks),
        reserved=max(peak.reserved for peak in peaks),
        device=max(peak.device for peak in peaks),
    )


def combine(ranks: Sequence[Measured]) -> Measured:
    """One Measured of all ranks': memory of the one that allocated most, times of the slowest."""
    fullest = max(ranks, key=lambda one: one.allocated_bytes or 0)
    slowest = max(ranks, key=lambda one: one.step.seconds if one.step else 0.0)
    return dataclasses.replace(
        fullest,
        step=slowest.step,
        tokens_per_s=slowest.tokens_per_s,
        real_tokens_per_s=slowest.real_tokens_per_s,
        reserved_bytes=max((one.reserved_bytes or 0 for one in ranks), default=0) or None,
        device_bytes=max((one.device_bytes or 0 for one in ranks), default=0) or None,
    )
