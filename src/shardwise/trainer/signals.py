"""Signals: SIGTERM, Ctrl-C and a closed terminal save and stop after the step under way, SIGUSR1 saves and goes on.

A handler only notes what was asked; the ranks agree on it after each step, because a signal reaches them at different
moments. After the last step there is nothing left to stop: what is being written is written to its end, since a signal
that ended the process there would cut off the last save. A second Ctrl-C ends the process at once; what comes within a
moment of the first is the same one, because a terminal signals the ranks and their launcher passes it on to them once
more.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Generator
from types import FrameType
from typing import Any

SAME_SECONDS = 5.0
"""A SIGINT this soon after the first signal is its echo."""


class Signals:
    """Notes what signals have asked for."""

    def __init__(self) -> None:
        self.stop = 0
        """Number of the signal that asked to stop, or 0."""
        self.save = False
        """Whether a signal has asked for a checkpoint."""
        self._before: dict[int, Any] = {}
        self._first = 0.0

    @contextlib.contextmanager
    def noted(self) -> Generator[Signals]:
        """Notes signals while inside; inside another `noted` of the same object it changes nothing."""
        if self._before:
            yield self
            return
        self.install()
        try:
            yield self
        finally:
            self.restore()

    def install(self) -> None:
        """Takes over the signals; of the main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                self._before[number] = signal.signal(number, self._note)

    def restore(self) -> None:
        """Gives the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save = True
        elif not self.stop:
            self.stop, self._first = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._first > SAME_SECONDS:
            raise KeyboardInterrupt
