"""Start a probe's ranks (or join torchrun's), wait for them, and turn what they found into a Cluster."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import shardwise
from shardwise.errors import MissingExtraError, ResourceError, UsageError
from shardwise.facts.machine.child import count_cuda_cards
from shardwise.probe import inventory
from shardwise.probe.build import build_report
from shardwise.probe.findings import Findings, ProbeReport
from shardwise.probe.options import USED_FILE, Device, Place, ProbeOptions, ProbeTask, check_options, make_task
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.codec import from_data, to_json, to_yaml

SETTLE_SECONDS = 0.5
"""How long to wait for the other ranks' words after the first has failed."""
GRACE_SECONDS = 100.0
"""Over the limit, before a probe that does not end is ended."""


def measure(options: ProbeOptions | None = None) -> Cluster:
    """Measure this machine (or, under torchrun, all of them) and write the Cluster file if `options.out` names one.

    Returns:
        The Cluster, the same on every rank that joined.

    Raises:
        UsageError: If the options ask for what cannot be measured.
        MissingExtraError: If torch is not installed.
        ResourceError: If a rank failed, hung, or received wrong data.
    """
    return probe(options).cluster


def probe(options: ProbeOptions | None = None) -> ProbeReport:
    """The same as `measure`, with everything the Cluster was made from."""
    options = options or ProbeOptions()
    check_options(options)
    started_at = time.time()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _join(options, started_at)
    if options.nodes > 1:
        raise UsageError(
            f"A probe of {options.nodes} machines is started on each of them by torchrun, for example: torchrun "
            f"--nnodes={options.nodes} --nproc-per-node=gpu --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 "
            "-m shardwise probe"
        )
    device, num_ranks = choose_ranks(options)
    findings = _run_local(make_task(options, device), num_ranks, started_at, options)
    report = build_report(findings)
    _write(report, options)
    return report


def choose_ranks(options: ProbeOptions) -> tuple[Device, int]:
    """The kind and the number of ranks on this machine.

    Raises:
        UsageError: If more cards are asked for than there are, or more CPU ranks than cores.
    """
    num_gpus = 0 if options.device == "cpu" else _num_gpus()
    if options.device == "cuda" and num_gpus == 0:
        raise UsageError("device is cuda, but torch sees no GPU here; use device cpu, or see: shardwise doctor")
    if num_gpus:
        if (options.ranks or 0) > num_gpus:
            raise UsageError(f"ranks is {options.ranks}, but only {num_gpus} GPU(s) are visible; each rank needs one")
        return "cuda", options.ranks or num_gpus
    cores = inventory.num_usable_cpus()
    ranks = options.ranks or 2
    if ranks > max(2, cores):
        raise UsageError(f"ranks is {ranks}, but only {cores} core(s) are usable; ask for at most {max(2, cores)}")
    return "cpu", ranks


def _num_gpus() -> int:
    """Cards that ranks may use. Asks the driver in a child: importing torch to count takes as long as measuring."""
    if not inventory.has_nvidia_device():
        return 0
    count = count_cuda_cards()
    if isinstance(count, int):
        return count
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("Measuring", "train", "torch") from error
    return torch.cuda.device_count()  # reads NVML and CUDA_VISIBLE_DEVICES; creates no context


def _write(report: ProbeReport, options: ProbeOptions) -> None:
    if options.out is None:
        return
    partial = options.out.with_name(options.out.name + ".partial")
    try:
        partial.write_text(to_yaml(report.cluster), encoding="utf-8")
        partial.replace(options.out)
    except OSError as error:
        raise ResourceError(f"{options.out} cannot be written: {error.strerror or error}") from error


# ------------------------------------------------------------------------------------------------------ under torchrun


def _join(options: ProbeOptions, started_at: float) -> ProbeReport:
    """Be one rank of a launch that torchrun made."""
    try:
        from shardwise.probe.ranks import Join, place_from_environment, run_rank
    except ModuleNotFoundError as error:
        raise MissingExtraError("Measuring", "train", error.name or "torch") from error
    place = place_from_environment(os.environ)
    check_place(place, options, os.environ)
    device: Device = options.device or ("cuda" if _num_gpus() else "cpu")
    say = options.progress or _silence
    join = Join(init_method="env://", started_at=started_at)
    report = build_report(run_rank(make_task(options, device), place, join, say))
    if place.rank == 0:
        _write(report, options)
    return report


def _silence(_text: str) -> None:
    """Shows nothing."""


def check_place(place: Place, options: ProbeOptions, environment: Mapping[str, str]) -> None:
    """Refuse a launch that is not what was asked for.

    Raises:
        UsageError: With every difference.
    """
    problems: list[str] = []
    if place.world_size % place.local_world_size or place.node != int(environment.get("GROUP_RANK", place.node)):
        problems.append("the machines of this launch run different numbers of ranks; a Cluster has equal machines")
    if options.nodes > 1 and options.nodes != place.num_nodes:
        problems.append(f"nodes is {options.nodes}, but torchrun started {place.num_nodes} machine(s)")
    if options.ranks is not None and options.ranks != place.local_world_size:
        problems.append(
            f"ranks is {options.ranks}, but torchrun started {place.local_world_size} on each machine; "
            "set --nproc-per-node instead"
        )
    if problems:
        raise UsageError(*problems)


# ---------------------------------------------------------------------------------------------------- ranks of our own


@dataclass(frozen=True, kw_only=True)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path


def _run_local(task: ProbeTask, num_ranks: int, started_at: float, options: ProbeOptions) -> Findings:
    """Start `num_ranks` processes, wait, and read what rank 0 wrote. None of them outlives this call."""
    with tempfile.TemporaryDirectory(prefix="shardwise-probe-") as name:
        folder = Path(name)
        (folder / "task.json").write_text(to_json(task))
        read_end, write_end = os.pipe()
        ranks: list[_Rank] = []
        try:
            for rank in range(num_ranks):
                ranks.append(_start(rank, num_ranks, folder, task, started_at, write_end))
            os.close(write_end)
            if task.device == "cuda":
                _write_used_memory(folder)
            with os.fdopen(read_end, "rb") as progress:
                _wait(ranks, folder, progress, options, time.monotonic() + task.budget.limit_seconds + GRACE_SECONDS)
        finally:
            for each in ranks:
                if each.process.poll() is None:
                    each.process.kill()
                each.process.wait()
        findings = from_data(Findings, json.loads((folder / "findings.json").read_text()))
        end = max(0.0, time.time() - started_at - findings.seconds)
        return replace(findings, phases={**findings.phases, "end": end})


def _write_used_memory(folder: Path) -> None:
    """For the ranks, which weigh their contexts: read while they import torch, before any of them opens one."""
    partial = folder / (USED_FILE + ".partial")
    partial.write_text(json.dumps(inventory.used_device_memory()))
    partial.replace(folder / USED_FILE)


def _start(rank: int, num_ranks: int, folder: Path, task: ProbeTask, started_at: float, progress: int) -> _Rank:
    environment = dict(os.environ)
    environment.update(
        RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(num_ranks)
    )  # fmt: skip
    package_root = str(Path(shardwise.__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, environment.get("PYTHONPATH", "")]))
    if task.device == "cpu":
        environment.setdefault("OMP_NUM_THREADS", str(max(1, inventory.num_usable_cpus() // num_ranks)))
    command = [sys.executable, "-m", "shardwise.probe.ranks", str(folder), "--started-at", repr(started_at)]
    log = folder / f"log-{rank}.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *(["--progress-fd", str(progress)] if rank == 0 else [])],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(progress,) if rank == 0 else (),
        )
    return _Rank(rank=rank, process=process, log=log)


def _wait(ranks: list[_Rank], folder: Path, progress: IO[bytes], options: ProbeOptions, deadline: float) -> None:
    """Until every rank has ended well.

    Raises:
        ResourceError: As soon as one has not, or when the deadline has passed.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(progress, selectors.EVENT_READ)
        buffer = b""
        while True:
            if selector.get_map() and selector.select(timeout=0.1):
                piece = os.read(progress.fileno(), 65_536)
                if not piece:
                    selector.unregister(progress)
                *lines, buffer = (buffer + piece).split(b"\n")
                for line in lines:
                    if options.progress is not None:
                        options.progress(line.decode("utf-8", "replace"))
            elif not selector.get_map():
                time.sleep(0.02)
            codes = [each.process.poll() for each in ranks]
            if any(codes):
                raise _failure(_culprit(ranks, folder), folder)
            if all(code == 0 for code in codes) and not selector.get_map():  # every line has been read
                return
            if time.monotonic() > deadline:
                raise ResourceError(
                    f"The probe did not end within {GRACE_SECONDS:.0f} s after its time limit; a collective hangs. "
                    f"Find out why with: shardwise doctor --run\n{_tail(ranks[0].log)}"
                )


def _culprit(ranks: list[_Rank], folder: Path) -> _Rank:
    """The rank whose failure explains the others'.

    When one rank ends, the others soon end too, complaining about a lost connection. So wait for them a little, then
    believe a rank that left its own words, else one that was killed, else the first.
    """
    until = time.monotonic() + SETTLE_SECONDS
    while any(each.process.poll() is None for each in ranks) and time.monotonic() < until:
        time.sleep(0.02)
    failed = [each for each in ranks if each.process.poll() not in (None, 0)]
    told = [each for each in failed if _words_file(each, folder).exists()]
    killed = [each for each in failed if (each.process.poll() or 0) < 0]
    return (told or killed or failed)[0]


def _words_file(rank: _Rank, folder: Path) -> Path:
    return folder / f"error-{rank.rank}.json"


def _failure(rank: _Rank, folder: Path) -> ResourceError | MissingExtraError:
    """What a rank that ended said about it."""
    code = rank.process.poll() or 0
    told = _words_file(rank, folder)
    if told.exists():
        return ResourceError(*json.loads(told.read_text()))
    text = _tail(rank.log)
    if "No module named 'torch'" in text:
        return MissingExtraError("Measuring", "train", "torch")
    how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return ResourceError(f"Rank {rank.rank} of the probe {how}. Its last words:\n{text}")


def _tail(log: Path, num_lines: int = 15) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join("    " + line for line in lines[-num_lines:]) or "    (nothing)"
