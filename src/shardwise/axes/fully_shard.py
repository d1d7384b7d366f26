"""What `fully_shard` holds, for any stage: the arithmetic that replicate and shard share.

[Note: what fully_shard holds]
Source: torch 2.11 to 2.13, torch/distributed/fsdp/_fully_shard (read), compared with peak bytes of simulated and real
steps in `tests/distributed/test_costs.py`. With N = dp_shard, P the trainable and W the elements of one group, E, M and
R bytes of an element in compute, in the master copy and on the wire:

    weights            M * P / N, always
    gathered           E * W for the group in use; a second copy of it is the all_gather's output: of this group in
                       forward (freed with the next one), of the next group in backward (prefetch)
    kept gathered      stages 1 and 2 keep every group from its forward to its backward; the root always stays
    block gradients    E * W once the block's backward has run; copied into the reduce_scatter's input, R * W, which
                       lives until the next group's reduction
    gradients          M * P / N once reduced; before that, where a stage accumulates whole gradients, R * P
    root gradients     E * root, from the head's backward to the end of the backward pass: the root is reduced last

One rank in a group still casts and copies, but its reduce needs no input buffer of its own. What is offloaded to the
host is not on the card: see `levers/offload`.
"""

from __future__ import annotations

from shardwise.vocabulary.memory import ALWAYS, Category, Instant, Term, span
from shardwise.vocabulary.placement import FROZEN_BYTES, Group, Placement

SOURCE = "torch.distributed.fsdp.fully_shard, [Note: what fully_shard holds]"


def managed_bytes(place: Placement, group: Group) -> int:
    """Bytes of one group when gathered: what `fully_shard` manages of it, in compute dtypes."""
    frozen = place.frozen_bytes_of(group) if place.shards_frozen else 0.0
    return round(group.trainable * place.element_bytes + frozen)


def whole_gradients(place: Placement) -> bool:
    """True where unsharded gradients are kept between micro-batches."""
    strategy = place.strategy
    return strategy.accumulation > 1 and (strategy.zero_stage <= 1 or strategy.keep_unsharded)


def keeps_gathered(place: Placement) -> bool:
    """True where every group stays gathered from its forward to its backward."""
    return place.strategy.zero_stage in (1, 2)


def stores(place: Placement) -> tuple[Term, ...]:
    """Every term of [Note: what fully_shard holds]."""
    return weights(place) + gradients(place) + gathered(place) + reductions(place)


def weights(place: Placement) -> tuple[Term, ...]:
    """Master copies of what is trained (in compute dtype where masters wait on the host), and frozen weights."""
    shards, offload = place.strategy.dp_shard, place.strategy.offload
    if offload == "parameters":
        return ()
    each = place.master_bytes if offload == "none" else place.element_bytes
    terms = [
        Term(
            category=Category.PARAMETER,
            name="trainable weights",
            bytes=-(-place.trainable * each // shards),
            alive=ALWAYS,
            formula=f"{each} B x {place.trainable:,} / {shards}",
            source=SOURCE,
        )
    ]
    if place.frozen:
        divisor = shards if place.shards_frozen else 1
        terms.append(
            Term(
                category=Category.PARAMETER,
                name="frozen weights",
                bytes=round(place.frozen_bytes / divisor),
                alive=ALWAYS,
                formula=f"({FROZEN_BYTES} B, or NF4 for block matrices under QLoRA) x {place.frozen:,} / {divisor}",
                source=SOURCE,
            )
        )
    return tuple(terms)


def gradients(place: Placement) -> tuple[Term, ...]:
    """Gradients that outlive the backward of their group."""
    reduced = -(-place.trainable * place.master_bytes // place.strategy.dp_shard)
    whole = place.trainable * place.reduce_bytes
    before, until = (reduced, "sharded") if not whole_gradients(place) else (whole, "whole")
    if place.strategy.offload != "none":
        early = span(Instant.FORWARD, Instant.BACKWARD_LAST)
        kept = before if whole_gradients(place) else 0
        return (_gradient("accumulated gradients", kept, early, f"from earlier micro-batches, {until}"),)
    last_groups = [group for group in place.groups if group.site != "block"]
    pending = sum(group.elements and group.trainable for group in last_groups)
    pending_bytes = -(-pending * place.master_bytes // place.strategy.dp_shard)
    terms: list[Term] = []
    if place.strategy.accumulation > 1:
        early = span(Instant.FORWARD, Instant.BACKWARD_LAST)
        formula = f"from earlier micro-batches, {until}"
        terms.append(_gradient("accumulated gradients", before, early, formula))
    else:
        terms.append(
            _gradient("gradients", reduced - pending_bytes, (Instant.BACKWARD_LAST,), "of all blocks but the first")
        )
    terms.append(_gradient("gradients", reduced - pending_bytes, (Instant.REDUCE_LAST,), "of all blocks"))
    terms.append(_gradient("gradients", reduced, (Instant.OPTIMIZER,), f"{place.master_bytes} B x trainable / shards"))
    return tuple(terms)


def _gradient(name: str, num_bytes: int, alive: tuple[Instant, ...], formula: str) -> Term:
    return Term(category=Category.GRADIENT, name=name, bytes=num_bytes, alive=alive, formula=formula, source=SOURCE)


def gathered(place: Placement) -> tuple[Term, ...]:
    """Unsharded copies and the all_gather's buffers."""
    block = place.group("block")
    block_bytes = managed_bytes(place, block) if block else 0
    always = sum(managed_bytes(place, group) for group in place.groups if group.site == "root")
    backward = span(Instant.FORWARD, Instant.BACKWARD_LAST)
    if keeps_gathered(place):
        whole = sum(group.count * managed_bytes(place, group) for group in place.groups)
        kept = span(Instant.FORWARD, Instant.REDUCE_FIRST)
        if place.strategy.zero_stage == 1 and place.strategy.accumulation > 1:
            kept = backward
        terms = [_temporary("gathered weights", whole, kept, f"{place.element_bytes} B x all managed parameters")]
        if Instant.BACKWARD_LAST not in kept:
            terms.append(
                _temporary("gathered weights", always + block_bytes, (Instant.BACKWARD_LAST,), "root and one block")
            )
    else:
        terms = [
            _temporary("gathered root", always, backward, f"{place.element_bytes} B x root, stays until its backward"),
            _temporary("gathered block", block_bytes, _IN_BLOCKS, f"{place.element_bytes} B x one block"),
            _temporary("all_gather output", block_bytes, _BUFFERED, "this block in forward, the next in backward"),
        ]
    return tuple(terms)


_IN_BLOCKS = (Instant.FORWARD, Instant.BACKWARD_FIRST, Instant.BACKWARD_LAST, Instant.EVALUATION)
_BUFFERED = (Instant.FORWARD, Instant.BACKWARD_FIRST, Instant.REDUCE_FIRST, Instant.EVALUATION)


def reductions(place: Placement) -> tuple[Term, ...]:
    """Unsharded gradients on their way, and the reduction's input."""
    reduce_bytes, element = place.reduce_bytes, place.element_bytes
    block = place.group("block")
    block_trainable = block.trainable if block else 0
    last = {group.site: group.trainable for group in place.groups if group.site != "block"}
    root, embedding = last.get("root", 0), last.get("embedding", 0)
    terms = [
        _temporary(
            "root gradients", element * root, span(Instant.BACKWARD_FIRST, Instant.REDUCE_LAST), "until the end"
        ),
        _temporary("block gradients", element * block_trainable, _REDUCING, f"{element} B x one block"),
    ]
    if place.strategy.data_parallel > 1:
        terms.append(
            _temporary("reduction input", reduce_bytes * block_trainable, _REDUCED, f"{reduce_bytes} B x one block")
        )
        end = max(
            (element + reduce_bytes) * root + element * embedding - element * root, (element + reduce_bytes) * embedding
        )
        terms.append(
            _temporary(
                "last reductions", end, (Instant.REDUCE_LAST,), f"({element} + {reduce_bytes}) B x root or embedding"
            )
        )
    else:
        terms.append(_temporary("embedding gradients", element * embedding, (Instant.REDUCE_LAST,), "reduced last"))
    return tuple(terms)


_REDUCING = (Instant.REDUCE_FIRST, Instant.BACKWARD_LAST)
_REDUCED = (Instant.REDUCE_FIRST, Instant.BACKWARD_LAST)


def _temporary(name: str, num_bytes: int, alive: tuple[Instant, ...], formula: str) -> Term:
    return Term(category=Category.TEMPORARY, name=name, bytes=num_bytes, alive=alive, formula=formula, source=SOURCE)
