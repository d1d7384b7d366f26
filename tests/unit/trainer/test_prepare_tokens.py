"""Tokens that the model has no row for are found before anything is started."""

from __future__ import annotations

import pytest

from shardwise.errors import DataError
from shardwise.trainer.data.store import from_samples
from shardwise.trainer.prepare import refuse_unknown_tokens


def test_a_token_beyond_the_vocabulary_is_named_with_its_row() -> None:
    tokenized = from_samples([[1, 2, 3], [4, 99_999, 5], [6, 7]])
    refuse_unknown_tokens(tokenized, "ids.jsonl", 100_000)
    with pytest.raises(DataError, match=r"ids.jsonl: row 2 holds the token 99,999, .* below 259 \(vocab_size\)"):
        refuse_unknown_tokens(tokenized, "ids.jsonl", 259)
