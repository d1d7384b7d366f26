"""Children that are ended when their time is up, with everything that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

_GRACE_SECONDS = 5.0


def run_children(commands: list[list[str]], environments: list[Mapping[str, str]], folder: Path, seconds: float) -> str:
    """Runs children to their end or to the limit; the problem in words, empty if all finished well."""
    children: list[subprocess.Popen[bytes]] = []
    errors = [folder / f"stderr{index}" for index in range(len(commands))]
    try:
        for command, environment, error in zip(commands, environments, errors, strict=True):
            with error.open("wb") as stderr:
                children.append(subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL,
                                                 stdout=subprocess.DEVNULL, stderr=stderr,
                                                 start_new_session=True))  # fmt: skip
        return _wait(children, errors, seconds)
    finally:
        for child in children:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_GRACE_SECONDS)


def _wait(children: list[subprocess.Popen[bytes]], errors: list[Path], seconds: float) -> str:
    """Waits for all; a child that fails ends the trial at once, since its peers would only hang."""
    deadline = time.monotonic() + seconds
    while True:
        codes = [child.poll() for child in children]
        failed = next((index for index, code in enumerate(codes) if code), None)
        if failed is not None:
            words = errors[failed].read_bytes().decode("utf-8", "replace").strip().splitlines()
            return f"rank {failed} failed: {words[-1][:300] if words else f'exit code {codes[failed]}'}"
        if all(code == 0 for code in codes):
            return ""
        left = deadline - time.monotonic()
        if left <= 0:
            return f"did not finish within {seconds:g} s and was ended"
        waiting = next(child for child, code in zip(children, codes, strict=True) if code is None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            waiting.wait(min(left, 0.1))
