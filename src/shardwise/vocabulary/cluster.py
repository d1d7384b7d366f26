"""Gpu, Link and Cluster: the machine that a job runs on, from data sheets or measured by `probe`.

Bandwidths are one-way and per card, in bytes a second. Headline figures, which count both directions, are made from
them at the edge and say so.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardwise.vocabulary.limits import (
    MAX_GPUS,
    Bytes,
    Count,
    Degree,
    Delay,
    Fraction,
    Rate,
    Seconds,
    Slowdown,
    SomeBytes,
)

FactSource = Literal["datasheet", "measured", "assumed"]
DType = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "int8"]
LinkKind = Literal["nvlink", "pcie", "host_memory", "network", "loopback"]
CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send"]
"""Spelled as NCCL and torch.distributed spell them."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One card (or, for a machine without any, the cores that one rank gets)."""

    name: str
    memory_bytes: SomeBytes
    """As the driver reports it (`nvidia-smi`)."""
    peak_flops: Mapping[str, Rate]
    """Dense FLOP/s by dtype, without sparsity."""
    memory_bandwidth_bytes_per_s: Rate
    cuda_memory_bytes: SomeBytes | None = None
    """What a CUDA program may use in all (cudaMemGetInfo total): memory_bytes less what the driver keeps for itself,
    0.3 to 0.9 GiB by card. None if nobody has looked."""
    architecture: str = ""
    """Such as ampere, ada, hopper, blackwell, or cpu."""
    source: FactSource = "datasheet"
    url: str = ""
    """Where the figures come from."""


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One measured collective: `bytes` as nccl-tests defines the size, median of the slowest rank."""

    bytes: SomeBytes
    seconds: Seconds


@dataclass(frozen=True, kw_only=True)
class CollectiveCurve:
    """Measured times of one collective over one group, by size."""

    op: CollectiveOp
    ranks: Degree
    points: tuple[CurvePoint, ...]
    """In order of size."""

    def contradictions(self) -> Iterator[str]:
        """Points that no line can be drawn through."""
        sizes = [point.bytes for point in self.points]
        if not sizes:
            yield "points is empty; leave the curve out, or measure it with: shardwise probe"
        yield from _not_rising("points", "bytes", sizes)

    def seconds_at(self, num_bytes: float) -> float:
        """The time of a message of any size: a straight line in bytes between the measured neighbors.

        A message costs a latency and its bytes, and where one protocol gives way to the next that holds on either
        side; a line in log-log, which is a power of the size, was less right at sizes that were left out of a table
        (benchmarks/collective_model.py). Below the smallest size its time holds, above the largest its bandwidth.

        Args:
            num_bytes: As nccl-tests defines the size.

        Raises:
            ValueError: If the table is empty.
        """
        if not self.points:
            raise ValueError(
                f"the table of {self.op} over {self.ranks} ranks is empty; measure it with: shardwise probe"
            )
        right = bisect.bisect_left(self.points, num_bytes, key=lambda point: point.bytes)
        if right == 0:
            return self.points[0].seconds
        low = self.points[right - 1]
        if right == len(self.points):
            return low.seconds * num_bytes / low.bytes
        high = self.points[right]
        share = (num_bytes - low.bytes) / (high.bytes - low.bytes)
        return low.seconds + share * (high.seconds - low.seconds)


@dataclass(frozen=True, kw_only=True)
class Link:
    """The wire between the ranks of a group."""

    name: str
    kind: LinkKind
    bandwidth_bytes_per_s: Rate
    """One way, per card, as the data sheet says."""
    latency_seconds: Seconds = 10e-6
    """One small collective between two ranks."""
    attained_fraction: Fraction = 0.8
    """Share of the data sheet's bandwidth that large collectives reach as bus bandwidth."""
    attained_source: str = ""
    curves: tuple[CollectiveCurve, ...] = ()
    """Measured tables; where they exist they win over the data sheet."""
    stated_headline_bytes_per_s: Rate | None = None
    """What the vendor advertises, where that is not twice the one-way figure: PCIe before line coding, networks one
    way."""
    source: FactSource = "datasheet"
    url: str = ""

    @property
    def headline_bandwidth_bytes_per_s(self) -> float:
        """As the vendor advertises it: both directions together for NVLink and PCIe, one way for networks."""
        if self.stated_headline_bytes_per_s is not None:
            return self.stated_headline_bytes_per_s
        return 2 * self.bandwidth_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class RatePoint:
    """A measured rate at one size, such as a matmul's FLOP/s at n = 4096."""

    size: Count
    rate: Rate


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What `probe` found out about one card besides the wire. Empty where nothing was measured."""

    matmul_flops: Mapping[str, tuple[RatePoint, ...]] = field(default_factory=dict[str, tuple[RatePoint, ...]])
    """Attained FLOP/s by dtype over the side of a square product."""
    attention_flops: Mapping[str, tuple[RatePoint, ...]] = field(default_factory=dict[str, tuple[RatePoint, ...]])
    """Attained FLOP/s of causal attention by pass ("forward", "backward") over the sequence length."""
    copy_bytes_per_s: Rate | None = None
    """Device memory copy, bytes read plus bytes written."""
    host_to_device_bytes_per_s: Rate | None = None
    device_to_host_bytes_per_s: Rate | None = None
    launch_gap_seconds: Delay | None = None
    """Between two small kernels."""
    context_bytes: Bytes | None = None
    """Device memory that a process takes before its first tensor."""
    communicator_bytes: Bytes | None = None
    """Device memory that one communicator takes after its first collective."""
    matmul_slowdown_under_wire: Slowdown | None = None
    """Time of a matmul while a collective runs, over its time alone (at least 1)."""
    wire_slowdown_under_matmul: Slowdown | None = None
    """Time of a collective while a matmul runs, over its time alone (at least 1)."""
    checkpoint_bytes_per_s: Rate | None = None

    def contradictions(self) -> Iterator[str]:
        """Points that no line can be drawn through."""
        for name, tables in (("matmul_flops", self.matmul_flops), ("attention_flops", self.attention_flops)):
            for key, points in tables.items():
                yield from _not_rising(f"{name}.{key}", "size", [point.size for point in points])


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`num_nodes` equal machines with `gpus_per_node` equal cards each."""

    name: str
    gpu: Gpu
    num_nodes: Degree = 1
    gpus_per_node: Degree = 1
    intra_node: Link
    """Between the cards of one machine."""
    inter_node: Link | None = None
    """Between machines, per card (a shared adapter's bandwidth divided by the cards that use it); None for one node."""
    host_memory_bytes: Bytes | None = None
    """Of one machine."""
    measurements: Measurements = field(default_factory=Measurements)
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    """What it was measured with: torch, nccl, driver, python."""
    source: FactSource = "datasheet"
    date: str = ""
    """ISO date of the measurement or of the data sheet's reading."""
    assumptions: tuple[str, ...] = ()
    """What nobody measured or said and was therefore assumed, one sentence each."""

    def contradictions(self) -> Iterator[str]:
        """Machines without a wire between them, or more cards than are planned for."""
        if self.num_nodes > 1 and self.inter_node is None:
            yield f"inter_node is missing, and there are {self.num_nodes} machines; describe the wire between them"
        if self.num_gpus > MAX_GPUS:
            yield f"num_nodes x gpus_per_node are {self.num_gpus:,} cards; the limit is {MAX_GPUS:,}"

    @property
    def num_gpus(self) -> int:
        """Cards in total; the product of every mesh."""
        return self.num_nodes * self.gpus_per_node


def _not_rising(field_name: str, what: str, values: Sequence[int]) -> Iterator[str]:
    for before, after in itertools.pairwise(values):
        if after <= before:
            yield f"{field_name} must rise in {what}, and {after:,} follows {before:,}; sort them, each once"
            return
