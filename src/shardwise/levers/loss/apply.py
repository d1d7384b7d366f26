"""The loss over the vocabulary, in the model's own forward, so that the groups of `fully_shard` see one call.

plain     logits of the whole micro-batch, as the model makes them; fp32 cross-entropy; sum
chunked   head and cross-entropy for a few thousand tokens at a time, computed again in backward: logits never exist
          whole
fused     Liger's kernel, which makes neither logits nor their gradient

Shapes: B rows, T tokens of a row, H hidden size, V vocabulary.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ConfigError, MissingExtraError
from shardwise.vocabulary.strategy import LossKind

IGNORE_INDEX = -100
CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once in a chunked loss."""
_UNKNOWN_SCALINGS = ("logit_scale", "logits_scaling", "output_multiplier_scale")
"""Keys of config.json that change logits in ways that only the model's own forward knows."""


def apply(model: nn.Module, kind: LossKind) -> None:
    """Teaches a causal language model to answer `model(..., loss_labels=labels)` with its summed loss.

    Without `loss_labels` its forward is what it was.

    Args:
        model: A Hugging Face causal language model.
        kind: plain, chunked or fused.

    Raises:
        ConfigError: The model scales its logits in a way that chunked and fused do not know.
        MissingExtraError: fused without Liger.
    """
    config: Any = model.config
    scalings = [name for name in _UNKNOWN_SCALINGS if getattr(config, name, None) not in (None, 1, 1.0)]
    if kind != "plain" and scalings:
        raise ConfigError(
            f"The model's config sets {', '.join(scalings)}, which loss: {kind} does not know. Use plain."
        )
    from_hidden = None if kind == "plain" else {"chunked": _chunked, "fused": _fused}[kind]
    if kind == "fused":
        _liger()
    own_forward: Callable[..., Any] = model.forward

    def forward(self: Any, *args: Any, loss_labels: Tensor | None = None, **kwargs: Any) -> Any:
        if loss_labels is None:
            return own_forward(*args, **kwargs)
        targets = F.pad(loss_labels, (0, 1), value=IGNORE_INDEX)[:, 1:]  # [B, T]: what each token should predict
        if from_hidden is None:
            logits: Tensor = own_forward(*args, use_cache=False, **kwargs).logits  # [B, T, V]
            return summed_cross_entropy(logits, targets)
        hidden: Tensor = self.get_decoder()(*args, use_cache=False, **kwargs).last_hidden_state  # [B, T, H]
        return from_hidden(self, hidden, targets)

    model.forward = types.MethodType(forward, model)


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in fp32 (or finer), summed over the tokens that are learnt: [..., V], [...] -> []."""
    fine = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(fine.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def _softcap(model: Any, logits: Tensor) -> Tensor:
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _chunked(model: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    head = model.get_output_embeddings()
    rows, flat_targets = hidden.flatten(0, 1), targets.flatten()  # [B * T, H], [B * T]

    def of_chunk(chunk: Tensor, chunk_targets: Tensor) -> Tensor:
        return summed_cross_entropy(_softcap(model, head(chunk)), chunk_targets)

    total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    for chunk, chunk_targets in zip(rows.split(CHUNK_TOKENS), flat_targets.split(CHUNK_TOKENS), strict=True):
        total = total + checkpoint(of_chunk, chunk, chunk_targets, use_reentrant=False)
    return total


def _liger() -> Any:
    try:
        return importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    except ImportError:
        raise MissingExtraError("loss: fused", "fused", "liger-kernel") from None


def _fused(model: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    head = model.get_output_embeddings()
    function = _liger().LigerFusedLinearCrossEntropyFunction
    cap = getattr(model.config, "final_logit_softcapping", None)
    loss = function.apply(
        hidden.flatten(0, 1), head.weight, targets.flatten(), head.bias, None, IGNORE_INDEX, 0.0, 0.0, "sum", cap
    )
    return loss[0] if isinstance(loss, tuple) else loss
