"""The whole set, tokenized once, before any process group exists.

Ranks that tokenize behind a collective's timeout are a classic hang: call `prepare` in the launcher, or at the top of
each rank before torch.distributed is touched. One process of a machine works, the others find the result in the cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import DataError, ResourceError
from shardwise.trainer.data import cache
from shardwise.trainer.data.encode import NUM_SHOWN_ROWS, EncodedChunk, Encoder
from shardwise.trainer.data.formats import ExampleReader, Form, NumberedExample
from shardwise.trainer.data.options import DataOptions
from shardwise.trainer.data.sources import Problems, open_source
from shardwise.trainer.data.store import TokenizedSet, TokenizeReport, count_supervised

CHUNK_ROWS = 512
"""Rows that are tokenized together."""
ROWS_IN_PROCESS = 4096
"""A set with fewer rows is not worth starting processes for."""
NOTED_LOSS = 0.02
"""Share of all tokens that truncation may take without a sentence of its own."""
_CHAT_FORMS = ("messages", "conversations", "instruction+output")

Progress = Callable[[int], None]


def prepare(options: DataOptions, tokenizer: Any, progress: Progress | None = None) -> TokenizedSet:
    """Reads, renders and tokenizes a data set, or takes it from the cache. Call it before any process group exists.

    Args:
        options: What to read and how.
        tokenizer: A Hugging Face tokenizer.
        progress: Called with the number of rows read so far, after every chunk.

    Raises:
        DataError: Rows that cannot be used, by number; or nothing is supervised; or everything is, where only the
            assistant was asked for.
        MissingExtraError: The source needs pyarrow or datasets, which is not installed.
        ResourceError: The cache cannot be written, or a worker process was killed.
    """
    if options.max_length < 2:
        raise DataError(f"max_length is {options.max_length}; a sample needs at least 2 tokens to predict one.")
    encoder = Encoder(tokenizer, options)
    if options.cache_dir is None:
        return _tokenize(options, encoder, progress).tokenized
    template = encoder.renderer.template_override
    content_hash = open_source(options).content_hash()
    folder = options.cache_dir.expanduser() / cache.cache_key(content_hash, tokenizer, options, template)
    found = cache.load(folder)
    if found is None:
        with cache.lock(folder):
            found = cache.load(folder)  # somebody else may have made it while we waited
            if found is None:
                cache.save(_tokenize(options, encoder, progress).tokenized, folder)
                found = cache.load(folder)
    if found is None:
        raise ResourceError(f"The tokenized set in {folder} cannot be read back right after it was written.")
    return dataclasses.replace(found, report=dataclasses.replace(found.report, source=options.source))


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeLengths:
    """A tokenized set, and how long its rows were before truncation."""

    tokenized: TokenizedSet
    lengths: NDArray[np.int64]
    """Tokens of every row, rows that were dropped included. [rows]"""


def prepare_with_lengths(options: DataOptions, tokenizer: Any) -> WholeLengths:
    """As `prepare`, in memory, with the lengths that truncation hides: for a person to look at."""
    return _tokenize(options, Encoder(tokenizer, options), None)


def _tokenize(options: DataOptions, encoder: Encoder, progress: Progress | None) -> WholeLengths:
    reader = ExampleReader(open_source(options), options)
    parts = Parts()
    for chunk in _encode_all(reader, encoder, options.num_workers):
        parts.add(chunk, reader.problems)
        if progress is not None:
            progress(reader.num_rows)
    if reader.problems.num_rows and not options.skip_bad_rows:
        raise reader.problems.error()
    if reader.form is None or not parts.chunks:
        why = f": {'; '.join(reader.problems.lines())}" if reader.problems.num_rows else ""
        raise DataError(f"{options.source} has no row to train on{why}.")
    tokenized = parts.finished(options, reader, reader.form)
    check_supervised(tokenized, parts, options, reader)
    whole = np.concatenate([chunk.whole_lengths for chunk in parts.chunks])
    return WholeLengths(tokenized=tokenized, lengths=whole)


# ------------------------------------------------------------------------------------------- gathering the chunks


@dataclass(kw_only=True, eq=False)
class Parts:
    """The chunks of a set, or of one window of a stream, while they come in."""

    chunks: list[EncodedChunk] = dataclasses.field(default_factory=list[EncodedChunk])
    counts: Counter[str] = dataclasses.field(default_factory=Counter[str])

    def add(self, chunk: EncodedChunk, problems: Problems) -> None:
        """One more chunk; rows that cannot be used go to the problems."""
        for number, text in chunk.problems:
            problems.add(number, text)
        self.counts.update(chunk.counts)
        self.chunks.append(chunk)

    def first_rows(self, name: str) -> str:
        """The first row numbers of a kind, in words."""
        rows = itertools.chain.from_iterable(getattr(chunk, name) for chunk in self.chunks)
        return ", ".join(str(row) for row in itertools.islice(rows, NUM_SHOWN_ROWS))

    def finished(self, options: DataOptions, reader: ExampleReader, form: Form) -> TokenizedSet:
        """One set from all chunks."""
        lengths = np.concatenate([chunk.lengths for chunk in self.chunks])
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        input_ids = np.concatenate([chunk.input_ids for chunk in self.chunks])
        supervised = np.concatenate([chunk.supervised for chunk in self.chunks])
        counts = count_supervised(supervised, offsets)
        digest = hashlib.sha256()
        for array in (input_ids, supervised, offsets):
            digest.update(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).data)
        named = {name: value for name, value in self.counts.items() if not name.startswith("path:")}
        skipped = reader.problems.num_rows if options.skip_bad_rows else 0
        report = TokenizeReport(
            source=options.source,
            form=form.name,
            num_rows=sum(count for name, count in self.counts.items() if name.startswith("path:")) + skipped,
            num_samples=len(lengths),
            num_tokens=len(input_ids),
            num_supervised_tokens=int(counts.sum()),
            max_length=options.max_length,
            num_skipped_rows=skipped,
            mask_paths={name[5:]: count for name, count in sorted(self.counts.items()) if name.startswith("path:")},
            notes=self._notes(reader, form, options),
            **named,
        )
        return TokenizedSet(
            input_ids=input_ids,
            supervised=supervised,
            offsets=offsets,
            supervised_counts=counts,
            rows=np.concatenate([chunk.rows for chunk in self.chunks]),
            fingerprint=digest.hexdigest(),
            report=report,
        )

    def _notes(self, reader: ExampleReader, form: Form, options: DataOptions) -> tuple[str, ...]:
        unit = reader.source.unit
        notes = [f"{form.describe()}."]  # no path: the cache knows a set by its content, whatever the file is called
        lost = self.counts["num_truncated_tokens"]
        if lost > NOTED_LOSS * (lost + sum(int(chunk.lengths.sum()) for chunk in self.chunks)):
            longest = max(int(chunk.whole_lengths.max(initial=0)) for chunk in self.chunks)
            notes.append(
                f"{self.counts['num_truncated_rows']:,} rows are longer than max_length {options.max_length:,} (the "
                f"longest has {longest:,} tokens), and {lost:,} tokens of them are lost: raise max_length, or split "
                "long rows beforehand."
            )
        if self.counts["num_lost_rows"]:
            notes.append(
                f"{self.counts['num_lost_rows']:,} rows lost all their supervised tokens to max_length "
                f"{options.max_length} and were dropped ({unit}s {self.first_rows('lost_rows')})."
            )
        if self.counts["num_unsupervised_rows"]:
            notes.append(
                f"{self.counts['num_unsupervised_rows']:,} rows have nothing to learn in them and were dropped "
                f"({unit}s {self.first_rows('unsupervised_rows')})."
            )
        if self.counts["num_merged_boundaries"]:
            notes.append(
                f"At {self.counts['num_merged_boundaries']:,} places a token joins the end of the prompt and the start "
                "of the answer; at inference the prompt ends in another token. Move the space or line break from the "
                "end of the prompt to the start of the completion."
            )
        if self.counts["num_dropped_reasoning"]:
            notes.append(
                f"The chat template leaves out the reasoning of {self.counts['num_dropped_reasoning']:,} answers, so "
                "it is not learned: most templates keep it in the last answer only. Make each answer its own chat, "
                "or give another chat_template_path."
            )
        if reader.problems.num_rows:
            notes.append(f"{reader.problems.num_rows:,} bad rows were left out: " + "; ".join(reader.problems.lines()))
        return tuple(notes)


def check_supervised(
    tokenized: TokenizedSet, parts: Parts, options: DataOptions, reader: ExampleReader
) -> None:  # fmt: skip
    """0 % supervised is an error; so is 100 % where only the assistant's tokens were asked for."""
    report, unit = tokenized.report, reader.source.unit
    if not len(tokenized):
        reasons: list[str] = []
        if not any(int(chunk.whole_lengths.max(initial=0)) > 1 for chunk in parts.chunks):
            reasons.append(
                "the tokenizer makes at most one token of any row, so its files are not those of the model that "
                "config.json names: take them from where the model comes from"
            )
        if report.num_lost_rows:
            reasons.append(
                f"{report.num_lost_rows:,} rows reach their first supervised token only behind max_length "
                f"{options.max_length} ({unit}s {parts.first_rows('lost_rows')}): raise max_length"
            )
        if report.num_unsupervised_rows:
            reasons.append(
                f"in {report.num_unsupervised_rows:,} rows nothing is marked as the model's answer "
                f"({unit}s {parts.first_rows('unsupervised_rows')}): see `shardwise data show`, the chat template or "
                "the labels"
            )
        if report.num_skipped_rows:
            reasons.append(f"{report.num_skipped_rows:,} bad rows were left out: {'; '.join(reader.problems.lines())}")
        raise DataError(f"{options.source}: 0 % of the tokens are supervised. {'; '.join(reasons)}.")
    conversational = report.form in _CHAT_FORMS and options.assistant_only_loss
    if conversational and report.num_supervised_tokens == report.num_tokens - report.num_samples:
        raise DataError(
            f"{options.source}: 100 % of the tokens are supervised, though assistant_only_loss asks for the "
            "assistant's alone: the chat template's generation marks enclose the user's words too, or no row has any. "
            "Look at `shardwise data show`, give another chat_template_path, or set assistant_only_loss: false."
        )


# ---------------------------------------------------------------------------------------------------- in parallel

_worker_encoder: Encoder | None = None


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder  # a worker process has no other place to keep it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker_encoder = encoder


def _encode_in_worker(examples: Sequence[NumberedExample]) -> EncodedChunk:
    assert _worker_encoder is not None
    return _worker_encoder.encode(examples)


def _encode_all(reader: ExampleReader, encoder: Encoder, num_workers: int | None) -> Iterator[EncodedChunk]:
    """All chunks in order. Small sets stay in this process, whose tokenizer is parallel by itself."""
    chunks = _chunks(reader)
    workers = _num_workers(num_workers)
    if workers > 1 and num_workers is None:
        head = list(itertools.islice(chunks, ROWS_IN_PROCESS // CHUNK_ROWS))
        if sum(len(chunk) for chunk in head) < ROWS_IN_PROCESS:
            workers = 1
        chunks = itertools.chain(head, chunks)
    if workers <= 1:
        yield from map(encoder.encode, chunks)
    else:
        yield from _encode_in_workers(chunks, encoder, workers)


def _encode_in_workers(
    chunks: Iterable[Sequence[NumberedExample]], encoder: Encoder, workers: int
) -> Iterator[EncodedChunk]:
    """Chunks in order, with a bounded number in flight, so that a large set never lies in memory as text."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    waiting: deque[Future[EncodedChunk]] = deque()
    try:
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(encoder,)) as pool:
            for chunk in chunks:
                waiting.append(pool.submit(_encode_in_worker, chunk))
                if len(waiting) >= 3 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise ResourceError(
            f"One of {workers} tokenizing processes was killed, probably for lack of memory. "
            "Free some memory, or tokenize on a machine with more."
        ) from error


def _num_workers(wish: int | None) -> int:
    """Processes to start: forks are safe only while this process has no other threads and no GPU in use."""
    torch: Any = sys.modules.get("torch")
    unsafe = sys.platform != "linux" or threading.active_count() > 1 or (torch and torch.cuda.is_initialized())
    if unsafe:
        return 1
    return wish if wish is not None else _num_cores()


def _num_cores() -> int:
    with contextlib.suppress(AttributeError):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _chunks(reader: ExampleReader) -> Iterator[list[NumberedExample]]:
    examples = iter(reader)
    while chunk := list(itertools.islice(examples, CHUNK_ROWS)):
        yield chunk
