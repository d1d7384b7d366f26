"""`shardwise data show`: what the model will see of a data set, before anything is trained on it."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from shardwise.cli.options import POSITIONAL
from shardwise.errors import ConfigError
from shardwise.vocabulary.limits import NotNegative, Within

Tokens = Annotated[int, Within(least=2, most=2**31 - 1)]
"""Of a sample: one, and one to predict."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Look at a data set: its format, lengths, bad rows, duplicates, and samples with the learnt tokens marked.

    Without a model only the text is looked at; with one, tokens, truncation and what packing would save.

    Examples:
      shardwise data show chats.jsonl
      shardwise data show chats.jsonl --model Qwen/Qwen2.5-0.5B-Instruct --max-length 2048 --samples 1
    """

    action: Literal["show"] = field(metadata=POSITIONAL)
    """show."""
    source: str = field(metadata=POSITIONAL)
    """A file (JSONL, JSON, CSV, Parquet, Arrow), a folder saved by `datasets`, or a hub id; #500 takes 500 rows."""
    model: str | None = None
    """Whose tokenizer and chat template: a folder or a hub id."""
    split: str | None = None
    """Split of a hub id, or of a folder with several; train if nothing is said."""
    max_length: Tokens = 1024
    """Tokens; longer sequences would be cut."""
    column_map: dict[str, str] = field(default_factory=dict[str, str])
    """Names of your columns to known ones."""
    chat_template_path: str | None = None
    """A jinja file that replaces the tokenizer's template."""
    assistant_only_loss: bool = True
    """`messages`: learn the assistant's tokens only."""
    completion_only_loss: bool = True
    """`prompt`/`completion`: learn the completion only."""
    samples: NotNegative = 2
    """How many to show."""
    json: bool = False
    """Everything as JSON on stdout."""


def run(options: Options) -> int:
    """Show, and return 0."""
    from shardwise.cli.train import require_training
    from shardwise.report.style import Style

    require_training()
    from shardwise.trainer.data.options import DataOptions
    from shardwise.trainer.data.preview import preview, render_preview
    from shardwise.trainer.data.sources import refuse_split

    if options.split is not None:
        refuse_split(options.source, options.split)
    source = DataOptions(
        source=options.source,
        split=options.split or "train",
        column_map=options.column_map,
        max_length=options.max_length,
        chat_template_path=options.chat_template_path,
        assistant_only_loss=options.assistant_only_loss,
        completion_only_loss=options.completion_only_loss,
    )
    tokenizer, vocab_size = (None, None) if options.model is None else _tokenizer(options.model)
    found = preview(source, tokenizer, options.samples, vocab_size=vocab_size)
    if options.json:
        sys.stdout.write(json.dumps(dataclasses.asdict(found), indent=2, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(render_preview(found, color=Style.of(sys.stdout).color).rstrip("\n") + "\n")
    return 0


def _tokenizer(model: str) -> tuple[Any, int]:
    """The tokenizer, and how many tokens the model knows."""
    from transformers import AutoTokenizer

    from shardwise.facts.hub import find_model

    found = find_model(model)
    weights = found.weights or model
    try:
        return AutoTokenizer.from_pretrained(weights), found.shape.vocab_size
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer can be read from {weights!r}: {error}") from error
