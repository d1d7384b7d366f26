"""What `probe` says when its ranks fail, shown with ranks that are shell scripts: no torch, no waiting."""

import json
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.errors import MissingExtraError, ResourceError
from shardwise.probe import launch as module
from shardwise.probe.launch import probe
from shardwise.probe.options import ProbeOptions

RanksRun = Callable[[str], None]


@pytest.fixture
def ranks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RanksRun:
    """Replace the interpreter of the ranks by a shell script; $FOLDER is the probe's, $RANK the rank's number."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)

    def replace(body: str) -> None:
        script = tmp_path / "rank.sh"
        script.write_text(f"#!/bin/sh\nFOLDER=$3\n{body}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(script))

    return replace


def run_probe(budget_seconds: float | None = None, progress: Callable[[str], None] | None = None) -> None:
    probe(ProbeOptions(quick=True, device="cpu", budget_seconds=budget_seconds, progress=progress))


def test_a_rank_that_dies_is_quoted(ranks_run: RanksRun) -> None:
    ranks_run('[ "$RANK" = 1 ] && { echo "out of tea" >&2; exit 7; }; exec sleep 30')
    started = time.monotonic()
    with pytest.raises(ResourceError, match=r"Rank 1 .* ended with code 7.*\n.*out of tea"):
        run_probe()
    assert time.monotonic() - started < 10  # rank 0 was not waited for


def test_a_killed_rank_is_named_with_its_signal(ranks_run: RanksRun) -> None:
    ranks_run("kill -9 $$")
    with pytest.raises(ResourceError, match="signal 9"):
        run_probe()


def test_a_ranks_own_words_come_through(ranks_run: RanksRun) -> None:
    words = json.dumps(["all_reduce brought 3 wrong elements"])
    ranks_run(f"echo '{words}' > $FOLDER/error-$RANK.json; exit 1")
    with pytest.raises(ResourceError, match=r"^all_reduce brought 3 wrong elements$"):
        run_probe()


def test_the_cause_is_told_not_its_consequences(ranks_run: RanksRun) -> None:
    ranks_run('[ "$RANK" = 1 ] && kill -9 $$; echo "Connection closed by peer"; exit 1')
    with pytest.raises(ResourceError, match="Rank 1 of the probe was ended by signal 9"):
        run_probe()
    ranks_run("""[ "$RANK" = 1 ] && echo '["wrong data"]' > $FOLDER/error-1.json; exit 1""")
    with pytest.raises(ResourceError, match=r"^wrong data$"):
        run_probe()


def test_missing_torch_names_the_extra(ranks_run: RanksRun) -> None:
    ranks_run("echo \"ModuleNotFoundError: No module named 'torch'\"; exit 1")
    with pytest.raises(MissingExtraError, match=r"shardwise\[train\]"):
        run_probe()


def test_a_hang_ends(ranks_run: RanksRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.1)
    ranks_run("exec sleep 60")
    started = time.monotonic()
    with pytest.raises(ResourceError, match="did not end"):
        run_probe(budget_seconds=0.2)
    assert time.monotonic() - started < 10


def test_no_rank_outlives_the_probe(ranks_run: RanksRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.3)
    pids = tmp_path / "pids"
    ranks_run(f"echo $$ >> {pids}; exec sleep 60")
    with pytest.raises(ResourceError):
        run_probe(budget_seconds=0.5)
    for pid in map(int, pids.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_progress_lines_arrive_whole(ranks_run: RanksRun) -> None:
    lines: list[str] = []
    # The descriptor is the last word of rank 0's command line.
    ranks_run(
        '[ "$RANK" = 1 ] && { sleep 0.6; exit 3; }; for fd; do :; done; '
        'printf "on" >/proc/self/fd/$fd; sleep 0.2; printf "e\\ntwo\\nthr" >/proc/self/fd/$fd; exec sleep 30'
    )
    with pytest.raises(ResourceError):
        run_probe(progress=lines.append)
    assert lines == ["one", "two"]
