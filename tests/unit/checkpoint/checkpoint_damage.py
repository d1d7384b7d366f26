"""The benchmark's mutations as a module for tests, and a way to kill a save at a chosen point."""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

_FILE = Path(__file__).parents[3] / "benchmarks" / "checkpoint_mutations.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("checkpoint_mutations", _FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["checkpoint_mutations"] = module
    spec.loader.exec_module(module)
    return module


damage: Any = _load()


def _counting(kill_at: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    seen = [0]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            seen[0] += 1
            if seen[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counted

    return wrap


def killed_at(event: int, work: Callable[[], Any]) -> bool:
    """Do something in a forked child that dies by SIGKILL before its n-th write, fsync, rename, unlink, mkdir or rmdir.

    Returns whether it died; False if it was done before.
    """
    child = os.fork()
    if child == 0:
        from shardwise.trainer.checkpoint import tensorfile

        wrap = _counting(event)
        for owner, name in (
            (tensorfile.HashingFile, "write"),
            (os, "fsync"),
            *((Path, name) for name in ("rename", "unlink", "mkdir", "rmdir")),
        ):
            patch.object(owner, name, wrap(getattr(owner, name))).start()
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(f"the save failed: {error!r}", file=sys.stderr)
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the save failed by itself"
    return os.WIFSIGNALED(status)


damage.killed_at = killed_at
