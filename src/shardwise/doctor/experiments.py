"""Copies and collectives on the real cards, each in child processes with a time limit.

[Note: order of the experiments]
A collective over a broken P2P path does not fail, it hangs, and the hang may outlive the process: the card stays busy
until it is reset. So the order is: host copies, peer copies, then collectives through host memory, then as set, then
without switches; P2P between cards that NCCL keeps apart is forced last, and only with `risky`. The parent imports no
torch and holds no CUDA context; it kills a child's whole process group when its time is up.

The same child code runs on CPU tensors over gloo, which is how it is tested without cards.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from shardwise.doctor.measurements import Measurement, MeasurementKind
from shardwise.doctor.nccl_log import read_nccl_log
from shardwise.doctor.nccl_log.records import NcclLog
from shardwise.doctor.relevance import why_no_effect
from shardwise.doctor.scene import Scene
from shardwise.doctor.switches import variables
from shardwise.doctor.thresholds import value
from shardwise.doctor.transport import default_level
from shardwise.errors import MissingExtraError, ResourceError
from shardwise.facts.machine.nvml import read_nvlink_traffic, sample_link
from shardwise.facts.machine.record import Unreadable
from shardwise.vocabulary.units import GIB, MIB

_COPY_BYTES = 256 * MIB
_COLLECTIVE_BYTES = (64 * MIB, GIB)
_TIMED_SECONDS = 1.0
"""Of one size of one collective, at most; a slow wire gets fewer calls."""
_SIZE_SECONDS = 3.0
"""A larger size is left out where its calls would take longer: on so slow a wire the smaller one is all bandwidth."""
_MIN_CALLS, _MAX_CALLS, _WARM_UPS = 5, 20, 3
_SAMPLE_SECONDS = 0.05
_GRACE_SECONDS = 5.0
_LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
_BUS_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
}
"""Bus bandwidth over algorithm bandwidth, as nccl-tests defines it."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One start of the child processes."""

    variant: str
    environment: Mapping[str, str]
    ops: tuple[str, ...] = ("all_reduce",)
    sizes: tuple[int, ...] = _COLLECTIVE_BYTES
    backend: str = "nccl"
    """nccl on cards, gloo on CPU tensors."""


def run_experiments(scene: Scene, *, seconds: float, risky: bool) -> tuple[Measurement, ...]:
    """Measures the cards of a scene.

    Args:
        scene: Machine and switches.
        seconds: Time limit of each child.
        risky: Whether to force P2P between cards that NCCL keeps apart, last of all.

    Returns:
        Measurements; those that did not finish carry the problem.

    Raises:
        MissingExtraError: If torch is not installed.
        ResourceError: If there is no card to measure.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("doctor --run", "train", "torch")
    gpus = visible_cards(scene)
    if not gpus:
        raise ResourceError("There is no GPU to measure; run the doctor without --run for what can be read.")
    base = _base_environment(os.environ)
    found = list(run_copies(gpus, base, seconds))
    if len(gpus) > 1:
        for trial in plan_trials(scene, base, risky=risky):
            found.extend(run_trial(trial, gpus, seconds))
    return tuple(found)


def visible_cards(scene: Scene) -> tuple[int, ...]:
    """NVML indices of the cards that CUDA will show, in its order."""
    wanted = scene.environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return tuple(card.index for card in scene.cards)
    by_uuid = {card.uuid: card.index for card in scene.cards if isinstance(card.uuid, str)}
    known = {card.index for card in scene.cards}
    found: list[int] = []
    for word in filter(None, wanted.split(",")):
        index = int(word) if word.isdigit() else next((i for uuid, i in by_uuid.items() if uuid.startswith(word)), -1)
        if index not in known:
            break  # CUDA stops at the first entry that it cannot resolve
        found.append(index)
    return tuple(found)


def _base_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The shell's environment without a launcher's variables; cards in the order of PCI addresses, as NVML has them."""
    base = {name: value for name, value in environment.items() if name not in _LAUNCHER_NAMES}
    base["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return base


def plan_trials(scene: Scene, base: Mapping[str, str], *, risky: bool) -> tuple[Trial, ...]:
    """The collectives to run, safest first. Each costs a start of all ranks, so none is run that shows nothing new."""
    clean = _without_switches(scene, base)
    trials: list[Trial] = []
    host_memory = scene.switches.is_on("NCCL_P2P_DISABLE") and not scene.switches.is_on("NCCL_SHM_DISABLE")
    if not host_memory:  # else that is what `as_set` measures
        trials.append(Trial(variant="p2p_off", environment={**clean, "NCCL_P2P_DISABLE": "1"}, sizes=(64 * MIB,)))
    trials.append(Trial(variant="as_set", environment=_as_set(scene, base), ops=tuple(_BUS_FACTORS)))
    if _suspects(scene):
        trials.append(Trial(variant="no_switches", environment=clean))
    nvlink = any(found.joined_by_nvlink for found in scene.known_predictions)
    if nvlink and len(scene.cards) >= int(value("nvls_min_cards")):  # with fewer cards NCCL takes a ring by itself
        trials.append(Trial(variant="ring", environment={**clean, "NCCL_ALGO": "Ring"}, sizes=_COLLECTIVE_BYTES[-1:]))
    kept_apart = [found for found in scene.known_predictions if found.reason == "level_rule" and found.p2p_possible]
    if risky and kept_apart:
        trials.append(Trial(variant="forced_p2p", environment={**clean, "NCCL_P2P_LEVEL": "SYS"}))
    return tuple(trials)


def _suspects(scene: Scene) -> bool:
    """Whether a switch in force may take bandwidth away here."""
    known = variables()
    return any(
        name in known
        and known[name].takes_bandwidth(setting.value)
        and why_no_effect(scene, known[name], setting) is None
        for name, setting in scene.switches.in_force.items()
    )


def _as_set(scene: Scene, base: Mapping[str, str]) -> dict[str, str]:
    """With the switches in force, wherever they were found: a rank's environment and files count here too."""
    environment = dict(base)
    for name, setting in scene.switches.in_force.items():
        variable = variables().get(name)
        if variable is not None and variable.scope != "quiet" and "$" not in setting.value:
            environment[name] = setting.value
    return environment


def _without_switches(scene: Scene, base: Mapping[str, str]) -> dict[str, str]:
    """Without any of NCCL's variables. /etc/nccl.conf cannot be left out, so what it sets is set back."""
    environment = {name: value for name, value in base.items() if not name.startswith("NCCL_")}
    environment["NCCL_CONF_FILE"] = "/dev/null"
    conf = next((file for file in scene.machine.conf_files if file.path == "/etc/nccl.conf"), None)
    for name, _ in () if conf is None or isinstance(conf.settings, Unreadable) else conf.settings:
        if name.endswith("_DISABLE"):
            environment[name] = "0"
        elif name == "NCCL_P2P_LEVEL" and not isinstance(scene.nccl_version, Unreadable):
            vendor = scene.machine.cpu.vendor if isinstance(scene.machine.cpu.vendor, str) else ""
            environment[name] = default_level(scene.nccl_version, vendor, len(scene.cards))
    return environment


def run_copies(gpus: tuple[int, ...], environment: Mapping[str, str], seconds: float) -> Iterator[Measurement]:
    """Host and peer copies, alone and at once, in one child."""
    with tempfile.TemporaryDirectory(prefix="shardwise-doctor-") as folder:
        out = Path(folder) / "copies.jsonl"
        command = [sys.executable, "-m", __name__, "copies", "--out", str(out), "--gpus", ",".join(map(str, gpus))]
        problem = _run([command], [environment], Path(folder), seconds)
        yield from (_measurement(line) for line in _lines(out))
        if problem:
            yield Measurement(kind="peer_copy", variant="alone", gpus=gpus, num_bytes=_COPY_BYTES, bytes_per_s=0.0,
                              problem=problem)  # fmt: skip


def run_trial(trial: Trial, gpus: tuple[int, ...], seconds: float) -> Iterator[Measurement]:
    """One collective trial: a process per card, results and NCCL's log gathered afterwards."""
    with tempfile.TemporaryDirectory(prefix="shardwise-doctor-") as name:
        folder = Path(name)
        commands: list[list[str]] = []
        for rank in range(len(gpus)):
            commands.append([
                sys.executable, "-m", __name__, "collectives", "--out", str(folder / f"rank{rank}.jsonl"),
                "--gpus", ",".join(map(str, gpus)), "--rank", str(rank), "--store", str(folder / "store"),
                "--ops", ",".join(trial.ops), "--sizes", ",".join(map(str, trial.sizes)), "--backend", trial.backend,
                "--seconds", str(seconds),
            ])  # fmt: skip
        environment = {
            **trial.environment,
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,GRAPH",
            "NCCL_DEBUG_FILE": str(folder / "nccl.%h.%p.log"),
        }
        problem = _run(commands, [environment] * len(commands), folder, seconds)
        transport = "gloo" if trial.backend == "gloo" else transport_of(
            [read_nccl_log(path) for path in sorted(folder.glob("nccl.*.log"))]
        )  # fmt: skip
        ranks = [_lines(folder / f"rank{rank}.jsonl") for rank in range(len(gpus))]
        yield from _gather(trial, gpus, ranks, transport)
        if problem:
            yield Measurement(
                kind=cast("MeasurementKind", trial.ops[0]),
                variant=trial.variant,
                gpus=gpus,
                num_bytes=trial.sizes[-1],
                bytes_per_s=0.0,
                problem=problem,
                transport=transport,
            )


def _gather(
    trial: Trial, gpus: tuple[int, ...], ranks: list[list[dict[str, Any]]], transport: str
) -> Iterator[Measurement]:
    """Slowest rank of each call, then the median over calls."""
    for results in zip(*ranks, strict=False):  # a killed rank may have written fewer
        first = results[0]
        calls = [max(times) for times in zip(*(result["seconds"] for result in results), strict=True)]
        middle = statistics.median(calls)
        late = sorted(calls)[min(len(calls) - 1, round(0.95 * (len(calls) - 1)))]
        size = int(first["bytes"])
        yield Measurement(
            kind=first["op"],
            variant=trial.variant,
            gpus=gpus,
            num_bytes=size,
            bytes_per_s=size / middle * _BUS_FACTORS[first["op"]](len(gpus)),
            seconds_p50=middle,
            seconds_p95=late,
            data_is_right=all(result["right"] for result in results),
            transport=transport,
            nvlink_bytes=first.get("nvlink_bytes"),
            slowdowns=tuple((int(gpu), str(reason)) for result in results for gpu, reason in result["slowdowns"]),
        )


def transport_of(logs: list[NcclLog]) -> str:
    """The slowest transport among the edges of a trial; empty if no log shows one."""
    edges = [edge for log in logs for edge in log.edges]
    networks = sorted(edge.method for edge in edges if edge.transport == "NET")
    if networks:
        return f"NET/{networks[-1]}"
    kinds = {edge.transport for edge in edges}
    return "SHM" if "SHM" in kinds else "P2P" if "P2P" in kinds else ""


def _lines(path: Path) -> list[dict[str, Any]]:
    """Results written so far; a line cut off by a kill is left out."""
    found: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


def _measurement(line: dict[str, Any]) -> Measurement:
    return Measurement(
        kind=line["kind"],
        variant=line["variant"],
        gpus=tuple(line["gpus"]),
        num_bytes=int(line["bytes"]),
        bytes_per_s=float(line["bytes_per_s"]),
        data_is_right=bool(line["right"]),
        pcie_samples=tuple((int(a), int(b), int(c)) for a, b, c in line["samples"]),
        slowdowns=tuple((int(gpu), str(reason)) for gpu, reason in line["slowdowns"]),
    )


def _run(commands: list[list[str]], environments: list[Mapping[str, str]], folder: Path, seconds: float) -> str:
    """Runs children to their end or to the limit; the problem in words, empty if all finished well."""
    children: list[subprocess.Popen[bytes]] = []
    errors = [folder / f"stderr{index}" for index in range(len(commands))]
    try:
        for command, environment, error in zip(commands, environments, errors, strict=True):
            with error.open("wb") as stderr:
                children.append(subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL,
                                                 stdout=subprocess.DEVNULL, stderr=stderr,
                                                 start_new_session=True))  # fmt: skip
        return _wait(children, errors, seconds)
    finally:
        for child in children:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_GRACE_SECONDS)


def _wait(children: list[subprocess.Popen[bytes]], errors: list[Path], seconds: float) -> str:
    """Waits for all; a child that fails ends the trial at once, since its peers would only hang."""
    deadline = time.monotonic() + seconds
    while True:
        codes = [child.poll() for child in children]
        failed = next((index for index, code in enumerate(codes) if code), None)
        if failed is not None:
            words = errors[failed].read_bytes().decode("utf-8", "replace").strip().splitlines()
            return f"rank {failed} failed: {words[-1][:300] if words else f'exit code {codes[failed]}'}"
        if all(code == 0 for code in codes):
            return ""
        left = deadline - time.monotonic()
        if left <= 0:
            return f"did not finish within {seconds:g} s and was ended"
        waiting = next(child for child, code in zip(children, codes, strict=True) if code is None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            waiting.wait(min(left, 0.1))


# ---- what runs in the children; torch is imported from here on only


class _Sampler:
    """Samples link and clocks of one card while something runs on it."""

    def __init__(self, gpu: int) -> None:
        self._gpu = gpu
        self._stop = threading.Event()
        self.links: list[tuple[int, int, int]] = []
        self.slowdowns: set[tuple[int, str]] = set()

    def __enter__(self) -> _Sampler:
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_GRACE_SECONDS)

    def _loop(self) -> None:
        while not self._stop.is_set():
            sample = sample_link(self._gpu)
            if isinstance(sample, Unreadable):
                return
            self.links.append((self._gpu, sample.generation, sample.width))
            self.slowdowns.update((self._gpu, reason) for reason in sample.slowdowns)
            self._stop.wait(_SAMPLE_SECONDS)


def copies_child(out: Path, gpus: tuple[int, ...]) -> None:
    """Copies on all cards; a line of results after each."""
    import torch

    devices = [torch.device("cuda", index) for index in range(len(gpus))]
    cards = dict(zip(devices, gpus, strict=True))
    host = {device: torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True).fill_(cards[device] + 1)
            for device in devices}  # fmt: skip
    there = {device: torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device) for device in devices}

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
    pattern = torch.arange(_COPY_BYTES, dtype=torch.int64, device=first).remainder_(251).to(torch.uint8)
    there[second].zero_()
    torch.cuda.synchronize(second)

    def across(_: Any) -> None:
        there[second].copy_(pattern, non_blocking=True)

    result = _time_copies([first], across, also=second)
    wanted = torch.arange(_COPY_BYTES, dtype=torch.int64, device=second).remainder_(251).to(torch.uint8)
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
    with _Sampler(devices[0].index) as sampler:
        while len(times) < _MIN_CALLS or (sum(times) < 0.3 and len(times) < 50):
            started = time.perf_counter()
            call(devices[0])
            wait()
            times.append(time.perf_counter() - started)
    return _Copied(bytes_per_s=_COPY_BYTES / statistics.median(times), samples=tuple(sampler.links),
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
        results.append(_Copied(bytes_per_s=repeats * _COPY_BYTES / seconds))
    return results


def _write_copy(stream: Any, kind: str, variant: str, gpus: tuple[int, ...], result: _Copied, *, right: bool) -> None:
    line = {"kind": kind, "variant": variant, "gpus": gpus, "bytes": _COPY_BYTES, "bytes_per_s": result.bytes_per_s,
            "right": right, "samples": result.samples, "slowdowns": result.slowdowns}  # fmt: skip
    stream.write(json.dumps(line) + "\n")
    stream.flush()


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """What one rank of a trial was told."""

    out: Path
    gpus: tuple[int, ...]
    rank: int
    store: Path
    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    backend: str
    seconds: float


def collectives_child(told: _Rank) -> None:
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


def _one_size(told: _Rank, op: str, size: int, device: Any) -> dict[str, Any]:
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
    with _Sampler(told.gpus[told.rank]) if device.type == "cuda" else contextlib.nullcontext() as sampler:
        for _ in range(_calls(call, wait, device)):
            dist.barrier()
            wait()
            started = time.perf_counter()
            call()
            wait()
            times.append(time.perf_counter() - started)
    result = {"op": op, "bytes": count * 4, "seconds": times, "right": right,
              "slowdowns": sorted(sampler.slowdowns) if isinstance(sampler, _Sampler) else []}  # fmt: skip
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


def _main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("copies", "collectives"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--store", type=Path, default=Path())
    parser.add_argument("--ops", default="all_reduce")
    parser.add_argument("--sizes", default=str(MIB))
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args(arguments)
    gpus = tuple(int(word) for word in given.gpus.split(","))
    if given.what == "copies":
        copies_child(given.out, gpus)
    else:
        sizes = tuple(int(word) for word in given.sizes.split(","))
        collectives_child(_Rank(out=given.out, gpus=gpus, rank=given.rank, store=given.store,
                                ops=tuple(given.ops.split(",")), sizes=sizes, backend=given.backend,
                                seconds=given.seconds))  # fmt: skip


if __name__ == "__main__":
    _main(sys.argv[1:])
