"""The tokenized set: flat arrays, and the report of what was lost on the way."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardwise.vocabulary.units import format_percent


@dataclass(frozen=True, kw_only=True)
class TokenizeReport:
    """What tokenization did to a data set. All counts; nothing that was lost is left out."""

    source: str
    """The file or hub id, as the user wrote it."""
    form: str
    """The column form that was recognized, such as `messages`."""
    num_rows: int
    """Rows read from the source, bad ones included."""
    num_samples: int
    """Samples that can be trained on."""
    num_tokens: int
    """Tokens of all samples, after truncation."""
    num_supervised_tokens: int
    """Tokens that are predicted and learned, after truncation and after the shift ([Note: labels])."""
    max_length: int
    """The limit that truncated."""
    num_truncated_rows: int = 0
    """Rows that were longer than `max_length`."""
    num_truncated_tokens: int = 0
    """Tokens cut from rows that were kept, and all tokens of rows dropped for truncation."""
    num_lost_rows: int = 0
    """Rows dropped because truncation took their last supervised token."""
    num_unsupervised_rows: int = 0
    """Rows dropped because nothing in them was supervised, even before truncation."""
    num_skipped_rows: int = 0
    """Bad rows left out because `skip_bad_rows` asked for it."""
    num_merged_boundaries: int = 0
    """Places where one token holds the end of a prompt and the start of an answer; it counts as the answer's."""
    num_dropped_reasoning: int = 0
    """Answers whose reasoning the chat template leaves out, so that it is not learned."""
    mask_paths: Mapping[str, int] = field(default_factory=dict[str, int])
    """How supervised tokens were found -> number of rows: `all`, `completion`, `labels`, `marks`, `prefix`, `probe`."""
    notes: tuple[str, ...] = ()
    """Sentences for the user: choices made, things to know."""

    @property
    def supervised_share(self) -> float:
        """Supervised tokens over all tokens, 0 to 1."""
        return self.num_supervised_tokens / self.num_tokens if self.num_tokens else 0.0

    def describe(self) -> tuple[str, ...]:
        """What a run should say about its data before step 0, a line each: sizes, truncation, masks, notes."""
        paths = ", ".join(f"{name} {count:,}" for name, count in self.mask_paths.items())
        return (
            f"{self.num_samples:,} samples, {self.num_tokens:,} tokens, {self.num_supervised_tokens:,} learned "
            f"({format_percent(self.supervised_share, 1)})",
            f"cut at max_length {self.max_length:,}: {self.num_truncated_rows:,} rows, "
            f"{self.num_truncated_tokens:,} tokens lost, {self.num_lost_rows:,} rows dropped",
            f"learned tokens found by: {paths}",
            *self.notes,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenizedSet:
    """Every sample of a data set as flat arrays; memory-mapped when it comes from the cache.

    Sample `i` is `input_ids[offsets[i]:offsets[i + 1]]`.
    """

    input_ids: NDArray[np.int32]
    """Token ids of all samples, one after the other. [num_tokens]"""
    supervised: NDArray[np.uint8]
    """1 where the token is learned; always 0 at the first token of a sample ([Note: labels]). [num_tokens]"""
    offsets: NDArray[np.int64]
    """Where each sample starts, and the end. [num_samples + 1]"""
    supervised_counts: NDArray[np.int32]
    """Supervised tokens of each sample. [num_samples]"""
    rows: NDArray[np.int64]
    """Line or row number in the source, from 1. [num_samples]"""
    fingerprint: str
    """Equal if and only if the content is equal: hash of the source, the tokenizer and the settings."""
    report: TokenizeReport
    """What was lost on the way."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample: [num_samples]."""
        return np.diff(self.offsets)

    def sample(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Token ids and supervised marks of one sample, both [length], views into the flat arrays."""
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        return self.input_ids[start:end], self.supervised[start:end]


def from_samples(
    samples: Sequence[Sequence[int]], supervised: Sequence[Sequence[int]] | None = None, *, source: str = "memory"
) -> TokenizedSet:
    """A set from token ids that are already here: for random tokens in a benchmark, and for tests.

    Args:
        samples: Token ids of each sample; none may be empty.
        supervised: 0 or 1 for every token; all but the first token of each sample if left out.
        source: The name in the report.

    Raises:
        ValueError: A sample is empty, or its marks have another length.
    """
    marks = [[1] * len(sample) for sample in samples] if supervised is None else [list(mark) for mark in supervised]
    wrong = [i for i, sample in enumerate(samples) if not len(sample) or len(sample) != len(marks[i])]
    if wrong or len(marks) != len(samples):
        raise ValueError(f"samples {wrong[:10]} are empty or have marks of another length")
    offsets = np.zeros(len(samples) + 1, dtype=np.int64)
    np.cumsum([len(sample) for sample in samples], out=offsets[1:])
    input_ids = np.array([token for sample in samples for token in sample], dtype=np.int32)
    flags = np.array([mark for row in marks for mark in row], dtype=np.uint8)
    flags[offsets[:-1]] = 0
    counts = count_supervised(flags, offsets)
    digest = hashlib.sha256(input_ids.tobytes() + flags.tobytes() + offsets.tobytes()).hexdigest()
    report = TokenizeReport(
        source=source, form="input_ids", num_rows=len(samples), num_samples=len(samples), num_tokens=len(input_ids),
        num_supervised_tokens=int(counts.sum()), max_length=max((len(sample) for sample in samples), default=0),
        mask_paths={"labels": len(samples)},
    )  # fmt: skip
    return TokenizedSet(
        input_ids=input_ids,
        supervised=flags,
        offsets=offsets,
        supervised_counts=counts,
        rows=np.arange(1, len(samples) + 1, dtype=np.int64),
        fingerprint=digest,
        report=report,
    )


def count_supervised(supervised: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.int32]:
    """Supervised tokens of each sample: [num_tokens], [num_samples + 1] -> [num_samples]."""
    running = np.zeros(len(supervised) + 1, dtype=np.int64)
    np.cumsum(supervised, dtype=np.int64, out=running[1:])
    return (running[offsets[1:]] - running[offsets[:-1]]).astype(np.int32)


def subset(tokenized: TokenizedSet, indices: Sequence[int]) -> TokenizedSet:
    """A smaller set of the given samples, in that order: the longest for a preflight, the first few for a sample."""
    samples = [tokenized.sample(index) for index in indices]
    made = from_samples(
        [ids.tolist() for ids, _ in samples], [marks.tolist() for _, marks in samples], source=tokenized.report.source
    )
    return dataclasses.replace(made, rows=tokenized.rows[np.asarray(indices, dtype=np.int64)])


def unknown_token(tokenized: TokenizedSet, name: str, vocab_size: int) -> str | None:
    """What is wrong if a set holds a token that the model has no row for; None if every token is known.

    Every token is looked at; on a card, one too large would only say `device-side assert`.
    """
    place = int(tokenized.input_ids.argmax())
    token = int(tokenized.input_ids[place])
    if token < vocab_size:
        return None
    sample = int(tokenized.offsets.searchsorted(place, side="right")) - 1
    return (
        f"{name}: row {int(tokenized.rows[sample])} holds the token {token:,}, and the model knows those below "
        f"{vocab_size:,} (vocab_size); tokenize with the model's own tokenizer, or resize its embeddings first."
    )


def num_shared(held_out: TokenizedSet, train: TokenizedSet) -> int:
    """Samples of a held-out set that are in the training set too, token for token."""
    wanted = {held_out.sample(index)[0].tobytes() for index in range(len(held_out))}
    lengths = np.unique(held_out.lengths)
    candidates = np.flatnonzero(np.isin(train.lengths, lengths)).tolist()
    found = {content for index in candidates if (content := train.sample(index)[0].tobytes()) in wanted}
    return sum(held_out.sample(index)[0].tobytes() in found for index in range(len(held_out)))
