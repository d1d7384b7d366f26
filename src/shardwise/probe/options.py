"""What a user may ask of a probe, and what each rank is told to do."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardwise.errors import UsageError
from shardwise.probe.budget import Budget, budget_for
from shardwise.vocabulary.units import GIB, KIB, MIB

Device = Literal["cuda", "cpu"]
Part = Literal["compute", "disk", "wire"]
PARTS: tuple[Part, ...] = ("compute", "disk", "wire")

NEEDED_SIZES = (4 * KIB, 256 * KIB, 4 * MIB, 16 * MIB)
"""Measured first, for the collectives that training by data lives on, even if the time is over: a table without large
messages knows no bandwidth, and a plan made from it is worth nothing."""
QUICK_SIZES = (8, 4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
QUICK_CUDA_SIZES = (*QUICK_SIZES, 256 * MIB)
"""A card's wire reaches its bandwidth only from about 256 MiB on, and gets there in a millisecond."""
FULL_SIZES = tuple(8 * 2**power for power in range(28))
MAX_MESSAGE_BYTES = 4 * GIB
USED_FILE = "used.json"
"""Beside a probe's task: device memory in use by card before the ranks open their contexts."""


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """What to measure, and for how long."""

    quick: bool = False
    """A few sizes within 20 s, instead of all sizes within 120 s."""
    ranks: int | None = None
    """Ranks on this machine; by default one for each visible GPU, or two CPU ranks where there is none."""
    nodes: int = 1
    """Machines. More than one needs torchrun: every rank of the launch calls the probe, and they join."""
    sizes: tuple[int, ...] = ()
    """Message sizes in bytes, as nccl-tests defines them; by default 8 B to 64 MiB (quick; 256 MiB on GPUs) or 1 GiB.
    Given, they are all that is measured; by default four of them are measured even if the time is over."""
    parts: tuple[Part, ...] = PARTS
    """What to measure; what is left out stays empty in the Cluster."""
    out: Path | None = None
    """Where to write the Cluster file (YAML)."""
    device: Device | None = None
    """By default cuda where there is a card, else cpu."""
    checkpoint_dir: Path | None = None
    """The folder whose disk is measured; by default the folder of `out`, else the current one."""
    budget_seconds: float | None = None
    """When to stop measuring, counted from the start; what no longer fits is left out and said so. A few things are
    measured in any case: each kind of rate once, and four sizes of the three main collectives."""
    progress: Callable[[str], None] | None = None
    """Called with one line of text now and then, on rank 0 only."""


def check_options(options: ProbeOptions) -> None:
    """Refuse what cannot be measured.

    Raises:
        UsageError: With every problem at once.
    """
    problems: list[str] = []
    if options.ranks is not None and options.ranks < 1:
        problems.append(f"ranks is {options.ranks}; a probe needs at least 1")
    if options.nodes < 1:
        problems.append(f"nodes is {options.nodes}; a probe needs at least 1")
    for size in options.sizes:
        if not 1 <= size <= MAX_MESSAGE_BYTES:
            problems.append(f"sizes holds {size}; a message has between 1 byte and {MAX_MESSAGE_BYTES} bytes")
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown or not options.parts:
        problems.append(f"parts is {options.parts}; choose from {', '.join(PARTS)}, at least one")
    budget = options.budget_seconds
    if budget is not None and not (math.isfinite(budget) and budget > 0):
        problems.append(f"budget_seconds is {budget}; it must be a finite number of seconds above 0")
    for name, folder in (("checkpoint_dir", options.checkpoint_dir), ("out", options.out and options.out.parent)):
        if folder is not None and not folder.is_dir():
            problems.append(f"{name} needs the folder {str(folder)!r}, which does not exist; create it first")
        elif folder is not None and not os.access(folder, os.W_OK):
            problems.append(f"{name} needs the folder {str(folder)!r}, which this user may not write; give another")
    if options.out is not None and options.out.is_dir():
        problems.append(f"out is {str(options.out)!r}, which is a folder; give the name of a file in it")
    if problems:
        raise UsageError(*problems)


@dataclass(frozen=True, kw_only=True)
class ProbeTask:
    """What every rank of one probe is told; the same on all of them. Travels as JSON."""

    device: Device
    quick: bool
    sizes: tuple[int, ...]
    needed_sizes: tuple[int, ...] = ()
    """Those of `sizes` that are measured first, whatever they take."""
    budget: Budget
    checkpoint_dir: str
    parts: tuple[Part, ...] = PARTS
    matmul_sizes: Mapping[str, tuple[int, ...]]
    """Sides of square products by dtype, most telling first; the first of each is measured in any case."""
    attention_lengths: tuple[int, ...]
    """Most telling first; the first is measured in any case."""
    disk_bytes: int
    copy_bytes: int
    """Of one buffer of a memory copy."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one rank stands. The names are torchrun's."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    environment: dict[str, str] = field(default_factory=dict[str, str])
    """Switches that change the result, such as NCCL_P2P_DISABLE."""

    @property
    def node(self) -> int:
        """The machine that this rank is on, from 0."""
        return self.rank // self.local_world_size

    @property
    def num_nodes(self) -> int:
        """Machines."""
        return self.world_size // self.local_world_size


def make_task(options: ProbeOptions, device: Device) -> ProbeTask:
    """Fill in what the user left open, for the kind of rank that will run it."""
    quick = options.quick
    folder = options.checkpoint_dir or (options.out.parent if options.out else Path.cwd())
    usual = FULL_SIZES if not quick else QUICK_CUDA_SIZES if device == "cuda" else QUICK_SIZES
    return ProbeTask(
        device=device,
        quick=quick,
        sizes=tuple(sorted(set(options.sizes or usual))),
        needed_sizes=() if options.sizes else NEEDED_SIZES,
        budget=budget_for(quick=quick, aim_seconds=options.budget_seconds),
        checkpoint_dir=str(folder.resolve()),
        parts=options.parts,
        matmul_sizes=_matmul_sizes(device, quick),
        attention_lengths=_attention_lengths(device, quick),
        disk_bytes=(64 if quick else 512) * MIB,
        copy_bytes=(64 if quick or device == "cpu" else 512) * MIB,
    )


def _matmul_sizes(device: Device, quick: bool) -> dict[str, tuple[int, ...]]:
    if device == "cpu":
        sizes = (512, 1024) if quick else (512, 1024, 256, 2048, 4096)
        return {"fp32": sizes, "bf16": sizes}
    if quick:
        return {"bf16": (4096, 8192, 2048), "fp32": (4096,)}
    return dict.fromkeys(("bf16", "fp16", "tf32", "fp32"), (4096, 8192, 2048, 1024))


def _attention_lengths(device: Device, quick: bool) -> tuple[int, ...]:
    """Sequences of 2,048 and 4,096 tokens are what most people train on."""
    if device == "cpu":
        return (512, 256) if quick else (512, 256, 1024, 2048)
    return (4096, 2048, 1024) if quick else (4096, 2048, 8192, 1024, 16384)
