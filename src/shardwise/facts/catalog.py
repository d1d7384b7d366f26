"""The catalogue: cards, links and models by name, and a Cluster from a few words such as `2x8xh200`.

[Note: catalogue]
One YAML file a card, link or model, named as the thing is named, so that a plan reads three small files and no more.
`aliases.yaml` beside them lists other names: hub ids, what the driver calls a card, what people call it. Names are
compared without case, blanks and hyphens. Every value names its source, every source its address and the day it was
read; what nobody published is marked `kind: assumed`. `docs/facts.md` shows how to add one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from shardwise.errors import UnknownNameError, UsageError, nearest_names
from shardwise.facts.config import model_from_config
from shardwise.facts.entries import CardFile, LinkFile, Machine, ModelFile, Origin
from shardwise.vocabulary.cluster import Cluster, Gpu, Link
from shardwise.vocabulary.codec import from_data, read_yaml
from shardwise.vocabulary.limits import MAX_GPUS
from shardwise.vocabulary.model import ModelShape
from shardwise.vocabulary.plan import Fact
from shardwise.vocabulary.units import parse_bytes

T = TypeVar("T")
Kind = Literal["gpus", "links", "models"]
_HERE = Path(__file__).parent
_SINGULAR: Mapping[Kind, str] = {"gpus": "card", "links": "link", "models": "model"}
_MAKERS = re.compile(r"^(?:nvidia|geforce|tesla|quadro)+")


# ------------------------------------------------------------------------------------------------------------- lookups


def gpu(name: str) -> Gpu:
    """The card of that name, from its data sheet.

    Args:
        name: A catalogue name (`rtx-5090`), an alias (`5090`), or the driver's name (`NVIDIA GeForce RTX 5090`).

    Raises:
        UnknownNameError: With the nearest names.
    """
    stem = canonical("gpus", name)
    card = _card(stem)
    return Gpu(
        name=stem,
        memory_bytes=parse_bytes(card.memory.value),
        cuda_memory_bytes=None if card.cuda_memory is None else parse_bytes(card.cuda_memory.value),
        peak_flops={str(dtype): flops for dtype, flops in card.peak_flops.values.items()},
        memory_bandwidth_bytes_per_s=card.memory_bandwidth_bytes_per_s.value,
        architecture=card.architecture,
        source=card.sources[card.peak_flops.source].kind,
        url=card.sources[card.peak_flops.source].url,
    )


def link(name: str) -> Link:
    """The link of that name (`nvlink4`, `pcie5-x8-host`, `10gbe`), one adapter of it for networks.

    Raises:
        UnknownNameError: With the nearest names.
    """
    stem = canonical("links", name)
    entry = _link(stem)
    rate, attained = entry.bandwidth_bytes_per_s, entry.attained_fraction
    headline = entry.stated_headline_bytes_per_s
    origin = entry.sources[attained.source]
    return Link(
        name=stem,
        kind=entry.kind,
        bandwidth_bytes_per_s=rate.value,
        stated_headline_bytes_per_s=None if headline is None else headline.value,
        latency_seconds=entry.latency_seconds.value,
        attained_fraction=attained.value,
        attained_source=f"{origin.kind}: {origin.note or origin.url}",
        source=entry.sources[rate.source].kind,
        url=entry.sources[rate.source].url,
    )


def model(name: str) -> ModelShape:
    """The model of that name, or of that hub id if the catalogue holds it.

    Raises:
        UnknownNameError: With the nearest names.
    """
    stem = canonical("models", name, "A folder or file with a config.json, or a hub id, is read as well.")
    return model_from_config(dict(_model(stem).config), stem)


def card_file(name: str) -> CardFile:
    """A card's whole entry: its machine, and the source of every value.

    Raises:
        UnknownNameError: With the nearest names.
    """
    return _card(canonical("gpus", name))


def link_file(name: str) -> LinkFile:
    """A link's whole entry, with the source of every value.

    Raises:
        UnknownNameError: With the nearest names.
    """
    return _link(canonical("links", name))


def model_file(name: str) -> ModelFile:
    """A model's whole entry: config, source, the count that was written down.

    Raises:
        UnknownNameError: With the nearest names.
    """
    return _model(canonical("models", name))


def hub_id(name: str) -> str:
    """The hub repository that holds the weights of a catalogue model.

    Args:
        name: A catalogue name gives the base model's repository; the last part of a listed id (`Qwen2.5-7B-Instruct`)
            gives that very repository; an id is returned as it is.

    Raises:
        UnknownNameError: With the nearest names.
    """
    if "/" in name:
        return name
    stem, wanted = canonical("models", name), _folded(name)
    if wanted != _folded(stem):
        for alias in aliases("models"):
            if "/" in alias and _folded(alias.rsplit("/", 1)[1]) == wanted:
                return alias
    return _model(stem).hub_id


def names(kind: Kind) -> tuple[str, ...]:
    """The catalogue names of one kind, sorted."""
    return tuple(sorted(path.stem for path in (_HERE / kind).glob("*.yaml") if path.stem != "aliases"))


def known_names(kind: Kind) -> tuple[str, ...]:
    """Catalogue names and aliases."""
    return (*names(kind), *aliases(kind))


def canonical(kind: Kind, name: str, way_out: str = "") -> str:
    """The catalogue name for any accepted name.

    Raises:
        UnknownNameError: With the nearest names, and `way_out` at its end.
    """
    stem = _index(kind).get(_folded(name))
    if stem is None:
        known = known_names(kind)
        if not way_out and not nearest_names(name, known):
            way_out = f"Known are: {', '.join(names(kind))}."
        raise UnknownNameError(_SINGULAR[kind], name, known, way_out)
    return stem


def knows(kind: Kind, name: str) -> bool:
    """Whether the catalogue holds that name or alias."""
    return _folded(name) in _index(kind)


def gpu_facts(name: str) -> tuple[Fact, ...]:
    """The figures of a card that a plan rests on, each with its source."""
    stem = canonical("gpus", name)
    card = _card(stem)
    rows = [
        ("memory (nvidia-smi)", card.memory.value, card.memory.source),
        ("memory rate", f"{card.memory_bandwidth_bytes_per_s.value:.4g} B/s", card.memory_bandwidth_bytes_per_s.source),
        *(
            (f"peak {dtype}", f"{flops:.4g} FLOP/s", card.peak_flops.source)
            for dtype, flops in card.peak_flops.values.items()
        ),
    ]
    if card.cuda_memory is not None:
        rows.append(("memory (CUDA)", card.cuda_memory.value, card.cuda_memory.source))
    return tuple(
        Fact(name=f"{stem}: {what}", value=value, source=_cited(card.sources[key])) for what, value, key in rows
    )


def link_facts(name: str) -> tuple[Fact, ...]:
    """The figures of a link that a plan rests on, each with its source."""
    stem = canonical("links", name)
    entry = _link(stem)
    rows = (
        ("bandwidth, one way", f"{entry.bandwidth_bytes_per_s.value:.4g} B/s", entry.bandwidth_bytes_per_s.source),
        ("attained fraction", f"{entry.attained_fraction.value:g}", entry.attained_fraction.source),
        ("latency", f"{entry.latency_seconds.value:g} s", entry.latency_seconds.source),
    )
    return tuple(
        Fact(name=f"{stem}: {what}", value=value, source=_cited(entry.sources[key])) for what, value, key in rows
    )


def _cited(origin: Origin) -> str:
    return ", ".join(part for part in (origin.kind, origin.url, origin.note, f"written down {origin.date}") if part)


@functools.cache
def _card(stem: str) -> CardFile:
    return _read(CardFile, "gpus", stem)


@functools.cache
def _link(stem: str) -> LinkFile:
    return _read(LinkFile, "links", stem)


@functools.cache
def _model(stem: str) -> ModelFile:
    return _read(ModelFile, "models", stem)


def _read(kind: type[T], folder: Kind, stem: str) -> T:
    path = _HERE / folder / f"{stem}.yaml"
    return from_data(kind, read_yaml(path), str(path))


@functools.cache
def aliases(kind: Kind) -> Mapping[str, str]:
    """Catalogue name by alias, as written."""
    listed: dict[str, list[str | int]] = read_yaml(_HERE / kind / "aliases.yaml") or {}
    return {str(alias): stem for stem, aliases in listed.items() for alias in aliases}


@functools.cache
def _index(kind: Kind) -> Mapping[str, str]:
    """Catalogue name by folded name or alias."""
    index = {_folded(alias): stem for alias, stem in aliases(kind).items()}
    # The last part of a hub id is a name as well: Qwen2.5-7B-Instruct.
    index |= {_folded(alias.rsplit("/", 1)[1]): stem for alias, stem in aliases(kind).items() if "/" in alias}
    return index | {_folded(stem): stem for stem in names(kind)}


def _folded(name: str) -> str:
    """Without case, blanks, hyphens and the maker's name: what two spellings of one thing have in common."""
    squashed = re.sub(r"[\s_\-]+", "", name.casefold())
    return _MAKERS.sub("", squashed) or squashed


# ------------------------------------------------------------------------------------------------------------ clusters


@dataclass(frozen=True, kw_only=True)
class _Count:
    """What `8xh100` says."""

    num_nodes: int
    gpus_per_node: int
    card: str
    assumptions: tuple[str, ...] = field(default=())


_GPUS = re.compile(r"\s*(?:(?:(-?\d+)\s*[xX*×]\s*)?(-?\d+)\s*[xX*×]\s*)?(.+?)\s*")


def parse_gpus(
    text: str, nodes: int | None = None, network: str | None = None, link_name: str | None = None
) -> Cluster:
    """A Cluster from a few words.

    Args:
        text: `h100`, `8xh100` (cards of one machine) or `2x8xh200` (machines, cards in each).
        nodes: Machines, if `text` does not say.
        network: The link across machines; the card's usual one if None.
        link_name: The link inside a machine; the card's usual one if None.

    Returns:
        The cluster, with what was assumed in `assumptions`.

    Raises:
        UsageError: If a count is not sensible or a name unknown; carries every problem.
    """
    problems: list[str] = []
    count = _counted(text, nodes, problems)
    card = _known("gpus", count.card, problems)
    inner = None if link_name is None else _known("links", link_name, problems)
    outer = None if network is None else _known("links", network, problems)
    if outer is not None and _link(outer).kind != "network":
        problems.append(f"{network!r} is not a network; networks are {', '.join(_networks())}")
    if inner is not None and _link(inner).kind == "network":
        problems.append(f"{link_name!r} is a network; the link inside a machine is NVLink, PCIe or host memory")
    if card is not None:
        count = _split_over_nodes(count, _card(card).machine, problems, said_nodes=nodes is not None)
    if network is not None and count.num_nodes == 1:
        problems.append(
            f"the network {network!r} is between machines, and {text!r} is one; leave it out, or say how many"
        )
    if problems or card is None:
        raise UsageError(*problems)
    return _cluster(card, count, inner, outer)


def _counted(text: str, nodes: int | None, problems: list[str]) -> _Count:
    match = _GPUS.fullmatch(text)
    if match is None:
        problems.append(f"{text!r} names no card; write 8xh100, 2x8xh200 (machines x cards) or h100")
        return _Count(num_nodes=1, gpus_per_node=1, card="")
    said_nodes, said_cards, card = match[1], match[2], match[3]
    num_nodes = _bounded(said_nodes if said_nodes is not None else nodes, "machines", problems)
    per_node = _bounded(said_cards, "cards", problems)
    if said_nodes is not None and nodes is not None and num_nodes != nodes:
        problems.append(f"{text!r} says {num_nodes} machines and --nodes says {nodes}; say it once")
    if num_nodes * per_node > MAX_GPUS:
        problems.append(f"{num_nodes} x {per_node} cards are more than the limit of {MAX_GPUS:,}")
    return _Count(num_nodes=num_nodes, gpus_per_node=per_node, card=card)


def _bounded(said: str | int | None, what: str, problems: list[str]) -> int:
    """A count from 1 to MAX_GPUS; 1 if nothing or nonsense was said."""
    if said is None:
        return 1
    digits = str(said)
    value = int(digits) if len(digits) < 12 else MAX_GPUS + 1
    if not 1 <= value <= MAX_GPUS:
        problems.append(f"{digits[:24]} {what} cannot be planned for; the limits are 1 to {MAX_GPUS:,}")
        return 1
    return value


def _known(kind: Kind, name: str, problems: list[str]) -> str | None:
    if not name:
        return None
    try:
        return canonical(kind, name)
    except UnknownNameError as error:
        problems.extend(error.problems)
        return None


def _networks() -> tuple[str, ...]:
    return tuple(name for name in names("links") if _link(name).kind == "network")


def _split_over_nodes(count: _Count, machine: Machine, problems: list[str], *, said_nodes: bool) -> _Count:
    """`64xh100` means 8 machines of 8: no machine holds 64."""
    most, total = machine.cards_per_node, count.gpus_per_node
    if total <= most:
        return count
    if count.num_nodes > 1 or said_nodes or total % most:
        problems.append(
            f"{total} cards in one machine; a machine with this card holds at most {most}. "
            f"Write machines x cards, such as {-(-total // most) * count.num_nodes}x{most}x{count.card}"
        )
        return count
    nodes = total // most
    return replace(
        count,
        num_nodes=nodes,
        gpus_per_node=most,
        assumptions=(f"{total} cards are {nodes} machines of {most}: no machine with this card holds more",),
    )


def _cluster(card: str, count: _Count, inner: str | None, outer: str | None) -> Cluster:
    machine = _card(card).machine
    assumptions = list(count.assumptions)
    if inner is None:
        inner, why = _usual_link(machine, count.gpus_per_node)
        if count.gpus_per_node > 1:
            assumptions.append(why)
    inter_node = None
    if count.num_nodes > 1:
        if outer is None:
            outer = machine.network
            assumptions.append(f"across machines: {_link(outer).title}; say --network for another")
        inter_node = _shared(outer, count.gpus_per_node, assumptions)
    size = f"{count.gpus_per_node}x{card}"
    return Cluster(
        name=size if count.num_nodes == 1 else f"{count.num_nodes}x{size}",
        gpu=gpu(card),
        num_nodes=count.num_nodes,
        gpus_per_node=count.gpus_per_node,
        intra_node=link(inner),
        inter_node=inter_node,
        date=_card(card).sources[_card(card).peak_flops.source].date,
        assumptions=tuple(assumptions),
    )


def _usual_link(machine: Machine, cards: int) -> tuple[str, str]:
    """The link inside a machine that this many cards usually have, and the assumption in words."""
    if machine.nvlink is not None:
        return machine.nvlink, f"inside a machine: {_link(machine.nvlink).title} between all cards"
    lanes, board = 16, "a server board with 16 lanes for each card"
    if machine.form == "desktop" and cards <= 4:
        lanes = {1: 16, 2: 8}.get(cards, 4)
        board = f"a desktop board whose 16 processor lanes give {cards} cards {lanes} each"
    name = f"pcie{machine.pcie_generation}-x{lanes}" + ("" if machine.peer_to_peer else "-host")
    way = (
        "cards read each other's memory directly; NCCL from 2.23 on may go through host memory instead"
        if machine.peer_to_peer
        else "through host memory, since the driver grants no peer access"
    )
    return name, f"inside a machine: PCIe {machine.pcie_generation} x{lanes} ({board}; {way})"


def _shared(network: str, cards: int, assumptions: list[str]) -> Link:
    """A card's share of the machine's adapters."""
    whole = link(network)
    if _link(network).adapters == "one a card" or cards == 1:
        return whole
    assumptions.append(f"across machines: one {_link(network).title} adapter a machine, shared by its {cards} cards")
    headline = whole.stated_headline_bytes_per_s
    return replace(
        whole,
        bandwidth_bytes_per_s=whole.bandwidth_bytes_per_s / cards,
        stated_headline_bytes_per_s=None if headline is None else headline / cards,
    )
