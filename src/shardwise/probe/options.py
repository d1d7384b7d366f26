"""What a user may ask of a probe, and what each rank is told to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardwise.errors import UsageError
from shardwise.vocabulary.units import GIB, KIB, MIB

Device = Literal["cuda", "cpu"]
Part = Literal["compute", "disk", "wire"]
PARTS: tuple[Part, ...] = ("compute", "disk", "wire")

QUICK_SECONDS = 15.0
"""A quick probe's aim, from its start to the end of the last measurement; what remains to 20 s is slack."""
FULL_SECONDS = 95.0
QUICK_SIZES = (8, 4 * KIB, 64 * KIB, 512 * KIB, 4 * MIB, 16 * MIB, 64 * MIB)
FULL_SIZES = tuple(8 * 2**power for power in range(28))
MAX_MESSAGE_BYTES = 4 * GIB


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
    """Message sizes in bytes, as nccl-tests defines them; by default 8 B to 64 MiB (quick) or 1 GiB."""
    parts: tuple[Part, ...] = PARTS
    """What to measure; what is left out stays empty in the Cluster."""
    out: Path | None = None
    """Where to write the Cluster file (YAML)."""
    device: Device | None = None
    """By default cuda where there is a card, else cpu."""
    checkpoint_dir: Path | None = None
    """The folder whose disk is measured; by default the folder of `out`, else the current one."""
    budget_seconds: float | None = None
    """When to stop measuring, counted from the start; sizes that no longer fit are left out and said so."""
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
    budget_seconds: float
    checkpoint_dir: str
    parts: tuple[Part, ...] = PARTS
    matmul_sizes: tuple[int, ...]
    """Sides of square products."""
    matmul_dtypes: tuple[str, ...]
    attention_lengths: tuple[int, ...]
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
    default_budget = QUICK_SECONDS if quick else FULL_SECONDS
    if device == "cuda":
        matmul_sizes = (2048, 4096, 8192) if quick else (1024, 2048, 4096, 8192)
        dtypes = ("bf16", "fp32") if quick else ("bf16", "fp16", "tf32", "fp32")
        lengths = (1024, 4096) if quick else (1024, 2048, 4096, 8192, 16384)
    else:
        matmul_sizes = (512, 1024) if quick else (256, 512, 1024, 2048, 4096)
        dtypes = ("fp32", "bf16")
        lengths = (256, 512) if quick else (256, 512, 1024, 2048)
    return ProbeTask(
        device=device,
        quick=quick,
        sizes=tuple(sorted(set(options.sizes or (QUICK_SIZES if quick else FULL_SIZES)))),
        budget_seconds=options.budget_seconds or default_budget,
        checkpoint_dir=str(folder.resolve()),
        parts=options.parts,
        matmul_sizes=matmul_sizes,
        matmul_dtypes=dtypes,
        attention_lengths=lengths,
        disk_bytes=(64 if quick else 512) * MIB,
        copy_bytes=(64 if quick or device == "cpu" else 512) * MIB,
    )
