"""What is not a tensor, as JSON: an allow-list of types out and in.

Plain JSON values stand for themselves. Everything else is an object with one key that starts with `$`:

    {"$tuple": [...]}  {"$dict": [[key, value], ...]}  {"$float": "nan"}  {"$bytes": "<base64>"}  {"$dtype": "F32"}
    {"$tensor": 0}     the n-th tensor that belongs to this value; its elements lie in a safetensors file

Nothing in the text can name a class or a function, so reading it can only ever make these types.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any, Final, cast

import torch

from shardwise.errors import CheckpointError
from shardwise.trainer.checkpoint.tensorfile import DTYPE_NAMES, DTYPES, HeaderError

_FLOATS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MAX_DEPTH: Final = 100


def encode_value(name: str, value: Any) -> tuple[Any, list[torch.Tensor]]:
    """A JSON value and the tensors that it refers to.

    Args:
        name: What the value is called in a message.
        value: None, bool, int, float, str, bytes, torch.dtype, torch.Tensor, or lists, tuples and dicts of them.

    Raises:
        CheckpointError: A type that is not in the list.
    """
    tensors: list[torch.Tensor] = []
    return _encode(name, value, tensors, 0), tensors


def _encode(name: str, value: Any, tensors: list[torch.Tensor], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{name} is nested more than {_MAX_DEPTH} deep, or contains itself. Flatten it.")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype) and value in DTYPE_NAMES:
        return {"$dtype": DTYPE_NAMES[value]}
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"$tensor": len(tensors) - 1}
    return _encode_container(name, value, tensors, depth)


def _encode_container(name: str, value: Any, tensors: list[torch.Tensor], depth: int) -> Any:
    if isinstance(value, list):
        items = cast(list[Any], value)
        return [_encode(f"{name}[{i}]", item, tensors, depth + 1) for i, item in enumerate(items)]
    if type(value) in (tuple, torch.Size):
        return {"$tuple": [_encode(f"{name}[{i}]", item, tensors, depth + 1) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        pairs = cast(dict[Any, Any], value)
        if all(type(key) is str and not key.startswith("$") for key in pairs):
            return {key: _encode(f"{name}.{key}", item, tensors, depth + 1) for key, item in pairs.items()}
        return {
            "$dict": [
                [_encode(f"{name} key", key, tensors, depth + 1), _encode(f"{name}.{key}", item, tensors, depth + 1)]
                for key, item in pairs.items()
            ]
        }
    raise CheckpointError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint does not store. "
        "Give it as numbers, text, bytes, tensors, or lists, tuples and dicts of them."
    )


def decode_value(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The opposite of `encode_value`.

    Raises:
        HeaderError: A form that `encode_value` never writes.
    """
    if isinstance(value, list):
        return [decode_value(item, tensors) for item in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    pairs = cast(dict[str, Any], value)
    if not any(key.startswith("$") for key in pairs):
        return {key: decode_value(item, tensors) for key, item in pairs.items()}
    if len(pairs) != 1:
        raise HeaderError("an object with a $ key has other keys beside it")
    [(tag, content)] = pairs.items()
    return _decode_tagged(tag, content, tensors)


def _decode_tagged(tag: str, content: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if tag == "$tuple" and isinstance(content, list):
        return tuple(decode_value(item, tensors) for item in cast(list[Any], content))
    if tag == "$dict" and isinstance(content, list):
        return dict(_decode_pair(pair, tensors) for pair in cast(list[Any], content))
    if tag == "$float" and isinstance(content, str) and content in _FLOATS:
        return _FLOATS[content]
    if tag == "$bytes" and isinstance(content, str):
        try:
            return base64.b64decode(content, validate=True)
        except ValueError:
            raise HeaderError("bytes that are not base64") from None
    if tag == "$dtype" and isinstance(content, str) and content in DTYPES:
        return DTYPES[content]
    if tag == "$tensor" and type(content) is int and 0 <= content < len(tensors):
        return tensors[content]
    raise HeaderError(f"unknown or malformed value {tag[:40]!r}")


def _decode_pair(pair: Any, tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    if not isinstance(pair, list) or len(cast(list[Any], pair)) != 2:
        raise HeaderError("a $dict holds something that is not a pair")
    key = decode_value(pair[0], tensors)
    try:
        hash(key)
    except TypeError:
        raise HeaderError("a $dict key that cannot be one") from None
    return key, decode_value(pair[1], tensors)
