"""What the child of the copies does: host and peer copies, alone and at once, with the data checked on the far side."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.doctor.experiments.run import COPY_BYTES
from shardwise.doctor.experiments.sampler import Sampler

_MIN_CALLS, _WARM_UPS = 5, 3


def copies_child(out: Path, gpus: tuple[int, ...]) -> None:
    """Copies on all cards; a line of results after each."""
    import torch

    devices = [torch.device("cuda", index) for index in range(len(gpus))]
    cards = dict(zip(devices, gpus, strict=True))
    host = {device: torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True).fill_(cards[device] + 1)
            for device in devices}  # fmt: skip
    there = {device: torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device) for device in devices}

    def up(device: Any) -> None:
        there[device].copy_(host[device], non_blocking=True)

    def down(device: Any) -> None:
        host[device].copy_(there[device], non_blocking=True)

    with out.open("w") as stream:
        for kind, call in (("host_to_device", up), ("device_to_host", down)):
            for device in devices:
                _write_copy(stream, kind, "alone", (cards[device],), _time_copies([device], call), right=True)
            if len(devices) > 1:
                for device, result in zip(devices, _time_each_at_once(devices, call), strict=True):
                    _write_copy(stream, kind, "at_once", (cards[device],), result, right=True)
        for first in devices:
            for second in devices:
                if first != second:
                    _peer_copy(stream, there, (first, second), (cards[first], cards[second]))


def _peer_copy(stream: Any, there: Mapping[Any, Any], pair: tuple[Any, Any], gpus: tuple[int, int]) -> None:
    """A known pattern from one card to another, compared on the far side."""
    import torch

    first, second = pair
    pattern = torch.arange(COPY_BYTES, dtype=torch.int64, device=first).remainder_(251).to(torch.uint8)
    there[second].zero_()
    torch.cuda.synchronize(second)

    def across(_: Any) -> None:
        there[second].copy_(pattern, non_blocking=True)

    result = _time_copies([first], across, also=second)
    wanted = torch.arange(COPY_BYTES, dtype=torch.int64, device=second).remainder_(251).to(torch.uint8)
    _write_copy(stream, "peer_copy", "alone", gpus, result, right=bool(torch.equal(there[second], wanted)))


@dataclass(frozen=True, kw_only=True)
class _Copied:
    bytes_per_s: float
    samples: tuple[tuple[int, int, int], ...] = ()
    slowdowns: tuple[tuple[int, str], ...] = ()


def _time_copies(devices: list[Any], call: Callable[[Any], None], also: Any = None) -> _Copied:
    """Median rate of copies that run one after another, with samples of the link meanwhile."""
    import torch

    def wait() -> None:
        for device in [*devices, *([also] if also is not None else [])]:
            torch.cuda.synchronize(device)

    for _ in range(_WARM_UPS):
        call(devices[0])
    wait()
    times: list[float] = []
    with Sampler(devices[0].index) as sampler:
        while len(times) < _MIN_CALLS or (sum(times) < 0.3 and len(times) < 50):
            started = time.perf_counter()
            call(devices[0])
            wait()
            times.append(time.perf_counter() - started)
    return _Copied(bytes_per_s=COPY_BYTES / statistics.median(times), samples=tuple(sampler.links),
                   slowdowns=tuple(sorted(sampler.slowdowns)))  # fmt: skip


def _time_each_at_once(devices: list[Any], call: Callable[[Any], None]) -> list[_Copied]:
    """Each card's rate while all copy."""
    import torch

    repeats = 8
    events = {device: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for device in devices}
    for device in devices:
        with torch.cuda.device(device):
            call(device)
            torch.cuda.synchronize(device)
    for device in devices:
        with torch.cuda.device(device):
            events[device][0].record()
            for _ in range(repeats):
                call(device)
            events[device][1].record()
    results: list[_Copied] = []
    for device in devices:
        torch.cuda.synchronize(device)
        seconds = events[device][0].elapsed_time(events[device][1]) / 1e3
        results.append(_Copied(bytes_per_s=repeats * COPY_BYTES / seconds))
    return results


def _write_copy(stream: Any, kind: str, variant: str, gpus: tuple[int, ...], result: _Copied, *, right: bool) -> None:
    line = {"kind": kind, "variant": variant, "gpus": gpus, "bytes": COPY_BYTES, "bytes_per_s": result.bytes_per_s,
            "right": right, "samples": result.samples, "slowdowns": result.slowdowns}  # fmt: skip
    stream.write(json.dumps(line) + "\n")
    stream.flush()
