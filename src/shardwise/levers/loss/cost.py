"""The loss over the vocabulary: often the largest thing on a card.

[Note: bytes of a logit]
Plain: logits leave the head in E bytes; cross-entropy works in fp32. The forward holds logits, their fp32 copy and the
log-softmax (E + 4 + 4); the backward holds the log-softmax, the incoming fp32 gradient and its own fp32 result
(4 + 4 + 4), then their E-byte copy. Not E, as many calculators have it.
The final norm, which no block compiles, keeps its fp32 input, and what it normalized and gave if it is trained.
Chunked: the same for one chunk of tokens at a time, plus the gradient of the hidden states.
Fused: one chunk of logits, over which their gradient is written (E); where the chunk's kernel is not compiled, an fp32
copy and one passing value beside it (E + 4 + 4). From the forward of the loss to its backward the gradients of hidden
states (E) and head stay; the head's in fp32 if there is more than one chunk, cast to E bytes at the end.
Split over tp (`apply_split.py`): one fp32 copy, worked on in place, forward and backward (E + 4).

Source: peak bytes of simulated steps; `tests/distributed/test_costs.py` on real ones.
"""

from __future__ import annotations

from shardwise.vocabulary.memory import Category, Instant, Term
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.strategy import Axis
from shardwise.vocabulary.timeline import Collective, Pass

SOURCE = "[Note: bytes of a logit]"
CHUNK_TOKENS = 1024
"""Tokens of one chunk of the chunked loss, as the engine cuts them."""
FUSED_CHUNK_BYTES = 2**30
"""What one chunk of the fused loss may take: large enough that its products run at the full rate and that the fp32 sum
of the head's gradient is read and written seldom."""
TILE = 128
"""Chunks and numbers of tokens are rounded to it, as matrix kernels cut them."""


STATISTICS_BYTES = 12
"""A token and rank of tp: largest logit, sum of exponentials, logit of the target, in fp32."""


def sends(place: Placement) -> tuple[Collective, ...]:
    """Statistics of split logits, of all tokens or chunk by chunk; chunks are computed once more in backward."""
    strategy = place.strategy
    if strategy.tp == 1 or not place.is_last:
        return ()
    size = chunk_tokens(place)
    chunks, rest = divmod(place.tokens, size)
    passes: tuple[Pass, ...] = ("forward", "backward") if strategy.loss == "chunked" else ("forward",)
    return tuple(
        Collective(
            op="all_gather",
            axis=Axis.TP,
            ranks=strategy.tp,
            bytes=STATISTICS_BYTES * tokens * strategy.tp,
            count=count * strategy.accumulation,
            site="root",
            during=during,
            hides_behind="nothing",
            name="all_gather of the loss's statistics",
            formula=f"{STATISTICS_BYTES} B x {tokens:,} tokens x {strategy.tp}",
            source="levers/loss/apply_split.py",
        )
        for tokens, count in ((size, chunks), (rest, 1 if rest else 0))
        if count
        for during in passes
    )


def stores(place: Placement) -> tuple[Term, ...]:
    """Logits and their gradients at the instant of the loss, and the last hidden states."""
    if not place.is_last:
        return ()
    saved = 4 + (2 * place.element_bytes if place.trains_all else 0)
    hidden = place.tokens * place.model.hidden_size * saved
    terms = [_term("logits", logit_bytes(place), (Instant.LOSS,), "see [Note: bytes of a logit]")]
    forward = chunk_tokens(place) * _vocabulary(place) * (place.element_bytes + 8)
    terms.append(_term("logits in evaluation", forward, (Instant.EVALUATION,), "forward only, of one micro-batch"))
    terms.append(_term("last hidden states", hidden, (Instant.LOSS,), f"{saved} B an element: the final norm, eager"))
    return (*terms, *_kept_gradients(place), *_other_losses(place, hidden))


def _other_losses(place: Placement, hidden: int) -> tuple[Term, ...]:
    """What the losses of other micro-batches keep where a pipeline computes all before the first backward."""
    others = place.losses_in_flight - 1
    if not others:
        return ()
    kept = sum(term.bytes for term in _kept_gradients(place)) if place.strategy.loss == "fused" else 0
    if place.strategy.loss == "plain":
        kept = 4 * place.tokens * _vocabulary(place)  # the log-softmax
    alive = (Instant.FORWARD, Instant.LOSS, Instant.BACKWARD_FIRST)
    return (_term("losses of other micro-batches", others * (hidden + kept), alive, f"{others} wait for backward"),)


def per_logit(place: Placement) -> int:
    """Bytes of one logit at the peak; see [Note: bytes of a logit]."""
    if place.strategy.loss == "fused":
        return place.element_bytes + (0 if place.strategy.compile_blocks else 8)
    if place.strategy.tp > 1:
        return place.element_bytes + 4
    return max(place.element_bytes + 8, 12)


def logit_bytes(place: Placement) -> int:
    """Peak bytes of logits, log-softmax and gradients."""
    return per_logit(place) * chunk_tokens(place) * _vocabulary(place)


def chunk_tokens(place: Placement) -> int:
    """Tokens whose logits exist at once."""
    if place.strategy.loss == "plain":
        return place.tokens
    if place.strategy.loss == "chunked":
        return min(place.tokens, CHUNK_TOKENS)
    element, compiled = place.element_bytes, place.strategy.compile_blocks
    return fused_chunk(place.tokens, _vocabulary(place), element, compiled=compiled)


def fused_chunk(num_tokens: int, vocab_size: int, element_bytes: int, *, compiled: bool) -> int:
    """Tokens of one chunk of the fused loss: as few chunks as FUSED_CHUNK_BYTES allows, all about equally large."""
    each = vocab_size * (element_bytes + (0 if compiled else 8))
    most = max(TILE, FUSED_CHUNK_BYTES // each // TILE * TILE)
    if num_tokens <= most:
        return max(1, num_tokens)
    chunks = -(-num_tokens // most)
    return -(-num_tokens // chunks // TILE) * TILE


def _vocabulary(place: Placement) -> int:
    return -(-place.model.vocab_size // place.strategy.tp)


def _kept_gradients(place: Placement) -> tuple[Term, ...]:
    """Gradients that exist while logits do: chunks add up the head's, and the fused loss makes the hidden states'."""
    kind, element = place.strategy.loss, place.element_bytes
    terms: list[Term] = []
    if kind == "fused":
        hidden = element * place.tokens * place.model.hidden_size
        terms.append(_term("gradient of hidden states", hidden, (Instant.LOSS,), f"{element} B an element"))
    if kind == "plain" or not place.trains_all:
        return tuple(terms)
    several = kind == "fused" and chunk_tokens(place) < place.tokens
    each = 4 if several else element
    size = each * place.model.embedding_parameters // place.strategy.tp
    terms.append(_term("head gradient", size, (Instant.LOSS,), f"{each} B an element, summed over the chunks"))
    return tuple(terms)


def _term(name: str, num_bytes: int, alive: tuple[Instant, ...], formula: str) -> Term:
    return Term(category=Category.TEMPORARY, name=name, bytes=num_bytes, alive=alive, formula=formula, source=SOURCE)
