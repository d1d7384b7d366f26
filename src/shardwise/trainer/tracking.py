"""Where a run's numbers go: metrics.jsonl always, trackers if asked for.

The file is the truth; a tracker is a guest. One that fails, whatever it raises, says so once and is not asked again: it
can never stop a run.

[Note: each step once] A run that was killed has logged steps beyond its last checkpoint, and does them again. With the
first line that it logs then, those of before are moved to metrics.repeated.jsonl, so that metrics.jsonl holds every
step once. A start that fails before it logs moves nothing.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

from shardwise.vocabulary.run import Tracker

METRICS_FILE, REPEATED_FILE = "metrics.jsonl", "metrics.repeated.jsonl"
Say = Callable[[str], None]


class Sink(Protocol):
    """One tracker."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Numbers of one step, by HF's keys with `train/` or `eval/` before them."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrackingWish:
    """What is written where."""

    folder: Path
    """The run folder."""
    trackers: Sequence[Tracker] = ()
    """Names of trackers, as in `report_to`."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the trackers may show as the run's settings."""
    run_name: str = ""
    """The run's name in the trackers."""
    first_step: int = 0
    """Steps done when it starts; what an earlier start has logged beyond them will be done again."""


class Tracking:
    """Writes numbers; on rank 0 only.

    Args:
        wish: What is written where.
        say: Where warnings go.
    """

    def __init__(self, wish: TrackingWish, say: Say) -> None:
        self._path, self._first_step = wish.folder / METRICS_FILE, wish.first_step
        self._file: TextIO | None = None
        self._say = say
        self._sinks: dict[str, Sink] = {}
        for name in wish.trackers:
            if name != "none":
                self._guard(name, lambda name=name: self._open(name, wish))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One line in metrics.jsonl, and the same to every tracker.

        Args:
            values: By HF's keys: loss, grad_norm, learning_rate, epoch, eval_loss.
            step: Optimizer steps done.
        """
        if self._file is None:
            set_aside(self._path, self._first_step)
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps({**values, "step": step}) + "\n")
        self._file.flush()
        named = {_tracker_key(key): value for key, value in values.items()}
        for name, sink in list(self._sinks.items()):
            self._guard(name, lambda sink=sink: sink.log(named, step))

    def close(self) -> None:
        """Finish every tracker and the file."""
        for name, sink in list(self._sinks.items()):
            self._guard(name, sink.close)
        if self._file is not None:
            self._file.close()

    def _open(self, name: str, wish: TrackingWish) -> None:
        self._sinks[name] = _SINKS[name](wish)

    def _guard(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._sinks.pop(name, None)
            self._say(
                f"Warning: the tracker {name} failed and is left out from here on: {type(error).__name__}: {error}"
            )


def set_aside(path: Path, steps_done: int) -> int:
    """Move the lines of steps that will be done again to the file beside ([Note: each step once]); nothing is lost.

    Args:
        path: The metrics file; it need not exist.
        steps_done: Lines up to this step stay; none does for 0, where a run starts at the beginning.

    Returns:
        How many lines have moved; half a line that a killed process has left is one of them.
    """
    if not path.is_file():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    stays = [steps_done > 0 and _is_up_to(line, steps_done) for line in lines]
    repeated = [line for line, kept in zip(lines, stays, strict=True) if not kept]
    if not repeated:
        return 0
    with (path.parent / REPEATED_FILE).open("ab") as aside:
        aside.writelines(line if line.endswith(b"\n") else line + b"\n" for line in repeated)
        aside.flush()
        os.fsync(aside.fileno())
    unfinished = path.with_name(path.name + ".part")
    with unfinished.open("wb") as file:
        file.writelines(line for line, kept in zip(lines, stays, strict=True) if kept)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    return len(repeated)


def _is_up_to(line: bytes, step: int) -> bool:
    """Whether a line is whole and of no step that will be done again."""
    if not line.endswith(b"\n"):
        return False
    try:
        record = json.loads(line)
    except ValueError:
        return False
    found = cast(dict[str, Any], record).get("step") if isinstance(record, dict) else None
    return not isinstance(found, (int, float)) or found <= step


def _tracker_key(key: str) -> str:
    return f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}"


class _TensorBoard:
    def __init__(self, wish: TrackingWish) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        place = os.environ.get("TENSORBOARD_LOGGING_DIR") or str(wish.folder / "tensorboard" / wish.run_name)
        again = wish.first_step + 1 if wish.first_step else None  # steps from here on will be logged again
        self._writer: Any = SummaryWriter(log_dir=place, purge_step=again)
        self._writer.add_text("settings", "```\n" + json.dumps(wish.settings, indent=2, default=str) + "\n```")

    def log(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """W&B, and trackio, which has the same three calls."""

    def __init__(self, module: str, wish: TrackingWish) -> None:
        self._api: Any = importlib.import_module(module)
        where: dict[str, Any] = {"dir": str(wish.folder)} if module == "wandb" else {}
        project = os.environ.get("WANDB_PROJECT" if module == "wandb" else "TRACKIO_PROJECT", "shardwise")
        self._api.init(project=project, name=wish.run_name, config=dict(wish.settings), **where)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._api.log(dict(values), step=step)

    def close(self) -> None:
        self._api.finish()


_SINKS: dict[str, Callable[[TrackingWish], Sink]] = {
    "tensorboard": _TensorBoard,
    "wandb": lambda wish: _Wandb("wandb", wish),
    "trackio": lambda wish: _Wandb("trackio", wish),
}
