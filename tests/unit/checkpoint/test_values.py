import json
import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import CheckpointError
from shardwise.trainer.checkpoint.tensorfile import HeaderError
from shardwise.trainer.checkpoint.values import decode_value, encode_value

SIMPLE = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
KEYS = st.text(max_size=4) | st.integers() | st.booleans() | st.tuples(st.integers(), st.text(max_size=2))
NESTED = st.recursive(
    SIMPLE,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


def there_and_back(value: Any) -> Any:
    encoded, tensors = encode_value("it", value)
    return decode_value(json.loads(json.dumps(encoded, allow_nan=False)), tensors)


@given(NESTED)
def test_every_allowed_value_comes_back_as_it_was(value: Any) -> None:
    assert repr(there_and_back(value)) == repr(value)  # repr tells 1 from True and nan from nothing


def test_tensors_and_dtypes_come_back() -> None:
    tensor = torch.arange(3)
    value = {"betas": (0.9, 0.999), "lr": tensor, "dtype": torch.bfloat16, "size": torch.Size([2, 3])}
    back = there_and_back(value)
    assert back["lr"] is tensor
    assert back["dtype"] is torch.bfloat16
    assert back["size"] == (2, 3)


class Thing:
    pass


@pytest.mark.parametrize("value", [Thing(), object, len, {1, 2}, 1j, torch.optim.SGD, range(3), bytearray(b"x")])
def test_a_type_outside_the_list_is_refused_by_name(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"extra\.sampler\.thing is a .*, which a checkpoint does not store"):
        encode_value("extra.sampler", {"thing": value})


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="contains itself"):
        encode_value("it", loop)


def test_subclasses_of_containers_lose_their_class() -> None:
    assert type(there_and_back(OrderedDict(a=1))) is dict


@pytest.mark.parametrize(
    "text",
    [
        '{"$class": "os.system"}',
        '{"$tensor": 0}',
        '{"$tensor": true}',
        '{"$float": "1e5"}',
        '{"$bytes": "?"}',
        '{"$dict": [[{"$dict": []}, 1]]}',
        '{"$dict": [[1]]}',
        '{"$tuple": {}}',
        '{"$dtype": "object"}',
        '{"$tuple": [], "x": 1}',
    ],
)
def test_forms_that_are_never_written_are_refused(text: str) -> None:
    with pytest.raises(HeaderError):
        decode_value(json.loads(text), [])


def test_not_a_number_survives() -> None:
    assert math.isnan(there_and_back([math.nan])[0])
