"""The whole set, tokenized once."""

from __future__ import annotations

from typing import Any

from shardwise.trainer.data.options import DataOptions
from shardwise.trainer.data.store import TokenizedSet


def prepare(options: DataOptions, tokenizer: Any) -> TokenizedSet:
    """Reads, renders and tokenizes a data set, or takes it from the cache. Call it before any process group exists.

    Args:
        options: What to read and how.
        tokenizer: A Hugging Face tokenizer.

    Raises:
        DataError: A row cannot be used; every bad row by line number. Or nothing, or everything, is supervised.
    """
    raise NotImplementedError("the reader is being written; use store.from_samples until then")
