"""Where a run's numbers go: metrics.jsonl always, trackers if asked for.

The file is the truth; a tracker is a guest. One that fails, whatever it raises, says so once and is not asked again: it
can never stop a run.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from shardwise.vocabulary.run import Tracker

METRICS_FILE = "metrics.jsonl"
Say = Callable[[str], None]


class Sink(Protocol):
    """One tracker."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Numbers of one step, by HF's keys with `train/` or `eval/` before them."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


class Tracking:
    """Writes numbers; on rank 0 only.

    Args:
        folder: The run folder.
        trackers: Names of trackers, as in `report_to`.
        settings: What the trackers may show as the run's settings.
        run_name: The run's name in the trackers.
        say: Where warnings go.
    """

    def __init__(
        self, folder: Path, trackers: Sequence[Tracker], settings: Mapping[str, Any], run_name: str, say: Say
    ) -> None:
        self._file = (folder / METRICS_FILE).open("a", encoding="utf-8")
        self._say = say
        self._sinks: dict[str, Sink] = {}
        for name in trackers:
            if name != "none":
                self._guard(name, lambda name=name: self._open(name, folder, settings, run_name))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One line in metrics.jsonl, and the same to every tracker.

        Args:
            values: By HF's keys: loss, grad_norm, learning_rate, epoch, eval_loss.
            step: Optimizer steps done.
        """
        self._file.write(json.dumps({**values, "step": step}) + "\n")
        self._file.flush()
        named = {_tracker_key(key): value for key, value in values.items()}
        for name, sink in list(self._sinks.items()):
            self._guard(name, lambda sink=sink: sink.log(named, step))

    def close(self) -> None:
        """Finish every tracker and the file."""
        for name, sink in list(self._sinks.items()):
            self._guard(name, sink.close)
        self._file.close()

    def _open(self, name: str, folder: Path, settings: Mapping[str, Any], run_name: str) -> None:
        self._sinks[name] = _SINKS[name](folder, settings, run_name)

    def _guard(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._sinks.pop(name, None)
            self._say(
                f"Warning: the tracker {name} failed and is left out from here on: {type(error).__name__}: {error}"
            )


def _tracker_key(key: str) -> str:
    return f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}"


class _TensorBoard:
    def __init__(self, folder: Path, settings: Mapping[str, Any], run_name: str) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        place = os.environ.get("TENSORBOARD_LOGGING_DIR") or str(folder / "tensorboard" / run_name)
        self._writer: Any = SummaryWriter(log_dir=place)
        self._writer.add_text("settings", "```\n" + json.dumps(settings, indent=2, default=str) + "\n```")

    def log(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """W&B, and trackio, which has the same three calls."""

    def __init__(self, module: str, folder: Path, settings: Mapping[str, Any], run_name: str) -> None:
        self._api: Any = importlib.import_module(module)
        where: dict[str, Any] = {"dir": str(folder)} if module == "wandb" else {}
        project = os.environ.get("WANDB_PROJECT" if module == "wandb" else "TRACKIO_PROJECT", "shardwise")
        self._api.init(project=project, name=run_name, config=dict(settings), **where)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._api.log(dict(values), step=step)

    def close(self) -> None:
        self._api.finish()


_SINKS: dict[str, Callable[[Path, Mapping[str, Any], str], Sink]] = {
    "tensorboard": _TensorBoard,
    "wandb": lambda folder, settings, run_name: _Wandb("wandb", folder, settings, run_name),
    "trackio": lambda folder, settings, run_name: _Wandb("trackio", folder, settings, run_name),
}
