"""The doctor's one entrance: gather a scene, let every check look at it, sort what they say."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path

from shardwise.doctor.check import Check
from shardwise.doctor.checks import ALL_CHECKS
from shardwise.doctor.findings import Answer, Finding, Gap, Severity, merge_equal
from shardwise.doctor.measurements import Measurement
from shardwise.doctor.nccl_log import read_nccl_log
from shardwise.doctor.nccl_log.records import NcclLog
from shardwise.doctor.scene import Scene, find_version, local_hosts
from shardwise.doctor.switches import gather_switches
from shardwise.doctor.transport import predict
from shardwise.errors import UsageError
from shardwise.facts.machine.read import read_machine
from shardwise.facts.machine.record import Limits, Machine, Unreadable

CHILD_SECONDS = 60.0
"""Time limit of an experiment, where nothing is said."""


class Verdict(IntEnum):
    """The diagnosis in one word; its value is the exit code."""

    HEALTHY = 0
    """Every check that applies could look, and none found anything. Readings that only corroborate may be missing."""
    FINDINGS = 1
    COULD_NOT_LOOK = 2
    """Nothing was found, but something that a check needs could not be read."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What to look at. Everything is passive unless `run` is set."""

    log: Path | None = None
    """A NCCL log (NCCL_DEBUG=INFO), plain or gzip."""
    pids: tuple[int, ...] = ()
    """Running ranks, or launchers of ranks, whose environment and mounts count."""
    env_files: tuple[Path, ...] = ()
    """Container env files, scripts or YAML files to be read as a rank's environment."""
    run: bool = False
    """Also copy and run collectives, in child processes with a time limit. Needs torch and idle cards."""
    risky: bool = False
    """With `run`: also force P2P between cards that NCCL keeps apart. It may hang the cards until a reboot."""
    seconds: float | None = None
    """With `run`: time limit of each child process; 60 s if nothing is said."""
    wire_bytes_per_step: int | None = None
    """Bytes that one rank sends in a training step (from a plan), to put losses in milliseconds."""
    compute_seconds_per_step: float | None = None
    """Compute in that step, which may hide the wire; without it only the most that a loss can cost is told."""
    root: Path = Path("/")
    """`/`, or the directory of a recorded machine."""
    record: Path | None = None
    """New directory in which to record everything that is read, for a bug report; one that is there must be empty."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the checks said."""

    findings: tuple[Finding, ...]
    """Worst first; without notes."""
    notes: tuple[Finding, ...]
    """Facts that change no verdict: red herrings, limits of the hardware."""
    gaps: tuple[Gap, ...]
    """What could not be read; essential ones first."""
    scene: Scene
    looked: tuple[str, ...]
    """Ids of the checks that ran."""
    machine_skipped: str = ""
    """Why the machine itself was left out; empty if it was looked at."""
    crashed: tuple[tuple[str, str], ...] = field(default=())
    """(check, error) of checks that failed themselves; also among the gaps."""

    @property
    def verdict(self) -> Verdict:
        """Findings win over gaps; a gap that a check needed is never healthy."""
        if self.findings:
            return Verdict.FINDINGS
        return Verdict.COULD_NOT_LOOK if any(gap.essential for gap in self.gaps) else Verdict.HEALTHY

    @property
    def exit_code(self) -> int:
        """0 healthy, 1 findings, 2 could not look."""
        return int(self.verdict)


def diagnose(options: DoctorOptions, *, environment: Mapping[str, str] | None = None) -> Diagnosis:
    """Looks at a machine, its switches and, if given, a log; runs experiments only if asked.

    Args:
        options: What to look at.
        environment: Of the shell that asks; this process's own if None, a recording's own for a recording.

    Returns:
        Findings, notes and gaps.

    Raises:
        UsageError: If a file that was named cannot be read, or `risky` is set without `run`.
        MissingExtraError: If `run` is set and torch is not installed.
    """
    _check(options)
    log = None if options.log is None else read_nccl_log(options.log)
    machine = read_machine(options.root, pids=options.pids, record_to=options.record)
    if environment is None:
        environment = dict(os.environ) if options.root == Path("/") else {}
    scene = gather(machine, environment, log, options)
    if options.run and scene.cards:  # without cards the inventory says what is wrong
        from shardwise.doctor.experiments import run_experiments

        seconds = CHILD_SECONDS if options.seconds is None else options.seconds
        measurements = run_experiments(scene, seconds=seconds, risky=options.risky)
        scene = gather(machine, environment, log, options, measurements)
    return examine(scene, ALL_CHECKS, look_at_machine=_wants_machine(options, scene))


def _check(options: DoctorOptions) -> None:
    problems: list[str] = []
    if options.risky and not options.run:
        problems.append(
            "--risky forces experiments, and there are none without --run; add --run, or leave --risky out."
        )
    if options.run and options.root != Path("/"):
        problems.append(f"--run measures this machine, and {options.root} is a recording; leave one of them out.")
    if options.seconds is not None:
        if not options.run:
            problems.append(
                "--seconds limits the experiments, and there are none without --run; add --run, or leave --seconds out."
            )
        if not (math.isfinite(options.seconds) and options.seconds > 0):
            problems.append(f"A time limit of {options.seconds:g} s is none; give a positive number of seconds.")
    if options.record is not None and (words := _cannot_record(options.record)):
        problems.append(words)
    if options.wire_bytes_per_step is not None and options.wire_bytes_per_step < 0:
        problems.append(f"{options.wire_bytes_per_step} bytes a step cannot be; give the plan's bytes, at least 0.")
    problems.extend(
        f"There is no process {pid}; give the id of a running rank or launcher (ps aux | grep python)."
        for pid in options.pids
        if not (options.root / "proc" / str(pid)).exists()
    )
    if problems:
        raise UsageError(*problems)


def _cannot_record(folder: Path) -> str:
    """Why a recording cannot be made there; empty if it can."""
    try:
        if folder.is_dir():
            inside = sorted(path.name for path in folder.iterdir())
            if inside:
                listed = f"{', '.join(inside[:3])}{' ...' if len(inside) > 3 else ''}"
                return (
                    f"The folder {str(folder)!r} holds {listed}, and a recording wants one of its own; give a new name."
                )
        elif folder.exists():
            return f"{str(folder)!r} is a file; give the name of a new folder for the recording."
    except OSError as error:
        return f"The folder {str(folder)!r} cannot be used for a recording: {error.strerror}. Give another."
    return ""


def gather(
    machine: Machine,
    environment: Mapping[str, str],
    log: NcclLog | None,
    options: DoctorOptions,
    measurements: tuple[Measurement, ...] = (),
) -> Scene:
    """Puts a scene together and makes the predictions."""
    switches = gather_switches(machine, environment, options.env_files, log)
    version = find_version(machine, log)
    return Scene(
        machine=machine,
        environment=environment,
        switches=switches,
        log=log,
        local_hosts=local_hosts(machine, log),
        nccl_version=version,
        predictions=predict(machine, switches, version),
        measurements=measurements,
        wire_bytes_per_step=options.wire_bytes_per_step,
        compute_seconds_per_step=options.compute_seconds_per_step,
    )


def _wants_machine(options: DoctorOptions, scene: Scene) -> bool:
    """A log that was written elsewhere is judged alone, unless something of this machine was asked for as well."""
    return options.log is None or bool(scene.local_hosts) or options.run or bool(options.pids)


def examine(scene: Scene, checks: tuple[Check, ...], *, look_at_machine: bool = True) -> Diagnosis:
    """Lets checks look at a scene.

    A check that fails itself becomes a gap: the others still speak, and nothing is called healthy.
    """
    skipped = "" if look_at_machine else _why_skipped(scene)
    if not look_at_machine:
        away = Unreadable(why="the log is of another machine")
        scene = _without_machine(scene, away)
    answers: list[Answer] = []
    crashed: list[tuple[str, str]] = []
    chosen = [check for check in checks if look_at_machine or check.of_log]
    for check in chosen:
        try:
            answers.extend(check.look(scene))
        except Exception as error:
            crashed.append((check.id, f"{type(error).__name__}: {error}"))
            answers.append(Gap(check=check.id, what=check.title, why=f"the check itself failed: {error!r}"))
    answers.extend(_log_gaps(scene))
    findings = merge_equal(tuple(answer for answer in answers if isinstance(answer, Finding)))
    gaps = {(gap.check, gap.why, gap.command): gap for gap in answers if isinstance(gap, Gap)}
    return Diagnosis(
        findings=tuple(sorted((f for f in findings if f.severity > Severity.NOTE), key=_badness)),
        notes=tuple(sorted((f for f in findings if f.severity is Severity.NOTE), key=_badness)),
        gaps=tuple(sorted(gaps.values(), key=lambda gap: not gap.essential)),
        scene=scene,
        looked=tuple(check.id for check in chosen),
        machine_skipped=skipped,
        crashed=tuple(crashed),
    )


def _why_skipped(scene: Scene) -> str:
    assert scene.log is not None
    hosts = sorted({edge.host for edge in scene.log.edges} | {comm.host for comm in scene.log.communicators})
    return (
        f"the log is of {', '.join(filter(None, hosts)) or 'unnamed hosts'}, this machine is {scene.machine.hostname}"
    )


def _without_machine(scene: Scene, away: Unreadable) -> Scene:
    limits = Limits(memlock_bytes=away, open_files=away, stack_bytes=away)
    machine = replace(
        scene.machine, gpus=away, pairs=(), pci={}, ib_ports=away, interfaces=away, processes=(), limits=limits
    )
    return replace(scene, machine=machine, predictions=away, local_hosts=frozenset())


def _log_gaps(scene: Scene) -> list[Gap]:
    """What the log itself leaves open."""
    log = scene.log
    if log is None:
        return []
    found: list[Gap] = []
    if log.num_nccl_lines == 0:
        found.append(
            Gap(
                check="log",
                what=f"NCCL's lines in {log.source}",
                why=f"none among {log.num_lines:,} lines",
                command="NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log torchrun ...",
            )
        )
    elif not log.edges:
        found.append(
            Gap(
                check="log",
                what=f"edges in {log.source}",
                why="the log has none: the level is too low, or it ends too early",
                command="NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log torchrun ...",
            )
        )
    if log.ends_mid_line:
        found.append(
            Gap(
                check="log",
                what=f"the end of {log.source}",
                essential=False,
                why="it stops in the middle of a line: it is still being written, or was cut off",
            )
        )
    if log.num_unreadable_lines:
        found.append(
            Gap(
                check="log",
                what=f"parts of {log.source}",
                essential=False,
                why=f"{log.num_unreadable_lines:,} lines are binary or too long",
            )
        )
    if log.num_dropped:
        found.append(
            Gap(
                check="log",
                what=f"parts of {log.source}",
                essential=False,
                why=f"{log.num_dropped:,} records beyond the limit were not kept",
            )
        )
    return found


def _badness(finding: Finding) -> tuple[int, float, int]:
    lost = 0.0 if finding.cost is None else finding.cost.lost_bytes_per_s
    return -int(finding.severity), -lost, -int(finding.certainty)
