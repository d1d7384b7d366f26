"""Reads a run folder for the report. Missing or broken parts are named, never guessed, and never stop the rest."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from shardwise.errors import ConfigError, UsageError
from shardwise.report.charts import LossCurves
from shardwise.vocabulary import codec
from shardwise.vocabulary.ledger import Ledger
from shardwise.vocabulary.measured import Measured
from shardwise.vocabulary.plan import Plan

T = TypeVar("T")
PARTS = {
    "plan.yaml": "what was predicted, and why this split",
    "ledger.json": "predicted beside measured",
    "metrics.jsonl": "the loss of every step",
    "measured.json": "the measured step, and answers before and after",
}
TRAIN_KEYS = ("loss", "train/loss")
"""Not train_loss, which is the mean of the run."""
HELD_OUT_KEYS = ("eval_loss", "eval/loss")
STEP_KEYS = ("step", "train/global_step", "global_step")


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """What a run left behind, as far as it could be read."""

    path: Path
    plan: Plan | None = None
    ledger: Ledger | None = None
    curves: LossCurves = field(default_factory=LossCurves)
    measured: Measured = field(default_factory=Measured)
    notes: tuple[str, ...] = ()
    """One sentence for every part that is missing or broken."""


def read_folder(path: Path) -> RunFolder:
    """A run folder.

    Raises:
        UsageError: If there is no such folder, or none of the parts is in it.
    """
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder; name the output_dir of a run, or a plan with --plan")
    if not any((path / name).exists() for name in PARTS):
        raise UsageError(f"{path} holds none of {', '.join(PARTS)}; name the output_dir of a run")
    notes: list[str] = []

    def part(name: str, read: Callable[[Path], T]) -> T | None:
        if not (path / name).exists():
            notes.append(f"{name} is missing: {PARTS[name]} cannot be shown")
            return None
        try:
            return read(path / name)
        except ConfigError as error:
            notes.append(f"{name} cannot be read: {error}")
            return None

    return RunFolder(
        path=path,
        plan=part("plan.yaml", lambda file: codec.read_noun(Plan, file)),
        ledger=part("ledger.json", lambda file: codec.read_noun(Ledger, file)),
        curves=part("metrics.jsonl", lambda file: read_curves(file, notes)) or LossCurves(),
        measured=part("measured.json", lambda file: codec.read_noun(Measured, file)) or Measured(),
        notes=tuple(notes),
    )


def read_curves(path: Path, notes: list[str]) -> LossCurves:
    """Training and held-out loss by step; lines that are no metrics are counted in `notes`.

    A run that was killed may end in half a line, and a resumed one repeats steps: the last word counts.

    Raises:
        ConfigError: If the file cannot be read.
    """
    train: dict[int, float] = {}
    held_out: dict[int, float] = {}
    broken = 0
    for line in _lines(path):
        record = _record(line)
        step = None if record is None else _number(record, STEP_KEYS)
        if record is None or step is None:
            broken += 1
            continue
        for keys, curve in ((TRAIN_KEYS, train), (HELD_OUT_KEYS, held_out)):
            loss = _number(record, keys)
            if loss is not None:
                curve[round(step)] = loss
    if broken:
        notes.append(f"{path.name}: {broken} line{'s' if broken > 1 else ''} without a step left out")
    return LossCurves(train=tuple(sorted(train.items())), held_out=tuple(sorted(held_out.items())))


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.strip():
                    yield line
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def _record(line: str) -> Mapping[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast("Mapping[str, Any]", record) if isinstance(record, dict) else None


def _number(record: Mapping[str, Any], keys: tuple[str, ...]) -> float | None:
    for key in keys:
        value = record.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None
