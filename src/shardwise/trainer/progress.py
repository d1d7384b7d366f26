"""What a person sees while a run goes on: one line that renews itself on a terminal, plain lines elsewhere.

Everything goes to stderr, from rank 0 only; stdout stays free for results.

[Note: time left] The first step compiles, reserves and warms up, so it tells nothing about the others. The time left is
the median of the latest steps, pauses taken out, for every step to come, and as much for pauses (evaluations, saves) a
step as they have taken so far; before the first pause they are not in it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import sys
import time
from collections import deque
from collections.abc import Generator, Mapping
from typing import TextIO

from shardwise.vocabulary.units import format_count, format_seconds

_NUM_REMEMBERED = 64
"""Steps whose duration tells how long the others take."""


class Progress:
    """Says how far a run is.

    Args:
        num_steps: Optimizer steps of the whole run.
        first_step: The step that this process starts with.
        speaks: Whether this rank is the one that speaks.
        stream: Where to; stderr if None.
    """

    def __init__(self, num_steps: int, first_step: int, *, speaks: bool, stream: TextIO | None = None) -> None:
        self._durations = deque[float](maxlen=_NUM_REMEMBERED)
        self._pauses = 0.0
        self._paused = 0.0
        self._last: float | None = None
        self._num_steps = num_steps
        self._first_step = first_step
        self._speaks = speaks
        self._stream = stream or sys.stderr
        self._renews = self._stream.isatty() and "CI" not in os.environ
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
        self._note_step()
        if not self._speaks or not (logs or self._renews):
            return
        line = self._line(step, values)
        if self._renews:
            width = shutil.get_terminal_size().columns
            print("\r" + line[: width - 1].ljust(width - 1), end="", file=self._stream, flush=True)
            self._open_line = True
        else:
            print(line, file=self._stream, flush=True)

    def _note_step(self) -> None:
        """How long it took since the step before, without pauses; the first one counts for nothing."""
        now = time.monotonic()
        if self._last is not None:
            self._durations.append(max(0.0, now - self._last - self._paused))
        self._last, self._paused = now, 0.0

    @contextlib.contextmanager
    def pause(self) -> Generator[None]:
        """What happens inside is no step: an evaluation or a save."""
        started = time.monotonic()
        try:
            yield
        finally:
            if self._last is not None:  # what comes before the first step comes once
                spent = time.monotonic() - started
                self._paused += spent
                self._pauses += spent

    def seconds_left(self, step: int) -> float | None:
        """Until the last step is over, after so many steps ([Note: time left]); None if nothing is known yet."""
        if not self._durations:
            return None
        left, done = self._num_steps - step, max(1, step - self._first_step)
        return (statistics.median(self._durations) + self._pauses / done) * left

    def close(self) -> None:
        """Leave the cursor at the start of a fresh line."""
        if self._speaks:
            self._end_line()

    def _end_line(self) -> None:
        if self._open_line:
            print(file=self._stream)
            self._open_line = False

    def _line(self, step: int, values: Mapping[str, float]) -> str:
        left = self.seconds_left(step)
        parts = [f"step {step}/{self._num_steps}"]
        if "loss" in values:
            parts.append(f"loss {values['loss']:.4f}")
        if "grad_norm" in values:
            parts.append(f"grad norm {values['grad_norm']:.3g}")
        if "tokens_per_second" in values:
            parts.append(f"{format_count(round(values['tokens_per_second']))} tokens/s")
        if step == self._num_steps:
            parts.append("done")
        elif left is not None:
            parts.append(f"{format_seconds(left)} left")
        return " | ".join(parts)
