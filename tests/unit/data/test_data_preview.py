from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from data_helpers import MakeTokenizer, Write, chat

from shardwise.errors import DataError
from shardwise.trainer.data.encode import EncodedChunk, Encoder
from shardwise.trainer.data.formats import NumberedExample
from shardwise.trainer.data.options import DataOptions
from shardwise.trainer.data.preview import distribution, preview, render_preview, visible


def test_text_alone(write: Write) -> None:
    path = write([chat("q", "a"), chat("Q ", " a"), {"bad": 1}, chat("other", "answer")])
    found = preview(DataOptions(source=path))
    assert (found.num_rows, found.num_bad_rows, found.num_duplicates) == (3, 1, 1)
    assert found.duplicates == ((2, 1),)
    assert found.lengths.unit == "characters"
    assert found.tokenized is None
    text = render_preview(found)
    assert "line 3: has no messages" in text
    assert "1 duplicates, letter case and white space aside: line 2 = 1" in text
    json.dumps(dataclasses.asdict(found))


def test_what_the_model_sees(write: Write, make_tokenizer: MakeTokenizer) -> None:
    path = write([chat("q", "the answer"), chat("q", "hello " * 50)])
    found = preview(DataOptions(source=path, max_length=32), make_tokenizer())
    assert found.tokenized is not None
    assert found.tokenized.num_truncated_rows == 1
    assert found.lengths.percentiles["100"] > 32  # the whole length, not the truncated one
    assert sum(count for _, count in found.lengths.buckets) == 2
    assert found.packing_efficiency is not None
    assert 0 < found.packing_efficiency <= 1
    pieces = found.samples[0].pieces
    assert [piece.text for piece in pieces if piece.supervised] == ["the answer<|im_end|>"]
    assert "".join(piece.text for piece in pieces) == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nthe answer<|im_end|>\n"
    )
    text = render_preview(found)
    assert "<|im_start|>assistant\n⟦the answer<|im_end|>⟧\n" in text
    assert "cut at max_length 32: 1 rows" in text
    assert "learned tokens found by: prefix 2" in text
    assert "\x1b[32m⟦the answer" in render_preview(found, color=True)
    json.dumps(dataclasses.asdict(found))


def test_a_set_that_cannot_be_trained_on_is_shown_all_the_same(write: Write, make_tokenizer: MakeTokenizer) -> None:
    path = write([chat("q " * 50, "the answer")])
    found = preview(DataOptions(source=path, max_length=20), make_tokenizer())
    assert found.refusal is not None
    assert "raise max_length" in found.refusal
    assert [piece.text for piece in found.samples[0].pieces if piece.supervised] == ["the answer<|im_end|>"]
    assert "cannot be trained on as it is" in render_preview(found)


def test_a_token_beyond_the_vocabulary_is_marked(write: Write, make_tokenizer: MakeTokenizer) -> None:
    path = write([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 99_999, 9]}])
    found = preview(DataOptions(source=path), make_tokenizer(), vocab_size=420)
    assert found.refusal is not None
    assert "row 2 holds the token 99,999, and the model knows those below 420" in found.refusal
    assert "<token 99999 is beyond the vocabulary>" in render_preview(found)
    assert preview(DataOptions(source=path + "#1"), make_tokenizer(), vocab_size=420).refusal is None


def test_long_rows_are_tokenized_once(
    write: Write, make_tokenizer: MakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    encode = Encoder.encode

    def counted(self: Encoder, examples: Sequence[NumberedExample]) -> EncodedChunk:
        calls.append(len(examples))
        return encode(self, examples)

    monkeypatch.setattr(Encoder, "encode", counted)
    path = write([chat("q", "hello " * 500), chat("q " * 60, "a"), chat("q", "a")])
    found = preview(DataOptions(source=path, max_length=32), make_tokenizer())
    assert calls == [3]
    assert found.lengths.percentiles["100"] > 500  # as it is in the file
    assert sum(count for _, count in found.lengths.buckets) == 3  # the row that is dropped is looked at too
    text = render_preview(found)
    assert "2 rows are longer than max_length 32 (the longest has" in text
    assert "raise max_length, or split long rows beforehand" in text


def test_control_characters_cannot_steer_the_terminal(write: Write) -> None:
    assert visible("a\x1b[2Jb\x07\x9b\n\t\x7f") == "a␛[2Jb␇�\n\t�"
    path = write([chat("\x1b[31mq", "a")])
    assert "\x1b" not in render_preview(preview(DataOptions(source=path)))


def test_distribution_counts_every_length() -> None:
    lengths = np.array([1, 1, 2, 50, 100])
    found = distribution(lengths, "tokens")
    assert sum(count for _, count in found.buckets) == 5
    assert found.buckets[0] == (10, 3)
    assert found.buckets[-1] == (100, 1)
    assert (found.percentiles["0"], found.percentiles["50"], found.percentiles["100"]) == (1, 2, 100)
    assert distribution(np.array([3]), "tokens").mean == 3


@pytest.mark.parametrize("limit", ["", "#0"])
def test_a_set_without_rows_says_so(limit: str, tmp_path: Path) -> None:
    path = tmp_path / "blank.jsonl"
    path.write_text("\n  \n\n", encoding="utf-8")
    with pytest.raises(DataError, match="has no row to train on"):
        preview(DataOptions(source=f"{path}{limit}"), None, 1)
