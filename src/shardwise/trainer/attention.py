"""Attention that needs no mask: causal rows, and documents in one row told apart by where they start.

[Note: no mask] transformers makes a mask before the first block of every forward, and to find out whether it may leave
it out it looks at values on the card: the host waits there for everything that it has handed over, in every
micro-batch. An attention that transformers does not know gets no mask and no such look. So models whose blocks say all
there is to know (causal, perhaps a window) are given this one: rows without bounds go to scaled_dot_product_attention
as causal, which takes cuDNN's or flash attention's kernel; documents in one row go to the variable-length kernel with
their starts, which are known on the host. No tensor of T x T exists.

[Note: bounds] cu_seqlens holds the first token of each document and the number of all tokens. Empty documents at its
end are allowed, so that its length takes few values; max_seqlen may be larger than the longest document.

Shapes: T tokens of a row, A query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import ConfigError

NAME = "shardwise"
"""Under which transformers knows it."""
_LEAST_CAPABILITY = (8, 0)
_MOST_HEAD_DIM = 256
_MOST_PARAMETERS = 50_000_000
"""Of a twin; one that stays larger would take seconds."""


def adopt(model: Any) -> bool:
    """Gives a model that was made with sdpa this attention, if a small twin of it proves it right ([Note: no mask]).

    Returns:
        Whether it took; a model that keeps sdpa is as right as before, and slower.
    """
    if (
        model.config._attn_implementation != "sdpa"
        or not _proof(type(model), model.config.to_json_string(use_diff=False)).rows
    ):
        return False
    model.set_attn_implementation(NAME)
    return is_adopted(model)


def is_adopted(model: Any) -> bool:
    """Whether a model has this attention."""
    return model.config._attn_implementation == NAME


def attention_in_words(model: Any, layout: str) -> str:
    """Which attention a run has, and what it costs where it is not the fast one."""
    kind = model.config._attn_implementation
    if not is_adopted(model) and kind == "sdpa":
        return (
            f"Attention: sdpa with transformers' masks. {type(model).__name__} does not prove itself without them, so "
            "the host waits for the card once in every forward."
        )
    rows = {
        "padded": "one document a row",
        "flat": "documents in one row by their bounds",
        "packed": "documents in one row by a mask of T x T, which is slow: no kernel for their bounds here",
    }
    return f"Attention: {'sdpa without masks' if is_adopted(model) else kind}, {rows[layout]}"


def takes_bounds(model: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether documents in one row may be told apart by their bounds: [Note: bounds]."""
    config = model.config
    if not is_adopted(model) or getattr(config, "attention_dropout", 0.0):
        return False
    if not _proof(type(model), config.to_json_string(use_diff=False)).bounds:
        return False
    if device.type == "cpu":
        return True
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fits = head_dim <= _MOST_HEAD_DIM and head_dim % 8 == 0 and dtype in (torch.bfloat16, torch.float16)
    capable = torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
    return fits and capable and variable_length_kernel() is not None


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What a small twin of a model computes as it should with this attention."""

    rows: bool = False
    """Rows of one document, as with sdpa."""
    bounds: bool = False
    """Documents in one row, as if each were alone."""


TWIN: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
    "max_window_layers": 1, "sliding_window": 7, "attention_chunk_size": 7,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Sizes of the twin; keys that a config does not set stay as they are."""


@functools.cache
def _proof(kind: Any, config_json: str) -> Proof:
    """Makes the twin of a model class and its config and computes with it, in a tenth of a second on the CPU."""
    _register()
    keys = json.loads(config_json)
    small = {key: value for key, value in TWIN.items() if keys.get(key) is not None}
    if keys.get("layer_types"):
        small["layer_types"] = [keys["layer_types"][0], keys["layer_types"][-1]]
    keys.pop("_attn_implementation", None)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            config = kind.config_class.from_dict(keys | small)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in kind(config).parameters())
            if size > _MOST_PARAMETERS:
                return Proof()
            return _computed(kind._from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval())
    except Exception:  # a class that cannot be made small, or cannot take another attention, keeps its own
        return Proof()


def _computed(twin: Any) -> Proof:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 64, (1, 24), generator=draw)  # [1, T]
    expected = twin(input_ids=ids, use_cache=False).logits
    twin.set_attn_implementation(NAME)
    if not is_adopted(twin) or not torch.allclose(twin(input_ids=ids, use_cache=False).logits, expected, atol=1e-4):
        return Proof()
    marks = (0, 5, 18, 24)
    spans = list(itertools.pairwise(marks))
    alone = torch.cat([twin(input_ids=ids[:, a:b], use_cache=False).logits for a, b in spans], 1)
    positions = torch.cat([torch.arange(b - a) for a, b in spans])[None]
    bounds = torch.tensor([*marks, 24], dtype=torch.int32)
    together = twin(input_ids=ids, position_ids=positions, use_cache=False, **bounds_for(bounds, 16)).logits
    return Proof(rows=True, bounds=torch.allclose(together, alone, atol=1e-4))


def bounds_for(bounds: Tensor, longest: int) -> dict[str, Any]:
    """The arguments of a model's forward that tell documents apart."""
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **told: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' blocks call it.

    Args:
        module: The block's attention.
        query: [B, A, T, D]
        key: [B, G, T, D]
        value: [B, G, T, D]
        attention_mask: Usually None; what a caller has made is used. [B, 1, T, T]
        told: scaling, dropout, sliding_window, and with documents cu_seq_lens_q and max_length_q; others pass through.

    Returns:
        [B, T, A, D], and no weights.

    Raises:
        ConfigError: The block asks for something that changes attention and is not known here.
    """
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if told.get(name) is not None]
    if unknown:
        raise ConfigError(f"Attention with {', '.join(unknown)} is not known here. Use attn_implementation: eager.")
    window, bounds = told.get("sliding_window"), told.get("cu_seq_lens_q")
    if bounds is None or attention_mask is not None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if attention_mask is None and window is not None and key.shape[2] > window:
            attention_mask = band(query.shape[2], key.shape[2], window, query.device)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **told)
    rows = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]  # [T, heads, D]
    scale, reach = told.get("scaling"), -1 if window is None else window - 1
    kernel = _Found.kernel if query.is_cuda and _Found.kernel is not None else attend_by_document
    return kernel(rows, bounds, told["max_length_q"], scale, reach).unsqueeze(0), None


def band(num_queries: int, num_keys: int, window: int, device: torch.device) -> Tensor:
    """True where a query may look at a key: itself and the window - 1 before it: [1, 1, queries, keys]."""
    at = torch.arange(num_keys, device=device)
    query_at = at[num_keys - num_queries :, None]
    return ((at <= query_at) & (at > query_at - window))[None, None]


Kernel = Callable[[list[Tensor], Tensor, int, float | None, int], Tensor]


def attend_by_document(rows: list[Tensor], bounds: Tensor, longest: int, scale: float | None, reach: int) -> Tensor:
    """One document after the other by scaled_dot_product_attention, for processors.

    Args:
        rows: Query [T, A, D], key [T, G, D], value [T, G, D].
        bounds: cu_seqlens. [documents + 1]
        longest: Not needed here.
        scale: Of the scores; None: 1 / sqrt(D).
        reach: Tokens before its own that a token sees; -1: all.

    Returns:
        [T, A, D]
    """
    del longest
    marks = bounds.tolist()
    outputs: list[Tensor] = []
    for start, end in itertools.pairwise(marks):
        if start == end:
            continue
        query, key, value = (row[start:end].transpose(0, 1)[None] for row in rows)  # [1, heads, tokens, D]
        mask = band(end - start, end - start, reach + 1, query.device) if 0 <= reach < end - start else None
        out = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def variable_length_kernel() -> Kernel | None:
    """The kernel for documents in one row, whatever this torch calls its options; None where there is none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if "window_size" not in known:
        return None
    grouped = {"enable_gqa": True} if "enable_gqa" in known else {}

    def attend_documents(rows: list[Tensor], bounds: Tensor, longest: int, scale: float | None, reach: int) -> Tensor:
        query, key, value = rows
        options: dict[str, Any] = {"scale": scale, "window_size": (reach, 0), **grouped}
        out: Any = varlen_attn(query, key, value, bounds, bounds, longest, longest, **options)
        return out

    return attend_documents


class _Found:
    """What was looked up once."""

    kernel: Kernel | None = None


def _register() -> None:
    """Makes the name known to transformers, and looks once which kernel there is, as compiled code cannot."""
    from transformers import AttentionInterface

    _Found.kernel = variable_length_kernel()
    AttentionInterface.register(NAME, attend)
