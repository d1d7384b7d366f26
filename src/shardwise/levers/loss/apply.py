"""The loss over the vocabulary, in the model's own forward, so that the groups of `fully_shard` see one call.

plain     logits of the whole micro-batch, as the model makes them; fp32 cross-entropy; sum
chunked   head and cross-entropy for a thousand tokens at a time, computed again in backward: the least memory
fused     head, cross-entropy and their gradients for a few thousand tokens at a time, once (`apply_fused.py`)

Chunked and fused make logits only for tokens that are learned; which these are is known on the host, so nothing waits
for the card.

[Note: whose logits] Chunked and fused take the hidden states from the decoder and bypass what the model does between
them and its logits. So the model's own forward is asked: with a stand-in for decoder and head, which costs nothing, its
logits must be what the rule says, or these losses are refused.

A head that tensor parallel has split gives a DTensor of logits split along the vocabulary; see `apply_split.py`.

Shapes: B rows, T tokens of a row, N tokens that get logits, H hidden size, V vocabulary.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ConfigError
from shardwise.levers.loss.apply_fused import IGNORE_INDEX, LogitRule, fine_dtype, linear_cross_entropy
from shardwise.levers.loss.apply_split import split_cross_entropy, whole_hidden
from shardwise.levers.loss.cost import CHUNK_TOKENS
from shardwise.vocabulary.strategy import LossKind

LossOfHidden = Callable[[nn.Module, Tensor, Tensor], Tensor]


def apply(model: nn.Module, kind: LossKind, *, compiled: bool = False) -> None:
    """Teaches a causal language model to answer `model(..., loss_labels=labels)` with its summed loss.

    With `loss_rows` as well, chunked and fused make logits for those of the B * T tokens only; every token that has
    something to learn must be among them. Without `loss_labels` its forward is what it was.

    Args:
        model: A Hugging Face causal language model.
        kind: plain, chunked or fused.
        compiled: Whether fused compiles its kernel.

    Raises:
        ConfigError: The model does something to hidden states or logits that chunked and fused do not know.
    """
    from_hidden = None if kind == "plain" else loss_of_hidden(model, kind, compiled=compiled)
    own_forward: Callable[..., Any] = model.forward

    def forward(
        self: Any, *args: Any, loss_labels: Tensor | None = None, loss_rows: Tensor | None = None, **kwargs: Any
    ) -> Any:
        if loss_labels is None:
            return _with_whole_logits(own_forward(*args, **kwargs))
        targets = next_tokens(loss_labels)  # [B, T]
        if from_hidden is None:
            logits: Tensor = own_forward(*args, use_cache=False, **kwargs).logits  # [B, T, V]
            return summed_cross_entropy(logits, targets)
        hidden: Tensor = self.get_decoder()(*args, use_cache=False, **kwargs).last_hidden_state  # [B, T, H]
        weight = self.get_output_embeddings().weight
        if isinstance(weight, DTensor):
            hidden = whole_hidden(hidden, weight, targets.shape[1])
        return from_hidden(self, *taken(hidden.flatten(0, 1), targets.flatten(), loss_rows))

    model.forward = types.MethodType(forward, model)


def next_tokens(labels: Tensor) -> Tensor:
    """What each token should predict, -100 where it is not learned: [B, T] -> [B, T]."""
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]


def taken(hidden: Tensor, targets: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """The tokens that get logits: [B * T, H], [B * T], [N] -> [N, H], [N]; all of them where rows is None."""
    return (hidden, targets) if rows is None else (hidden.index_select(0, rows), targets.index_select(0, rows))


def loss_of_hidden(model: nn.Module, kind: LossKind, *, compiled: bool) -> LossOfHidden:
    """The chunked or fused loss of a model's hidden states: (model, [N, H], [N]) -> [].

    Raises:
        ConfigError: See [Note: whose logits].
    """
    rule = logit_rule(model)
    check_rule(model, rule, kind)

    def chunked(model: Any, hidden: Tensor, targets: Tensor) -> Tensor:
        return _chunked(model.get_output_embeddings(), hidden, targets, rule)

    def fused(model: Any, hidden: Tensor, targets: Tensor) -> Tensor:
        head = model.get_output_embeddings()
        return linear_cross_entropy(hidden, head.weight, head.bias, targets, rule, compiled=compiled)

    return chunked if kind == "chunked" else fused


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in fp32 (or finer), summed over the tokens that are learnt: [..., V], [...] -> []."""
    if isinstance(logits, DTensor):
        part, group = logits.to_local().flatten(0, -2), logits.device_mesh.get_group()
        return split_cross_entropy(part, targets.flatten(), group, IGNORE_INDEX)
    fine = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(fine.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def _with_whole_logits(output: Any) -> Any:
    """What a model's own forward gave, with its logits gathered if they are split."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, DTensor):
        output.logits = logits.full_tensor()
    return output


def _chunked(head: Any, hidden: Tensor, targets: Tensor, rule: LogitRule) -> Tensor:
    product: Callable[[Tensor], Tensor] = _split_product(head) if isinstance(head.weight, DTensor) else head

    def of_chunk(chunk: Tensor, chunk_targets: Tensor) -> Tensor:
        return summed_cross_entropy(rule(product(chunk)), chunk_targets)

    total = hidden.new_zeros((), dtype=fine_dtype(hidden.dtype))
    for chunk, chunk_targets in zip(hidden.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True):
        total = total + checkpoint(of_chunk, chunk, chunk_targets, use_reentrant=False)
    return total


def _split_product(head: Any) -> Callable[[Tensor], Tensor]:
    """The head for tokens that every rank of tp has, without the messages of its hooks: [N, H] -> [N, V] split."""
    mesh, weight = head.weight.device_mesh, head.weight.to_local()
    bias = None if head.bias is None else head.bias.to_local()
    return lambda chunk: DTensor.from_local(F.linear(chunk, weight, bias), mesh, [Shard(-1)], run_check=False)


def logit_rule(model: Any) -> LogitRule:
    """What a model's config says of its logits."""
    config = model.config
    scale = float(getattr(config, "logit_scale", None) or 1) * float(getattr(config, "lm_head_multiplier", None) or 1)
    return LogitRule(
        scale=scale / float(getattr(config, "logits_scaling", None) or 1),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


@torch.no_grad()
def check_rule(model: Any, rule: LogitRule, kind: LossKind) -> None:
    """Asks the model's own forward what it makes of hidden states and logits ([Note: whose logits]).

    Raises:
        ConfigError: Something else than the rule says, or its head is no plain matrix.
    """
    way_out = f"loss: {kind} computes the logits itself and would compute others. Use loss: plain."
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ConfigError(
            f"The head of {type(model).__name__} is a {type(head).__name__}, not a plain matrix; {way_out}"
        )
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 3, 8, generator=draw)  # [1, T, H]
    logits = 4 * torch.randn(1, 3, 8, generator=draw)  # [1, T, V]
    try:
        with _stand_ins(model, hidden, logits) as seen:
            found = model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=False).logits
    except Exception as error:
        raise ConfigError(
            f"{type(model).__name__} does not show what it does to its logits: {error}; {way_out}"
        ) from error
    if len(seen) != 1 or not torch.equal(seen[0], hidden):
        raise ConfigError(f"{type(model).__name__} changes the hidden states before its head; {way_out}")
    if found.shape != logits.shape or not torch.allclose(found.float(), rule(logits), rtol=1e-4, atol=1e-4):
        raise ConfigError(f"{type(model).__name__} changes its logits in a way that is not known here; {way_out}")


@contextmanager
def _stand_ins(model: Any, hidden: Tensor, logits: Tensor) -> Generator[list[Tensor]]:
    """Inside, the decoder answers `hidden` and the head `logits`; gives what the head was asked."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Answer(BaseModelOutputWithPast):
        """What a decoder gives; of all that some decoders give besides, nothing."""

        def __getattr__(self, name: str) -> None:
            return None

    seen: list[Tensor] = []

    def decode(*_args: Any, **_kwargs: Any) -> Any:
        return Answer(last_hidden_state=hidden)  # pyright: ignore[reportArgumentType]

    def project(asked: Tensor) -> Tensor:
        seen.append(asked)
        return logits

    decoder, head = model.get_decoder(), model.get_output_embeddings()
    decoder.forward, head.forward = decode, project
    try:
        yield seen
    finally:
        del decoder.forward, head.forward
