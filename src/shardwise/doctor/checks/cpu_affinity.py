"""Too few or too distant processors for the threads that feed the wire."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity, gap
from shardwise.doctor.scene import Scene
from shardwise.doctor.thresholds import value
from shardwise.facts.machine.record import Process, Unreadable


def look(scene: Scene) -> Iterator[Answer]:
    """Counts processors per card, and compares running ranks' masks with the processors near their card."""
    need = int(value("min_cores_per_rank"))
    machine = scene.machine
    num_cards = len(scene.cards)
    if num_cards < 2:
        return
    if machine.cpu.governor == "powersave":
        yield replace(
            _finding(
                "processors",
                "the governor holds the clocks down while the threads that feed the wire wait (powersave)",
                Evidence(what="governor", value="powersave", source="/sys/devices/system/cpu/cpu0/cpufreq"),
                "Try performance: cpupower frequency-set -g performance. With intel_pstate powersave may be as good.",
            ),
            severity=Severity.NOTE,
            certainty=Certainty.POSSIBLE,
            proof=AbTest(
                a="shardwise doctor --run", b="the same with the governor performance", expect="a higher rate over SHM"
            ),
            reference="",
        )
    for process in machine.processes:
        yield from _look_at_rank(scene, process, need)
    if not machine.processes and isinstance(machine.affinity, Unreadable):
        yield gap(CHECK.id, "the processors of this process", machine.affinity)
    elif not machine.processes and not isinstance(machine.affinity, Unreadable):
        granted = float(len(machine.affinity))
        if isinstance(machine.cpu_quota, float):
            granted = min(granted, machine.cpu_quota)
        if granted < need * num_cards:
            yield _finding(
                "this process",
                f"{granted:g} processors for {num_cards} ranks; each wants {need}",
                Evidence(what="processors", value=f"{granted:g}", source="affinity mask and cgroup cpu.max"),
                "Ask for more processors: --cpus-per-task (Slurm), --cpus (Docker), resources.limits.cpu (Kubernetes).",
            )


def _look_at_rank(scene: Scene, process: Process, need: int) -> Iterator[Answer]:
    if isinstance(process.affinity, Unreadable):
        yield gap(CHECK.id, f"the processors of process {process.pid}", process.affinity)
        return
    seen = Evidence(what=f"process {process.pid}", value=_spell(process.affinity), source="/proc/PID/status")
    wider = "Widen the mask: --cpu-bind=none (Slurm), --bind-to none (mpirun); or NCCL_IGNORE_CPU_AFFINITY=1."
    if len(process.affinity) < need:
        yield _finding(
            f"process {process.pid}", f"{len(process.affinity)} processor for a rank; it wants {need}", seen, wider
        )
        return
    rank = process.local_rank
    device = scene.machine.pci.get(scene.cards[rank].address) if rank is not None and rank < len(scene.cards) else None
    near = None if device is None else device.local_cpus
    if isinstance(near, frozenset) and near and not near & process.affinity:
        yield _finding(f"process {process.pid}", f"its processors are all far from GPU {rank}", seen, wider)


def _spell(cpus: frozenset[int]) -> str:
    shown = sorted(cpus)
    return ",".join(map(str, shown[:8])) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")


def _finding(subject: str, headline: str, evidence: Evidence, fix: str) -> Finding:
    return Finding(
        check=CHECK.id,
        subject=subject,
        severity=Severity.RISK,
        certainty=Certainty.INFERRED,
        headline=headline,
        evidence=(evidence,),
        fix=fix,
        proof=AbTest(
            a="the job as it is",
            b="NCCL_IGNORE_CPU_AFFINITY=1 with a wider mask",
            expect="shorter steps, most of all over SHM and NET",
        ),
        reference="NVIDIA/nccl#1017, NVIDIA/nccl-tests#57",
    )


CHECK = Check(
    id="cpu-affinity",
    title="Processors for the proxy threads",
    reads=("sched_getaffinity", "/proc/PID/status (--pid)", "/sys/fs/cgroup/cpu.max", "local_cpulist", "governor"),
    look=look,
)
