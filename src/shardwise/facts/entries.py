"""What the files of `gpus/`, `links/` and `models/` hold; read strictly, so that a misspelled key is an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.vocabulary.cluster import DType, FactSource, LinkKind


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where values come from."""

    kind: FactSource = "datasheet"
    url: str = ""
    date: str
    """ISO date on which it was written down; vendor figures are the published ones, to be checked against the url."""
    note: str = ""
    """The words or the arithmetic behind the value, where it is not simply printed there."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A number and the key of its source."""

    value: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Size:
    """Bytes, written with a unit (`81559 MiB`), and the key of their source."""

    value: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Dense FLOP/s by dtype, tensor cores with fp32 accumulation where there is a choice, and their source."""

    values: Mapping[DType, float]
    source: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that a card usually sits in: what is assumed if nobody measures."""

    form: Literal["sxm", "server", "desktop"]
    """sxm: soldered to a board with NVLink. server: slots with all lanes. desktop: cards share a processor's lanes."""
    pcie_generation: Literal[3, 4, 5]
    peer_to_peer: bool
    """Whether the driver lets cards read each other's memory over PCIe."""
    nvlink: str | None = None
    """The link between all cards of a machine (sxm)."""
    nvlink_bridge: str | None = None
    """The link that a bridge, bought separately, makes between two cards. Never assumed."""
    network: str
    """The link across machines."""
    cards_per_node: int = 8
    """Most cards in one machine."""
    source: str


@dataclass(frozen=True, kw_only=True)
class CardFile:
    """One file of `gpus/`."""

    title: str
    architecture: str
    memory: Size
    """As `nvidia-smi` reports it."""
    cuda_memory: Size | None = None
    """As cudaMemGetInfo reports it."""
    memory_bandwidth_bytes_per_s: Rate
    peak_flops: Peaks
    machine: Machine
    sources: Mapping[str, Origin]


@dataclass(frozen=True, kw_only=True)
class LinkFile:
    """One file of `links/`."""

    title: str
    kind: LinkKind
    bandwidth_bytes_per_s: Rate
    """One way, per card; of one adapter, for networks."""
    stated_headline_bytes_per_s: Rate | None = None
    attained_fraction: Rate
    latency_seconds: Rate
    adapters: Literal["one a card", "one a node"] = "one a card"
    """Networks: whether the cards of a machine share one adapter."""
    sources: Mapping[str, Origin]


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """One file of `models/`."""

    hub_id: str
    """The repository that holds its weights."""
    num_parameters: int
    """Exact, tied tensors counted once; a test compares it with the module that transformers builds."""
    source: Origin
    config: Mapping[str, Any]
    """The keys of config.json that decide the shape, unchanged."""
