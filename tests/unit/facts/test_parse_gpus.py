"""A cluster from a few words."""

import pytest

from shardwise.errors import UsageError
from shardwise.facts.catalog import parse_gpus


@pytest.mark.parametrize(
    ("text", "nodes", "cards", "inside", "across"),
    [
        ("h100", 1, 1, "nvlink4", None),
        ("8xh100", 1, 8, "nvlink4", None),
        ("2x8xh200", 2, 8, "nvlink4", "ndr-400"),
        (" 2 X 8 x H200 ", 2, 8, "nvlink4", "ndr-400"),
        ("64xa100", 8, 8, "nvlink3", "hdr-200"),
        ("8xb200", 1, 8, "nvlink5", None),
        ("1x8xh100", 1, 8, "nvlink4", None),
        ("rtx-5090", 1, 1, "pcie5-x16-host", None),
        ("2xrtx-5090", 1, 2, "pcie5-x8-host", None),
        ("4x4090", 1, 4, "pcie4-x4-host", None),
        ("3x3090", 1, 3, "pcie4-x4-host", None),
        ("8xrtx-4090", 1, 8, "pcie4-x16-host", None),
        ("4xa6000", 1, 4, "pcie4-x16", None),
        ("4xA10G", 1, 4, "pcie4-x16-host", None),
        ("2x2x4090", 2, 2, "pcie4-x8-host", "10gbe"),
    ],
)
def test_usual_machines(text: str, nodes: int, cards: int, inside: str, across: str | None) -> None:
    cluster = parse_gpus(text)
    assert (cluster.num_nodes, cluster.gpus_per_node) == (nodes, cards)
    assert cluster.intra_node.name == inside
    assert (cluster.inter_node.name if cluster.inter_node else None) == across
    assert cluster.source == "datasheet"


def test_two_consumer_cards_share_the_lanes_of_a_desktop_board() -> None:
    cluster = parse_gpus("2x5090")
    assert cluster.intra_node.headline_bandwidth_bytes_per_s == 64e9
    assert any("16 processor lanes give 2 cards 8 each" in sentence for sentence in cluster.assumptions)


def test_one_card_assumes_nothing() -> None:
    assert parse_gpus("h100").assumptions == ()


def test_nodes_may_be_said_apart() -> None:
    cluster = parse_gpus("8xh100", nodes=4)
    assert (cluster.num_nodes, cluster.gpus_per_node, cluster.name) == (4, 8, "4x8xh100-sxm")
    assert parse_gpus("4x8xh100", nodes=4) == cluster


def test_more_cards_than_a_machine_holds_are_several_machines_and_this_is_said() -> None:
    cluster = parse_gpus("512xh100")
    assert (cluster.num_nodes, cluster.gpus_per_node) == (64, 8)
    assert cluster.assumptions[0].startswith("512 cards are 64 machines of 8")


def test_a_chosen_network_is_shared_by_the_cards_of_a_machine() -> None:
    cluster = parse_gpus("2x4xrtx-4090", network="10gbe")
    assert cluster.inter_node is not None
    assert cluster.inter_node.bandwidth_bytes_per_s == 1.25e9 / 4
    assert cluster.inter_node.headline_bandwidth_bytes_per_s == 1.25e9 / 4
    assert any("shared by its 4 cards" in sentence for sentence in cluster.assumptions)


def test_an_adapter_for_each_card_is_not_shared() -> None:
    cluster = parse_gpus("2x8xh100")
    assert cluster.inter_node is not None
    assert cluster.inter_node.bandwidth_bytes_per_s == 50e9


def test_a_chosen_inner_link_is_taken() -> None:
    cluster = parse_gpus("2x3090", link_name="nvlink-bridge")
    assert cluster.intra_node.kind == "nvlink"
    assert cluster.assumptions == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0xh100", "0 cards cannot be planned for"),
        ("-2xh100", "-2 cards cannot be planned for"),
        ("0x8xh100", "0 machines cannot be planned for"),
        ("99999999999999999999xh100", "cannot be planned for"),
        ("60000x8xh100", "more than the limit of 65,536"),
        ("9xh100", "Write machines x cards, such as 2x8xh100"),
        ("2x16xh100", "Write machines x cards, such as 4x8xh100"),
        ("8xh1000", r"Unknown card 'h1000'\. Did you mean 'h100'"),
        ("8x", "Unknown card"),
        ("", "names no card"),
    ],
)
def test_nonsense_is_answered(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_gpus(text)


def test_all_problems_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        parse_gpus("0x0xh1oo", nodes=3, network="11gbe", link_name="10gbe")
    text = "\n".join(caught.value.problems)
    for part in ("0 machines", "0 cards", "h1oo", "say it once", "11gbe", "'10gbe' is a network"):
        assert part in text


def test_a_link_inside_a_machine_is_no_network() -> None:
    with pytest.raises(UsageError, match="'nvlink4' is not a network; networks are 100gbe"):
        parse_gpus("2x8xh100", network="nvlink4")
