"""One optimizer step on lanes: an event simulation, block by block.

[Note: what waits for what]
forward   a block waits for its all_gather; the next all_gather starts when the lane is free and the block before the
          current one is done (two buffers)
backward  the all_gather of the block before starts with the block's backward (prefetch); a reduction starts when the
          block's gradients exist; both share the group's lane, in the order of their issue
          (with dp_replicate > 1 reductions then pass on the replicate lane)
tensor    sums stand in the way: nothing hides them
offload   a group's copy up lengthens its gather, its gradients' way down lengthens its reduction
step      the optimizer waits for all reductions

Equal micro-batches repeat: the first, one inner and the last are simulated, the inner one counts as often as it occurs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwise.axes import fully_shard
from shardwise.axes.pipeline import cost as pipeline
from shardwise.axes.replicate import cost as replicate
from shardwise.axes.shard import cost as shard
from shardwise.axes.tensor import cost as tensor
from shardwise.levers.loss import cost as loss
from shardwise.levers.offload import cost as offload
from shardwise.levers.optimizer import cost as optimizer
from shardwise.planner.compute import BlockTimes, ComputeTimes, GradientTimes, compute_times
from shardwise.planner.wire import group_shape, shaped_seconds
from shardwise.vocabulary.cluster import Cluster, LinkKind
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.strategy import Axis
from shardwise.vocabulary.timeline import COMPUTE_LANE, Collective, Every, Pass, Site, Span, SpanKind, StepTimeline

CONTENTION: dict[LinkKind, float] = {"nvlink": 1.45}
"""Compute is this much slower while a collective runs beside it, where `probe` did not measure it: as it did on two
H200s (`benchmarks/results/cluster_h200_x2.yaml`). NCCL takes 24 to 32 of 132 multiprocessors to fill NVLink, and memory
bandwidth and power besides."""
CONTENTION_ELSEWHERE = 1.03
"""Slower wires need two to four of them."""


_AXES = tuple(Axis)


def sends(place: Placement) -> tuple[Collective, ...]:
    """Everything that one rank sends in a step."""
    axes = shard.sends(place) + replicate.sends(place) + tensor.sends(place) + pipeline.sends(place)
    return axes + optimizer.sends(place) + loss.sends(place)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a step of one rank is made of: counted once, for the quick estimate and for the simulation."""

    place: Placement
    times: ComputeTimes
    prices: tuple[tuple[Collective, float], ...]
    """Messages and the seconds of one of each."""
    copies: tuple[_Copy, ...] = ()

    @classmethod
    def of(cls, place: Placement, cluster: Cluster, block: BlockTimes | None = None) -> Parts:
        """Compute, messages and copies of this rank; a block's times, if they are known."""
        shapes = {axis: group_shape(cluster, place.strategy, axis) for axis in _AXES}
        prices = [(message, shaped_seconds(cluster, shapes[message.axis], message)) for message in sends(place)]
        return cls(
            place=place, times=compute_times(place, cluster, block), prices=tuple(prices),
            copies=tuple(_copies(place, cluster)),
        )  # fmt: skip

    @property
    def messages(self) -> tuple[Collective, ...]:
        """Everything that the rank sends in a step."""
        return tuple(message for message, _ in self.prices)


def step_timeline(parts: Parts, cluster: Cluster, *, keep_spans: bool = False) -> StepTimeline:
    """Predict one optimizer step of a rank."""
    return _Simulation(parts, keep_spans=keep_spans).run(cluster)


def contention_of(cluster: Cluster) -> float:
    """The assumed slowdown of compute beside a collective."""
    return CONTENTION.get(cluster.intra_node.kind, CONTENTION_ELSEWHERE)


def _copies(place: Placement, cluster: Cluster) -> Iterator[_Copy]:
    """Copies between host and card for every kind of group."""
    if place.strategy.offload == "none":
        return
    rate = offload.pcie_bytes_per_s(cluster)
    for group in place.groups:
        moved = offload.copies(place, group)
        yield _Copy(site=group.site, up=moved.up / rate, down=moved.down / rate)


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """Seconds over PCIe for one group."""

    site: Site
    up: float
    down: float


@dataclass
class _Clock:
    """Where each lane stands."""

    compute: float = 0.0
    shard: float = 0.0
    replicate: float = 0.0
    waited: float = 0.0
    """Compute lane waiting for messages."""
    wire: float = 0.0
    """All messages."""


@dataclass(frozen=True)
class _Messages:
    """Seconds of the messages of one group of parameters, by site."""

    gather_forward: dict[Site, float] = field(default_factory=dict[Site, float])
    gather_backward: dict[Site, float] = field(default_factory=dict[Site, float])
    reduce: dict[Site, float] = field(default_factory=dict[Site, float])
    replicate: dict[Site, float] = field(default_factory=dict[Site, float])
    always_casts: bool = False
    """Stage 0: no gather, but a cast of each block in its place."""

    def copied(self, gather: dict[Site, float], times: ComputeTimes) -> float:
        """Seconds of the copy that follows a block's gather, where there is one."""
        return times.gather_copy if self.always_casts or gather.get("block", 0.0) > 0 else 0.0


class _Simulation:
    """The event simulation of one rank; see [Note: what waits for what]."""

    def __init__(self, parts: Parts, *, keep_spans: bool) -> None:
        self.place, self.times, self.prices, self.copies = parts.place, parts.times, parts.prices, parts.copies
        self.blocks = parts.place.num_blocks
        self.accumulation = parts.place.strategy.accumulation
        self.serial_forward, self.serial_backward = self._serial("forward"), self._serial("backward")
        self.clock = _Clock()
        self.spans: list[Span] = []
        self.keep_spans = keep_spans

    def _serial(self, during: Pass) -> float:
        """Seconds a block waits for sums that nothing hides."""
        total = sum(
            seconds * message.count
            for message, seconds in self.prices
            if message.hides_behind == "nothing" and message.during == during
        )
        return total / (self.blocks * self.accumulation) if self.blocks else 0.0

    def _messages(self, *, first: bool, last: bool) -> _Messages:
        """What crosses the wire in a micro-batch."""
        found = _Messages(always_casts=self.place.strategy.zero_stage == 0)
        for message, seconds in self.prices:
            if message.hides_behind == "nothing" or message.op == "send":
                continue
            once = message.every == "step"
            if message.op == "all_gather":
                if once and not first:
                    continue
                into = found.gather_forward if message.during == "forward" else found.gather_backward
            else:
                if once and not last:
                    continue
                into = found.replicate if message.axis is Axis.DP_REPLICATE else found.reduce
            into[message.site] = into.get(message.site, 0.0) + seconds
        strategy = self.place.strategy
        for copy in self.copies:
            if first or not offload.stays(self.place):
                found.gather_forward[copy.site] = found.gather_forward.get(copy.site, 0.0) + copy.up
            if copy.site != "root" and strategy.offload == "parameters":
                found.gather_backward[copy.site] = found.gather_backward.get(copy.site, 0.0) + copy.up
            if last or not fully_shard.whole_gradients(self.place):
                found.reduce[copy.site] = found.reduce.get(copy.site, 0.0) + copy.down
        return found

    def run(self, cluster: Cluster) -> StepTimeline:
        """Simulate the step."""
        inner = max(0, self.accumulation - 2)
        repeated, repeated_waited, repeated_wire = 0.0, 0.0, 0.0
        rounds = ["first"] + (["inner"] if inner else []) + (["last"] if self.accumulation > 1 else [])
        for name in rounds:
            before = (self.clock.compute, self.clock.waited, self.clock.wire)
            only = self.accumulation == 1
            first, last = name == "first", name == "last" or only
            self._micro_batch(self._messages(first=first, last=last), self.times.gradients[first][last])
            if name == "inner":
                repeated = (inner - 1) * (self.clock.compute - before[0])
                repeated_waited = (inner - 1) * (self.clock.waited - before[1])
                repeated_wire = (inner - 1) * (self.clock.wire - before[2])
        drained = max(self.clock.compute, self.clock.shard, self.clock.replicate)
        self._wait_until(drained)
        for message, seconds in self.prices:
            if message.during == "optimizer":
                waited = self.clock.compute + seconds * message.count
                self._wait_until(waited, lane=message.axis.value, name=message.name)
        self._compute("optimizer", self.times.optimizer, kind="optimizer")
        return self._summary(cluster, repeated, repeated_waited, repeated_wire)

    def _micro_batch(self, messages: _Messages, gradients: GradientTimes) -> None:
        self._forward(messages)
        self._backward(messages, gradients)

    def _forward(self, messages: _Messages) -> None:
        gather = messages.gather_forward
        self._wait_until(self._send("shard", "all_gather root", gather.get("root", 0.0), self.clock.compute))
        self._wait_until(self._send("shard", "all_gather embedding", gather.get("embedding", 0.0), self.clock.compute))
        outer = self.times.outer_gather_copy if messages.always_casts or gather.get("root", 0.0) > 0 else 0.0
        self._compute("embedding", self.times.embedding + outer)
        ready = self._send("shard", "all_gather 0", gather.get("block", 0.0), self.clock.compute)
        before_last = self.clock.compute
        for i in range(self.blocks):
            self._wait_until(ready)
            if i + 1 < self.blocks:
                ready = self._send("shard", f"all_gather {i + 1}", gather.get("block", 0.0), before_last)
            before_last = self.clock.compute
            self._compute(f"forward {i}", self.times.block_forward + messages.copied(gather, self.times))
            self._wait_until(self.clock.compute + self.serial_forward, lane="tp", name="tensor sums")

    def _backward(self, messages: _Messages, gradients: GradientTimes) -> None:
        gather = messages.gather_backward
        self._compute("loss", self.times.head)
        ready = self._send("shard", f"all_gather {self.blocks - 1}", gather.get("block", 0.0), self.clock.compute)
        for i in reversed(range(self.blocks)):
            self._wait_until(ready)
            if i > 0:
                ready = self._send("shard", f"all_gather {i - 1}", gather.get("block", 0.0), self.clock.compute)
            copied = messages.copied(gather, self.times)
            self._compute(f"backward {i}", self.times.block_backward + copied + gradients.block)
            self._wait_until(self.clock.compute + self.serial_backward, lane="tp", name="tensor sums")
            self._reduce(messages, "block", str(i))
        self._send("shard", "all_gather embedding", gather.get("embedding", 0.0), self.clock.compute)
        self._compute("gradients of root and embedding", gradients.outer)
        self._reduce(messages, "root", "root")
        self._reduce(messages, "embedding", "embedding")

    def _reduce(self, messages: _Messages, site: Site, label: str) -> None:
        """A group's gradients: across shards, then across replicas."""
        done = self._send("shard", f"reduce_scatter {label}", messages.reduce.get(site, 0.0), self.clock.compute)
        start = max(self.clock.compute, done)
        self._send("replicate", f"all_reduce {label}", messages.replicate.get(site, 0.0), start)

    def _send(self, lane: str, name: str, seconds: float, earliest: float) -> float:
        """Put a message on a lane; returns when it is over."""
        if seconds <= 0.0:
            return earliest if lane == "replicate" else self.clock.compute
        start = max(self.clock.shard if lane == "shard" else self.clock.replicate, earliest)
        end = start + seconds
        if lane == "shard":
            self.clock.shard = end
        else:
            self.clock.replicate = end
        self.clock.wire += seconds
        axis = Axis.DP_SHARD if lane == "shard" else Axis.DP_REPLICATE
        self._record(axis.value, "wire", name, start, seconds)
        return end

    def _wait_until(self, moment: float, lane: str = "", name: str = "") -> None:
        """The compute lane waits for a message."""
        if moment > self.clock.compute:
            waited = moment - self.clock.compute
            if lane:
                self.clock.wire += waited
                self._record(lane, "wire", name, self.clock.compute, waited)
            self.clock.waited += waited
            self.clock.compute = moment

    def _compute(self, name: str, seconds: float, kind: SpanKind = "compute") -> None:
        if seconds > 0.0:
            self._record(COMPUTE_LANE, kind, name, self.clock.compute, seconds)
            self.clock.compute += seconds

    def _record(self, lane: str, kind: SpanKind, name: str, start: float, seconds: float) -> None:
        if self.keep_spans:
            self.spans.append(Span(lane=lane, kind=kind, name=name, start_seconds=start, seconds=seconds))

    def _summary(self, cluster: Cluster, repeated: float, waited: float, wire: float) -> StepTimeline:
        """Add what repeats, contention, the bubble and the host."""
        total = self.clock.compute + repeated
        exposed, wire = self.clock.waited + waited, self.clock.wire + wire
        compute = total - exposed
        slowdown = cluster.measurements.matmul_slowdown_under_wire or contention_of(cluster)
        contention = max(0.0, min(wire - exposed, compute)) * (slowdown - 1)
        compute, total = compute + contention, total + contention
        hidden_from = compute - self.times.optimizer
        host = max(0.0, self.times.host_per_block * self.blocks * self.accumulation - hidden_from - exposed)
        sends = sum(s * m.count for m, s in self.prices if m.op == "send") / max(1, self.accumulation)
        total, exposed, wire = total + host + sends, exposed + sends, wire + sends * self.accumulation
        idle = pipeline.idle_share(self.place.strategy)
        bubble = (total - self.times.optimizer) * idle / (1 - idle)
        return StepTimeline(
            seconds=total + bubble,
            compute_seconds=compute,
            exposed_wire_seconds=exposed,
            bubble_seconds=bubble,
            host_seconds=host,
            wire_seconds=wire,
            optimizer_seconds=self.times.optimizer,
            spans=tuple(self.spans),
        )


@dataclass
class _Loads:
    """Seconds of messages that may hide behind the blocks' compute in one direction, by lane."""

    each: dict[Axis, float] = field(default_factory=dict[Axis, float])
    """In every micro-batch."""
    once: dict[Axis, float] = field(default_factory=dict[Axis, float])
    """Besides, in the first (forward) or the last (backward)."""

    def add(self, axis: Axis, seconds: float, every: Every) -> None:
        into = self.each if every == "micro_batch" else self.once
        into[axis] = into.get(axis, 0.0) + seconds

    def beside(self, compute: float, micro_batches: int) -> float:
        """Seconds of all micro-batches, each as long as its compute or its fullest lane."""
        usual = max(self.each.values(), default=0.0)
        fullest = max((self.each.get(axis, 0.0) + seconds for axis, seconds in self.once.items()), default=0.0)
        fullest = max(fullest, usual)
        return (micro_batches - 1) * max(compute, usual) + max(compute, fullest)


def estimate_seconds(parts: Parts) -> float:
    """A quick estimate of the step, to rank candidates before they are simulated: every block in its steady state."""
    place, times = parts.place, parts.times
    blocks, steps = place.num_blocks, place.strategy.accumulation
    forward, backward, waits = _Loads(), _Loads(), 0.0
    for message, each in parts.prices:
        seconds = each * message.count
        if message.hides_behind == "nothing" or message.op == "send" or message.site != "block":
            waits += seconds
            continue
        into = forward if message.during == "forward" else backward
        into.add(message.axis, seconds / (steps if message.every == "micro_batch" else 1), message.every)
    up: Every = "step" if offload.stays(place) else "micro_batch"
    down: Every = "step" if fully_shard.whole_gradients(place) else "micro_batch"
    for copy in parts.copies:
        if copy.site != "block":
            waits += copy.up * (1 if up == "step" else steps) + copy.down * (1 if down == "step" else steps)
            continue
        forward.add(Axis.DP_SHARD, copy.up * blocks, up)
        backward.add(Axis.DP_SHARD, copy.down * blocks, down)
        if place.strategy.offload == "parameters":
            backward.add(Axis.DP_SHARD, copy.up * blocks, "micro_batch")
    copied = times.gather_copy if place.strategy.zero_stage != 1 else 0.0
    step = forward.beside((times.block_forward + copied) * blocks, steps)
    step += backward.beside((times.block_backward + copied) * blocks, steps)
    step += waits + (times.head + times.embedding) * steps
    for first, kinds in times.gradients.items():
        for last, added in kinds.items():
            step += (blocks * added.block + added.outer) * (1 if first or last else steps - 2)
    step = max(step, times.host_per_block * blocks * steps)
    idle = pipeline.idle_share(place.strategy)
    return step / (1 - idle) + times.optimizer
