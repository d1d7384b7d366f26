"""The loss over the vocabulary: often the largest thing on a card.

[Note: bytes of a logit]
Plain: logits leave the head in E bytes; cross-entropy works in fp32. The forward holds logits, their fp32 copy and the
log-softmax (E + 4 + 4); the backward holds the log-softmax, the incoming fp32 gradient and its own fp32 result
(4 + 4 + 4), then their E-byte copy. Not E, as many calculators have it.
The final norm, which no block compiles, keeps its fp32 input, and what it normalized and gave if it is trained.
Chunked: the same for one chunk of tokens at a time, plus the gradient of the hidden states.
Fused (Liger): as chunked, the chunk chosen by the kernel so that it is about as large as the hidden states.

Source: peak bytes of simulated steps; `tests/distributed/test_costs.py` on real ones.
"""

from __future__ import annotations

import math

from shardwise.vocabulary.memory import Category, Instant, Term
from shardwise.vocabulary.placement import Placement

SOURCE = "[Note: bytes of a logit]"
CHUNK_TOKENS = 1024
"""Tokens of one chunk of the chunked loss, as the engine cuts them."""


def stores(place: Placement) -> tuple[Term, ...]:
    """Logits and their gradients at the instant of the loss, and the last hidden states."""
    if not place.is_last:
        return ()
    saved = 4 + (2 * place.element_bytes if place.trains_all else 0)
    hidden = place.tokens * place.model.hidden_size * saved
    terms = [_term("logits", logit_bytes(place), (Instant.LOSS,), "see [Note: bytes of a logit]")]
    forward = logit_bytes(place) * (place.element_bytes + 8) // per_logit(place)
    terms.append(_term("logits in evaluation", forward, (Instant.EVALUATION,), "forward only, of one micro-batch"))
    terms.append(_term("last hidden states", hidden, (Instant.LOSS,), f"{saved} B an element: the final norm, eager"))
    return (*terms, *_head_gradient(place))


def per_logit(place: Placement) -> int:
    """Bytes of one logit at the peak; see [Note: bytes of a logit]."""
    return max(place.element_bytes + 8, 12)


def logit_bytes(place: Placement) -> int:
    """Peak bytes of logits, log-softmax and gradients."""
    vocab = -(-place.model.vocab_size // place.strategy.tp)
    return per_logit(place) * chunk_tokens(place) * vocab


def chunk_tokens(place: Placement) -> int:
    """Tokens whose logits exist at once."""
    if place.strategy.loss == "plain":
        return place.tokens
    if place.strategy.loss == "chunked":
        return min(place.tokens, CHUNK_TOKENS)
    pieces = max(1, -(-place.model.vocab_size // place.model.hidden_size))
    return 2 ** math.ceil(math.log2(max(1, -(-place.tokens // pieces))))


def _head_gradient(place: Placement) -> tuple[Term, ...]:
    """Chunks add up the head's gradient while logits of the next chunk exist."""
    if place.strategy.loss == "plain" or not place.trains_all:
        return ()
    size = place.element_bytes * place.model.embedding_parameters // place.strategy.tp
    return (_term("head gradient", size, (Instant.LOSS,), "accumulated over the chunks"),)


def _term(name: str, num_bytes: int, alive: tuple[Instant, ...], formula: str) -> Term:
    return Term(category=Category.TEMPORARY, name=name, bytes=num_bytes, alive=alive, formula=formula, source=SOURCE)
