"""What a person sees while a run goes on: one line that renews itself on a terminal, plain lines elsewhere.

Everything goes to stderr, from rank 0 only; stdout stays free for results.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from shardwise.vocabulary.units import format_count, format_seconds


class Progress:
    """Says how far a run is.

    Args:
        num_steps: Optimizer steps of the whole run.
        first_step: The step that this process starts with.
        speaks: Whether this rank is the one that speaks.
        stream: Where to; stderr if None.
    """

    def __init__(self, num_steps: int, first_step: int, *, speaks: bool, stream: TextIO | None = None) -> None:
        self._num_steps = num_steps
        self._first_step = first_step
        self._speaks = speaks
        self._stream = stream or sys.stderr
        self._renews = self._stream.isatty() and "CI" not in os.environ
        self._started = time.monotonic()
        self._open_line = False

    def say(self, text: str) -> None:
        """A line of words that stays."""
        if self._speaks:
            self._end_line()
            print(text, file=self._stream, flush=True)

    def step(self, step: int, values: Mapping[str, float], *, logs: bool) -> None:
        """One optimizer step is over.

        Args:
            step: Steps done, from 1.
            values: loss, tokens_per_second and so on, in HF's keys.
            logs: Whether this step is one of logging_steps; without a terminal only those are shown.
        """
        if not self._speaks or not (logs or self._renews):
            return
        line = self._line(step, values)
        if self._renews:
            width = shutil.get_terminal_size().columns
            print("\r" + line[: width - 1].ljust(width - 1), end="", file=self._stream, flush=True)
            self._open_line = True
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the cursor at the start of a fresh line."""
        if self._speaks:
            self._end_line()

    def _end_line(self) -> None:
        if self._open_line:
            print(file=self._stream)
            self._open_line = False

    def _line(self, step: int, values: Mapping[str, float]) -> str:
        done = step - self._first_step
        left = (time.monotonic() - self._started) / max(done, 1) * (self._num_steps - step)
        parts = [f"step {step}/{self._num_steps}"]
        if "loss" in values:
            parts.append(f"loss {values['loss']:.4f}")
        if "grad_norm" in values:
            parts.append(f"grad norm {values['grad_norm']:.3g}")
        if "tokens_per_second" in values:
            parts.append(f"{format_count(round(values['tokens_per_second']))} tokens/s")
        parts.append(f"{format_seconds(left)} left" if step < self._num_steps else "done")
        return " | ".join(parts)
