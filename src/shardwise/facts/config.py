"""A ModelShape from the data of a config.json.

[Note: config.json]
A config.json is written by a stranger. It is read as data only: `auto_map` and `trust_remote_code` are never looked at,
no key is evaluated, every number is checked against a limit before it is multiplied. Keys that a family leaves out get
the default that transformers gives them; the sizes that make a model what it is must be there, because transformers
would silently put those of another model in their place.

[Note: families]
What differs between families is a table (`FAMILIES`), not a class each: which keys carry biases and norms, which
defaults hold, which layers look through a window.
Source: transformers, `models/<model_type>/configuration_*.py` and `modeling_*.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from shardwise.errors import ConfigError, nearest_names
from shardwise.vocabulary.model import ModelShape

Config = Mapping[str, Any]
HeadDim = int | Literal["hidden_size / num_attention_heads"]
Windows = Literal["none", "all", "above_max_window_layers", "alternate", "pattern"]
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""The keys without which a model has no shape."""
QUANTIZATION = "quantization_config"
LIMITS: Mapping[str, int] = {
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "moe_intermediate_size": 2**20,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**13,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**31,
    "sliding_window": 2**31,
    "num_experts": 2**14,
    "num_experts_per_tok": 2**14,
}
"""Largest believable value of a key; several times what any published decoder has."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the decoders of one `model_type` are built."""

    defaults: Mapping[str, Any]
    """What transformers puts in the place of a key that is left out."""
    head_dim: HeadDim = "hidden_size / num_attention_heads"
    """Where the key is left out."""
    heads_must_divide_hidden: bool = False
    """transformers refuses the config otherwise, even where head_dim is given."""
    qkv_bias: bool | Literal["attention_bias"] = False
    """Fixed by the family, or given by a key."""
    output_bias: bool | Literal["attention_bias"] = False
    mlp_bias: bool | Literal["mlp_bias"] = False
    qk_norm: bool = False
    norms_per_block: int = 2
    windows: Windows = "none"
    """Which layers attend to the last `sliding_window` tokens only."""
    activation_key: str = "hidden_act"
    expert_width_key: str | None = None
    """The key that holds the width of one expert; None for dense families."""
    expert_count_keys: tuple[str, ...] = ()


def _dense(max_positions: int, kv_heads: int | None, *, tied: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "max_position_embeddings": max_positions,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        **more,
    }


_GEMMA3_SIZES = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8,
}  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        defaults=_dense(2048, None),
        heads_must_divide_hidden=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "mistral": Family(defaults=_dense(131072, 8, sliding_window=4096), windows="all"),
    "qwen2": Family(
        defaults=_dense(32768, 32, sliding_window=4096, max_window_layers=28),
        qkv_bias=True,
        windows="above_max_window_layers",
    ),
    "qwen3": Family(
        defaults=_dense(32768, 32, sliding_window=4096, max_window_layers=28),
        head_dim=128,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        windows="above_max_window_layers",
    ),
    "gemma": Family(
        defaults=_dense(8192, 16, tied=True, hidden_act="gelu_pytorch_tanh"),
        head_dim=256,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "gemma2": Family(
        defaults=_dense(8192, 4, tied=True, hidden_act="gelu_pytorch_tanh", sliding_window=4096),
        head_dim=256,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        norms_per_block=4,
        windows="alternate",
        activation_key="hidden_activation",
    ),
    "gemma3_text": Family(
        # The nested text_config of Gemma 3 is saved as its difference from these defaults, so the sizes have them too.
        defaults=_dense(131072, 4, tied=True, hidden_act="gelu_pytorch_tanh", sliding_window=4096) | _GEMMA3_SIZES,
        head_dim=256,
        heads_must_divide_hidden=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        norms_per_block=4,
        windows="pattern",
        activation_key="hidden_activation",
    ),
    "qwen3_moe": Family(
        defaults=_dense(32768, 4, sliding_window=4096, moe_intermediate_size=768, num_experts_per_tok=8),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        windows="all",
        expert_width_key="moe_intermediate_size",
        expert_count_keys=("num_experts", "num_local_experts"),
    ),
    "mixtral": Family(
        defaults=_dense(131072, 8, sliding_window=None, num_experts_per_tok=2),
        windows="all",
        expert_width_key="intermediate_size",
        expert_count_keys=("num_local_experts", "num_experts"),
    ),
    "phi3": Family(defaults=_dense(4096, None, sliding_window=None), windows="all"),
}
"""See [Note: families]. Phi-3 fuses q, k, v and gate, up into one matrix each: the elements are the same."""
_USES_SLIDING_WINDOW_KEY = ("qwen2", "qwen3", "qwen3_moe")


def model_from_config(data: object, name: str) -> ModelShape:
    """The shape that a config.json describes; see [Note: config.json].

    Args:
        data: What the JSON gave.
        name: What the user called the model; names the shape and begins every message.

    Raises:
        ConfigError: If the model_type is not supported, or a key is missing, of the wrong type, out of its limits, or
            at odds with another; carries every problem.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: config.json must hold an object of keys, not {type(data).__name__}")
    config = cast("dict[str, Any]", data)
    model_type = config.get("model_type")
    text = config.get("text_config")
    if model_type == "gemma3" and isinstance(text, dict):
        # The decoder of a model that also sees: what is fine-tuned on text. The vision tower is not counted.
        packed = {key: config[key] for key in (QUANTIZATION,) if key in config}
        config = {"model_type": "gemma3_text", **packed, **cast("dict[str, Any]", text)}
        model_type = config["model_type"]
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ConfigError(f"{name}: {_unsupported(model_type)}")
    reader = _Reader(config, family)
    shape = reader.shape(name, cast("str", model_type))
    if shape is None:
        raise ConfigError(*(f"{name}: {problem}" for problem in reader.problems))
    return shape


def _unsupported(model_type: object) -> str:
    supported = ", ".join(FAMILIES)
    if model_type is None:
        return f"config.json has no 'model_type'; supported are {supported}"
    near = nearest_names(str(model_type), list(FAMILIES), count=1)
    hint = f" (nearest: {near[0]})" if near else ""
    return f"model_type {str(model_type)[:60]!r} is not supported{hint}; supported are {supported}"


@dataclass
class _Reader:
    """Reads checked values out of one config and gathers what is wrong with it."""

    config: Config
    family: Family
    problems: list[str] = field(default_factory=list[str])

    def shape(self, name: str, model_type: str) -> ModelShape | None:
        """The shape, or None if there are problems."""
        sizes = {key: self.integer(key) for key in SIZES}
        heads = sizes["num_attention_heads"]
        kv_heads = self.integer("num_key_value_heads", heads)
        experts, active = self.experts()
        width_key = self.family.expert_width_key
        if width_key is not None:
            sizes["intermediate_size"] = self.integer(width_key)
        window, num_windowed = self.windows(model_type, sizes["num_hidden_layers"])
        bias = {key: self.flag(key, False) for key in ("attention_bias", "mlp_bias")}
        head_dim = self.head_dim(sizes["hidden_size"], heads)
        max_positions = self.integer("max_position_embeddings")
        tied = self.flag("tie_word_embeddings", bool(self.family.defaults["tie_word_embeddings"]))
        act = self.activation()
        stored_as = self.stored_as()
        if heads and kv_heads and heads % kv_heads:
            self.problems.append(
                f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})"
            )
        if self.problems:
            return None
        return ModelShape(
            name=name,
            model_type=model_type,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            tie_word_embeddings=tied,
            attention_bias=_resolve(self.family.qkv_bias, bias),
            attention_output_bias=_resolve(self.family.output_bias, bias),
            mlp_bias=_resolve(self.family.mlp_bias, bias),
            qk_norm=self.family.qk_norm,
            norms_per_block=self.family.norms_per_block,
            hidden_act=act,
            sliding_window=window if num_windowed else None,
            num_windowed_layers=num_windowed,
            max_position_embeddings=max_positions,
            num_experts=experts,
            num_experts_per_tok=active,
            stored_as=stored_as,
            **sizes,
        )

    def integer(self, key: str, if_null: int | None = None) -> int:
        """A whole number from 1 to its limit; 0 after a problem was noted.

        Args:
            key: The key of config.json.
            if_null: What stands for null, where the family's default is null too.
        """
        value = self.config.get(key)
        if value is None:
            value = self.family.defaults.get(key)
        if value is None:
            value = if_null
        limit = LIMITS[key]
        if value is None:
            self.problems.append(f"config.json has no {key!r}; add it as a whole number from 1 to {limit:,}")
        elif isinstance(value, bool) or not isinstance(value, int):
            self.problems.append(f"{key!r} must be a whole number, not {_shown(value)}")
        elif not 1 <= value <= limit:
            self.problems.append(f"{key!r} is {_shown(value)}; the limits are 1 to {limit:,}")
        else:
            return value
        return 0

    def flag(self, key: str, default: bool) -> bool:
        """Whether the key is true."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problems.append(f"{key!r} must be true or false, not {_shown(value)}")
            return default
        return value

    def head_dim(self, hidden_size: int, heads: int) -> int:
        """Given, or the family's default."""
        must_divide = self.family.heads_must_divide_hidden
        if self.config.get("head_dim") is not None:
            head_dim = self.integer("head_dim")
        elif isinstance(self.family.head_dim, int):
            head_dim = self.family.head_dim
        else:
            must_divide = True
            head_dim = hidden_size // heads if heads else 0
        if must_divide and heads and hidden_size % heads:
            self.problems.append(
                f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({heads})"
                + ("" if self.family.heads_must_divide_hidden else ", or 'head_dim' must be given")
            )
        return head_dim

    def activation(self) -> str:
        """The name of the feed-forward layer's activation."""
        key = self.family.activation_key
        value = self.config.get(key)
        if value is None:
            return str(self.family.defaults["hidden_act"])
        if not isinstance(value, str) or not 1 <= len(value) <= 40:
            self.problems.append(f"{key!r} must be the name of an activation, not {_shown(value)}")
            return ""
        # Gemma's first files say gelu and mean its tanh form; transformers reads them so.
        tanh = value == "gelu" and self.config.get("model_type") == "gemma"
        return "gelu_pytorch_tanh" if tanh else value

    def stored_as(self) -> str:
        """How the files pack the weights, in a few words; empty if they do not."""
        packing: object = self.config.get(QUANTIZATION)
        if packing is None:
            return ""
        if not isinstance(packing, dict):
            self.problems.append(f"{QUANTIZATION!r} must be an object of keys, not {_shown(packing)}")
            return ""
        keys = cast("dict[str, object]", packing)
        method = keys.get("quant_method")
        name = method if isinstance(method, str) and _WORD.fullmatch(method) else "an unnamed packing"
        bits = keys.get("bits", keys.get("w_bit"))
        if keys.get("load_in_4bit") is True or keys.get("_load_in_4bit") is True:
            bits, kind = 4, keys.get("bnb_4bit_quant_type")
            name += f" {kind}" if isinstance(kind, str) and _WORD.fullmatch(kind) else ""
        elif keys.get("load_in_8bit") is True or keys.get("_load_in_8bit") is True:
            bits = 8
        whole = isinstance(bits, int) and not isinstance(bits, bool) and 1 <= bits <= 16
        return f"{name}, {bits} bits" if whole else name

    def experts(self) -> tuple[int, int]:
        """Experts a block, and how many of them a token passes; (0, 0) for a dense family."""
        keys = self.family.expert_count_keys
        if not keys:
            return 0, 0
        key = next((key for key in keys if self.config.get(key) is not None), keys[0])
        count = self.config.get(key)
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= LIMITS["num_experts"]:
            said = "is missing" if count is None else f"is {_shown(count)}"
            self.problems.append(f"{key!r} {said}; it must be a whole number from 1 to {LIMITS['num_experts']:,}")
            count = 0
        active = self.integer("num_experts_per_tok")
        if count and active > count:
            self.problems.append(f"num_experts_per_tok ({active}) must not be more than {key} ({count})")
        if self.config.get("mlp_only_layers") or self.config.get("decoder_sparse_step") not in (None, 1):
            self.problems.append(
                "mixtures with dense layers in between ('mlp_only_layers' not empty or 'decoder_sparse_step' not 1) "
                "are not supported"
            )
        return count, active

    def windows(self, model_type: str, num_layers: int) -> tuple[int | None, int]:
        """The window in tokens, and how many layers look through it."""
        rule = self.family.windows
        uses = not (model_type in _USES_SLIDING_WINDOW_KEY and not self.flag("use_sliding_window", False))
        given = self.config["sliding_window"] if "sliding_window" in self.config else self.family.defaults.get(
            "sliding_window"
        )  # fmt: skip
        if rule == "none" or not uses or given is None:
            return None, 0
        window = self.integer("sliding_window")
        kinds = self.config.get("layer_types")
        if rule != "all" and isinstance(kinds, list):
            return window, self.windowed_of(cast("list[object]", kinds), num_layers)
        if rule == "all":
            return window, num_layers
        if rule == "alternate":  # layers 0, 2, 4, ...
            return window, (num_layers + 1) // 2
        if rule == "pattern":  # every sixth layer sees all
            pattern = self.config.get("sliding_window_pattern", 6)
            if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
                self.problems.append(f"'sliding_window_pattern' must be a whole number from 1, not {_shown(pattern)}")
                return window, 0
            return window, num_layers - num_layers // pattern
        first = self.config.get("max_window_layers", self.family.defaults["max_window_layers"])
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            self.problems.append(f"'max_window_layers' must be a whole number from 0, not {_shown(first)}")
            return window, 0
        return window, max(0, num_layers - first)

    def windowed_of(self, kinds: list[object], num_layers: int) -> int:
        """How many entries of `layer_types` use the window."""
        known = ("sliding_attention", "full_attention")
        wrong = [kind for kind in kinds if kind not in known]
        if wrong or len(kinds) != num_layers:
            self.problems.append(
                f"'layer_types' must name one of {' or '.join(known)} for each of the {num_layers} layers"
                + (f", not {_shown(wrong[0])}" if wrong else f"; it names {len(kinds)}")
            )
        return sum(kind == "sliding_attention" for kind in kinds)


_WORD = re.compile(r"[A-Za-z0-9_.-]{1,40}")


def _resolve(rule: bool | str, flags: Mapping[str, bool]) -> bool:
    return flags[rule] if isinstance(rule, str) else rule


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number with more digits than Python will print
        text = "a number of thousands of digits"
    return text if len(text) <= 40 else text[:37] + "..."
