"""What a launcher's variables may say; nonsense is told, all of it."""

from __future__ import annotations

import pytest

from shardwise.errors import UsageError
from shardwise.launch.environment import node_environment, rank_environment


@pytest.mark.parametrize("value", ["0", "-1", "abc", "", "1e3"])
def test_a_number_of_machines_that_is_none(value: str) -> None:
    with pytest.raises(UsageError, match="PET_NNODES is '"):
        node_environment({"PET_NNODES": value})


def test_every_wrong_variable_is_named() -> None:
    environ = {"RANK": "abc", "WORLD_SIZE": "0", "LOCAL_RANK": "x", "MASTER_ADDR": "h", "MASTER_PORT": "no"}
    with pytest.raises(UsageError) as caught:
        rank_environment(environ)
    assert len(caught.value.problems) == 4
    assert all(name in str(caught.value) for name in environ if name != "MASTER_ADDR")
