"""Examples as token ids, with a mark on every token that is learned.

[Note: coverage] A token covers the characters from the end of the token before it to its own end. Offsets as the
tokenizer reports them leave out leading spaces (a token of spaces only, as in indented code, would cover nothing), and
bytes of one character share its offsets; coverage has neither problem. A token is learned if it covers a learned
character. Where a token covers both sides of a prompt's end it counts as learned, and the case is counted: at
inference the prompt alone is tokenized otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.trainer.data.formats import NumberedExample, RowProblem, TokenExample
from shardwise.trainer.data.options import DataOptions
from shardwise.trainer.data.template import Rendered, Renderer

NUM_CHECKED = 8
"""Rows of each chunk whose prompt is tokenized once more, alone, to see that it is a prefix of the whole."""
NUM_SHOWN_ROWS = 10
"""Row numbers that are kept for a message."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedChunk:
    """Some rows, tokenized."""

    input_ids: NDArray[np.int32]
    """Token ids of all kept rows, one after the other. [tokens]"""
    supervised: NDArray[np.uint8]
    """1 where learned. [tokens]"""
    lengths: NDArray[np.int64]
    """Tokens of each kept row. [kept rows]"""
    rows: NDArray[np.int64]
    """Row numbers. [kept rows]"""
    whole_lengths: NDArray[np.int64]
    """Tokens of every row before truncation, rows that were dropped included. [rows]"""
    counts: Counter[str]
    """Names of TokenizeReport's counts, and `path:<name>`."""
    lost_rows: tuple[int, ...] = ()
    """The first rows that truncation left without a learned token."""
    unsupervised_rows: tuple[int, ...] = ()
    """The first rows that never had one."""
    problems: tuple[tuple[int, str], ...] = ()
    """Row numbers that cannot be used, and why."""


@dataclass(kw_only=True, eq=False)
class _Chunk:
    """An EncodedChunk while it grows."""

    ids: list[NDArray[np.int32]] = field(default_factory=list[NDArray[np.int32]])
    marks: list[NDArray[np.uint8]] = field(default_factory=list[NDArray[np.uint8]])
    rows: list[int] = field(default_factory=list[int])
    whole_lengths: list[int] = field(default_factory=list[int])
    counts: Counter[str] = field(default_factory=Counter[str])
    lost: list[int] = field(default_factory=list[int])
    unsupervised: list[int] = field(default_factory=list[int])
    problems: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])

    def frozen(self) -> EncodedChunk:
        return EncodedChunk(
            input_ids=np.concatenate(self.ids) if self.ids else np.empty(0, np.int32),
            supervised=np.concatenate(self.marks) if self.marks else np.empty(0, np.uint8),
            lengths=np.array([len(ids) for ids in self.ids], dtype=np.int64),
            rows=np.array(self.rows, dtype=np.int64),
            whole_lengths=np.array(self.whole_lengths, dtype=np.int64),
            counts=self.counts,
            lost_rows=tuple(self.lost[:NUM_SHOWN_ROWS]),
            unsupervised_rows=tuple(self.unsupervised[:NUM_SHOWN_ROWS]),
            problems=tuple(self.problems),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tokens:
    """One row, tokenized and marked, not yet truncated."""

    ids: NDArray[np.int32]
    marks: NDArray[np.uint8]
    path: str
    num_merged: int = 0


class Encoder:
    """Tokenizes chunks of rows. Built once for a set; may be sent to another process."""

    def __init__(self, tokenizer: Any, options: DataOptions) -> None:
        self.tokenizer = tokenizer
        self.max_length = options.max_length
        self.renderer = Renderer(tokenizer, options)

    def encode(self, examples: Sequence[NumberedExample]) -> EncodedChunk:
        """Renders, tokenizes, marks and truncates. Row problems are returned, not raised."""
        chunk = _Chunk()
        rendered: dict[int, Rendered] = {}
        for index, one in enumerate(examples):
            if isinstance(one.example, TokenExample):
                continue
            try:
                rendered[index] = self.renderer.render(one.example)
                chunk.counts["num_dropped_reasoning"] += rendered[index].num_dropped_reasoning
            except RowProblem as problem:
                chunk.problems.append((one.number, str(problem)))
        tokens = self._tokenize(rendered, chunk, [one.number for one in examples])
        for index, one in enumerate(examples):
            if isinstance(one.example, TokenExample):
                self._add(chunk, one.number, _given_tokens(one.example))
            elif index in tokens:
                self._add(chunk, one.number, tokens[index])
        return chunk.frozen()

    def _tokenize(self, rendered: dict[int, Rendered], chunk: _Chunk, numbers: Sequence[int]) -> dict[int, _Tokens]:
        """Tokens of each rendered row, by its index."""
        tokens: dict[int, _Tokens] = {}
        if not getattr(self.tokenizer, "is_fast", False):
            for index, one in rendered.items():
                try:
                    tokens[index] = self._tokenize_slowly(one)
                except RowProblem as problem:
                    chunk.problems.append((numbers[index], str(problem)))
            return tokens
        for add_special_tokens in (False, True):
            indices = [index for index, one in rendered.items() if one.add_special_tokens == add_special_tokens]
            if not indices:
                continue
            encoded: Any = self.tokenizer(
                [rendered[index].text for index in indices],
                add_special_tokens=add_special_tokens,
                return_offsets_mapping=True,
                return_attention_mask=False,
                return_token_type_ids=False,
                padding=False,
                truncation=False,
                verbose=False,  # it warns of long texts before we truncate
            )
            for place, index in enumerate(indices):
                offsets = np.array(encoded["offset_mapping"][place], dtype=np.int64).reshape(-1, 2)
                tokens[index] = self._marked(
                    rendered[index], np.array(encoded["input_ids"][place], dtype=np.int32), offsets, place < NUM_CHECKED
                )
        return tokens

    def _marked(self, rendered: Rendered, ids: NDArray[np.int32], offsets: NDArray[np.int64], check: bool) -> _Tokens:
        ends = np.maximum.accumulate(offsets[:, 1]) if len(offsets) else offsets[:, 1]
        starts = np.minimum(offsets[:, 0], np.concatenate(([0], ends[:-1])))  # [Note: coverage]
        marks = np.zeros(len(ids), dtype=np.uint8)
        num_merged = 0
        for start, end in rendered.spans:
            marks |= ((starts < end) & (offsets[:, 1] > start)).astype(np.uint8)
            if start:
                crossed = bool(((starts < start) & (offsets[:, 1] > start)).any())
                num_merged += crossed or (
                    check and not self._is_prefix(rendered, start, ids, int((ends <= start).sum()))
                )
        return self._with_eos(rendered, ids, marks, num_merged)

    def _is_prefix(self, rendered: Rendered, start: int, ids: NDArray[np.int32], num_tokens: int) -> bool:
        """Whether the text before `start`, tokenized alone, gives the first tokens of the whole."""
        return self._prefix_ids(rendered, start) == ids[:num_tokens].tolist()

    def _prefix_ids(self, rendered: Rendered, end: int) -> list[int]:
        """The text before `end`, tokenized alone, without the end-of-text token that some tokenizers add."""
        text = rendered.text[:end]
        ids = self._ids(text, rendered.add_special_tokens)
        added = rendered.add_special_tokens and self._ends_with_eos(ids) and not text.endswith(self.tokenizer.eos_token)
        return ids[:-1] if added else ids

    def _tokenize_slowly(self, rendered: Rendered) -> _Tokens:
        """Without offsets: by the number of tokens of each prefix, which must be a prefix in tokens too."""
        ids = self._ids(rendered.text, rendered.add_special_tokens)
        marks = np.zeros(len(ids), dtype=np.uint8)
        for span in rendered.spans:
            places: list[int] = []
            for boundary in span:
                prefix = self._prefix_ids(rendered, boundary) if 0 < boundary < len(rendered.text) else []
                if ids[: len(prefix)] != prefix:
                    raise RowProblem(
                        "the prompt's tokens are not the first tokens of the whole text, and this tokenizer reports no "
                        "offsets to tell them apart; use the fast tokenizer of the model"
                    )
                places.append(len(ids) if boundary == len(rendered.text) else len(prefix))
            marks[places[0] : places[1]] = 1
        return self._with_eos(rendered, np.array(ids, dtype=np.int32), marks, 0)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def _ends_with_eos(self, ids: Sequence[int]) -> bool:
        return bool(len(ids)) and int(ids[-1]) == self.tokenizer.eos_token_id

    def _with_eos(
        self, rendered: Rendered, ids: NDArray[np.int32], marks: NDArray[np.uint8], num_merged: int
    ) -> _Tokens:
        if rendered.append_eos:
            if not self._ends_with_eos(ids[-1:].tolist()):
                ids = np.append(ids, np.int32(self.tokenizer.eos_token_id))
                marks = np.append(marks, np.uint8(1))
            marks[-1] = 1
        return _Tokens(ids=ids, marks=marks, path=rendered.path, num_merged=num_merged)

    def _add(self, chunk: _Chunk, number: int, tokens: _Tokens) -> None:
        """Truncates a row, counts, and keeps it if there is something to learn in it."""
        ids, marks = tokens.ids[: self.max_length], tokens.marks[: self.max_length].copy()
        marks[:1] = 0  # nothing predicts the first token
        cut = len(tokens.ids) - len(ids)
        chunk.whole_lengths.append(len(tokens.ids))
        chunk.counts[f"path:{tokens.path}"] += 1
        chunk.counts["num_merged_boundaries"] += tokens.num_merged
        if cut:
            chunk.counts["num_truncated_rows"] += 1
            chunk.counts["num_truncated_tokens"] += cut
        if marks.any():
            chunk.ids.append(ids)
            chunk.marks.append(marks)
            chunk.rows.append(number)
        elif tokens.marks[1:].any():
            chunk.counts["num_lost_rows"] += 1
            chunk.counts["num_truncated_tokens"] += len(ids)
            chunk.lost.append(number)
        else:
            chunk.counts["num_unsupervised_rows"] += 1
            chunk.unsupervised.append(number)


def _given_tokens(example: TokenExample) -> _Tokens:
    return _Tokens(
        ids=np.array(example.input_ids, dtype=np.int32),
        marks=np.array(example.supervised, dtype=np.uint8),
        path="labels",
    )
