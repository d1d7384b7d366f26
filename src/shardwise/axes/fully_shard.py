"""What `fully_shard` holds, for any stage: the arithmetic that replicate and shard share.

[Note: what fully_shard holds]
Source: torch 2.11 to 2.13, torch/distributed/fsdp/_fully_shard (read), compared with peak bytes of simulated and real
steps in `tests/distributed/test_costs.py`. With N = dp_shard, P the trainable and W the elements of one group, E, M and
R bytes of an element in compute, in the master copy and on the wire:

    weights            M * P / N, always
    gathered           E * W for the group in use; a second copy of it is the all_gather's output: of this group in
                       forward (freed with the next one, so that two outputs exist for a moment, and one at the loss),
                       of the next group in backward (prefetch). One rank casts and needs no output
    kept gathered      stages 1 and 2 keep every group from its forward to its backward; the root always stays
    block gradients    E * W once the block's backward has run; copied into the reduction's input, R * W, which lives
                       until the next group's reduction, so beside the next block's backward; on one rank too
    gradients          M * P / N once reduced; before that, where a stage accumulates whole gradients, R * P
    root gradients     E * root, from the head's backward to the end of the backward pass: the root is reduced last

`reduce_first` is the moment when the last block has been reduced and the block before it has run its backward.
What is offloaded to the host is not on the card: see `levers/offload`.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.vocabulary.memory import ALWAYS, Category, Instant, Term, span
from shardwise.vocabulary.placement import Group, Placement
from shardwise.vocabulary.strategy import Strategy
from shardwise.vocabulary.timeline import Site

SOURCE = "torch.distributed.fsdp.fully_shard, [Note: what fully_shard holds]"


WHOLE_GRADIENTS = "whole gradients"
GATHER_OUTPUTS = ("all_gather output", "next all_gather output")
"""Names of terms; which stream's memory they lie in is in `gather_pool_bytes` and `planner/memory.py`."""


def managed_bytes(place: Placement, group: Group) -> int:
    """Bytes of one group when gathered: what `fully_shard` manages of it, in compute dtypes."""
    frozen = place.frozen_bytes_of(group) if place.shards_frozen else 0.0
    return round(group.trainable * place.element_bytes + frozen)


def whole_gradients(place: Placement) -> bool:
    """True where unsharded gradients are kept between micro-batches."""
    strategy = place.strategy
    return strategy.accumulation > 1 and (strategy.zero_stage <= 1 or strategy.keep_unsharded)


def sums_shards_first(strategy: Strategy) -> bool:
    """True where HSDP adds a rank's shards over the micro-batches and all-reduces the sum once a step.

    `fully_shard` adds them in the reduction's dtype and on the card, so not where that is bf16 (every micro-batch would
    be rounded) and not where gradients wait on the host.
    """
    return (
        strategy.dp_replicate > 1
        and strategy.zero_stage > 1
        and strategy.accumulation > 1
        and not strategy.keep_unsharded
        and strategy.offload == "none"
        and (strategy.reduce_dtype == "fp32" or strategy.precision == "fp32")
    )


def keeps_gathered(place: Placement) -> bool:
    """True where every group stays gathered from its forward to its backward."""
    return place.strategy.zero_stage in (1, 2)


def stores(place: Placement) -> tuple[Term, ...]:
    """Every term of [Note: what fully_shard holds]."""
    return weights(place) + gradients(place) + gathered(place) + reductions(place)


def weights(place: Placement) -> tuple[Term, ...]:
    """Master copies of what is trained, and frozen weights; on the host what is managed and offloaded."""
    shards, offloads = place.strategy.dp_shard, place.strategy.offload != "none"
    terms: list[Term] = []
    if not offloads:
        terms.append(
            Term(
                category=Category.PARAMETER,
                name="trainable weights",
                bytes=-(-place.trainable * place.master_bytes // shards),
                alive=ALWAYS,
                formula=f"{place.master_bytes} B x {place.trainable:,} / {shards}",
                source=SOURCE,
            )
        )
    if place.frozen and not (offloads and place.shards_frozen):
        divisor = shards if place.shards_frozen else 1
        terms.append(
            Term(
                category=Category.PARAMETER,
                name="frozen weights",
                bytes=round(place.frozen_bytes / divisor),
                alive=ALWAYS,
                formula=f"({place.element_bytes} B, or NF4 for matrices under QLoRA) x {place.frozen:,} / {divisor}",
                source=SOURCE,
            )
        )
    return tuple(terms)


def gradients(place: Placement) -> tuple[Term, ...]:
    """Gradients that outlive the backward of their group."""
    strategy, whole = place.strategy, whole_gradients(place)
    reduced = _shard(place, place.trainable)
    block, pending = _shard(place, _trainable(place, "block")), _shard(place, _pending(place))
    kept = place.trainable * place.reduce_bytes if whole else reduced
    if sums_shards_first(strategy):
        kept = -(-place.trainable * place.reduce_bytes // strategy.dp_shard)
    terms: list[Term] = []
    if strategy.accumulation > 1 and (whole or strategy.offload == "none"):
        early = span(Instant.FORWARD, Instant.BACKWARD_LAST)
        name = WHOLE_GRADIENTS if whole else "accumulated gradients"
        terms.append(_gradient(name, kept, early, "from earlier micro-batches"))
    if strategy.offload != "none":
        return tuple(terms)
    if not whole:
        terms.append(_gradient("reduced block", block, (Instant.REDUCE_FIRST,), "the last block's shard"))
        before = block if strategy.accumulation > 1 else reduced - pending - block
        said = "one block's shard, to be added" if strategy.accumulation > 1 else "of all blocks but the first"
        terms.append(_gradient("gradients", before, (Instant.BACKWARD_LAST,), said))
    terms.append(_gradient("gradients", reduced - pending, (Instant.REDUCE_LAST,), "of all blocks"))
    terms.append(_gradient("gradients", reduced, (Instant.OPTIMIZER,), f"{place.master_bytes} B x trainable / shards"))
    return tuple(terms)


def _shard(place: Placement, elements: int) -> int:
    """Bytes of one rank's part of reduced gradients."""
    return -(-elements * place.master_bytes // place.strategy.dp_shard)


def _trainable(place: Placement, site: Site) -> int:
    group = place.group(site)
    return group.trainable if group else 0


def _pending(place: Placement) -> int:
    """Elements that are reduced after all blocks."""
    return _trainable(place, "root") + _trainable(place, "embedding")


def _gradient(name: str, num_bytes: int, alive: tuple[Instant, ...], formula: str) -> Term:
    return Term(category=Category.GRADIENT, name=name, bytes=num_bytes, alive=alive, formula=formula, source=SOURCE)


def gather_pool_bytes(place: Placement) -> int:
    """The most that all_gathers' outputs take at once: two blocks', or embedding's or root's before them.

    They are allocated on a stream of their own (`all_gather_copy_in_stream`), whose memory no other stream may use.
    """
    if place.strategy.dp_shard == 1:
        return 0
    return max((managed_bytes(place, group) * (2 if group.site == "block" else 1) for group in place.groups), default=0)


def gathered(place: Placement) -> tuple[Term, ...]:
    """Unsharded copies and the all_gather's buffers."""
    block = place.group("block")
    one = managed_bytes(place, block) if block else 0
    root = sum(managed_bytes(place, group) for group in place.groups if group.site == "root")
    if keeps_gathered(place):
        return tuple(_kept_gathered(place, one, root))
    whole = whole_gradients(place)
    held = (*_IN_BLOCKS, *(() if whole else (Instant.REDUCE_FIRST,)))
    element = place.element_bytes
    terms = [
        _temporary("gathered root", root, span(Instant.FORWARD, Instant.BACKWARD_LAST), f"{element} B x root"),
        _temporary("gathered block", one, held, f"{element} B x one block"),
    ]
    if place.strategy.dp_shard > 1:
        buffered = tuple(instant for instant in (*held, Instant.LOSS) if instant is not Instant.BACKWARD_LAST)
        ahead = (Instant.FORWARD, Instant.EVALUATION)
        this, following = GATHER_OUTPUTS
        terms.append(_temporary(this, one, buffered, "of this block in forward, the next in backward"))
        terms.append(_temporary(following, one, ahead, "of the next block, while this one's is held"))
    return tuple(terms)


_IN_BLOCKS = (Instant.FORWARD, Instant.BACKWARD_FIRST, Instant.BACKWARD_LAST, Instant.EVALUATION)


def _kept_gathered(place: Placement, one: int, root: int) -> Iterator[Term]:
    """Stages 1 and 2: everything from its forward to its backward; stage 1 until the last micro-batch's."""
    everything = sum(group.count * managed_bytes(place, group) for group in place.groups)
    until_backward = span(Instant.FORWARD, Instant.BACKWARD_FIRST)
    yield _temporary(
        "gathered weights", everything, until_backward, f"{place.element_bytes} B x all managed parameters"
    )
    yield _temporary("gathered weights", everything - one, (Instant.REDUCE_FIRST,), "all but the last block")
    stays = place.strategy.zero_stage == 1 and place.strategy.accumulation > 1
    last = everything if stays else root + one
    said = "stays for the next micro-batch" if stays else "root and one block"
    yield _temporary("gathered weights", last, (Instant.BACKWARD_LAST,), said)


def reductions(place: Placement) -> tuple[Term, ...]:
    """Unsharded gradients on their way, and the reduction's input."""
    wire, element = place.reduce_bytes, place.element_bytes
    block = _trainable(place, "block")
    root, embedding = _trainable(place, "root"), _trainable(place, "embedding")
    until_end = span(Instant.BACKWARD_FIRST, Instant.REDUCE_LAST)
    terms = [_temporary("root gradients", element * root, until_end, "until the end")]
    if whole_gradients(place):
        terms += _reduced_from_whole(place)
    else:
        during = (Instant.REDUCE_FIRST, Instant.BACKWARD_LAST)
        terms.append(_temporary("block gradients", element * block, during, f"{element} B x one block"))
        terms.append(_temporary("reduction input", wire * block, during, f"{wire} B x the block before"))
    end = max(wire * root + element * embedding, (element + wire) * embedding)
    formula = f"({element} + {wire}) B x root or embedding"
    terms.append(_temporary("last reductions", end, (Instant.REDUCE_LAST,), formula))
    return tuple(terms)


def _reduced_from_whole(place: Placement) -> Iterator[Term]:
    """Whole gradients of the last block are copied into the reduction, or have been and the next block runs."""
    wire, element = place.reduce_bytes, place.element_bytes
    block = place.group("block")
    trainable = block.trainable if block else 0
    runs = element * trainable + _shard(place, trainable)
    if not keeps_gathered(place) and block is not None:
        runs += managed_bytes(place, block) * (2 if place.strategy.dp_shard > 1 else 1)
    size = max(wire * trainable, runs)
    yield _temporary("reduction of whole gradients", size, (Instant.REDUCE_FIRST,), "its input, or the next block")
    yield _temporary("block gradients", element * trainable, (Instant.BACKWARD_LAST,), f"{element} B x one block")


def gradient_traffic_bytes(place: Placement, group: Group, *, first: bool, last: bool) -> float:
    """Bytes that the card's memory moves for one group's gradients after their backward, in one micro-batch.

    A reduction copies them into its input (and one rank on to the output, where NCCL would have done it), and casts the
    result to the masters' dtype. Whole gradients are cast once and then added to (`unsharded_accumulated_grad`);
    sharded ones are added after their reduction.

    Args:
        place: The rank.
        group: Of which one is counted.
        first: Nothing has been accumulated yet.
        last: The step's last micro-batch.
    """
    element, wire, master = place.element_bytes, place.reduce_bytes, place.master_bytes
    shards, whole = place.strategy.dp_shard, whole_gradients(place)
    each = 0.0
    if whole and first:
        each += element + wire if element != wire else 0
    elif whole:
        each += element + 2 * wire
    if last or not whole:
        each += (wire if whole else element) + wire + (2 * wire if shards == 1 else 0)
        each += (wire + master) / shards if wire != master else 0
        each += 3 * master / shards if not (whole or first) else 0
    return each * group.trainable


def _temporary(name: str, num_bytes: int, alive: tuple[Instant, ...], formula: str) -> Term:
    return Term(category=Category.TEMPORARY, name=name, bytes=num_bytes, alive=alive, formula=formula, source=SOURCE)
