import pytest

from shardwise.probe.groups import groupings


def shown(world_size: int, local: int, quick: bool = False) -> dict[str, tuple[tuple[int, ...], ...]]:
    return {way.name: way.groups for way in groupings(world_size, local, quick)}


def test_two_ranks_have_one_way() -> None:
    assert shown(2, 2) == {"all": ((0, 1),)}


def test_one_rank_has_none() -> None:
    assert shown(1, 1) == {}


def test_four_cards_of_one_machine() -> None:
    assert shown(4, 4) == {
        "all": ((0, 1, 2, 3),),
        "blocks of 2": ((0, 1), (2, 3)),
        "strides of 2": ((0, 2), (1, 3)),
    }
    assert list(shown(4, 4, quick=True)) == ["all", "blocks of 2"]


def test_two_machines_of_four() -> None:
    ways = shown(8, 4)
    assert ways["inside nodes"] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert ways["across nodes"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert ways["strides of 2"] == ((0, 2), (1, 3), (4, 6), (5, 7))
    scopes = {way.name: way.scope for way in groupings(8, 4, False)}
    assert scopes["all"] == scopes["across nodes"] == "inter_node"
    assert scopes["inside nodes"] == scopes["blocks of 2"] == "intra_node"


def test_two_machines_of_one_have_only_what_crosses() -> None:
    assert shown(2, 1) == {"all": ((0, 1),)}


@pytest.mark.parametrize(("world_size", "local"), [(2, 2), (6, 6), (8, 8), (16, 8), (12, 4), (3, 1)])
def test_every_way_holds_every_rank_once(world_size: int, local: int) -> None:
    ways = groupings(world_size, local, quick=False)
    assert len({frozenset(way.groups) for way in ways}) == len(ways)
    for way in ways:
        assert sorted(rank for group in way.groups for rank in group) == list(range(world_size))
        assert len({len(group) for group in way.groups}) == 1
        assert all(rank in way.group_of(rank) for rank in range(world_size))
