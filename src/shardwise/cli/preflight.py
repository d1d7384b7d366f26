"""`shardwise preflight`: the run in small on the real cards; go or no-go."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardwise.cli import train, train_options
from shardwise.cli.options import POSITIONAL, flags_of
from shardwise.report.style import Style
from shardwise.report.table import Column, render_table
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.units import format_seconds

if TYPE_CHECKING:
    from shardwise.verify.preflight import Check, Preflight

COLORS = {"go": "green", "note": "yellow", "no-go": "red"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Rehearse a run on the real cards in about two minutes: go or no-go, with numbers.

    Trains four steps of the longest batch of this data set, saves, builds everything anew, resumes, compares the
    losses, evaluates, exports and loads the export. Exits with 0 for go and 1 for no-go. TARGET and flags are those of
    `shardwise train`.

    Examples:
      shardwise preflight plan.yaml --data chats.jsonl
      shardwise preflight run.yaml && shardwise train run.yaml
    """

    target: str | None = field(default=None, metadata=POSITIONAL)
    """A model, a run file or a plan file."""
    data: str | None = None
    """The same as --dataset-name."""
    out: str | None = None
    """The same as --output-dir."""
    cluster: str | None = None
    """The cluster file to plan with, as `shardwise probe` writes it; measured now (within 20 s) if nothing is said."""
    gpus: str | None = None
    """Plan with data sheets instead, such as 2xrtx-5090."""
    keys: dict[str, Any] = field(default_factory=dict[str, Any], metadata=flags_of(RunFile))
    """The keys of a run file that were given as flags."""


def run(options: Options) -> int:
    """Rehearses; returns 0 for go and 1 for no-go."""
    from shardwise.verify.preflight import run_preflight

    ready = train.get_ready(
        train_options.Options(
            target=options.target,
            data=options.data,
            out=options.out,
            cluster=options.cluster,
            gpus=options.gpus,
            keys=options.keys,
        )
    )
    answer = run_preflight(ready.trial, cuda=ready.cuda, writes=ready.speaks)
    if ready.speaks:
        sys.stdout.write(page(answer, Style.of(sys.stdout)))
    return 0 if answer.is_go else 1


def page(answer: Preflight, style: Style) -> str:
    """What `shardwise preflight` answers: the verdict, every promise, the seconds of every phase."""
    word = "go" if answer.is_go else "no-go"
    lines = [style.paint(f"Preflight of {answer.strategy.name}: {word.upper()}", "bold", COLORS[word]), ""]
    columns: list[Column[Check]] = [
        Column(title="", cell=lambda check: check.verdict, right=False, colors=lambda check: (COLORS[check.verdict],)),
        Column(title="check", cell=lambda check: check.name, right=False),
        Column(title="found", cell=lambda check: check.found, right=False),
        Column(title="limit", cell=lambda check: check.limit, right=False, priority=1),
    ]
    lines += render_table(columns, answer.checks, style)
    if answer.seconds:
        total = sum(answer.seconds.values())
        phases = ", ".join(f"{name} {format_seconds(spent)}" for name, spent in answer.seconds.items())
        lines += ["", style.plain(f"{format_seconds(total)} in all: {phases}.")]
    return "\n".join(lines) + "\n"
