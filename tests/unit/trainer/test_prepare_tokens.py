"""Tokens that the model has no row for are found before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.errors import ConfigError, DataError
from shardwise.trainer.data.store import from_samples
from shardwise.trainer.prepare import RunWishes, prepare_run, random_rows, refuse_unknown_tokens
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy


def test_a_token_beyond_the_vocabulary_is_named_with_its_row() -> None:
    tokenized = from_samples([[1, 2, 3], [4, 99_999, 5], [6, 7]])
    refuse_unknown_tokens(tokenized, "ids.jsonl", 100_000)
    with pytest.raises(DataError, match=r"ids.jsonl: row 2 holds the token 99,999, .* below 259 \(vocab_size\)"):
        refuse_unknown_tokens(tokenized, "ids.jsonl", 259)


@pytest.mark.parametrize("count", ["0", "-1", "x", "", "²", "9" * 5000])
def test_a_wrong_number_of_random_sequences_is_refused(count: str) -> None:
    run = RunFile(model_name_or_path="m", dataset_name=f"random:{count}")
    with pytest.raises(ConfigError, match="write random:N with N sequences"):
        random_rows(run, run.dataset_name)


def test_random_sequences_beyond_memory_are_refused() -> None:
    run = RunFile(model_name_or_path="m", dataset_name="random:999999999999")
    with pytest.raises(ConfigError, match="999,999,999,999 sequences of 1,024 tokens"):
        random_rows(run, run.dataset_name)


@pytest.mark.parametrize(("keys", "num_steps"), [({}, 5), ({"num_train_epochs": 2.5}, 13), ({"max_steps": 7}, 7)])
def test_a_run_counts_epochs_unless_it_is_given_steps(keys: dict[str, Any], num_steps: int) -> None:
    run = RunFile(
        model_name_or_path="llama-3.2-1b", random_init=True, dataset_name="random:20", max_length=16, **keys
    )  # fmt: skip
    assert prepare_run(run, Strategy(micro_batch_size=4), RunWishes()).plan.num_steps == num_steps
