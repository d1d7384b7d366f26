"""Collectives over the real wire: sent, checked element by element, and timed.

Runs inside a rank. Sizes and bus bandwidth are nccl-tests' (doc/PERFORMANCE.md): bytes of one rank's tensor for
all_reduce, broadcast and send; of all ranks' parts together for all_gather, reduce_scatter and all_to_all. Tensors are
fp32. `send` is nccl-tests' sendrecv: every rank sends to the next one and receives from the one before.

[Note: one call's time]
Calls are queued one after the other, as training does. On a GPU an event is recorded after each call in the stream
that waits for it; on CPU the clock is read after each call. The time of a call is the difference of its neighbors'
marks, the slowest rank counts in each call, and the median is over calls.

[Note: pattern]
Rank r's tensor repeats a pattern of 65,537 random integers below 1,000. Sums over up to 16,000 ranks stay exact in
fp32. The period is a prime, so data that lands at a wrong place (chunks start at multiples of powers of two) differs.
Filling and comparing run at the speed of memory, so every element is checked, at every size.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import ResourceError
from shardwise.probe.budget import NO_TIME
from shardwise.probe.control import Control
from shardwise.probe.curves import median, percentile
from shardwise.probe.findings import Skipped, WireRecord
from shardwise.probe.groups import Grouping
from shardwise.vocabulary.cluster import CollectiveOp
from shardwise.vocabulary.units import KIB, MIB, format_bandwidth, format_bytes, format_seconds

PERIOD = 65_537
ELEMENT_BYTES = 4
OPS: tuple[CollectiveOp, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send")
WEIGHTS: dict[CollectiveOp, int] = {"all_reduce": 3, "all_gather": 3, "reduce_scatter": 3}
"""Shares of the time; training by data lives on these three, the others count 1."""
WARM_UP_CALLS = 5
MIN_CALLS, MAX_CALLS = 5, 200
FEW_CALLS = 2
SLOW_CALL_SECONDS = 0.25
"""Where a call takes this long and the time is short, the wire itself is the slow part, and few calls tell it."""
PLAIN_SECONDS = 1.0
"""A message of 1 MiB or more that takes this long is all bandwidth; larger ones would tell nothing new."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The group that this rank belongs to."""

    grouping: Grouping
    members: tuple[int, ...]
    """Global ranks."""
    index: int
    """This rank's place among them."""
    process_group: Any
    device: torch.device

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One collective on buffers of its own."""

    op: CollectiveOp
    bytes: int
    fill: Callable[[], None]
    """Write the pattern into what is sent and clear what is received."""
    call: Callable[[], None]
    received: Tensor
    """(n,): what one `call` after `fill` has written."""
    expected: Callable[[], list[tuple[int, Tensor]]]
    """(start, one period of what must stand from there to the next start)."""

    def count_wrong(self) -> int:
        """Elements of `received` that are not what they must be."""
        parts = self.expected()
        ends = [start for start, _ in parts[1:]] + [self.received.numel()]
        return sum(
            _count_different(self.received[start:end], period)
            for (start, period), end in zip(parts, ends, strict=True)
        )  # fmt: skip


def open_group(grouping: Grouping, device: torch.device) -> Group:
    """Create the process groups of a grouping; every rank must call this, in the same order."""
    rank = dist.get_rank()
    members = grouping.group_of(rank)
    process_group: Any = None
    for ranks in grouping.groups:
        opened = dist.new_group(list(ranks))
        if ranks == members:
            process_group = opened
    return Group(
        grouping=grouping, members=members, index=members.index(rank), process_group=process_group, device=device
    )


# ------------------------------------------------------------------------------------------------------------- pattern


def pattern(rank: int, device: torch.device, shift: int = 0) -> Tensor:
    """(65537,): one period of rank's data, as it stands from element `shift` on; see [Note: pattern]."""
    generator = torch.Generator().manual_seed(1_000_003 * (rank + 1))
    period = torch.randint(0, 1000, (PERIOD,), generator=generator).to(device, torch.float32)
    return torch.roll(period, -(shift % PERIOD))


def fill(out: Tensor, period: Tensor) -> None:
    """Repeat `period` over `out` (n,)."""
    whole = out.numel() // PERIOD
    out[: whole * PERIOD].view(whole, PERIOD).copy_(period)
    out[whole * PERIOD :].copy_(period[: out.numel() - whole * PERIOD])


def _count_different(data: Tensor, period: Tensor) -> int:
    whole = data.numel() // PERIOD
    wrong = (data[: whole * PERIOD].view(whole, PERIOD) != period).sum()
    rest = data[whole * PERIOD :]
    return int(wrong + (rest != period[: rest.numel()]).sum())


# --------------------------------------------------------------------------------------------------------- collectives


def make_exchange(op: CollectiveOp, num_bytes: int, group: Group) -> Exchange:
    """Buffers and call of one collective.

    Args:
        op: Which.
        num_bytes: Wanted size; rounded up to whole elements, and where parts are sent to whole elements a part.
        group: Over which ranks.
    """
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        part = -(-num_bytes // (ELEMENT_BYTES * group.size))
        return _BUILDERS[op](part, group)
    return _BUILDERS[op](-(-num_bytes // ELEMENT_BYTES), group)


def _empty(num_elements: int, group: Group) -> Tensor:
    return torch.empty(num_elements, dtype=torch.float32, device=group.device)


def _sum_pattern(group: Group, shift: int) -> Tensor:
    return torch.stack([pattern(member, group.device, shift) for member in group.members]).sum(dim=0)


def _all_reduce(num_elements: int, group: Group) -> Exchange:
    data = _empty(num_elements, group)
    return Exchange(
        op="all_reduce",
        bytes=num_elements * ELEMENT_BYTES,
        fill=lambda: fill(data, pattern(group.members[group.index], group.device)),
        call=lambda: _done(dist.all_reduce(data, group=group.process_group)),
        received=data,
        expected=lambda: [(0, _sum_pattern(group, 0))],
    )


def _all_gather(part: int, group: Group) -> Exchange:
    mine, whole = _empty(part, group), _empty(part * group.size, group)

    def refill() -> None:
        whole.zero_()
        fill(mine, pattern(group.members[group.index], group.device))

    return Exchange(
        op="all_gather",
        bytes=whole.numel() * ELEMENT_BYTES,
        fill=refill,
        call=lambda: _done(_all_gather_call(whole, mine, group=group.process_group)),
        received=whole,
        expected=lambda: [(i * part, pattern(member, group.device)) for i, member in enumerate(group.members)],
    )


def _reduce_scatter(part: int, group: Group) -> Exchange:
    mine, whole = _empty(part, group), _empty(part * group.size, group)

    def refill() -> None:
        mine.zero_()
        fill(whole, pattern(group.members[group.index], group.device))

    return Exchange(
        op="reduce_scatter",
        bytes=whole.numel() * ELEMENT_BYTES,
        fill=refill,
        call=lambda: _done(_reduce_scatter_call(mine, whole, group=group.process_group)),
        received=mine,
        expected=lambda: [(0, _sum_pattern(group, group.index * part))],
    )


def _all_to_all(part: int, group: Group) -> Exchange:
    sent, received = _empty(part * group.size, group), _empty(part * group.size, group)

    def refill() -> None:
        received.zero_()
        fill(sent, pattern(group.members[group.index], group.device))

    shift = group.index * part
    return Exchange(
        op="all_to_all",
        bytes=sent.numel() * ELEMENT_BYTES,
        fill=refill,
        call=lambda: _done(dist.all_to_all_single(received, sent, group=group.process_group)),
        received=received,
        expected=lambda: [(i * part, pattern(member, group.device, shift)) for i, member in enumerate(group.members)],
    )


def _broadcast(num_elements: int, group: Group) -> Exchange:
    data = _empty(num_elements, group)
    root = group.members[0]

    def refill() -> None:
        data.zero_()
        if group.index == 0:
            fill(data, pattern(root, group.device))

    return Exchange(
        op="broadcast",
        bytes=num_elements * ELEMENT_BYTES,
        fill=refill,
        call=lambda: _done(dist.broadcast(data, src=root, group=group.process_group)),
        received=data,
        expected=lambda: [(0, pattern(root, group.device))],
    )


def _send(num_elements: int, group: Group) -> Exchange:
    sent, received = _empty(num_elements, group), _empty(num_elements, group)
    to = group.members[(group.index + 1) % group.size]
    source = group.members[(group.index - 1) % group.size]

    def refill() -> None:
        received.zero_()
        fill(sent, pattern(group.members[group.index], group.device))

    def call() -> None:
        messages = [
            dist.P2POp(dist.isend, sent, to, group.process_group),
            dist.P2POp(dist.irecv, received, source, group.process_group),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    return Exchange(
        op="send",
        bytes=num_elements * ELEMENT_BYTES,
        fill=refill,
        call=call,
        received=received,
        expected=lambda: [(0, pattern(source, group.device))],
    )


def _first_of(*names: str) -> Callable[..., Any]:
    """torch.distributed's function under the first of `names` that this torch has: some were renamed in 2.13."""
    return next(found for found in (getattr(dist, name, None) for name in names) if found is not None)


_all_gather_call = _first_of("all_gather_single", "all_gather_into_tensor")
_reduce_scatter_call = _first_of("reduce_scatter_single", "reduce_scatter_tensor")


def _done(_work: Any) -> None:
    """A blocking collective returns nothing, and nothing of it is needed."""


_BUILDERS: dict[CollectiveOp, Callable[[int, Group], Exchange]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "send": _send,
}


# -------------------------------------------------------------------------------------------------------------- timing


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing on CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_calls(call: Callable[[], Any], count: int, device: torch.device) -> list[float]:
    """Seconds of each of `count` calls, queued one after the other; see [Note: one call's time]."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(count):
            call()
            marks.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One exchange, timed. Every rank holds the same."""

    iterations: int
    seconds: float
    p95_seconds: float
    verified_elements: int


def measure_exchange(exchange: Exchange, group: Group, control: Control, slice_seconds: float) -> Sample:
    """Verify, warm up and time one exchange. Every rank calls this with the same arguments.

    Args:
        exchange: What to send.
        group: Over which ranks; all groups of its grouping run at the same time.
        control: Brings the ranks to the same number of calls.
        slice_seconds: About how long the timed calls together may take; at least five are timed, or two of slow ones.

    Raises:
        ResourceError: On every rank, if any element on any rank is wrong.
    """
    verified = verify(exchange, group, control)
    first = control.slowest([sum(time_calls(exchange.call, 1, group.device))])[0]
    if first >= SLOW_CALL_SECONDS and first * (1 + MIN_CALLS) > slice_seconds:
        count = FEW_CALLS
    else:
        warm_up = WARM_UP_CALLS if first * WARM_UP_CALLS < slice_seconds else 1
        control.barrier()
        estimate = control.slowest([median(time_calls(exchange.call, warm_up, group.device))])[0]
        count = max(MIN_CALLS, min(MAX_CALLS, int(slice_seconds / max(estimate, 1e-9))))
    control.barrier()
    slowest = control.slowest(time_calls(exchange.call, count, group.device))
    return Sample(
        iterations=count, seconds=median(slowest), p95_seconds=percentile(slowest, 0.95), verified_elements=verified
    )


def verify(exchange: Exchange, group: Group, control: Control) -> int:
    """Run the exchange once on known data and compare every element on every rank.

    Returns:
        Elements compared, on all ranks together.

    Raises:
        ResourceError: On every rank, if any element on any rank is wrong.
    """
    exchange.fill()
    synchronize(group.device)
    exchange.call()
    synchronize(group.device)
    wrong, compared = control.total([exchange.count_wrong(), exchange.received.numel()])
    if wrong:
        raise ResourceError(
            f"{exchange.op} of {format_bytes(exchange.bytes)} over {group.size} ranks ({group.grouping.name}, "
            f"{group.device.type}) brought {wrong:,.0f} wrong elements of {compared:,.0f}, where every one must be "
            "exact. Training over this wire would be silently wrong: do not use it, and run: shardwise doctor"
        )
    return round(compared)


# --------------------------------------------------------------------------------------------------------------- sweep


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a sweep over ops and sizes brought."""

    records: tuple[WireRecord, ...]
    skipped: tuple[Skipped, ...]


def sweep_group(
    group: Group, sizes: tuple[int, ...], control: Control, seconds: float, needed: tuple[int, ...] = ()
) -> Sweep:
    """Measure every op over one grouping within about `seconds`; what an op leaves over goes to the next.

    Args:
        group: Over which ranks.
        sizes: Of messages, ascending.
        control: Brings the ranks to the same decisions.
        seconds: About how long it may take.
        needed: Those of `sizes` that the main collectives (`WEIGHTS`) get even if it takes longer.
    """
    until = control.slowest([control.seconds])[0] + seconds
    records: list[WireRecord] = []
    skipped: list[Skipped] = []
    for i, op in enumerate(OPS):
        what = f"{op} over {group.grouping.name} ({group.size} ranks)"
        why = why_unsupported(op, group, control)
        if why:
            skipped.append(Skipped(what=what, why=why))
            continue
        left = until - control.slowest([control.seconds])[0]
        share = _weight(op) / sum(_weight(other) for other in OPS[i:])
        first = needed if op in WEIGHTS else ()
        found, cut = sweep_op(op, group, (*first, *(size for size in sizes if size not in first)), control,
                              Allowance(seconds=left * share, needed=len(first)))  # fmt: skip
        records += found
        if cut:
            skipped.append(Skipped(what=what, why=cut))
        if found:
            best = max(found, key=lambda record: record.bus_bandwidth)
            control.say(
                f"{what}: {format_bytes(found[0].bytes)} in {format_seconds(found[0].seconds)}, "
                f"{format_bandwidth(best.bus_bandwidth)} at {format_bytes(best.bytes)}"
            )
    return Sweep(records=tuple(records), skipped=tuple(skipped))


def _weight(op: CollectiveOp) -> int:
    return WEIGHTS.get(op, 1)


def why_unsupported(op: CollectiveOp, group: Group, control: Control) -> str:
    """The backend's own words if it has no such collective; empty if it has."""
    try:
        make_exchange(op, ELEMENT_BYTES * group.size, group).call()
        synchronize(group.device)
        words = ""
    except (RuntimeError, NotImplementedError, ValueError) as error:
        words = (str(error) or type(error).__name__).splitlines()[0]
    refusals = [refusal for refusal in control.gather(words) if refusal]
    return f"{group.device.type} backend: {refusals[0]}" if refusals else ""


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What one op of a sweep may take."""

    seconds: float
    needed: int = 0
    """How many of the sizes, from the first, are measured even if that takes longer."""


def sweep_op(
    op: CollectiveOp, group: Group, sizes: tuple[int, ...], control: Control, allowance: Allowance
) -> tuple[list[WireRecord], str]:
    """Sizes in the given order until they are through or the time is.

    Returns:
        The records by size, and why sizes are missing (empty if none is).
    """
    started = control.slowest([control.seconds])[0]
    limit = largest_message(group, control)
    records: dict[int, WireRecord] = {}
    too_large: list[int] = []
    too_long: list[int] = []
    for i, size in enumerate(sizes):
        left = allowance.seconds - (control.slowest([control.seconds])[0] - started)
        if size > limit:
            too_large.append(size)
            continue
        if not _fits(records, size, left, needed=i < allowance.needed):
            too_long.append(size)
            continue
        exchange = make_exchange(op, size, group)
        if exchange.bytes in records:
            continue  # rounded up to the same number of elements
        sample = measure_exchange(exchange, group, control, max(0.0, left) / (2 * (len(sizes) - i)))
        records[exchange.bytes] = _record(exchange, group, sample)
    reasons = [_left_out(too_large, "do not fit into memory"), _left_out(too_long, NO_TIME)]
    return [records[size] for size in sorted(records)], "; ".join(filter(None, reasons))


def _fits(records: Mapping[int, WireRecord], size: int, left: float, *, needed: bool) -> bool:
    """Whether a size is to be measured. The first always is; all ranks hold the same records and the same time left."""
    if not records:
        return True
    if needed:
        plain = any(found.bytes >= MIB and found.seconds >= PLAIN_SECONDS for found in records.values())
        return left > 0 or not plain
    # Each size needs at least 8 calls: verify, first, warm-up, 5 timed.
    return 8 * _expected_seconds(records, size) <= left


def _expected_seconds(records: Mapping[int, WireRecord], size: int) -> float:
    """From the nearest size below; below 64 KiB a message is all latency and growing it costs nothing yet."""
    nearest = max((known for known in records if known <= size), default=min(records))
    return records[nearest].seconds * max(1.0, size / max(nearest, 64 * KIB))


def _left_out(sizes: list[int], why: str) -> str:
    if not sizes:
        return ""
    if len(sizes) == 1:
        return f"{format_bytes(sizes[0])} {why}"
    return f"{len(sizes)} sizes from {format_bytes(min(sizes))} to {format_bytes(max(sizes))} {why}"


def largest_message(group: Group, control: Control) -> int:
    """Bytes of the largest message whose buffers and checks fit: a sixth of what is free on the fullest rank."""
    if group.device.type == "cuda":
        free = torch.cuda.mem_get_info(group.device)[0]
    else:
        from shardwise.probe.inventory import available_memory_bytes

        free = available_memory_bytes() // control.world_size
    return int(control.fastest([free / 6])[0])


def _record(exchange: Exchange, group: Group, sample: Sample) -> WireRecord:
    return WireRecord(
        op=exchange.op,
        grouping=group.grouping.name,
        scope=group.grouping.scope,
        ranks=group.size,
        bytes=exchange.bytes,
        iterations=sample.iterations,
        seconds=sample.seconds,
        p95_seconds=sample.p95_seconds,
        verified_elements=sample.verified_elements,
    )
