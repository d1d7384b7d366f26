"""What a process says before it ends, in a file, for the one that started it.

A rank that fails writes its error as data; its launcher reads the words of all ranks and raises the earliest, as the
very class that it was. A rank whose main thread hangs leaves its words from another thread, then ends the process.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise import errors
from shardwise.errors import ShardwiseError, TrainingError

FOLDER_VARIABLE = "SHARDWISE_LAST_WORDS"
"""Names the folder to a process; not set: nobody reads."""


def write(folder: Path, rank: int, error: BaseException) -> None:
    """Leave an error in a file of this rank, whole or not at all."""
    record = {
        "rank": rank,
        "time": time.time(),
        "class": type(error).__name__,
        "module": type(error).__module__,
        "problems": list(error.problems) if isinstance(error, ShardwiseError) else [str(error)],
        "traceback": "".join(traceback.format_exception(error)),
    }
    unfinished = folder / f"rank-{rank}.part"
    unfinished.write_text(json.dumps(record), encoding="utf-8")
    unfinished.replace(folder / f"rank-{rank}.json")


def leave(rank: int, error: BaseException) -> None:
    """Leave an error where this process's launcher reads; nothing happens if none does."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and Path(folder).is_dir():
        write(Path(folder), rank, error)


def read(folder: Path) -> list[Mapping[str, Any]]:
    """The words of all ranks, earliest first."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank-*.json")]
    return sorted(records, key=lambda record: record["time"])


def is_ours(record: Mapping[str, Any]) -> bool:
    """Whether it was an error meant for the user."""
    return record["module"] == errors.__name__


def as_error(record: Mapping[str, Any]) -> ShardwiseError:
    """The rank's own error, if it is one of ours; otherwise a TrainingError with the traceback in a note."""
    kind = getattr(errors, record["class"], None) if is_ours(record) else None
    if isinstance(kind, type) and issubclass(kind, ShardwiseError):
        error = kind.__new__(kind)
        ShardwiseError.__init__(error, *record["problems"])
        return error
    error = TrainingError(f"Rank {record['rank']} failed: {record['class']}: {record['problems'][0]}")
    error.add_note(record["traceback"])
    return error
