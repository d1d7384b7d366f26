"""Several independent runs, one on each card: no wire at all, for jobs that fit one card.

Each job is a `shardwise train` of its own, in a process of its own that sees one card; what it says goes to `train.log`
in its run folder. A job that fails stops no other.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.verify.trials import LEDGER_FILE

LOG_FILE, METRICS_FILE = "train.log", "metrics.jsonl"
POLL_S = 0.5
GRACE_S = 120.0
"""How long jobs may take to save when the queue is interrupted."""
_TAIL_BYTES = 16_384
_STEP = re.compile(r"step (\d+)/(\d+)")
State = Literal["waiting", "running", "done", "failed", "stopped", "skipped"]


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """One run."""

    name: str
    words: tuple[str, ...]
    """The command line after `shardwise train`."""
    folder: Path
    """Its run folder."""
    skipped: bool = False
    """Finished earlier: shown, not run."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A place for one job at a time."""

    name: str
    environ: Mapping[str, str]
    """What a job in it gets beside this process's environment."""


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """Where a job stands."""

    job: QueuedJob
    state: State
    slot: str = ""
    seconds: float = 0.0
    step: int | None = None
    num_steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    tokens_per_s: float | None = None
    reason: str = ""
    """Why it failed: the first line of what it said."""


@dataclass(eq=False)
class _Running:
    process: subprocess.Popen[bytes]
    slot: Slot
    started: float


def card_slots(visible: str | None, num_cards: int) -> list[Slot]:
    """One slot a card.

    Args:
        visible: CUDA_VISIBLE_DEVICES as it is set; None if it is not.
        num_cards: Cards that torch sees.
    """
    names = visible.split(",")[:num_cards] if visible else [str(number) for number in range(num_cards)]
    return [Slot(name=f"card {name}", environ={"CUDA_VISIBLE_DEVICES": name}) for name in names]


def core_slots(num_jobs: int, num_cores: int) -> list[Slot]:
    """Slots that share the cores of a machine without cards."""
    count = max(1, min(num_jobs, num_cores))
    threads = str(max(1, num_cores // count))
    return [Slot(name=f"cpu {number}", environ={"OMP_NUM_THREADS": threads}) for number in range(count)]


def is_finished(folder: Path) -> bool:
    """Whether a run has come to its end: its account is settled."""
    return (folder / LEDGER_FILE).is_file()


class JobQueue:
    """Runs jobs on slots, each as soon as one is free.

    Args:
        jobs: In the order in which they start.
        slots: As many run at a time.
        show: Called after every look with the status of all jobs.
    """

    def __init__(
        self, jobs: Sequence[QueuedJob], slots: Sequence[Slot], show: Callable[[Sequence[JobStatus]], None]
    ) -> None:
        self._jobs, self._show = list(jobs), show
        self._free = list(slots)
        self._waiting = [job for job in jobs if not job.skipped]
        self._running: dict[str, _Running] = {}
        self._ended: dict[str, tuple[State, float, str, str]] = {}

    def run(self) -> list[JobStatus]:
        """All jobs, to the end of the last one.

        Returns:
            How each has ended.

        Raises:
            KeyboardInterrupt: It was interrupted; the jobs have been told to save and have stopped.
        """
        try:
            while self._waiting or self._running:
                while self._waiting and self._free:
                    self._start(self._waiting.pop(0), self._free.pop(0))
                self._look()
                self._show(self.status())
                if self._running:
                    time.sleep(POLL_S)
        except BaseException:
            self._stop()
            raise
        return self.status()

    def status(self) -> list[JobStatus]:
        """Where every job stands, in the order given."""
        return [self._status(job) for job in self._jobs]

    def _start(self, job: QueuedJob, slot: Slot) -> None:
        job.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "shardwise", "train", *job.words]
        with (job.folder / LOG_FILE).open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **slot.environ},
                start_new_session=True,  # Ctrl-C reaches the queue alone, which lets the jobs save
            )
        self._running[job.name] = _Running(process=process, slot=slot, started=time.monotonic())

    def _look(self) -> None:
        for job in self._jobs:
            running = self._running.get(job.name)
            code = running.process.poll() if running is not None else None
            if running is None or code is None:
                continue
            del self._running[job.name]
            self._free.append(running.slot)
            state: State = "done" if code == 0 else "failed"
            reason = "" if code == 0 else _reason(_tail(job.folder / LOG_FILE), code)
            self._ended[job.name] = (state, time.monotonic() - running.started, running.slot.name, reason)

    def _stop(self) -> None:
        """Tells every job to save and stop, and waits; a second interruption ends them at once."""
        for running in self._running.values():
            running.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        for name, running in self._running.items():
            try:
                running.process.wait(max(0.0, deadline - time.monotonic()))
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                with contextlib.suppress(OSError):
                    os.killpg(running.process.pid, signal.SIGKILL)  # its own session: the ranks are in it
            seconds = time.monotonic() - running.started
            self._ended[name] = ("stopped", seconds, running.slot.name, "interrupted; go on with --resume")
        self._running.clear()

    def _status(self, job: QueuedJob) -> JobStatus:
        seen = _progress(job.folder)
        if job.skipped:
            return JobStatus(job=job, state="skipped", reason="finished earlier", **seen)
        if job.name in self._ended:
            state, seconds, slot, reason = self._ended[job.name]
            return JobStatus(job=job, state=state, seconds=seconds, slot=slot, reason=reason, **seen)
        running = self._running.get(job.name)
        if running is None:
            return JobStatus(job=job, state="waiting")
        seconds = time.monotonic() - running.started
        return JobStatus(job=job, state="running", seconds=seconds, slot=running.slot.name, **seen)


def _progress(folder: Path) -> dict[str, Any]:
    """What the log and metrics.jsonl say last; nothing if there are none yet."""
    found: dict[str, Any] = {}
    steps = _STEP.findall(_tail(folder / LOG_FILE))
    if steps:
        found["step"], found["num_steps"] = map(int, steps[-1])
    for line in _tail(folder / METRICS_FILE).splitlines():
        with contextlib.suppress(ValueError):  # the first line of a tail is half a line
            values = json.loads(line)
            for key, name in (("loss", "loss"), ("eval_loss", "eval_loss"), ("tokens_per_second", "tokens_per_s")):
                if isinstance(values, dict) and key in values:
                    found[name] = values[key]
    return found


def _reason(log: str, code: int) -> str:
    """The message of the program in what a job said, or its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("shardwise: ")]
    text = said[-1].removeprefix("shardwise: ") if said else lines[-1] if lines else "no word"
    return f"exit code {code}: {text}"


def _tail(path: Path) -> str:
    """The end of a file; nothing if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
