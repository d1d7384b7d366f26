"""Seconds: of whole steps, and one step's parts: compute, exposed wire, host.

On a card the profiler's kernels are the truth: those of NCCL are wire, all others compute; wire is exposed where no
other kernel runs; what neither covers is the host's. On the CPU gloo's messages block the thread that computes, so
every second inside a message is exposed, and the rest is compute. Between the stages of a pipeline waiting is waiting:
nobody can tell a message that is on its way from one that the other stage has not sent yet, so both count as exposed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from shardwise.vocabulary.timeline import COMPUTE_LANE, Span, StepTimeline

_BLOCKING = (
    "all_reduce",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "broadcast",
    "all_to_all_single",
)
"""torch.distributed's functions that wait; some under two names, of older and newer versions."""
_WAIT = "_wait_batch_p2p"
"""Where torch's pipeline schedules wait for a neighbor stage."""
_MERGE_GAP_SECONDS = 20e-6
"""Kernels that follow within this are one span."""
_MAX_SPANS = 2000
"""Of one step, for drawing."""
Interval = tuple[float, float]


class StepClock:
    """Time of one step on its device; reading it waits for the step."""

    def __init__(self, device: torch.device) -> None:
        self._on_card = device.type == "cuda"
        self._start: Any = None
        self._end: Any = None

    def start(self) -> None:
        """The step begins."""
        self._start = self._mark()

    def stop(self) -> None:
        """The step has been handed over."""
        self._end = self._mark()

    def seconds(self) -> float:
        """From start to stop, as the device has lived it."""
        if not self._on_card:
            return self._end - self._start
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1e3

    def _mark(self) -> Any:
        if not self._on_card:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class StepProfile:
    """Takes one step apart.

    Args:
        device: Where it computes.
        lane: Gives the lane of a message by its op, such as dp_shard of all_gather.
    """

    def __init__(self, device: torch.device, lane: Callable[[str], str]) -> None:
        self._device, self._lane = device, lane
        self._timeline: StepTimeline | None = None
        self._optimizer: list[float] = []

    @property
    def timeline(self) -> StepTimeline | None:
        """The step's parts; None before `profiling` has ended."""
        return self._timeline

    @contextlib.contextmanager
    def profiling(self, optimizer: torch.optim.Optimizer) -> Generator[None]:
        """Takes what happens inside apart."""
        if self._device.type == "cuda":
            with self._on_card():
                yield
        else:
            with self._on_cpu(optimizer):
                yield

    @contextlib.contextmanager
    def _on_cpu(self, optimizer: torch.optim.Optimizer) -> Generator[None]:
        messages: list[tuple[str, float, float]] = []
        marks: list[float] = []

        def mark(*_: object) -> None:
            marks.append(time.perf_counter())

        hooks = [optimizer.register_step_pre_hook(mark), optimizer.register_step_post_hook(mark)]
        with _timed_messages(messages):
            start = time.perf_counter()
            yield
            end = time.perf_counter()
        for hook in hooks:
            hook.remove()
        wire = sum(seconds for _, _, seconds in messages)
        self._timeline = StepTimeline(
            seconds=end - start,
            compute_seconds=end - start - wire,
            exposed_wire_seconds=wire,
            wire_seconds=wire,
            optimizer_seconds=marks[1] - marks[0] if len(marks) == 2 else 0.0,
            spans=_cpu_spans(messages, start, end, self._lane),
        )

    @contextlib.contextmanager
    def _on_card(self) -> Generator[None]:
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize(self._device)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as profiler:
            yield
            torch.cuda.synchronize(self._device)
        self._timeline = _timeline_of_kernels(_kernels(profiler), self._lane)


@contextlib.contextmanager
def _timed_messages(messages: list[tuple[str, float, float]]) -> Generator[None]:
    """Notes name, start and seconds of every blocking message inside."""
    originals = {(dist, name): getattr(dist, name) for name in _BLOCKING if hasattr(dist, name)}
    originals[schedules, _WAIT] = getattr(schedules, _WAIT)
    depth = 0

    def timed(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            start, depth = time.perf_counter(), depth + 1
            try:
                return original(*args, **kwargs)
            finally:
                depth -= 1
                if depth == 0:  # one function may call another of them
                    messages.append((name, start, time.perf_counter() - start))

        return call

    for (module, name), original in originals.items():
        setattr(module, name, timed(name, original))
    try:
        yield
    finally:
        for (module, name), original in originals.items():
            setattr(module, name, original)


def _cpu_spans(
    messages: list[tuple[str, float, float]], start: float, end: float, lane: Callable[[str], str]
) -> tuple[Span, ...]:
    spans: list[Span] = []
    at = start
    for name, begin, seconds in messages:
        op = _op_name(name)
        spans.append(_span(COMPUTE_LANE, "compute", at - start, begin - at))
        spans.append(_span(lane(op), op, begin - start, seconds))
        at = begin + seconds
    spans.append(_span(COMPUTE_LANE, "compute", at - start, end - at))
    return tuple(spans)


def _op_name(name: str) -> str:
    if name == _WAIT:
        return "send"
    return name.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single")


def _span(lane: str, name: str, start: float, seconds: float) -> Span:
    kind = "compute" if lane == COMPUTE_LANE else "wire"
    return Span(lane=lane, kind=kind, name=name, start_seconds=start, seconds=max(seconds, 0.0))


def _kernels(profiler: Any) -> list[tuple[str, float, float]]:
    """Name, start and end in seconds of everything that ran on the card, in order."""
    found = [
        (event.name, event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        for event in profiler.events()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    return sorted(found, key=lambda kernel: kernel[1])


def _timeline_of_kernels(kernels: list[tuple[str, float, float]], lane: Callable[[str], str]) -> StepTimeline | None:
    if not kernels:
        return None
    begin, end = kernels[0][1], max(stop for _, _, stop in kernels)
    wire = merge([(start, stop) for name, start, stop in kernels if _is_wire(name)])
    compute = merge([(start, stop) for name, start, stop in kernels if not _is_wire(name)])
    both = merge([*wire, *compute])
    update = merge([(start, stop) for name, start, stop in kernels if "adam" in name.lower()])
    room = _MAX_SPANS - sum(_is_wire(name) for name, _, _ in kernels)
    drawn = fewer(compute, max(room, _MAX_SPANS // 2))
    spans = [_span(COMPUTE_LANE, "compute", start - begin, stop - start) for start, stop in drawn]
    spans += [
        _span(lane(_nccl_op(name)), _nccl_op(name), start - begin, stop - start)
        for name, start, stop in kernels
        if _is_wire(name)
    ]
    return StepTimeline(
        seconds=end - begin,
        compute_seconds=_length(compute),
        exposed_wire_seconds=_length(both) - _length(compute),
        host_seconds=end - begin - _length(both),
        wire_seconds=_length(wire),
        optimizer_seconds=_length(update),
        spans=tuple(sorted(spans, key=lambda span: span.start_seconds)),
    )


def merge(intervals: list[Interval], gap: float = 0.0) -> list[Interval]:
    """The union of intervals; those closer than `gap` become one."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def fewer(intervals: list[Interval], limit: int) -> list[Interval]:
    """The same intervals with near ones drawn as one, until they are no more than `limit`; nothing is left out."""
    gap = _MERGE_GAP_SECONDS
    drawn = merge(intervals, gap)
    while len(drawn) > limit:
        gap *= 2
        drawn = merge(intervals, gap)
    return drawn


def _length(intervals: list[Interval]) -> float:
    return sum(stop - start for start, stop in intervals)


def _is_wire(name: str) -> bool:
    return "nccl" in name.lower()


def _nccl_op(kernel: str) -> str:
    """The collective of a kernel such as ncclDevKernel_AllGather_RING_LL."""
    lowered = kernel.lower()
    for op in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"):
        if op.replace("_", "") in lowered:
            return op
    return "send"
