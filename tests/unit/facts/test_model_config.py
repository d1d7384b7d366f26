"""config.json is a stranger's data: read exactly, checked fully, never obeyed."""

import math
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.facts.config import FAMILIES, LIMITS, model_from_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
}


def problems(config: object) -> str:
    with pytest.raises(ConfigError) as caught:
        model_from_config(config, "mine")
    assert all(problem.startswith("mine: ") for problem in caught.value.problems)
    return "\n".join(caught.value.problems)


def test_reading_is_the_identity_on_the_sizes() -> None:
    shape = model_from_config(LLAMA, "mine")
    for key in LLAMA:
        assert getattr(shape, key) == LLAMA[key]
    assert (shape.name, shape.head_dim, shape.tie_word_embeddings) == ("mine", 16, False)


def test_biases_follow_the_family() -> None:
    llama = model_from_config({**LLAMA, "attention_bias": True, "mlp_bias": True}, "mine")
    assert (llama.attention_bias, llama.attention_output_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = model_from_config({**LLAMA, "model_type": "qwen2", "attention_bias": False}, "mine")
    assert (qwen2.attention_bias, qwen2.attention_output_bias, qwen2.mlp_bias) == (True, False, False)
    mistral = model_from_config({**LLAMA, "model_type": "mistral", "attention_bias": True}, "mine")
    assert (mistral.attention_bias, mistral.attention_output_bias) == (False, False)


@pytest.mark.parametrize(
    ("model_type", "more", "windowed"),
    [
        ("llama", {"sliding_window": 8}, 0),
        ("mistral", {}, 7),
        ("mistral", {"sliding_window": None}, 0),
        ("qwen2", {"sliding_window": 8}, 0),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4}, 3),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 9}, 0),
        ("gemma2", {}, 4),
        ("gemma3_text", {}, 6),
        ("gemma3_text", {"sliding_window_pattern": 2}, 4),
        ("gemma3_text", {"layer_types": ["full_attention"] * 6 + ["sliding_attention"]}, 1),
        ("phi3", {"sliding_window": 8}, 7),
    ],
)
def test_windows(model_type: str, more: dict[str, Any], windowed: int) -> None:
    shape = model_from_config({**LLAMA, "model_type": model_type, "num_hidden_layers": 7, **more}, "mine")
    assert shape.num_windowed_layers == windowed
    assert (shape.sliding_window is None) == (windowed == 0)


def test_code_that_comes_along_is_not_looked_at() -> None:
    hostile = {
        **LLAMA,
        "auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"},
        "trust_remote_code": True,
        "architectures": ["__import__('os').system('true')"],
    }
    assert model_from_config(hostile, "mine") == model_from_config(LLAMA, "mine")


def test_every_missing_key_is_named_at_once() -> None:
    text = problems({"model_type": "llama"})
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        assert f"no '{key}'" in text


@pytest.mark.parametrize(
    "value", [0, -1, 1.0, 2.5, math.nan, math.inf, True, "64", [], {}, 10**5000], ids=lambda value: str(type(value))
)
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "num_key_value_heads", "head_dim"])
def test_insane_values_are_refused(key: str, value: object) -> None:
    assert f"'{key}'" in problems({**LLAMA, key: value})


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_limits_are_told(key: str) -> None:
    assert f"the limits are 1 to {LIMITS[key]:,}" in problems({**LLAMA, key: 10**12})


def test_heads_must_divide() -> None:
    text = problems({**LLAMA, "num_attention_heads": 5})
    assert "hidden_size (64) must be a multiple of num_attention_heads (5)" in text
    assert "num_attention_heads (5) must be a multiple of num_key_value_heads (2)" in text


@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
def test_flags_are_true_or_false(key: str) -> None:
    assert f"'{key}' must be true or false, not 'yes'" in problems({**LLAMA, key: "yes"})


def test_mixtures() -> None:
    config = {**LLAMA, "model_type": "qwen3_moe", "moe_intermediate_size": 40, "num_experts": 4}
    shape = model_from_config({**config, "num_experts_per_tok": 2}, "mine")
    assert (shape.intermediate_size, shape.num_experts, shape.num_experts_per_tok) == (40, 4, 2)
    assert shape.num_active_parameters < shape.num_parameters
    assert "num_experts_per_tok (8) must not be more than num_experts (4)" in problems(config)
    assert "dense layers in between" in problems({**config, "num_experts_per_tok": 2, "mlp_only_layers": [0]})
    assert "dense layers in between" in problems({**config, "num_experts_per_tok": 2, "decoder_sparse_step": 2})
    assert "'num_local_experts' is missing" in problems({**LLAMA, "model_type": "mixtral"})


@pytest.mark.parametrize("kinds", [["full_attention"], ["full_attention", "chunked_attention", "full_attention"], [[]]])
def test_layer_types_must_fit(kinds: list[object]) -> None:
    assert "'layer_types'" in problems({**LLAMA, "model_type": "gemma2", "layer_types": kinds})


@pytest.mark.parametrize("model_type", [None, "bert", "llama4", 7, ["llama"], "x" * 10_000])
def test_other_families_are_named(model_type: object) -> None:
    text = problems({**LLAMA, "model_type": model_type})
    assert all(family in text for family in FAMILIES)
    assert len(text) < 400


@pytest.mark.parametrize("data", [None, [], "llama", 3])
def test_not_an_object(data: object) -> None:
    assert "must hold an object of keys" in problems(data)


PACKED = [
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq, 4 bits"),
    ({"quant_method": "awq", "w_bit": 4}, "awq, 4 bits"),
    ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, "fp8"),
    ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes nf4, 4 bits"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes, 8 bits"),
    ({"quant_method": "<b>" * 40, "bits": True}, "an unnamed packing"),
    ({}, "an unnamed packing"),
]


@pytest.mark.parametrize(("packing", "said"), PACKED)
def test_packed_weights_are_told(packing: dict[str, Any], said: str) -> None:
    """Counts are those of the unpacked model, whatever the files hold."""
    plain = model_from_config(LLAMA, "packed")
    shape = model_from_config({**LLAMA, "quantization_config": packing}, "packed")
    assert shape.stored_as == said
    assert shape.num_parameters == plain.num_parameters
    assert plain.stored_as == ""


def test_packing_must_be_an_object() -> None:
    with pytest.raises(ConfigError, match="'quantization_config' must be an object of keys, not 'gptq'"):
        model_from_config({**LLAMA, "quantization_config": "gptq"}, "packed")
