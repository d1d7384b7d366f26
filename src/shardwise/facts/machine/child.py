"""The driver's libraries, asked in a process of their own.

[Note: driver in a child]
NVML and libcuda are C behind ctypes: a call that the binding and the driver understand differently does not raise, it
ends the process, and a driver in trouble may not answer at all. Neither may take down whoever asks. So on a machine
with a card the libraries are asked by `python -m shardwise.facts.machine QUESTION`, which prints JSON, within a time
limit. That costs about a tenth of a second, once a look at a machine. Where there is no card there is nothing to fear,
and the question is asked in place.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import shardwise
from shardwise.facts.machine.nvml import ask_nvml
from shardwise.facts.machine.record import Reading, Unreadable
from shardwise.facts.machine.system import from_plain, to_plain

Question = Literal["nvml", "cuda-cards"]
LIMIT_SECONDS = 30.0
"""Without the persistence daemon the driver wakes every card first, which takes seconds."""
_COMMANDS: Mapping[str, str] = {"nvml": "nvidia-smi -q", "cuda-cards": "nvidia-smi -L"}
_NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE."""


def read_nvml() -> Reading[dict[str, Any]]:
    """What NVML says about every card and every pair; see `nvml.ask_nvml`."""
    return ask_nvml() if not _has_card() else ask_child("nvml")


def count_cuda_cards() -> Reading[int]:
    """Cards that a CUDA program would see here, CUDA_VISIBLE_DEVICES and MIG respected. Creates no context."""
    return 0 if not _has_card() else ask_child("cuda-cards")


def _has_card() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def ask_child(question: Question, limit_seconds: float = LIMIT_SECONDS) -> Reading[Any]:
    """The answer of a child process; whatever happens to it becomes an `Unreadable`."""
    roots = [str(Path(shardwise.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, roots))}
    command = _COMMANDS[question]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "shardwise.facts.machine", question],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Unreadable(why=f"the driver did not answer within {limit_seconds:g} s", command=command)
    except OSError as error:
        return Unreadable(why=f"no process could be started to ask the driver: {error.strerror}", command=command)
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return Unreadable(why=f"the driver's library ended the process that asked it ({name})", command=command)
    try:
        return from_plain(json.loads(done.stdout))
    except json.JSONDecodeError:
        words = done.stderr.strip().splitlines()
        return Unreadable(why=f"the driver could not be asked: {words[-1] if words else 'no answer'}", command=command)


def answer(arguments: list[str]) -> int:
    """In the child: print the answer. Returns the exit code."""
    questions: Mapping[str, Callable[[], Any]] = {"nvml": ask_nvml, "cuda-cards": ask_cuda}
    if len(arguments) != 1 or arguments[0] not in questions:
        sys.stderr.write(f"usage: python -m shardwise.facts.machine {{{','.join(questions)}}}\n")
        return 2
    sys.stdout.write(json.dumps(to_plain(questions[arguments[0]]())) + "\n")
    return 0


def ask_cuda(library: Any = None) -> Reading[int]:
    """The number of cards, from the CUDA driver itself.

    Args:
        library: libcuda, or something that answers like it; loaded if None.
    """
    if library is None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            return Unreadable(why=f"CUDA: {error}", command="nvidia-smi")
    count = ctypes.c_int(0)
    code = cast("int", library.cuInit(0)) or cast("int", library.cuDeviceGetCount(ctypes.byref(count)))
    if code == _NO_DEVICE:
        return 0
    return count.value if code == 0 else Unreadable(why=f"CUDA: error {code}", command="nvidia-smi")
