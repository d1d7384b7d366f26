r"""A launcher that is told to stop waits for its ranks to save.

[Note: stop signals]
torch's elastic launcher answers SIGTERM, SIGINT and SIGHUP by passing them on and killing with SIGKILL what still runs
30 s later (a time that only torch 2.13 and later lets one choose), in the middle of a save if need be. So those three
are taken from it, and passed to the ranks from here: they save after the step under way and end by themselves, within
`shutdown_timeout`. What ends with the signal is not started again. SIGQUIT (Ctrl-\) stays torch's: it ends at once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final

TORCHS_OWN: Final = "SIGQUIT"
"""What torch's elastic launcher is still told to handle."""
STOPPED_FILE: Final = "stopped"
_STOP: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL_S: Final = 0.2


class Stopping:
    """While entered, passes signals on to the ranks and remembers the first that asked to stop.

    Args:
        folder: Where `STOPPED_FILE` is left for ranks that are started again all the same.
        timeout_s: How long after the first stop signal ranks that still run are killed, in seconds.
    """

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self.number = 0
        """The signal that asked to stop, or 0."""
        self._file, self._timeout_s = folder / STOPPED_FILE, timeout_s
        self._before: dict[int, Any] = {}
        self._over = threading.Event()
        self._guard = threading.Thread(target=self._kill_late, name="shardwise-stop", daemon=True)

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():  # elsewhere the embedding program owns the signals
            for number in (*_STOP, signal.SIGUSR1, signal.SIGQUIT):
                self._before[number] = signal.getsignal(number)
                if number != signal.SIGQUIT and self._before[number] is not signal.SIG_IGN:  # nohup ignores SIGHUP
                    signal.signal(number, self._pass_on)
        self._guard.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._over.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, received: int, _frame: FrameType | None) -> None:
        if received != signal.SIGUSR1 and not self.number:
            self.number = received
            self._file.touch()
            name = signal.Signals(received).name
            sys.stderr.write(
                f"shardwise: {name}: the ranks save after this step and stop, within {self._timeout_s:.0f} s "
                "(shutdown_timeout)\n"
            )
        _signal_ranks(signal.SIGTERM if received == signal.SIGHUP else received)

    def _kill_late(self) -> None:
        while not self._over.wait(_POLL_S):
            if self.number and not self._over.wait(self._timeout_s):
                _signal_ranks(signal.SIGKILL)
                return


def _signal_ranks(number: int) -> None:
    for process in multiprocessing.active_children():
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
