"""`shardwise doctor`: find out why the wire is slow."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from shardwise.doctor.diagnose import DoctorOptions, diagnose
from shardwise.doctor.report import render_text, to_json
from shardwise.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Find out why the wire between the cards is slow: evidence, cost, fix and the test that proves it.

    Looks only, within a second, without root and without touching a card; --run adds experiments.
    Exit code: 0 healthy, 1 findings, 2 could not look.

    Examples:
      shardwise doctor
      shardwise doctor --run --plan plan.yaml
      shardwise doctor --log nccl.node-a.4242.log
      shardwise doctor --pid 4242 --json
      shardwise doctor --env job.sbatch /etc/environment
    """

    run: bool = False
    """Also time copies and collectives, in child processes with a time limit; the cards must be idle."""
    risky: bool = False
    """With --run: force P2P between cards that NCCL keeps apart, last of all; it may hang them until a reboot."""
    seconds: float | None = None
    """With --run: the limit of each child process; 60 s if nothing is said."""
    log: str | None = None
    """A NCCL log (of NCCL_DEBUG=INFO), plain or gzip, of this machine or of another."""
    pid: tuple[int, ...] = ()
    """Running ranks, or their launcher: their environment, limits and mounts count instead of this shell's."""
    env: tuple[str, ...] = ()
    """Container env files, scripts or YAML files, read as a rank's environment."""
    plan: str | None = None
    """A plan file, or a run's folder: losses are then also told in milliseconds a step."""
    record: str | None = None
    """Write everything that was read to this new folder, for a bug report."""
    root: str = "/"
    """A folder written by --record, to look at instead of this machine."""
    json: bool = False
    """One JSON object on stdout instead of the page."""


def run(options: Options) -> int:
    """Look, show, and return the verdict's exit code."""
    found = diagnose(doctor_options(options))
    sys.stdout.write(to_json(found) if options.json else render_text(found))
    return found.exit_code


def doctor_options(options: Options) -> DoctorOptions:
    """The same wishes in the doctor's own words."""
    wire_bytes, compute = (None, None) if options.plan is None else _step_of(Path(options.plan))
    return DoctorOptions(
        log=None if options.log is None else Path(options.log),
        pids=options.pid,
        env_files=tuple(Path(name) for name in options.env),
        run=options.run,
        risky=options.risky,
        seconds=options.seconds,
        wire_bytes_per_step=wire_bytes,
        compute_seconds_per_step=compute,
        root=Path(options.root),
        record=None if options.record is None else Path(options.record),
    )


def _step_of(path: Path) -> tuple[int, float]:
    """(bytes that one rank sends, seconds of compute) in a step of the recommended strategy."""
    from shardwise.vocabulary.codec import read_noun
    from shardwise.vocabulary.plan import Plan

    file = path / "plan.yaml" if path.is_dir() else path
    best = read_noun(Plan, file).recommended
    if best is None:
        raise ConfigError(f"{file}: nothing fits in this plan, so no step sends anything; give a plan that can run.")
    return sum(collective.wire_bytes for collective in best.collectives), best.step.compute_seconds
