"""Tokens that the model has no row for are found before anything is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.errors import ConfigError, DataError
from shardwise.trainer import prepare as prepare_module
from shardwise.trainer.data.store import TokenizedSet, from_samples
from shardwise.trainer.prepare import (
    Prepared,
    RunWishes,
    data_lines,
    prepare_run,
    random_rows,
    refuse_unknown_tokens,
)
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


def prepared(train: TokenizedSet, held_out: TokenizedSet | None) -> Prepared:
    return Prepared(config=None, tokenizer=None, train=train, plan=None, held_out=held_out)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_a_run_says_what_became_of_its_data() -> None:
    train, held_out = from_samples([[1, 2, 3], [4, 5]], source="a.jsonl"), from_samples([[4, 5], [7, 8], [1, 2]])
    assert data_lines(prepared(train, None)) == (
        "Data: 2 samples, 5 tokens, 3 learned (60.0 %)",
        "Data: cut at max_length 3: 0 rows, 0 tokens lost, 0 rows dropped",
        "Data: learned tokens found by: labels 2",
    )
    lines = data_lines(prepared(train, held_out))
    assert "Held out: 3 samples, 6 tokens; cut at max_length: 0 rows, 0 tokens lost" in lines
    assert "Warning: 1 of 3 held-out samples are in the training set too" in lines[-1]
    assert data_lines(prepared(from_samples([[1, 2]], source="random:1"), None)) == ()


def test_long_tokenizing_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [1, 2, 3]}\n' * 3)
    monkeypatch.setattr(prepare_module, "SILENT_S", 0.0)
    run = RunFile(model_name_or_path=str(tmp_path), dataset_name=str(tmp_path / "ids.jsonl"), max_steps=1)
    monkeypatch.setattr(prepare_module, "load_config", lambda _: SimpleNamespace(vocab_size=9, hidden_size=4))  # type: ignore[misc]
    monkeypatch.setattr(prepare_module, "_load_tokenizer", lambda _: _Tokenizer())  # type: ignore[misc]
    prepare_run(run, Strategy(), RunWishes(cache_dir=str(tmp_path / "cache")))
    assert "ids.jsonl: 3 rows so far" in capsys.readouterr().err


class _Tokenizer:
    """Of tokens that are made already, nothing is asked."""

    is_fast = True
    chat_template = None
    all_special_tokens = ()

    @property
    def special_tokens_map(self) -> dict[str, str]:
        return {}

    def get_vocab(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize(("keys", "num_steps"), [({}, 5), ({"num_train_epochs": 2.5}, 13), ({"max_steps": 7}, 7)])
def test_a_run_counts_epochs_unless_it_is_given_steps(keys: dict[str, Any], num_steps: int) -> None:
    run = RunFile(
        model_name_or_path="llama-3.2-1b", random_init=True, dataset_name="random:20", max_length=16, **keys
    )  # fmt: skip
    assert prepare_run(run, Strategy(micro_batch_size=4), RunWishes()).plan.num_steps == num_steps
