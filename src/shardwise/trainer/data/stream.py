"""Sets that are read while they are trained on: a hub id, or a file too large to tokenize beforehand.

[Note: windows] A stream is cut into windows of about `WINDOW_STEPS` optimizer steps. Each window is tokenized while the
one before it is trained on, and is then planned like a small epoch: shuffled, packed, balanced over ranks, its last
step perhaps smaller. What a window holds follows from the source and the global batch alone, never from the number of
ranks. Every rank reads the whole stream and computes its own share of each step, so samples are split example by
example, whatever the shards of the source are: none is seen twice, and no rank runs dry before the others. The price
is that every rank tokenizes every row.

[Note: cursor] A checkpoint keeps the window of its next step and the place in the source where it starts. A resumed
run, on any number of ranks, goes there and tokenizes that window again: in a file of lines by one seek, in Parquet and
Arrow by skipping what is not decoded, elsewhere (gzip, CSV, hub) by reading over what lies before.

[Note: ends] When the stream ends before `max_steps`, it starts again from its first row. A window may end with the very
last row, or with the last that anything can be learned from; the next one then begins anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError, DataError
from shardwise.trainer.data.batches import BatchOptions, BatchPlan, BatchState, MicroBatch, plan_batches
from shardwise.trainer.data.encode import EncodedChunk, Encoder
from shardwise.trainer.data.formats import ExampleReader, Form, NumberedExample
from shardwise.trainer.data.options import DataOptions
from shardwise.trainer.data.sources import START, Place, Problems, open_source
from shardwise.trainer.data.store import TokenizedSet, TokenizeReport
from shardwise.trainer.data.tokenize import CHUNK_ROWS, Parts, check_supervised
from shardwise.vocabulary import codec

WINDOW_STEPS = 32
"""Optimizer steps of a window, about ([Note: windows])."""
_NUM_KEPT = 3
"""Windows in memory: the one being trained on, the one before it, whose last step may not be read yet, the next."""


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Where a window starts."""

    number: int = 0
    """Windows before it."""
    first_step: int = 0
    """Optimizer steps before it."""
    num_passes: int = 0
    """How often the source has ended before it."""
    place: Place = START
    """In the source."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Window:
    """Some steps of a stream."""

    start: Cursor
    end: Cursor
    """Where the next window starts."""
    plan: BatchPlan
    """Of this window alone; its steps count from 0."""

    def holds(self, step: int) -> bool:
        """Whether a step of the run lies in this window."""
        return self.start.first_step <= step < self.end.first_step


class WindowReader:
    """Reads one window after the other; the same on every rank.

    Args:
        options: What to read and how.
        tokenizer: A Hugging Face tokenizer.
        batches: The global batch, packing and seed; how many ranks there are changes no window.
        check: Called with each window's set; raises if it cannot be trained on.
    """

    def __init__(
        self, options: DataOptions, tokenizer: Any, batches: BatchOptions, check: Callable[[TokenizedSet], None]
    ) -> None:
        self.options, self.batches = options, batches
        self.source = open_source(options)
        self._encoder = Encoder(tokenizer, options)
        self._check = check
        self._form: Form | None = None
        self._open: _Open | None = None
        self.counts: Counter[str] = Counter()
        """Of all windows: rows, samples, and what truncation and bad rows took."""

    def read(self, start: Cursor) -> Window:
        """The window that starts at a cursor.

        Raises:
            DataError: A row that cannot be used, or nothing is left to train on.
        """
        opened, self._open = self._open, None
        is_entered = False
        if opened is None or opened.place != start.place:
            is_entered = True
            reader = ExampleReader(self.source, self.options, after=start.place, form=self._form)
            opened = _Open(reader=reader, examples=iter(reader), place=start.place)
        reader = opened.reader
        reader.problems.forget()
        parts, end = Parts(), self._fill(opened)
        for chunk in end.chunks:
            parts.add(chunk, reader.problems)
        if reader.problems.num_rows and not self.options.skip_bad_rows:
            raise reader.problems.error()
        is_rest = start.place != START
        if reader.form is None or not end.chunks:
            if is_rest:
                self.counts["num_skipped_rows"] += reader.problems.num_rows
                return self._again(start, is_entered=is_entered)
            raise DataError(f"{self.options.source} has no row to train on.")
        self._form = reader.form
        tokenized = parts.finished(self.options, reader, reader.form)
        if is_rest and not len(tokenized):
            self._count(tokenized.report, num_windows=0)
            return self._again(start, is_entered=is_entered)
        check_supervised(tokenized, parts, self.options, reader)
        self._check(tokenized)
        self._count(tokenized.report)
        return self._planned(start, end, tokenized)

    def _again(self, start: Cursor, *, is_entered: bool) -> Window:
        """The window of a cursor behind which the source has nothing to train on: its first rows ([Note: ends]).

        Args:
            start: The cursor.
            is_entered: Whether the source was entered there, by a run that goes on, and not read up to there.

        Raises:
            DataError: The source has become shorter than the cursor says.
        """
        if is_entered:
            rows = self.source.rows(Problems(self.source.name, self.source.unit), START)
            last = max((row.number for row in rows), default=0)
            if last < start.place.number:
                raise DataError(
                    f"{self.options.source} ends at {self.source.unit} {last:,}, but had been read up to "
                    f"{start.place.number:,} when the checkpoint was made. Resume with the data that the run was "
                    "started with, or start a new run."
                )
        return self.read(dataclasses.replace(start, num_passes=start.num_passes + 1, place=START))

    def _count(self, report: TokenizeReport, num_windows: int = 1) -> None:
        for name in ("num_rows", "num_samples", "num_truncated_rows", "num_truncated_tokens", "num_skipped_rows"):
            self.counts[name] += getattr(report, name)
        self.counts["num_dropped_rows"] += report.num_lost_rows + report.num_unsupervised_rows
        self.counts["num_windows"] += num_windows

    def _planned(self, start: Cursor, end: _Filled, tokenized: TokenizedSet) -> Window:
        digest = hashlib.sha256(f"shardwise window {self.batches.seed} {start.number}".encode()).digest()
        seed = int.from_bytes(digest[:6], "little")
        plan = plan_batches(
            tokenized, dataclasses.replace(self.batches, seed=seed, max_steps=None, num_train_epochs=1.0)
        )
        following = Cursor(
            number=start.number + 1,
            first_step=start.first_step + plan.num_steps,
            num_passes=start.num_passes + (end.place is None),
            place=end.place or START,
        )
        return Window(start=start, end=following, plan=plan)

    def _fill(self, opened: _Open) -> _Filled:
        """Encodes rows until a window is full, or the source ends."""
        chunks, lengths = list[EncodedChunk](), np.empty(0, dtype=np.int64)
        while rows := list(itertools.islice(opened.examples, CHUNK_ROWS)):
            chunk = self._encoder.encode(rows)
            num_before, lengths = len(lengths), np.concatenate([lengths, chunk.lengths])
            needed = self._num_needed(lengths)
            if needed is None:
                chunks.append(chunk)
                continue
            last = int(chunk.rows[needed - num_before - 1])
            kept = [one for one in rows if one.number <= last]
            behind = rows[len(kept) :]  # they belong to the next window
            chunks.append(self._encoder.encode(kept) if behind else chunk)
            place = kept[-1].end
            self._open = dataclasses.replace(
                opened, examples=itertools.chain(behind, opened.examples), place=place
            )  # fmt: skip
            return _Filled(chunks=tuple(chunks), place=place)
        return _Filled(chunks=tuple(chunks), place=None)

    def _num_needed(self, lengths: NDArray[np.int64]) -> int | None:
        """How many of these samples fill a window; None if more are needed."""
        num_rows = WINDOW_STEPS * self.batches.global_batch
        if not self.batches.packing:
            return num_rows if len(lengths) >= num_rows else None
        assert self.batches.max_length is not None, "plan_batches asks for it"
        full = np.searchsorted(np.cumsum(lengths), num_rows * self.batches.max_length)
        return int(full) + 1 if full < len(lengths) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Open:
    """A source that stays open from one window to the next: not every one can be entered in the middle."""

    reader: ExampleReader
    examples: Iterator[NumberedExample]
    """What is left of it."""
    place: Place
    """Before the first of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Filled:
    """The rows of a window."""

    chunks: tuple[EncodedChunk, ...]
    place: Place | None
    """Behind the last row; None: the source has ended."""


class StreamPlan(BatchPlan):
    """The plan of a stream: every window's own plan, one after the other ([Note: windows]).

    Args:
        reader: Where windows come from.
        first: The first window of the stream, which also tells streams apart.
    """

    def __init__(self, reader: WindowReader, first: Window) -> None:
        super().__init__(first.plan.set_at(0), reader.batches, first.plan.packing)
        self.steps_per_epoch = self.num_steps
        self.fingerprint = _fingerprint(reader, first)
        layout = f"{self.fingerprint} {self.options.num_ranks} {self.options.micro_batch} {self.num_steps}"
        self.layout_fingerprint = hashlib.sha256(layout.encode()).hexdigest()
        self._reader = reader
        self._windows = [first]
        self._lock = threading.Lock()  # the loop and the thread that makes batches both ask
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shardwise-stream")
        self._next: Future[Window] | None = None

    def epoch(self, step: int) -> int:
        """How often the source had ended before a step."""
        return self._window(step).start.num_passes

    def set_at(self, step: int) -> TokenizedSet:
        """The window of a step."""
        return self._window(step).plan.set_at(0)

    def row_indices(self, step: int) -> NDArray[np.int64]:
        """The packing rows of a step, in its window: [rows of the step]."""
        window, own = self._at(step)
        return window.row_indices(own)

    def sample_ids(self, step: int) -> tuple[int, ...]:
        """All samples of a step, over all ranks, numbered in its window."""
        window, own = self._at(step)
        return window.sample_ids(own)

    def num_supervised_tokens(self, step: int) -> int:
        """Predicted and learned tokens of a step over all ranks."""
        window, own = self._at(step)
        return window.num_supervised_tokens(own)

    def num_tokens(self, step: int) -> int:
        """Tokens of a step over all ranks, padding not counted."""
        window, own = self._at(step)
        return window.num_tokens(own)

    def num_micro_steps(self, step: int) -> int:
        """Micro-batches that every rank computes in a step."""
        window, own = self._at(step)
        return window.num_micro_steps(own)

    def micro_batches(self, step: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of a step over all ranks, heaviest first."""
        window, own = self._at(step)
        return window.micro_batches(own)

    def for_rank(self, step: int, rank: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of one rank in a step; equally many on every rank."""
        window, own = self._at(step)
        return window.for_rank(own, rank)

    def balance(self, step: int) -> float:
        """Mean cost of a rank over what the slowest rank of every round costs, 0 to 1."""
        window, own = self._at(step)
        return window.balance(own)

    def state(self, step: int) -> BatchState:
        """What a checkpoint keeps so that the run resumes with `step` as its next step."""
        with self._lock:
            known = next((window.start for window in self._windows if window.holds(step)), self._windows[-1].end)
        assert known.first_step <= step, f"step {step} lies before the windows that are kept"
        return BatchState(
            epoch=known.num_passes,
            step=step,
            seed=self.options.seed,
            fingerprint=self.fingerprint,
            cursor=json.dumps(codec.to_data(known)),
        )

    def resume(self, state: BatchState) -> int:
        """Goes to the window of the saved step ([Note: cursor]).

        Raises:
            PlanMismatchError: The saved run drew other samples.
        """
        step = super().resume(state)
        start = codec.from_data(Cursor, json.loads(state.cursor))
        with self._lock:
            if start != self._windows[0].start:
                # One thread reads, one window after the other: what it may be reading ahead comes to its end first.
                self._windows, self._next = [self._thread.submit(self._reader.read, start).result()], None
        return step

    def describe(self) -> str:
        """The effective batch and the steps in words, for the start of a run."""
        options, first = self.options, self._windows[0].plan
        unit = f"packed rows of {self.packing.budget:,} tokens" if options.packing else "sequences"
        tokens = float(self.packing.row_tokens.mean()) * options.global_batch
        places = options.micro_batch * options.num_ranks
        return (
            f"{options.micro_batch} x {-(-options.global_batch // places)} x {options.num_ranks} ranks for "
            f"{options.global_batch} {unit} a step, about {tokens:,.0f} tokens; {self.num_steps} steps of a stream, "
            f"read in windows of {first.num_steps} steps"
        )

    def account(self) -> str:
        """How much was read, and what was lost on the way, in all windows of this start."""
        counts = self._reader.counts
        return (
            f"Stream: {counts['num_windows']:,} windows read, {counts['num_rows']:,} rows, {counts['num_samples']:,} "
            f"samples; {counts['num_truncated_rows']:,} rows cut at max_length "
            f"({counts['num_truncated_tokens']:,} tokens lost), {counts['num_dropped_rows']:,} rows without anything "
            f"to learn, {counts['num_skipped_rows']:,} bad rows left out."
        )

    def _at(self, step: int) -> tuple[BatchPlan, int]:
        """The plan of a step's window, and the step's number in it."""
        window = self._window(step)
        return window.plan, step - window.start.first_step

    def _window(self, step: int) -> Window:
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} is outside the plan of {self.num_steps} steps")
        with self._lock:
            while step >= self._windows[-1].end.first_step:
                coming = self._next or self._thread.submit(self._reader.read, self._windows[-1].end)
                self._windows = [*self._windows, coming.result()][-_NUM_KEPT:]
                self._next = None
            newest = self._windows[-1]
            if self._next is None and newest.holds(step) and newest.end.first_step < self.num_steps:
                self._next = self._thread.submit(self._reader.read, newest.end)
            for window in self._windows:
                if window.holds(step):
                    return window
        raise IndexError(f"step {step} lies before the windows that are kept")


def _fingerprint(reader: WindowReader, first: Window) -> str:
    """Of the source as far as it was read, and of all that cuts it; the end of a stream is known to nobody."""
    settings = [
        reader.options.source,
        reader.options.split,
        reader.options.subset,
        WINDOW_STEPS,
        first.plan.fingerprint,
    ]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def plan_stream(
    options: DataOptions, tokenizer: Any, batches: BatchOptions, check: Callable[[TokenizedSet], None]
) -> StreamPlan:
    """Reads the first window of a stream, and plans the rest as it comes.

    Args:
        options: What to read and how.
        tokenizer: A Hugging Face tokenizer.
        batches: How to cut it; `max_steps` is required.
        check: Called with each window's set; raises if it cannot be trained on.

    Raises:
        ConfigError: `max_steps` is not set.
        DataError: A row that cannot be used, or nothing to train on.
    """
    if batches.max_steps is None:
        raise ConfigError(
            "streaming: true needs max_steps: nobody knows where a stream ends, so epochs cannot be counted. "
            "Set max_steps, or streaming: false to read the whole set first."
        )
    reader = WindowReader(options, tokenizer, batches, check)
    return StreamPlan(reader, reader.read(Cursor()))


def first_window(options: DataOptions, tokenizer: Any, num_rows: int) -> TokenizedSet:
    """The first rows of a stream, for looking at lengths before anything is planned."""
    batches = BatchOptions(global_batch=max(1, num_rows // WINDOW_STEPS), micro_batch=1, num_ranks=1)
    return WindowReader(options, tokenizer, batches, lambda _: None).read(Cursor()).plan.set_at(0)
