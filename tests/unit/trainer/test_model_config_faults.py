"""A config.json with a value that nobody knows is answered in words, not by a KeyError of a rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.trainer.model import build_skeleton, load_config
from shardwise.vocabulary.job import LoraSettings
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy

TINY: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "nope"}, r"KeyError: 'nope'\. That is its hidden_act\. Correct it"),
        ({"rope_parameters": {"rope_type": "nope", "rope_theta": 1e4}}, r"That is its rope_parameters\.rope_type\."),
        ({"rope_scaling": {"rope_type": "yarn"}}, "Missing required keys in `rope_parameters`"),
        ({"num_attention_heads": 3}, r"The hidden size \(16\) is not a multiple of the number of attention heads"),
        ({"num_key_value_heads": 0}, "ZeroDivisionError"),
        ({"hidden_size": "16"}, "expected int, got str"),
        ({"model_type": "nope"}, "does not recognize this architecture"),
    ],
)
def test_what_transformers_stumbles_over_is_told(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **changes}))
    with pytest.raises(ConfigError, match=words):
        build_skeleton(
            load_config(RunFile(model_name_or_path=str(tmp_path))), Strategy(precision="fp32"), LoraSettings()
        )  # fmt: skip
