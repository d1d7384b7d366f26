"""The catalogue's files: complete, plausible, and every value with its source."""

import datetime
import re
from collections.abc import Iterator

import pytest

from shardwise.errors import UnknownNameError
from shardwise.facts import catalog
from shardwise.facts.entries import Origin
from shardwise.vocabulary.units import GIB, parse_bytes

CARDS = catalog.names("gpus")
LINKS = catalog.names("links")
MODELS = catalog.names("models")


def test_sizes_of_the_catalogue() -> None:
    assert len(CARDS) >= 20
    assert len(LINKS) >= 14
    assert len(MODELS) >= 18


@pytest.mark.parametrize("name", CARDS)
def test_card_is_plausible(name: str) -> None:
    card = catalog.gpu(name)
    assert card.name == name
    assert 14 * GIB < card.memory_bytes < 300 * GIB
    if card.cuda_memory_bytes is not None:
        assert 0.2 * GIB < card.memory_bytes - card.cuda_memory_bytes < 1.2 * GIB
    assert 0.25e12 < card.memory_bandwidth_bytes_per_s < 10e12
    assert card.architecture in {"volta", "turing", "ampere", "ada", "hopper", "blackwell"}
    assert all(5e12 < flops < 10e15 for flops in card.peak_flops.values())
    assert {"fp32", "fp16"} <= set(card.peak_flops)
    has_bf16 = card.architecture not in {"volta", "turing"}
    assert ("bf16" in card.peak_flops) == has_bf16
    if has_bf16:
        assert card.peak_flops["bf16"] == card.peak_flops["fp16"] >= 1.9 * card.peak_flops["tf32"]
    if "fp8" in card.peak_flops:
        assert card.peak_flops["fp8"] == pytest.approx(2 * card.peak_flops["bf16"], rel=0.02)


def test_geforce_counts_fp32_accumulate_at_half_rate() -> None:
    """The tensor cores of GeForce cards give with fp32 accumulate half of what the workstation cards' give."""
    geforce, workstation = catalog.gpu("rtx-3090"), catalog.gpu("rtx-a6000")
    assert geforce.peak_flops["bf16"] / geforce.peak_flops["fp32"] == pytest.approx(2, rel=0.01)
    assert workstation.peak_flops["bf16"] / workstation.peak_flops["fp32"] == pytest.approx(4, rel=0.01)


@pytest.mark.parametrize("name", CARDS)
def test_links_of_a_card_exist(name: str) -> None:
    machine = catalog.card_file(name).machine
    assert catalog.link(machine.network).kind == "network"
    if machine.form == "sxm":
        assert machine.nvlink is not None
        assert catalog.link(machine.nvlink).kind == "nvlink"
    if machine.nvlink_bridge is not None:
        assert catalog.link(machine.nvlink_bridge).kind == "nvlink"


@pytest.mark.parametrize("name", LINKS)
def test_link_is_plausible(name: str) -> None:
    link = catalog.link(name)
    assert link.name == name
    assert 0.5e9 < link.bandwidth_bytes_per_s < 1e12
    assert 1e-6 < link.latency_seconds < 1e-3
    assert 0.1 < link.attained_fraction <= 0.95
    assert link.attained_source.startswith(("measured", "assumed"))
    assert (link.kind == "host_memory") == name.endswith("-host")


def test_headlines_count_as_the_vendors_do() -> None:
    headline = {name: catalog.link(name).headline_bandwidth_bytes_per_s / 1e9 for name in LINKS}
    assert headline["nvlink4"] == 900
    assert headline["nvlink3"] == 600
    assert headline["nvlink-bridge"] == 112.5
    assert headline["pcie5-x16"] == headline["pcie5-x16-host"] == 128
    assert headline["pcie5-x8"] == 64
    assert headline["pcie5-x4"] == 32
    assert headline["10gbe"] == 1.25


@pytest.mark.parametrize("generation", [3, 4, 5])
def test_pcie_lanes_add_up(generation: int) -> None:
    whole = catalog.link(f"pcie{generation}-x16").bandwidth_bytes_per_s
    assert whole == pytest.approx({3: 15.754e9, 4: 31.508e9, 5: 63.015e9}[generation])
    for lanes in (4, 8):
        assert catalog.link(f"pcie{generation}-x{lanes}").bandwidth_bytes_per_s == pytest.approx(
            whole * lanes / 16, rel=1e-3
        )


def origins() -> Iterator[tuple[str, Origin]]:
    for name in CARDS:
        yield from ((f"gpus/{name}", origin) for origin in catalog.card_file(name).sources.values())
    for name in LINKS:
        yield from ((f"links/{name}", origin) for origin in catalog.link_file(name).sources.values())
    yield from ((f"models/{name}", catalog.model_file(name).source) for name in MODELS)


def test_every_source_says_where_and_when() -> None:
    for where, origin in origins():
        assert datetime.date.fromisoformat(origin.date) <= datetime.date(2100, 1, 1), where
        assert origin.url or origin.note, f"{where}: a source needs an address or a reason"
        assert not origin.url or re.fullmatch(r"https://\S+", origin.url), where
        assert origin.kind != "datasheet" or origin.url, f"{where}: a data sheet has an address"


def test_every_value_names_a_source_that_is_there() -> None:
    for name in CARDS:
        card = catalog.card_file(name)
        used = [card.memory, card.memory_bandwidth_bytes_per_s, card.peak_flops, card.machine]
        used += [card.cuda_memory] if card.cuda_memory is not None else []
        assert {value.source for value in used} == set(card.sources), name
        assert parse_bytes(card.memory.value) == catalog.gpu(name).memory_bytes
    for name in LINKS:
        link = catalog.link_file(name)
        used = [link.bandwidth_bytes_per_s, link.attained_fraction, link.latency_seconds]
        used += [link.stated_headline_bytes_per_s] if link.stated_headline_bytes_per_s is not None else []
        assert {value.source for value in used} == set(link.sources), name


def test_facts_carry_their_sources() -> None:
    facts = catalog.gpu_facts("h200") + catalog.link_facts("nvlink4")
    assert all(fact.source and fact.value for fact in facts)
    assert any(fact.name == "h200: memory (nvidia-smi)" and fact.value == "143771 MiB" for fact in facts)


@pytest.mark.parametrize("kind", ["gpus", "links", "models"])
def test_aliases_belong_to_files_and_to_one_only(kind: catalog.Kind) -> None:
    listed = catalog.aliases(kind)
    assert set(listed.values()) <= set(catalog.names(kind))
    folded: dict[str, str] = {}
    for alias, stem in [*listed.items(), *((stem, stem) for stem in catalog.names(kind))]:
        assert catalog.canonical(kind, alias) == stem
        assert folded.setdefault(alias.casefold(), stem) == stem


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("h100", "h100-sxm"),
        ("H100-SXM", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("5090", "rtx-5090"),
        ("rtx5090", "rtx-5090"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb-sxm"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb-pcie"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("Tesla T4", "t4"),
    ],
)
def test_names_of_cards(said: str, meant: str) -> None:
    assert catalog.canonical("gpus", said) == meant


@pytest.mark.parametrize(
    ("said", "meant", "repository"),
    [
        ("llama-3.1-8b", "llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct"),
        ("Qwen2.5-7B-Instruct", "qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct"),
        ("QWEN2.5_7B", "qwen2.5-7b", "Qwen/Qwen2.5-7B"),
    ],
)
def test_names_of_models(said: str, meant: str, repository: str) -> None:
    assert catalog.model(said).name == meant
    assert catalog.hub_id(said) == repository


def test_unknown_names_answer_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown card 'rtx-5900'\. Did you mean 'rtx-5090'"):
        catalog.gpu("rtx-5900")
    with pytest.raises(UnknownNameError, match=r"Did you mean 'qwen.*hub id"):
        catalog.model("qwen2.5-8b")
    with pytest.raises(UnknownNameError, match="Did you mean 'nvlink"):
        catalog.link("nvlinc4")
    with pytest.raises(UnknownNameError, match="Known are: a10, a100-40gb-pcie"):
        catalog.gpu("radeon")


@pytest.mark.parametrize("name", ["../models/qwen2.5-7b", "/etc/passwd", "", "aliases", "h100-sxm.yaml", "nvidia"])
def test_a_name_is_never_a_path(name: str) -> None:
    with pytest.raises(UnknownNameError):
        catalog.gpu(name)
