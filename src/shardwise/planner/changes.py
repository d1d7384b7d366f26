"""What could be done differently so that a job fits: the smallest changes, each tried before it is named.

[Note: changes]
A change is a function from one situation (job, cards, wishes) to another, and the flags of `shardwise plan` that say
it. Changes of one kind come from mild to harsh; the first that fits is kept. Two kinds together are tried where no
single one is enough. What is kept has been searched like any other plan, so the command that stands beside it gives the
very plan whose price is told.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from shardwise.errors import ShardwiseError
from shardwise.facts import catalog
from shardwise.planner import learning_rate, reasons, rules, search
from shardwise.planner.memory import memory
from shardwise.planner.search import Wishes
from shardwise.planner.splits import Split, splits
from shardwise.planner.uncertainty import fits
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.plan import Advice, Candidate
from shardwise.vocabulary.strategy import Strategy
from shardwise.vocabulary.units import format_count, format_gb, format_rate, format_seconds, some

SHORTEST_SEQUENCE = 256
"""Cutting sequences below this is no advice."""
MOST_ADVICE, MOST_PAIRS = 6, 3
NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
Flags = Mapping[str, object]
"""Options of `shardwise plan` by field name; None takes a flag back."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a plan is made for."""

    job: Job
    cluster: Cluster
    wishes: Wishes


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that could be done differently."""

    what: str
    to: Situation
    flags: Flags


def make_it_fit(here: Situation) -> Iterator[Advice]:
    """Ranked smallest changes, each with its price and the flags that make it."""
    found = [advice for kind in KINDS if (advice := _first_that_fits(kind(here))) is not None]
    if not found:
        found = list(itertools.islice(_pairs(here), MOST_PAIRS))
    yield from found[:MOST_ADVICE]
    if not found:
        yield Advice(
            rule="make_it_fit",
            message="Nothing that was tried fits, not even two changes together: take a smaller model or larger cards.",
        )


def _first_that_fits(changes: Iterable[Change]) -> Advice | None:
    for change in changes:
        taken = chosen(change.to)
        if taken is not None:
            return Advice(
                rule="make_it_fit",
                message=f"{change.what}.",
                command=spelled(change.flags),
                price=_price(change, taken),
            )
    return None


def _pairs(here: Situation) -> Iterator[Advice]:
    """Two kinds of changes together: the harshest of a milder kind, and the first of another that then is enough."""
    for first, second in itertools.combinations(KINDS, 2):
        harshest = None
        for harshest in first(here):  # noqa: B007  (the last one is what is wanted)
            pass
        if harshest is None:
            continue
        both = (
            Change(what=_joined(harshest, change), to=change.to, flags={**harshest.flags, **change.flags})
            for change in second(harshest.to)
        )
        advice = _first_that_fits(both)
        if advice is not None:
            yield advice


def _joined(first: Change, second: Change) -> str:
    return f"{first.what}, and {second.what[0].lower()}{second.what[1:]}"


def spelled(flags: Flags) -> str:
    """Flags as they are typed: `--tuning lora --micro-batch=null`; a model goes first, without a flag."""
    words = [str(flags["model"])] if "model" in flags else []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if name != "model":
            words.append(f"{flag}=null" if value is None else f"{flag} {value}")
    return " ".join(words)


def chosen(there: Situation) -> Candidate | None:
    """What a plan would recommend in that situation; None if nothing fits or the wishes contradict it."""
    try:
        search.check(there.job, there.cluster, there.wishes)
    except ShardwiseError:
        return None
    if not _may_fit(there):
        return None
    candidates, _ = search.survey(there.job, there.cluster, there.wishes)
    return rules.choose(there.job, there.cluster, candidates).candidate


def _may_fit(there: Situation) -> bool:
    """Whether the leanest variant of the most sharded meshes fits: quick, and never false where something fits."""
    wishes = replace(there.wishes, checkpointing=there.wishes.checkpointing or "full", every_candidate=False)
    ends: dict[tuple[object, ...], Split] = {}
    for split in splits(there.job, there.cluster, wishes):
        base = split.base
        key = (base.tuning, base.pp, base.tp, base.zero_stage > 0)
        best = ends.get(key)
        if best is None or (base.dp_shard, base.zero_stage) > (best.base.dp_shard, best.base.zero_stage):
            ends[key] = split
    return any(
        fits(memory(there.job, there.cluster, split.variant(batch, lever)), there.cluster)
        for split in ends.values()
        for batch in {split.batches[0], split.batches[-1]}
        for lever in split.levers
    )


def _price(change: Change, taken: Candidate) -> str:
    """Time, memory and what else the change costs."""
    job, strategy = change.to.job, taken.strategy
    parts = [
        f"{format_seconds(taken.step.seconds)} a step, {format_rate(taken.tokens_per_s)} tokens/s with "
        f"{words_for(strategy)}",
        f"{format_gb(taken.memory.needed_bytes)} a card",
    ]
    if strategy.tuning != "full":
        place = Placement(job=job, strategy=replace(strategy, tp=1, pp=1))
        share = place.trainable / job.model.num_parameters
        parts.append(f"{format_count(place.trainable)} weights trained ({100 * share:.2g} % as many as the model has)")
    if strategy.offload != "none":
        parts.append(f"{format_gb(taken.host_bytes, 0)} of memory in each machine")
    return "; ".join(parts)


def words_for(strategy: Strategy) -> str:
    """Tuning and split, after a preposition: `LoRA and DDP`, `ZeRO-3`, `QLoRA on one card`."""
    if strategy.num_ranks == 1 or strategy.tuning == "full":
        return reasons.called(strategy)
    return f"{reasons.WORDS[strategy.tuning]} and {strategy.name}"


# ------------------------------------------------------------------------------------------------- the kinds of changes


def _freed(wishes: Wishes, names: Mapping[str, str]) -> tuple[Wishes, dict[str, object]]:
    """Wishes without some of them, and the flags that take them back; `names` maps wishes to flags."""
    defaults = Wishes()
    given = [name for name in names if getattr(wishes, name) != getattr(defaults, name)]
    freed: dict[str, object] = {name: getattr(defaults, name) for name in given}
    return replace(wishes, **freed), {names[name]: None for name in given}  # pyright: ignore[reportArgumentType]


_LEVERS = {
    "micro_batch_size": "micro_batch", "accumulation": "accumulation", "checkpointing": "checkpointing", "loss": "loss",
    "compile_blocks": "compile",
}  # fmt: skip
_MESH = {
    "zero_stage": "zero", "dp_shard": "dp_shard", "dp_replicate": "dp_replicate", "tp": "tp", "pp": "pp",
    "sequence_parallel": "sequence_parallel", "pipeline_schedule": "pipeline_schedule",
}  # fmt: skip


def _open_levers(here: Situation) -> tuple[Situation, dict[str, object]]:
    """With micro-batch, checkpointing and loss left to the planner; the batch of a step stays."""
    wishes, flags = _freed(here.wishes, _LEVERS)
    if here.wishes.keep_unsharded:
        wishes, flags = replace(wishes, keep_unsharded=False), {**flags, "keep_unsharded": False}
    if flags:
        flags = {**flags, "global_batch": here.job.global_batch_size}
    return replace(here, wishes=wishes), flags


def _open_mesh(here: Situation) -> tuple[Situation, dict[str, object]]:
    """With stage and degrees left to the planner as well."""
    free, flags = _open_levers(here)
    wishes, more = _freed(free.wishes, _MESH)
    if free.wishes.virtual_stages != 1:
        wishes, more = replace(wishes, virtual_stages=1), {**more, "virtual_stages": 1}
    if more:
        more = {**more, "split": None, "global_batch": here.job.global_batch_size}
    return replace(free, wishes=wishes), {**flags, **more}


def _levers(here: Situation) -> Iterator[Change]:
    free, flags = _open_levers(here)
    if flags:
        named = " and ".join(name.replace("_", "-") for name in flags if name != "global_batch")
        yield Change(what=f"Leave {named} to the planner", to=free, flags=flags)


def _mesh(here: Situation) -> Iterator[Change]:
    free, flags = _open_mesh(here)
    if free.wishes != _open_levers(here)[0].wishes:
        yield Change(what="Leave the ZeRO stage and the degrees to the planner", to=free, flags=flags)
    if here.wishes.offload != "none":
        kept = replace(free, wishes=replace(free.wishes, offload="none"))
        yield Change(what="Keep everything on the card", to=kept, flags={**flags, "offload": "none"})


def _precision(here: Situation) -> Iterator[Change]:
    """Another dtype where the card does not have this one."""
    peaks = here.cluster.gpu.peak_flops
    missing = {"bf16": "bf16", "bf16_pure": "bf16", "fp8": "fp8"}.get(here.job.precision, "fp32") not in peaks
    if missing:
        free, flags = _open_levers(here)
        precision = "bf16" if here.job.precision == "fp8" and "bf16" in peaks else "fp32"
        job = replace(here.job, precision=precision)
        yield Change(what=f"Compute in {precision}", to=replace(free, job=job), flags={**flags, "precision": precision})


def _adapters(here: Situation) -> Iterator[Change]:
    free, flags = _open_levers(here)
    tunings = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ("lora",), "any": ()}[here.job.tuning]
    for tuning in tunings:
        job = replace(here.job, tuning=tuning)
        name = reasons.WORDS[tuning]
        yield Change(what=f"Train {name} adapters", to=replace(free, job=job), flags={**flags, "tuning": tuning})


def _optimizer(here: Situation) -> Iterator[Change]:
    if here.job.tuning in ("full", "any") and here.job.optimizer == "adamw" and here.wishes.offload == "none":
        free, flags = _open_levers(here)
        yield Change(
            what="Keep the optimizer's moments in 8 bits",
            to=replace(free, job=replace(here.job, optimizer="adamw_8bit")),
            flags={**flags, "optimizer": "adamw_8bit"},
        )


def _shorter(here: Situation) -> Iterator[Change]:
    free, flags = _open_levers(here)
    for part in (2, 4, 8, 16):
        sequence = here.job.sequence_length // part
        if sequence >= SHORTEST_SEQUENCE:
            yield Change(
                what=f"Cut sequences to {sequence:,} tokens",
                to=replace(free, job=_shortened(here.job, sequence)),
                flags={**flags, "seq": sequence},
            )


def _shortened(job: Job, sequence: int) -> Job:
    """With every row cut to that many tokens; a data set's lengths are cut with it."""
    lengths = job.lengths
    if lengths is not None:
        quantiles = tuple(min(length, sequence) for length in lengths.quantiles)
        mean = min(lengths.mean, sequence)
        lengths = replace(
            lengths, longest=min(lengths.longest, sequence), quantiles=quantiles, mean=mean,
            p50=min(lengths.p50, sequence), p95=min(lengths.p95, sequence),
            total_tokens=min(lengths.total_tokens, lengths.num_sequences * sequence),
        )  # fmt: skip
    return replace(job, sequence_length=sequence, lengths=lengths)


def _more_cards(here: Situation) -> Iterator[Change]:
    free, flags = _open_mesh(here)
    if here.wishes.zero_stage is not None:
        free = replace(free, wishes=replace(free.wishes, zero_stage=here.wishes.zero_stage))
        flags = {**flags, "zero": here.wishes.zero_stage}
    name = here.cluster.gpu.name
    for nodes, cards in _sizes(here.cluster):
        yield from _on(free, flags, name, (nodes, cards), f"Take {nodes * cards} cards")


def _sizes(cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Machines and cards in each, beyond what there is, as machines with this card are built."""
    known = catalog.knows("gpus", cluster.gpu.name)
    most = catalog.card_file(cluster.gpu.name).machine.cards_per_node if known else max(8, cluster.gpus_per_node)
    if cluster.num_nodes == 1:
        yield from ((1, cards) for cards in (2, 4, 8) if cluster.gpus_per_node < cards <= most)
    cards = most if cluster.num_nodes == 1 else cluster.gpus_per_node
    yield from ((nodes, cards) for nodes in NODES if nodes > cluster.num_nodes)


def _other_card(here: Situation) -> Iterator[Change]:
    """As many of another card, the smallest first."""
    free, flags = _open_levers(here)
    cluster = here.cluster
    cards = [gpu for gpu in map(catalog.gpu, catalog.names("gpus")) if gpu.memory_bytes > cluster.gpu.memory_bytes]
    cards = [gpu for gpu in cards if "bf16" in gpu.peak_flops]
    for gpu in sorted(cards, key=lambda gpu: (gpu.memory_bytes, -gpu.peak_flops["bf16"])):
        size = (cluster.num_nodes, cluster.gpus_per_node)
        what = f"Take {some(cluster.num_gpus, f'{gpu.name} card')} instead"
        yield from _on(free, flags, gpu.name, size, what)


def _on(free: Situation, flags: Flags, card: str, size: tuple[int, int], what: str) -> Iterator[Change]:
    """The same job on other cards, as the catalogue describes them, with a batch that they divide."""
    nodes, per_node = size
    text = f"{nodes}x{per_node}x{card}" if nodes > 1 else f"{per_node}x{card}" if per_node > 1 else card
    try:
        usual = catalog.parse_gpus(text)
        asked = _asked_links(free.cluster, nodes) if card == free.cluster.gpu.name else {}
        cluster = catalog.parse_gpus(text, None, asked.get("network"), asked.get("link")) if asked else usual
    except ShardwiseError:
        return
    job = free.job
    unit = cluster.num_gpus // ((free.wishes.tp or 1) * (free.wishes.pp or 1)) or 1
    batch = -(-job.global_batch_size // unit) * unit
    changed: dict[str, object] = {**flags, "gpus": text, "nodes": None, "cluster": None, "link": None, "network": None}
    changed |= asked
    if batch != job.global_batch_size:
        changed["global_batch"] = batch
        factor = batch / job.global_batch_size
        rates = learning_rate.scaled(1.0, factor)
        what += (
            f" (steps of {batch:,} sequences instead of {job.global_batch_size:,}: a learning rate "
            f"{rates.square_root:.3g} to {rates.linear:.3g} times as high)"
        )
    there = replace(free, cluster=cluster, job=replace(job, global_batch_size=batch))
    yield Change(what=what, to=there, flags=changed)


def _asked_links(cluster: Cluster, nodes: int) -> dict[str, str]:
    """The links of a cluster that are not what its cards usually have, and must be said again."""
    if not catalog.knows("gpus", cluster.gpu.name):
        return {}
    size = f"{cluster.gpus_per_node}x{cluster.gpu.name}"
    usual = catalog.parse_gpus(size if cluster.num_nodes == 1 else f"{cluster.num_nodes}x{size}")
    asked: dict[str, str] = {}
    if cluster.intra_node.name != usual.intra_node.name and catalog.knows("links", cluster.intra_node.name):
        asked["link"] = cluster.intra_node.name
    outer = cluster.inter_node
    if nodes > 1 and outer is not None and usual.inter_node is not None and outer.name != usual.inter_node.name:
        asked |= {"network": outer.name} if catalog.knows("links", outer.name) else {}
    return asked


def _offload(here: Situation) -> Iterator[Change]:
    """States that wait in the machine's memory; needs shards where there are several cards."""
    if here.wishes.offload != "none" or here.cluster.gpu.architecture == "cpu":
        return
    free, flags = _open_mesh(here)
    stage = 3 if here.cluster.num_gpus > 1 else None
    flags = {**flags, "split": None, "zero": stage}
    for kind, what in (("optimizer", "optimizer states"), ("parameters", "weights, gradients and optimizer states")):
        wishes = replace(free.wishes, offload=kind, zero_stage=stage)
        yield Change(
            what=f"Let {what} wait in the machine's memory",
            to=replace(free, wishes=wishes),
            flags={**flags, "offload": kind},
        )


def _smaller_model(here: Situation) -> Iterator[Change]:
    """The catalogue's next smaller ones of the same family."""
    own = here.job.model
    stem = catalog.canonical("models", own.name) if catalog.knows("models", own.name) else own.name.rpartition("/")[2]
    series, family = _series(stem), "".join(itertools.takewhile(str.isalpha, stem.lower()))
    shapes = [catalog.model(name) for name in catalog.names("models") if family and name.startswith(family)]
    smaller = [
        shape
        for shape in shapes
        if shape.num_parameters < own.num_parameters and shape.max_position_embeddings >= here.job.sequence_length
    ]
    free, flags = _open_levers(here)
    for shape in sorted(smaller, key=lambda shape: (_series(shape.name) != series, -shape.num_parameters)):
        job = replace(here.job, model=shape)
        yield Change(
            what=f"Take a smaller model, {shape.name}", to=replace(free, job=job), flags={**flags, "model": shape.name}
        )


def _series(name: str) -> str:
    """`llama-3.1` of `llama-3.1-70b`: what models of one generation share."""
    return re.split(r"-[0-9.x]+[bm]\b", name.lower())[0]


KINDS: tuple[Callable[[Situation], Iterator[Change]], ...] = (
    _levers, _mesh, _precision, _adapters, _optimizer, _shorter, _offload, _more_cards, _other_card, _smaller_model,
)  # fmt: skip
"""From the smallest change to the largest."""
