"""What one rank of a trial does: every size of every collective, verified, then timed."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.doctor.experiments.sampler import Sampler
from shardwise.facts.machine.nvml import read_nvlink_traffic
from shardwise.vocabulary.units import MIB

_TIMED_SECONDS = 1.0
"""Of one size of one collective, at most; a slow wire gets fewer calls."""
_SIZE_SECONDS = 3.0
"""A larger size is left out where its calls would take longer: on so slow a wire the smaller one is all bandwidth."""
_MIN_CALLS, _MAX_CALLS, _WARM_UPS = 5, 20, 3


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """What one rank of a trial was told."""

    out: Path
    gpus: tuple[int, ...]
    rank: int
    store: Path
    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    backend: str
    seconds: float


def collectives_child(told: RankTask) -> None:
    """One rank: every size of every collective, verified, then timed; a line of results after each."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    on_cards = told.backend == "nccl"
    device = torch.device("cuda", told.rank) if on_cards else torch.device("cpu")
    if on_cards:
        torch.cuda.set_device(device)
    dist.init_process_group(
        told.backend, init_method=f"file://{told.store}", rank=told.rank, world_size=len(told.gpus),
        timeout=timedelta(seconds=told.seconds), device_id=device if on_cards else None,
    )  # fmt: skip
    with told.out.open("w") as stream:
        for op in told.ops:
            per_byte = 0.0
            for size in told.sizes:
                if _agreed(per_byte * size * (_WARM_UPS + 1 + _MIN_CALLS), device) > _SIZE_SECONDS:
                    break
                result = _one_size(told, op, _affordable(size, device), device)
                per_byte = statistics.median(result["seconds"]) / result["bytes"]
                stream.write(json.dumps(result) + "\n")
                stream.flush()
    dist.barrier()
    dist.destroy_process_group()


def _agreed(seconds: float, device: Any) -> float:
    """Rank 0's figure, on every rank: they must take the same turn."""
    import torch
    import torch.distributed as dist

    told = torch.tensor([seconds], device=device, dtype=torch.float64)
    dist.broadcast(told, src=0)
    return float(told.item())


def _affordable(size: int, device: Any) -> int:
    """The size, or what a sixth of the free memory allows (input, output and NCCL's own), in whole MiB."""
    import torch

    if device.type != "cuda":
        return size
    free, _ = torch.cuda.mem_get_info(device)
    return max(min(size, free // 6 // MIB * MIB), MIB)


def _one_size(told: RankTask, op: str, size: int, device: Any) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    ranks = len(told.gpus)
    agreed = torch.tensor([size], device=device, dtype=torch.int64)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)  # ranks may have different amounts of memory free
    count = int(agreed.item()) // 4 // ranks * ranks
    call, check = _prepare(op, count, told.rank, ranks, device)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    wait()
    right = check()
    for _ in range(_WARM_UPS - 1):
        call()
    wait()
    traffic = read_nvlink_traffic() if told.rank == 0 and device.type == "cuda" else None
    times: list[float] = []
    with Sampler(told.gpus[told.rank]) if device.type == "cuda" else contextlib.nullcontext() as sampler:
        for _ in range(_calls(call, wait, device)):
            dist.barrier()
            wait()
            started = time.perf_counter()
            call()
            wait()
            times.append(time.perf_counter() - started)
    result = {"op": op, "bytes": count * 4, "seconds": times, "right": right,
              "slowdowns": sorted(sampler.slowdowns) if isinstance(sampler, Sampler) else []}  # fmt: skip
    after = None if traffic is None else read_nvlink_traffic()
    if isinstance(traffic, tuple) and isinstance(after, tuple):
        result["nvlink_bytes"] = sum(after) - sum(traffic)
    return result


def _calls(call: Callable[[], object], wait: Callable[[], None], device: Any) -> int:
    """How many calls fit the time; all ranks take rank 0's answer."""
    import torch
    import torch.distributed as dist

    started = time.perf_counter()
    call()
    wait()
    seconds = max(time.perf_counter() - started, 1e-9)
    count = torch.tensor([min(max(int(_TIMED_SECONDS / seconds), _MIN_CALLS), _MAX_CALLS)], device=device)
    dist.broadcast(count, src=0)
    return int(count.item())


def _prepare(
    op: str, count: int, rank: int, ranks: int, device: Any
) -> tuple[Callable[[], object], Callable[[], bool]]:
    """(the call, a check of its first result). Rank r holds r + 1 everywhere, so every result is known exactly."""
    import torch
    import torch.distributed as dist

    total = ranks * (ranks + 1) / 2
    if op == "all_reduce":
        buffer = torch.full((count,), rank + 1.0, device=device)
        # In place and again and again: after the checked first call the values grow to infinity, which costs no time.
        return partial(dist.all_reduce, buffer), lambda: bool((buffer == total).all())
    whole = torch.full((count,), rank + 1.0, device=device)
    part = torch.full((count // ranks,), rank + 1.0, device=device)
    if op == "all_gather":
        expected = torch.arange(1, ranks + 1, device=device, dtype=torch.float32).repeat_interleave(count // ranks)
        gather = _first_of(dist, "all_gather_single", "all_gather_into_tensor")
        return partial(gather, whole, part), lambda: bool(torch.equal(whole, expected))
    if op == "reduce_scatter":
        scatter = _first_of(dist, "reduce_scatter_single", "reduce_scatter_tensor")
        return partial(scatter, part, whole), lambda: bool((part == total).all())
    raise ValueError(f"{op!r} is no collective of this experiment")


def _first_of(module: Any, *names: str) -> Callable[..., Any]:
    """A function under its new name, or under the one that older torch has."""
    return next(getattr(module, name) for name in names if hasattr(module, name))
