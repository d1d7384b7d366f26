"""Parameter counts, exact to the last one, against the modules that transformers builds on the meta device."""

import copy
from typing import Any

import pytest

from shardwise.facts import catalog
from shardwise.facts.config import FAMILIES, model_from_config
from shardwise.vocabulary.model import ModelShape

pytest.importorskip("torch")
pytest.importorskip("transformers")

TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 131, "head_dim": 24,
}  # fmt: skip


def built(config: dict[str, Any]) -> tuple[int, Any]:
    """Elements of the unique tensors of the causal language model, and its config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    data = copy.deepcopy(config)
    hf_config = AutoConfig.for_model(data.pop("model_type"), **data)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    unique = {id(parameter): parameter.numel() for parameter in model.parameters()}
    return sum(unique.values()), model.config


def windowed_layers(hf_config: Any) -> int:
    """Layers that look through a window, as the module of each family decides it."""
    if getattr(hf_config, "sliding_window", None) is None or hf_config.model_type in ("llama", "gemma"):
        return 0
    kinds = getattr(hf_config, "layer_types", None)
    return hf_config.num_hidden_layers if kinds is None else kinds.count("sliding_attention")


def assert_same(shape: ModelShape, config: dict[str, Any]) -> None:
    count, hf_config = built(config)
    assert shape.num_parameters == count
    assert shape.tie_word_embeddings == bool(hf_config.tie_word_embeddings)
    assert shape.num_key_value_heads == hf_config.num_key_value_heads
    assert shape.max_position_embeddings == hf_config.max_position_embeddings
    assert shape.num_windowed_layers == windowed_layers(hf_config)
    assert shape.hidden_act == getattr(hf_config, "hidden_activation", None) or hf_config.hidden_act
    assert shape.sliding_window == (hf_config.sliding_window if shape.num_windowed_layers else None)


@pytest.mark.parametrize("name", catalog.names("models"))
def test_catalogue_model_has_exactly_as_many_parameters_as_transformers_builds(name: str) -> None:
    entry = catalog.model_file(name)
    shape = catalog.model(name)
    assert shape.num_parameters == entry.num_parameters
    assert_same(shape, dict(entry.config))


def test_every_family_is_in_the_catalogue() -> None:
    assert {catalog.model(name).model_type for name in catalog.names("models")} == set(FAMILIES)


@pytest.mark.parametrize("model_type", [family for family in FAMILIES if family != "phi3"])
@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_odd_shapes_agree_as_well(model_type: str, attention_bias: bool, tied: bool) -> None:
    config: dict[str, Any] = {
        **TINY,
        "model_type": model_type,
        "attention_bias": attention_bias,
        "mlp_bias": True,  # only Llama knows it
        "tie_word_embeddings": tied,
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    }
    if FAMILIES[model_type].expert_count_keys:
        config |= {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
        config |= {"num_local_experts": 4} if model_type == "mixtral" else {"num_experts": 4}
    assert_same(model_from_config(config, "odd"), config)


@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_keys_that_are_left_out_get_the_defaults_of_transformers(model_type: str) -> None:
    config: dict[str, Any] = {
        "model_type": model_type, "hidden_size": 4096, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 32, "vocab_size": 32064,
    }  # fmt: skip
    if FAMILIES[model_type].expert_count_keys:
        config |= {"num_local_experts": 4} if model_type == "mixtral" else {"num_experts": 4}
    if model_type == "qwen3_moe":
        config["num_experts_per_tok"] = 4
    assert_same(model_from_config(config, "bare"), config)


def test_gemma3_with_vision_gives_its_text_decoder() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 256, "intermediate_size": 300, "num_hidden_layers": 7}
    shape = model_from_config({"model_type": "gemma3", "text_config": text, "vision_config": {}}, "vision")
    assert_same(shape, text)
    assert (shape.vocab_size, shape.num_attention_heads, shape.num_windowed_layers) == (262_208, 8, 6)


def test_published_counts() -> None:
    """Totals that the hub prints for the safetensors of these repositories."""
    published = {
        "smollm2-135m": 134_515_008,
        "qwen2.5-7b": 7_615_616_512,
        "llama-3.1-8b": 8_030_261_248,
        "llama-3.1-70b": 70_553_706_496,
        "mistral-7b": 7_248_023_552,
        "mixtral-8x7b": 46_702_792_704,
        "gemma-2-27b": 27_227_128_320,
        "gemma-3-1b": 999_885_952,
        "qwen3-30b-a3b": 30_532_122_624,
        "phi-4": 14_659_507_200,
    }
    assert {name: catalog.model(name).num_parameters for name in published} == published
    assert catalog.model("qwen3-30b-a3b").num_active_parameters == pytest.approx(3.3e9, rel=0.02)
    assert catalog.model("mixtral-8x7b").num_active_parameters == pytest.approx(12.9e9, rel=0.01)


def test_the_golden_models_round_to_the_article_figures() -> None:
    given: dict[str, dict[str, Any]] = {
        "qwen2.5-7b": {"parameters": 7.62e9, "layers": 28},
        "qwen2.5-1.5b": {"parameters": 1.54e9, "layers": 28},
    }
    for name, figures in given.items():
        shape = catalog.model(name)
        assert round(shape.num_parameters / 1e9, 2) == figures["parameters"] / 1e9
        assert shape.num_hidden_layers == figures["layers"]
