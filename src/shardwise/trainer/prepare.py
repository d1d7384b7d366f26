"""What is ready before the ranks meet: config, tokenizer, tokens, and the plan of every step."""

from __future__ import annotations

import random
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, DataError
from shardwise.trainer.data.batches import BatchOptions, BatchPlan, plan_batches
from shardwise.trainer.data.cache import default_cache_dir
from shardwise.trainer.data.lengths import sequence_lengths
from shardwise.trainer.data.options import DataOptions
from shardwise.trainer.data.sources import refuse_split
from shardwise.trainer.data.store import TokenizedSet, from_samples, num_shared, unknown_token
from shardwise.trainer.data.stream import first_window, plan_stream
from shardwise.trainer.data.tokenize import prepare
from shardwise.trainer.model import load_config
from shardwise.vocabulary.job import SequenceLengths
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy

MOST_RANDOM_TOKENS = 10**8
"""Of `random:N`; a list in memory, 32 bytes a token."""
SILENT_S = 10.0
"""Seconds of tokenizing after which it says how far it is."""
NUM_LOOKED_AT = 4096
"""Rows of a stream whose lengths stand for all of them in the plan."""


@dataclass(frozen=True, kw_only=True)
class RunWishes:
    """What a caller wants besides the run file."""

    measure: bool = True
    """Watch memory, messages and times in the first steps and write measured.json."""
    command: str = ""
    """What started the run, for measured.json."""
    cache_dir: str | None = None
    """Where tokenized data is kept; None: see `default_cache_dir`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """What is ready before the ranks meet."""

    config: Any
    tokenizer: Any
    train: TokenizedSet
    plan: BatchPlan
    held_out: TokenizedSet | None


def prepare_run(run: RunFile, strategy: Strategy, wishes: RunWishes) -> Prepared:
    """Reads config and tokenizer, tokenizes the data or takes it from the cache, and plans every step.

    Raises:
        ConfigError: No such model or tokenizer, or no data is named.
        DataError: The data cannot be trained on.
    """
    config = load_config(run)
    tokenizer = _load_tokenizer(run)
    _refuse_splits(run)
    if run.dataset_name is None:
        raise ConfigError("dataset_name is not set: nothing to train on. Give a file, a hub id, or random:N.")
    options = BatchOptions(
        global_batch=strategy.global_batch_size,
        micro_batch=strategy.micro_batch_size,
        num_ranks=strategy.data_parallel,
        seed=run.seed,
        num_train_epochs=run.num_train_epochs,
        max_steps=run.max_steps,
        packing=run.packing,
        max_length=run.max_length,
        attention_crossover=12 * config.hidden_size,
    )
    plan = _plan_data(run, options, config, tokenizer, wishes)
    held_out = _load_data(run, run.eval_dataset_name, run.eval_dataset_split, config, tokenizer, wishes)
    return Prepared(config=config, tokenizer=tokenizer, train=plan.set_at(0), plan=plan, held_out=held_out)


def data_lines(prepared: Prepared) -> tuple[str, ...]:
    """What a run says of its data before the first step: sizes, truncation, what is learned and how it was found."""
    held_out = prepared.held_out
    if prepared.train.report.source.startswith("random:"):
        return ()
    lines = [f"Data: {line}" for line in prepared.train.report.describe()]
    if held_out is not None and not held_out.report.source.startswith("random:"):
        report = held_out.report
        lines.append(
            f"Held out: {report.num_samples:,} samples, {report.num_tokens:,} tokens; cut at max_length: "
            f"{report.num_truncated_rows:,} rows, {report.num_truncated_tokens:,} tokens lost"
        )
        if shared := num_shared(held_out, prepared.train):
            lines.append(
                f"Warning: {shared:,} of {len(held_out):,} held-out samples are in the training set too, token for "
                "token, so the held-out loss says less than it seems to."
            )
    return tuple(lines)


def _plan_data(run: RunFile, options: BatchOptions, config: Any, tokenizer: Any, wishes: RunWishes) -> BatchPlan:
    """The plan of the training set, or of the stream that it is."""
    name = run.dataset_name
    assert name is not None, "asked before"
    if not is_stream(run):
        train = _load_data(run, name, run.dataset_split, config, tokenizer, wishes)
        assert train is not None, "a name gives a set"
        return plan_batches(train, options)
    if "epoch" in (run.eval_strategy, run.save_strategy):
        raise ConfigError(
            f"eval_strategy is {run.eval_strategy} and save_strategy {run.save_strategy}, but nobody knows where an "
            "epoch of a stream ends; use steps."
        )
    source = _data_options(run, name, run.dataset_split, wishes, streaming=True)
    return plan_stream(
        source, tokenizer, options, lambda window: refuse_unknown_tokens(window, name, config.vocab_size)
    )  # fmt: skip


def is_stream(run: RunFile) -> bool:
    """Whether the training set is read while it is trained on.

    Raises:
        ConfigError: Random tokens, which nobody reads.
    """
    if run.streaming and random_rows(run, run.dataset_name) is not None:
        raise ConfigError("streaming: true has no effect on random tokens; leave it away.")
    return run.streaming


def _refuse_splits(run: RunFile) -> None:
    """A split that was set must have an effect; the usual ones are not asked for, since files have none.

    Raises:
        DataError: It has none.
    """
    usual = RunFile(model_name_or_path="")
    if run.dataset_name is not None and run.dataset_split != usual.dataset_split:
        refuse_split(run.dataset_name, run.dataset_split)
    if run.eval_dataset_name is not None and run.eval_dataset_split != usual.eval_dataset_split:
        refuse_split(run.eval_dataset_name, run.eval_dataset_split)


def _load_tokenizer(run: RunFile) -> Any:
    """The model's tokenizer; None if there is none and none is needed, because the tokens are random."""
    from transformers import AutoTokenizer

    needed = random_rows(run, run.dataset_name) is None
    if run.random_init and not needed:
        return None
    try:
        return AutoTokenizer.from_pretrained(
            run.model_name_or_path, revision=run.model_revision or "main", trust_remote_code=run.trust_remote_code
        )
    except (OSError, ValueError) as error:
        if not needed:
            return None
        raise ConfigError(f"No tokenizer can be read from {run.model_name_or_path!r}: {error}") from error


def random_rows(run: RunFile, name: str | None) -> int | None:
    """N of `random:N`; None for any other data set.

    Raises:
        ConfigError: N is no positive number, or too large a one.
    """
    if name is None or not name.startswith("random:"):
        return None
    count = name.removeprefix("random:")
    if not re.fullmatch(r"[0-9]{1,18}", count) or int(count) < 1:
        raise ConfigError(f"dataset_name {name!r}: write random:N with N sequences, such as random:512.")
    if int(count) * run.max_length > MOST_RANDOM_TOKENS:
        raise ConfigError(
            f"dataset_name {name!r}: {int(count):,} sequences of {run.max_length:,} tokens are drawn in memory; the "
            f"limit is {MOST_RANDOM_TOKENS:,} tokens. Ask for fewer, such as random:512."
        )
    return int(count)


def _load_data(
    run: RunFile, name: str | None, split: str, config: Any, tokenizer: Any, wishes: RunWishes
) -> TokenizedSet | None:
    if name is None:
        return None
    num_rows = random_rows(run, name)
    if num_rows is not None:
        draw = random.Random(f"{run.seed} {split}")
        rows = [draw.choices(range(config.vocab_size), k=run.max_length) for _ in range(num_rows)]
        return from_samples(rows, source=name)
    tokenized = prepare(_data_options(run, name, split, wishes), tokenizer, _SlowProgress(name))
    refuse_unknown_tokens(tokenized, name, config.vocab_size)
    return tokenized


class _SlowProgress:
    """Says how far tokenizing is, if it takes long.

    Args:
        name: Of the data set.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._next = time.monotonic() + SILENT_S

    def __call__(self, num_rows: int) -> None:
        """So many rows have been read."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + SILENT_S
            sys.stderr.write(f"Tokenizing {self._name}: {num_rows:,} rows so far\n")
            sys.stderr.flush()


def _data_options(run: RunFile, name: str, split: str, wishes: RunWishes, *, streaming: bool = False) -> DataOptions:
    return DataOptions(
        source=name,
        split=split,
        column_map=run.column_map,
        max_length=run.max_length,
        assistant_only_loss=run.assistant_only_loss,
        completion_only_loss=run.completion_only_loss,
        chat_template_path=run.chat_template_path,
        skip_bad_rows=run.skip_bad_rows,
        streaming=streaming,
        cache_dir=default_cache_dir() if wishes.cache_dir is None else Path(wishes.cache_dir),
    )


def refuse_unknown_tokens(tokenized: TokenizedSet, name: str, vocab_size: int) -> None:
    """Look at every token.

    Raises:
        DataError: A token that the model has no row for.
    """
    problem = unknown_token(tokenized, name, vocab_size)
    if problem is not None:
        raise DataError(problem)


def data_lengths(run: RunFile, wishes: RunWishes | None = None) -> SequenceLengths | None:
    """Lengths of the training set after truncation, tokenized now (and cached for the run); None if none is named.

    Raises:
        ShardwiseError: Whatever is wrong with the model's config, the tokenizer or the data.
    """
    if run.dataset_name is None:
        return None
    config = load_config(run)
    tokenizer = _load_tokenizer(run)
    if is_stream(run):
        options = _data_options(run, run.dataset_name, run.dataset_split, wishes or RunWishes(), streaming=True)
        return sequence_lengths(first_window(options, tokenizer, NUM_LOOKED_AT))
    tokenized = _load_data(run, run.dataset_name, run.dataset_split, config, tokenizer, wishes or RunWishes())
    return None if tokenized is None else sequence_lengths(tokenized)
