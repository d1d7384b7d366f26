"""A hang ends in the name of the rank and of the collective, long before the collectives' own timeouts.

[Note: watch] A thread of each rank writes a few words into the ranks' common store every few seconds: that it lives,
how often the main thread has come further, and what it does. The lowest rank that lives reads the words of all:

    silent   a rank has written nothing for a minute: its process was stopped, or its machine or network is gone
    stuck    all live, but no main thread has come further for `hang_timeout`: the one that is behind is named

A hanging main thread can raise nothing, so the thread leaves the verdict as the process's last words and ends it; the
launcher reads them and ends the others.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardwise.errors import TrainingError
from shardwise.trainer.sentinels.words import name_ranks
from shardwise.vocabulary import codec, last_words
from shardwise.vocabulary.units import format_seconds

SILENT_S = 60.0
"""A rank that has written nothing for so long is given up."""
_KEY = "shardwise-watch"
_WAITS = {
    "foreach_all_gather": "all_gather",
    "foreach_all_gather_copy_out": "all_gather",
    "wait_for_unshard": "all_gather",
    "foreach_reduce": "reduce_scatter",
    "_wait_for_post_backward": "reduce_scatter",
    "finalize_backward": "reduce_scatter",
}
"""Functions of `fully_shard` that wait for a collective of their own."""


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    """How long is too long, in seconds."""

    silent_s: float = SILENT_S
    stuck_s: float = 600.0

    @property
    def beat_s(self) -> float:
        """Between two words of a rank."""
        return min(5.0, self.silent_s / 4)


def limits_of(hang_timeout: float) -> HangLimits:
    """The limits that a run file's `hang_timeout` means, in seconds; 0: no watch."""
    return HangLimits(silent_s=min(SILENT_S, hang_timeout), stuck_s=hang_timeout)


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a rank says of itself."""

    beat: int
    tick: int
    """How often its main thread has come further."""
    what: str
    """What the main thread does."""
    waits_in: str = ""
    """The collective that it waits in, if it has not come further since the beat before."""
    patient: bool = False
    """Whether it may take as long as it likes."""
    host: str = ""
    pid: int = 0


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The newest words of a rank, and how long they are old by the reader's own clock."""

    beat: Beat
    silent_s: float
    stuck_s: float


class HangWatch:
    """Watches this rank's main thread, and the other ranks ([Note: watch]).

    Args:
        limits: How long is too long.
        on_hang: What to do with the verdict; None: leave it as last words and end the process.
    """

    def __init__(self, limits: HangLimits, on_hang: Callable[[TrainingError], None] | None = None) -> None:
        self._limits, self._on_hang = limits, on_hang or self._end
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._what, self._patient, self._tick = "starting", False, 0
        self._stopped = threading.Event()
        self._reader = _Reader(limits)
        self._killable: list[int] = []

    def at(self, what: str, *, patient: bool = False) -> None:
        """The main thread has come further.

        Args:
            what: What it does next, such as `step 3: forward and backward`.
            patient: Whether that may take as long as it likes; a silent rank is noticed all the same.
        """
        self._what, self._patient = what, patient
        self._tick += 1

    @contextlib.contextmanager
    def running(self) -> Generator[HangWatch]:
        """Watches while what is inside runs; alone there is nobody to wait for, and nothing is watched."""
        if self._size == 1 or self._limits.stuck_s <= 0:
            yield self
            return
        store: Any = c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
        store = store.clone() if hasattr(store, "clone") else store  # a connection of its own
        store.set_timeout(timedelta(seconds=self._limits.silent_s))
        thread = threading.Thread(target=self._watch, args=(store,), name="shardwise-watch", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stopped.set()
            thread.join(self._limits.silent_s)
            with contextlib.suppress(RuntimeError):
                store.delete_key(f"{_KEY}/{self._rank}")

    def _watch(self, store: Any) -> None:
        last_tick, lost_since, last_round = -1, None, time.monotonic()
        for number in range(1 << 60):
            waits_in = what_it_waits_in() if self._tick == last_tick else ""
            last_tick = self._tick
            mine = Beat(
                beat=number, tick=self._tick, what=self._what, waits_in=waits_in, patient=self._patient,
                host=platform.node(), pid=os.getpid(),
            )  # fmt: skip
            now = time.monotonic()
            if now - last_round > 3 * self._limits.beat_s:
                self._reader.forget()  # this process was stopped itself: what it has seen is old
            last_round = now
            try:
                store.set(f"{_KEY}/{self._rank}", codec.to_json(mine))
                verdict, lost_since = self._judge(store), None
            except RuntimeError:  # the store does not answer
                lost_since = lost_since or now
                verdict = _store_lost(now - lost_since) if now - lost_since > self._limits.silent_s else None
            if verdict is not None and not self._stopped.is_set():
                self._on_hang(verdict)
                return
            if self._stopped.wait(self._limits.beat_s):
                return

    def _judge(self, store: Any) -> TrainingError | None:
        """The verdict, if this is the lowest rank that lives and there is one."""
        for lower in range(self._rank):
            seen = self._reader.read(store, lower)
            if seen is None or seen.silent_s <= self._limits.silent_s:
                return None
        ranks = {rank: seen for rank in range(self._size) if (seen := self._reader.read(store, rank)) is not None}
        verdict = judge(ranks, self._limits)
        if verdict is not None:
            here = platform.node()
            silent = [seen for seen in ranks.values() if seen.silent_s > self._limits.silent_s]
            self._killable = [seen.beat.pid for seen in silent if seen.beat.host == here]
        return verdict

    def _end(self, verdict: TrainingError) -> None:
        """Last words, and the end; a stopped process of this machine too, so that its card is free at once."""
        last_words.leave(self._rank, verdict)
        if not os.environ.get(last_words.FOLDER_VARIABLE):
            sys.stderr.write(f"\nshardwise: {verdict}\n")
            sys.stderr.flush()
        for pid in self._killable:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        os._exit(verdict.exit_code)


class _Reader:
    """Reads what ranks have said, and knows since when it has not changed, by this process's own clock."""

    def __init__(self, limits: HangLimits) -> None:
        self._limits = limits
        self._seen: dict[int, tuple[Beat, float, float]] = {}

    def forget(self) -> None:
        """Count from now on."""
        self._seen.clear()

    def read(self, store: Any, rank: int) -> Seen | None:
        """None if the rank has not said anything yet, or has taken its leave."""
        key = f"{_KEY}/{rank}"
        if not store.check([key]):
            self._seen.pop(rank, None)
            return None
        beat = codec.from_data(Beat, json.loads(store.get(key)))
        now = time.monotonic()
        before, beaten_at, moved_at = self._seen.get(rank, (None, now, now))
        if before is None or beat.beat != before.beat:
            beaten_at = now
        if before is None or beat.tick != before.tick:
            moved_at = now
        self._seen[rank] = (beat, beaten_at, moved_at)
        return Seen(beat=beat, silent_s=now - beaten_at, stuck_s=now - moved_at)


def judge(ranks: Mapping[int, Seen], limits: HangLimits) -> TrainingError | None:
    """Whether ranks hang, from what they have said.

    Args:
        ranks: All that have said anything.
        limits: How long is too long.

    Returns:
        The error that names the rank and the collective; None if all is well.
    """
    silent = {rank: seen for rank, seen in ranks.items() if seen.silent_s > limits.silent_s}
    others = {rank: seen for rank, seen in ranks.items() if rank not in silent}
    if silent:
        names = "; ".join(
            f"rank {rank} (process {seen.beat.pid} on {seen.beat.host}, last heard of in {seen.beat.what})"
            for rank, seen in silent.items()
        )
        age = format_seconds(max(seen.silent_s for seen in silent.values()))
        return TrainingError(
            f"No sign of life for {age} from {names}. {_waiting(others)} The process was stopped or starved, or its "
            "machine or network is gone: look there (ps, dmesg, nvidia-smi), then go on from the newest checkpoint "
            "with --resume."
        )
    if not ranks or any(seen.beat.patient or seen.stuck_s <= limits.stuck_s for seen in ranks.values()):
        return None
    behind = _behind(ranks)
    rest = {rank: seen for rank, seen in ranks.items() if rank not in behind}
    age = format_seconds(min(seen.stuck_s for seen in ranks.values()))
    return TrainingError(
        f"No rank has come further for {age}. {_told(behind)} {_waiting(rest)}".rstrip()
        + " If the work there may take so long, raise hang_timeout; otherwise go on from the newest checkpoint with "
        "--resume."
    )


def _behind(ranks: Mapping[int, Seen]) -> dict[int, Seen]:
    """Who holds the others up: the least far; among equals those that wait in no collective, or in another."""
    least = min(seen.beat.tick for seen in ranks.values())
    behind = {rank: seen for rank, seen in ranks.items() if seen.beat.tick == least}
    if len(behind) < len(ranks):
        return behind
    idle = {rank: seen for rank, seen in behind.items() if not seen.beat.waits_in}
    if idle:
        return idle
    waits = [seen.beat.waits_in for seen in behind.values()]
    usual = max(set(waits), key=waits.count)
    return {rank: seen for rank, seen in behind.items() if seen.beat.waits_in != usual} or behind


def _told(ranks: Mapping[int, Seen]) -> str:
    return " ".join(
        f"{name_ranks(same)[0].upper()}{name_ranks(same)[1:]} {'is' if len(same) == 1 else 'are'} in {what}."
        for what, same in _by_place(ranks).items()
    )


def _waiting(ranks: Mapping[int, Seen]) -> str:
    told = (f"{name_ranks(same)} in {what}" for what, same in _by_place(ranks).items())
    return f"Waiting: {', '.join(told)}." if ranks else ""


def _by_place(ranks: Mapping[int, Seen]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for rank, seen in ranks.items():
        waits = f"{seen.beat.waits_in} ({seen.beat.what})" if seen.beat.waits_in else seen.beat.what
        places.setdefault(waits, []).append(rank)
    return places


def _store_lost(seconds: float) -> TrainingError:
    return TrainingError(
        f"The meeting point of the ranks has not answered for {format_seconds(seconds)}: the process that holds it "
        "(the launcher, or rank 0) was stopped, or its machine or network is gone. Go on from the newest checkpoint "
        "with --resume."
    )


# What this process waits in ------------------------------------------------------------------------------------------


def what_it_waits_in() -> str:
    """The collective that a thread of this process is in, by torch's flight recorder or by its stack; empty if none."""
    recorded = _flight_recorder() if torch.cuda.is_available() else ""
    if recorded:
        return recorded
    me = threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]  # documented all the same
        if ident != me and not names.get(ident, "").startswith("shardwise-"):
            found = collective_of(frame)
            if found:
                return found
    return ""


def collective_of(frame: FrameType | None) -> str:
    """The collective that a stack is in: the innermost function of torch.distributed that is one."""
    while frame is not None:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if "fsdp" in file and name in _WAITS:
            return _WAITS[name]
        if file.endswith("distributed_c10d.py") and name in c10d.__all__:
            return name
        frame = frame.f_back
    return ""


def _flight_recorder() -> str:
    """The oldest collective on the card that has not ended, such as `nccl:all_gather (number 1234)`."""
    bindings: Any = importlib.import_module("torch._C._distributed_c10d")
    dump: Any = getattr(bindings, "_dump_nccl_trace", None) or getattr(bindings, "_dump_fr_trace", None)
    if dump is None:
        return ""
    try:
        trace = pickle.loads(dump(includeCollectives=True, includeStackTraces=False, onlyActive=True))
        active = [entry for entry in trace.get("entries", ()) if entry.get("state") != "completed"]
        oldest = min(active, key=lambda entry: entry.get("record_id", 0))
        return f"{oldest['profiling_name']} (number {oldest.get('collective_seq_id')})"
    except (RuntimeError, ValueError, KeyError, TypeError, pickle.PickleError):
        return ""
