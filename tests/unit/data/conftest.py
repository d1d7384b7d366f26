"""Small tokenizers made in a moment, and files to read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_helpers import PLAIN_TEMPLATE, MakeTokenizer, Write

SPECIAL = ["<pad>", "<s>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    corpus = ["the wire carries the gradient of a layer", "hello hello world", "user assistant system", "    if x:\n"]

    def make(template: str | None = PLAIN_TEMPLATE, **special: str) -> Any:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        backend.train_from_iterator(
            corpus * 3, trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet)
        )
        names = {"pad_token": "<pad>", "eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
        made = PreTrainedTokenizerFast(tokenizer_object=backend, **{**names, **special})
        made.chat_template = template
        return made

    return make


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes rows as JSON lines, or text or bytes as they are; gives the path."""

    def write(content: object, name: str = "data.jsonl") -> str:
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            rows: Any = content
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write
