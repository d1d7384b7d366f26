"""Preflight: the run in small on the real cards, and a page that says go or no-go, with numbers.

What runs is `trainer/rehearse.py`. Here its numbers are laid beside the plan, and each is judged: a failed promise is
a no-go, what merely differs from the plan is a note.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardwise.errors import ResourceError, ShardwiseError, UsageError
from shardwise.planner.uncertainty import usable_bytes
from shardwise.verify.trials import Trial, write_before
from shardwise.vocabulary import codec
from shardwise.vocabulary.strategy import Strategy
from shardwise.vocabulary.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from shardwise.trainer.rehearse import Rehearsal

FOLDER, PAGE_FILE, MARK_FILE = "preflight", "preflight.json", ".made-by-shardwise-preflight"
Verdict = Literal["go", "note", "no-go"]
RESUME_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3, "bf16_pure": 2e-3, "fp8": 1e-2}
"""Relative difference of a loss after a resume that kernels in another order explain."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One promise, kept or not."""

    name: str
    found: str
    limit: str = ""
    """What was planned or allowed."""
    verdict: Verdict = "go"


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """The answer."""

    strategy: Strategy
    checks: tuple[Check, ...]
    seconds: dict[str, float]
    """Of each phase."""

    @property
    def is_go(self) -> bool:
        """Whether the run may start."""
        return all(check.verdict != "no-go" for check in self.checks)


def run_preflight(trial: Trial, *, cuda: bool, writes: bool = True) -> Preflight:
    """Rehearse a trial and judge it. What it wrote is removed again, but for preflight.json in the run folder.

    Args:
        trial: What is meant to run.
        cuda: Whether on cards.
        writes: Whether this process prepares and removes the folder (the first of several that a launcher started).

    Raises:
        UsageError: The place where it would write is taken.
        ResourceError: It cannot be written.
    """
    from shardwise.launch.local import LaunchOptions, launch
    from shardwise.trainer.rehearse import rehearse

    folder = trial.folder / FOLDER
    inside = dataclasses.replace(trial, run=dataclasses.replace(trial.run, output_dir=str(folder)))
    if writes:
        _make_room(folder)
        write_before(inside)
    strategy = trial.candidate.strategy
    options = LaunchOptions(num_ranks=strategy.num_ranks, device="cuda" if cuda else "cpu")
    try:
        seen: Rehearsal = launch(rehearse, (inside.run, strategy), options)
        answer = Preflight(
            strategy=strategy, checks=judge(trial, seen, _free_bytes(trial.folder)), seconds=seen.seconds
        )
    except UsageError:
        raise
    except ShardwiseError as error:
        answer = Preflight(strategy=strategy, checks=failed(error), seconds={})
    finally:
        if writes:
            shutil.rmtree(folder)
    if writes:
        (trial.folder / PAGE_FILE).write_text(codec.to_json(answer), encoding="utf-8")
    return answer


def _make_room(folder: Path) -> None:
    if folder.exists():
        if not (folder / MARK_FILE).exists():
            raise UsageError(f"{folder} exists and was not made by a preflight; move it, or give another --out")
        shutil.rmtree(folder)
    try:
        folder.mkdir(parents=True)
        (folder / MARK_FILE).touch()
    except OSError as error:
        raise ResourceError(
            f"output_dir {folder.parent} cannot be written ({error.strerror or error}); free or unlock it, or give "
            "another"
        ) from error


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def failed(error: ShardwiseError) -> tuple[Check, ...]:
    """The checks of a rehearsal that did not come to its end: what it said."""
    return tuple(Check(name="rehearsal", found=problem, verdict="no-go") for problem in error.problems)


def judge(trial: Trial, seen: Rehearsal, free_bytes: int) -> tuple[Check, ...]:
    """Every promise beside what came out.

    Args:
        trial: What is meant to run, with its prediction.
        seen: The rehearsal.
        free_bytes: Of the disk that the run folder is on.
    """
    return (
        *_memory(trial, seen),
        _losses(seen),
        _resume(trial.candidate.strategy, seen),
        _save(seen),
        _evaluation(seen),
        _export(seen),
        _disk(trial, seen, free_bytes),
    )


def _memory(trial: Trial, seen: Rehearsal) -> list[Check]:
    memory, measured = trial.candidate.memory, seen.measured
    upper = trial.candidate.memory_interval_bytes[1]
    what = f"longest batch: {seen.longest_tokens:,} tokens a row"
    checks: list[Check] = []
    if measured.allocated_bytes is not None:
        verdict: Verdict = "go" if measured.allocated_bytes <= 1.15 * memory.allocated_bytes else "note"
        checks.append(
            Check(
                name="memory allocated",
                found=f"{format_bytes(measured.allocated_bytes)} ({what})",
                limit=f"planned {format_bytes(memory.allocated_bytes)}",
                verdict=verdict,
            )
        )
    if measured.device_bytes is not None:
        usable = usable_bytes(trial.plan.cluster)
        verdict = "no-go" if measured.device_bytes > usable else "note" if measured.device_bytes > upper else "go"
        checks.append(
            Check(
                name="memory of the card",
                found=format_bytes(measured.device_bytes),
                limit=f"planned {format_bytes(memory.device_bytes)}, usable {format_bytes(usable)}",
                verdict=verdict,
            )
        )
    return checks


def _losses(seen: Rehearsal) -> Check:
    text = ", ".join(f"{loss:.4g}" for loss in seen.losses)
    finite = all(map(math.isfinite, seen.losses))
    return Check(name="losses", found=text, limit="finite", verdict="go" if finite else "no-go")


def _resume(strategy: Strategy, seen: Rehearsal) -> Check:
    """The last steps once more after a resume: the same numbers."""
    tolerance = RESUME_TOLERANCE[strategy.precision]
    before = seen.losses[-len(seen.resumed_losses) :] if seen.resumed_losses else ()
    pairs = list(zip(before, seen.resumed_losses, strict=True))
    difference = max((abs(a - b) / max(abs(a), 1e-12) for a, b in pairs), default=math.inf)
    found = "equal to the last bit" if difference == 0 else f"within {difference:.2g}"
    return Check(
        name="losses after a resume",
        found=found,
        limit=f"within {tolerance:g}",
        verdict="go" if difference <= tolerance else "no-go",
    )


def _save(seen: Rehearsal) -> Check:
    return Check(
        name="save",
        found=f"training waits {format_seconds(seen.blocked_s)}, durable after {format_seconds(seen.durable_s)}, "
        f"{format_bytes(seen.checkpoint_bytes)}",
    )


def _evaluation(seen: Rehearsal) -> Check:
    return Check(
        name="evaluation",
        found=f"loss {seen.eval_loss:.4g}",
        limit="finite",
        verdict="go" if math.isfinite(seen.eval_loss) else "no-go",
    )


def _export(seen: Rehearsal) -> Check:
    size, check = format_bytes(seen.export_bytes), seen.export_check
    if check is None:
        return Check(
            name="export",
            found=f"{size}; not loaded: adapters on random weights, or layers on several stages",
            verdict="note",
        )
    return Check(
        name="export",
        found=f"{size}; loaded again: {check.num_tensors} tensors equal, logits within "
        f"{check.max_logit_difference:.2g}",
        limit=f"within {check.tolerance:.2g}",
    )


def _disk(trial: Trial, seen: Rehearsal, free_bytes: int) -> Check:
    """Room for as many checkpoints as are kept, one more while it is written, and the export."""
    run = trial.run
    kept = 0 if run.save_strategy == "no" else run.save_total_limit or 1
    needed = (kept + bool(kept)) * seen.checkpoint_bytes + (seen.export_bytes if run.save_final else 0)
    unlimited = ", and more, since save_total_limit keeps all" if kept and run.save_total_limit is None else ""
    return Check(
        name="disk",
        found=f"{format_bytes(free_bytes)} free",
        limit=f"needs {format_bytes(needed)}{unlimited}",
        verdict="go" if free_bytes >= needed else "no-go",
    )
