"""What each rank of a probe runs, and the door by which `measure` starts it as a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.cuda.nccl
import torch.distributed as dist

from shardwise.errors import ResourceError, ShardwiseError
from shardwise.facts.machine import Machine, read_machine
from shardwise.probe import compute, inventory, wire
from shardwise.probe.budget import NO_TIME, SHARES, wire_seconds
from shardwise.probe.control import Control
from shardwise.probe.findings import Findings, Inventory, MemoryRecord, PairRecord, RankFacts, Skipped
from shardwise.probe.groups import groupings
from shardwise.probe.options import USED_FILE, Place, ProbeTask
from shardwise.vocabulary.codec import from_data, to_json
from shardwise.vocabulary.units import MIB

HANG_SECONDS = 90.0
"""After this long without an answer a collective is given up."""
LEAST_MESSAGES_TOGETHER = 25
"""Of an all_reduce alone and beside a matmul; on a slow wire they take longer than there is time for."""
NEGLIGIBLE_SECONDS = 1.0
READING_SECONDS = 10.0
"""How long the driver may take to describe its cards."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Join:
    """How a rank finds the others."""

    init_method: str
    """`file:///...` among ranks that `measure` started, `env://` among torchrun's."""
    started_at: float
    """time.time() of the probe's start on this machine."""
    used_before: Callable[[], Mapping[str, int]] = inventory.used_device_memory
    """Device memory in use by card before any rank had a context."""


def run_rank(task: ProbeTask, place: Place, join: Join, say: Callable[[str], None]) -> Findings:
    """Measure together with the other ranks; every rank returns the same wire and rates.

    Raises:
        ResourceError: If data came back wrong over the wire.
    """
    device = torch.device(task.device, place.local_rank) if task.device == "cuda" else torch.device("cpu")
    context = _open_context(device, join)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if task.device == "cuda" else "gloo",
        init_method=join.init_method,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=HANG_SECONDS),
    )
    try:
        control = Control(task.budget, time.time() - join.started_at, say)
        weighed = context()  # before anything else is allocated
        findings = _measure_all(task, place, device, control)
        memory = _largest_memory([weighed, *findings.memory] if weighed else list(findings.memory), control)
        return replace(findings, memory=memory, seconds=control.slowest([control.seconds])[0])
    finally:
        dist.destroy_process_group()


def _measure_all(task: ProbeTask, place: Place, device: torch.device, control: Control) -> Findings:
    """The measurements in order; what one leaves of the time, the next may use."""
    facts = control.gather(_facts(place, device))
    control.say(f"{control.world_size} ranks on {place.num_nodes} machine(s): {facts[0].device_name}")
    phases = {"start": control.seconds}
    copy = compute.measure_copy(task.copy_bytes, device, control, SHARES["copy"] * control.seconds_left())
    findings = Findings(
        ranks=tuple(facts), copy_bytes_per_s=copy, versions=versions(device), switches=place.environment
    )
    if "compute" in task.parts:
        findings = _measure_compute(task, place, device, control, findings)
    if not findings.inventories:
        findings = replace(
            findings, inventories=_inventories(read_machine() if place.local_rank == 0 else None, control)
        )
    _close_phase(phases, "compute", control)
    if "disk" in task.parts:
        findings = _measure_disk(task, place, control, findings)
        _close_phase(phases, "disk", control)
    if "wire" in task.parts:
        findings = _measure_wire(task, place, device, control, findings)
        _close_phase(phases, "wire", control)
    return replace(findings, phases=phases)


def _close_phase(phases: dict[str, float], name: str, control: Control) -> None:
    phases[name] = control.seconds - sum(phases.values())


def _facts(place: Place, device: torch.device) -> RankFacts:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, architecture = properties.name, f"sm_{properties.major}{properties.minor}"
        memory = int(torch.cuda.mem_get_info(device)[1])
        others = [other for other in range(place.local_world_size) if other != place.local_rank]
        peers = all(torch.cuda.can_device_access_peer(place.local_rank, other) for other in others)
    else:
        name, architecture = inventory.cpu_model() or platform.machine(), "cpu"
        memory, peers = inventory.available_memory_bytes() // place.local_world_size, None
    return RankFacts(
        rank=place.rank,
        node=place.node,
        host=socket.gethostname(),
        device_name=name,
        device_memory_bytes=memory,
        host_memory_bytes=inventory.total_memory_bytes(),
        num_threads=torch.get_num_threads(),
        architecture=architecture,
        peer_access=peers,
        num_cpus=inventory.num_usable_cpus(),
        load=os.getloadavg()[0],
    )


def versions(device: torch.device) -> dict[str, str]:
    """What the measurement ran on."""
    import shardwise

    found = {"shardwise": shardwise.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = inventory.driver_version()
    else:
        found["backend"] = "gloo"
    return {name: version for name, version in found.items() if version}


# ------------------------------------------------------------------------------------------------------------- compute


def _measure_compute(
    task: ProbeTask, place: Place, device: torch.device, control: Control, findings: Findings
) -> Findings:
    """Matmuls, attention, host copies and launches.

    Meanwhile one rank of each machine asks the driver what the cards and their links look like under load.
    """
    seconds = SHARES["compute"] * control.seconds_left()
    machine = in_background(read_machine) if device.type == "cuda" and place.local_rank == 0 else None
    rates, skipped = compute.measure_matmul(task.matmul_sizes, device, control, 0.55 * seconds)
    best: dict[str, float] = {}
    for record in rates:
        best[record.dtype] = max(record.rate, best.get(record.dtype, 0.0))
    dtype = max((name for name in best if name != "tf32"), key=best.__getitem__, default="fp32")
    attention, too_long = compute.measure_attention(task.attention_lengths, dtype, device, control, 0.3 * seconds)
    findings = replace(findings, rates=(*rates, *attention), skipped=(*findings.skipped, *skipped, *too_long))
    if device.type != "cuda":
        why = "ranks on CPU have no copies between host and device and no kernel launches"
        return replace(findings, skipped=(*findings.skipped, Skipped(what="host copies, launch gap", why=why)))
    up, down = compute.measure_host_copies(
        task.copy_bytes, device, control, SHARES["host_copies"] * control.seconds_left()
    )
    return replace(
        findings,
        host_to_device_bytes_per_s=up,
        device_to_host_bytes_per_s=down,
        launch_gap_seconds=compute.measure_launch_gap(device, control),
        inventories=_inventories(None if machine is None else machine(), control),
    )


def in_background(call: Callable[[], T]) -> Callable[[], T | None]:
    """Start a call in a thread; what comes back waits for its result, None if it failed or takes too long."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()

    def wait() -> T | None:
        thread.join(timeout=READING_SECONDS)
        return found[0] if found else None

    return wait


def _inventories(machine: Machine | None, control: Control) -> tuple[Inventory, ...]:
    """Of every rank that read its machine."""
    taken = control.gather(None if machine is None else inventory.take_inventory(machine))
    return tuple(each for each in taken if each is not None)


def _measure_disk(task: ProbeTask, place: Place, control: Control, findings: Findings) -> Findings:
    """One rank writes; the others wait."""
    seconds = SHARES["disk"] * control.seconds_left()
    rate, why = None, ""
    if place.rank == 0:
        rate, why = compute.measure_disk(Path(task.checkpoint_dir), task.disk_bytes, seconds)
    rate, why = control.gather((rate, why))[0]
    if rate is None:
        return replace(findings, skipped=(*findings.skipped, Skipped(what="checkpoint disk", why=why)))
    control.say(f"checkpoint disk: {rate / MIB:.0f} MiB/s with fsync")
    return replace(findings, checkpoint_bytes_per_s=rate)


# ---------------------------------------------------------------------------------------------------------------- wire


def _measure_wire(
    task: ProbeTask, place: Place, device: torch.device, control: Control, findings: Findings
) -> Findings:  # fmt: skip
    """Every grouping gets its share of the time that is left; the first one, all ranks, twice as much."""
    if control.world_size == 1:
        only = Skipped(what="the wire", why="there is one rank, and so no wire")
        return replace(findings, skipped=(*findings.skipped, only))
    ways = groupings(place.world_size, place.local_world_size, task.quick)
    for done, way in enumerate(ways):
        if done and control.seconds_to_limit() <= 0:
            skipped = Skipped(what=f"the wire of {way.name} ({way.ranks} ranks)", why=NO_TIME)
            findings = replace(findings, skipped=(*findings.skipped, skipped))
            continue
        before = _outside_memory(device)
        group = wire.open_group(way, device)
        if device.type == "cuda":
            wire.make_exchange("all_reduce", MIB, group).call()
            memory = MemoryRecord(what=f"communicator of {way.name}", bytes=_outside_memory(device) - before)
            findings = replace(findings, memory=(*findings.memory, memory))
        left = wire_seconds(control.seconds_left(SHARES["wire"]), control.seconds_to_limit())
        weight = 2 if done == 0 else 1
        share = left * weight / (len(ways) - done + weight - 1)
        sweep = wire.sweep_group(group, task.sizes, control, share, task.needed_sizes)
        findings = replace(
            findings, wire=(*findings.wire, *sweep.records), skipped=(*findings.skipped, *sweep.skipped)
        )  # fmt: skip
        if done == 0:
            findings = _with_contention(group, control, findings)
            if not task.quick and place.world_size > 2:
                findings = _with_pairs(group, control, findings)
        dist.destroy_process_group(group.process_group)
    return findings


def _with_contention(group: wire.Group, control: Control, findings: Findings) -> Findings:
    matmuls = [record for record in findings.rates if record.what == "matmul"]
    if not matmuls:
        return findings
    best = max(matmuls, key=lambda record: record.rate)
    seconds = SHARES["together"] * control.seconds_left()
    least = LEAST_MESSAGES_TOGETHER * _seconds_of(findings, compute.together_bytes(group.device))
    if least > max(seconds, control.seconds_to_limit(), NEGLIGIBLE_SECONDS):
        skipped = Skipped(what="a matmul and an all_reduce together", why=NO_TIME)
        return replace(findings, skipped=(*findings.skipped, skipped))
    contention = compute.measure_contention(group, best.dtype, control, seconds)
    control.say(
        f"together: a matmul takes {contention.matmul_slowdown:.2f} times as long, "
        f"an all_reduce {contention.wire_slowdown:.2f} times"
    )
    return replace(findings, contention=contention)


def _seconds_of(findings: Findings, num_bytes: int) -> float:
    """About what an all_reduce over all ranks takes; 0 where none was measured."""
    records = [record for record in findings.wire if record.op == "all_reduce"]
    if not records:
        return 0.0
    nearest = min(records, key=lambda record: abs(record.bytes - num_bytes))
    return nearest.seconds * max(1.0, num_bytes / nearest.bytes)


def _with_pairs(group: wire.Group, control: Control, findings: Findings) -> Findings:
    wanted = group.size * (group.size - 1) // 2
    pairs = measure_pairs(group, control, SHARES["pairs"] * control.seconds_to_limit())
    findings = replace(findings, pairs=pairs)
    if len(pairs) == wanted:
        return findings
    skipped = Skipped(what=f"{wanted - len(pairs)} of {wanted} pairs of ranks", why=NO_TIME)
    return replace(findings, skipped=(*findings.skipped, skipped))


def measure_pairs(group: wire.Group, control: Control, seconds: float) -> tuple[PairRecord, ...]:
    """One-way rate between every two ranks of the group, one pair at a time, over the group's own communicator.

    Stops after `seconds`; the pairs that are left have not been measured.
    """
    num_bytes = 64 * MIB if group.device.type == "cuda" else MIB
    data = torch.ones(num_bytes // wire.ELEMENT_BYTES, device=group.device)
    records: list[PairRecord] = []
    until = control.slowest([control.seconds])[0] + seconds
    for sender, receiver in itertools.combinations(range(group.size), 2):
        if control.slowest([control.seconds])[0] >= until:
            break
        mine = 0.0
        if group.index in (sender, receiver):
            peer = group.members[receiver if group.index == sender else sender]
            act = dist.isend if group.index == sender else dist.irecv
            call = _one_way(act, data, peer, group)
            wire.time_calls(call, 2, group.device)
            mine = sum(wire.time_calls(call, 5, group.device)) / 5
        spent = control.slowest([mine])[0]
        records.append(PairRecord(sender=sender, receiver=receiver, bytes=num_bytes, seconds=spent))
    return tuple(records)


def _one_way(act: Any, data: torch.Tensor, peer: int, group: wire.Group) -> Callable[[], None]:
    def call() -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(act, data, peer, group.process_group)]):
            work.wait()

    return call


# -------------------------------------------------------------------------------------------------------------- memory


def _open_context(device: torch.device, join: Join) -> Callable[[], MemoryRecord | None]:
    """Create the CUDA context, and weigh it while the ranks find each other.

    Returns:
        What waits for the weight: None on CPU, or where the driver does not say what was in use before.

    Raises:
        ResourceError: If this torch cannot use the cards.
    """
    if device.type != "cuda":
        return lambda: None
    if not torch.cuda.is_available() or device.index >= torch.cuda.device_count():
        raise ResourceError(
            f"Rank {device.index} of the probe has no card: torch {torch.__version__} (built for CUDA "
            f"{torch.version.cuda}) can use {torch.cuda.device_count()} of the cards that the driver shows. Install a "
            "torch that fits the driver, or measure the cores: shardwise probe --device cpu"
        )
    uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")  # creates no context yet
    before = join.used_before().get(uuid)
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)
    weigh = in_background(inventory.used_device_memory)

    def weight() -> MemoryRecord | None:
        after = (weigh() or {}).get(uuid)
        return None if before is None or after is None else MemoryRecord(what="context", bytes=after - before)

    return weight


def _outside_memory(device: torch.device) -> int:
    """Device memory in use, less what torch's allocator holds; 0 on CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _largest_memory(records: list[MemoryRecord], control: Control) -> tuple[MemoryRecord, ...]:
    """The largest of every rank for each name that all ranks have."""
    by_rank: list[dict[str, int]] = control.gather({record.what: record.bytes for record in records})
    shared = [name for name in by_rank[0] if all(name in found for found in by_rank)]
    return tuple(MemoryRecord(what=name, bytes=max(found[name] for found in by_rank)) for name in shared)


# ---------------------------------------------------------------------------------------------------------- as process


def main(argv: list[str] | None = None) -> int:
    """Run one rank as a process; its place comes from the environment, in torchrun's names."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.probe.ranks")
    parser.add_argument("folder", type=Path, help="holds task.json; findings.json or error-RANK.json are written there")
    parser.add_argument("--started-at", type=float, required=True)
    parser.add_argument("--progress-fd", type=int, default=None)
    arguments = parser.parse_args(argv)
    folder: Path = arguments.folder
    place = place_from_environment(os.environ)
    task = from_data(ProbeTask, json.loads((folder / "task.json").read_text()))
    join = Join(
        init_method=f"file://{folder / 'rendezvous'}",
        started_at=arguments.started_at,
        used_before=lambda: _read_when_there(folder / USED_FILE),
    )
    say = _writer(arguments.progress_fd)
    try:
        findings = run_rank(task, place, join, say)
    except ShardwiseError as error:
        (folder / f"error-{place.rank}.json").write_text(json.dumps(error.problems))
        return error.exit_code
    if place.rank == 0:
        (folder / "findings.json").write_text(to_json(findings))
    return 0


def _read_when_there(file: Path) -> dict[str, int]:
    """What the parent found in use, as soon as it has written it; empty if it does not."""
    until = time.monotonic() + READING_SECONDS
    while not file.exists():
        if time.monotonic() > until:
            return {}
        time.sleep(0.02)
    return json.loads(file.read_text())


def place_from_environment(environment: Any) -> Place:
    """This rank's place, from torchrun's environment variables."""
    return Place(
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        local_rank=int(environment["LOCAL_RANK"]),
        local_world_size=int(environment["LOCAL_WORLD_SIZE"]),
        environment=inventory.switches_in_force(environment),
    )


def _writer(descriptor: int | None) -> Callable[[str], None]:
    """Progress lines into a pipe; nowhere if there is none or its reader is gone."""

    def say(text: str) -> None:
        if descriptor is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(descriptor, (text + "\n").encode())

    return say


if __name__ == "__main__":
    sys.exit(main())
