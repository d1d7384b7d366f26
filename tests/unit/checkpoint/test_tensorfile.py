import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwise.trainer.checkpoint.tensorfile import (
    DTYPES,
    HeaderError,
    TensorFileWriter,
    TensorSpec,
    hash_file,
    parse_json,
    raw_bytes,
    read_header,
)


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Any:
    specs = [TensorSpec(key=key, dtype=tensor.dtype, shape=tuple(tensor.shape)) for key, tensor in tensors.items()]
    writer = TensorFileWriter(path, specs, {"format": "pt"})
    for spec in writer.order:
        writer.add(tensors[spec.key])
    return writer.finish()


def test_every_type_and_odd_shape_is_read_back_by_the_safetensors_package(tmp_path: Path) -> None:
    tensors = {f"{name}": torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "turned": torch.randn(3, 5).T}
    record = write(tmp_path / "a.safetensors", tensors)
    assert record.num_bytes == (tmp_path / "a.safetensors").stat().st_size
    assert record.sha256 == hash_file(tmp_path / "a.safetensors")
    loaded = load_file(tmp_path / "a.safetensors")
    assert set(loaded) == set(tensors)
    for key, tensor in tensors.items():
        assert loaded[key].dtype == tensor.dtype
        assert raw_bytes(loaded[key]) == raw_bytes(tensor)
    header = read_header(tmp_path / "a.safetensors")
    assert {key: found.shape for key, found in header.items()} == {key: tuple(t.shape) for key, t in tensors.items()}


def test_tensors_are_aligned_to_their_width(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(2, dtype=torch.float64), "c": torch.ones(1)}
    write(tmp_path / "a.safetensors", tensors)
    raw = (tmp_path / "a.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for key, tensor in tensors.items():
        assert (8 + length + header[key]["data_offsets"][0]) % tensor.element_size() == 0


def test_a_file_that_exists_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_text("mine")
    with pytest.raises(FileExistsError):
        write(tmp_path / "a.safetensors", {"a": torch.ones(1)})
    assert (tmp_path / "a.safetensors").read_text() == "mine"


def entry(dtype: str, shape: list[Any], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"a": entry("F32", [2], 0, 4)}, "contradict"),
        ({"a": entry("F32", [1], 0, 4)}, "end at byte 4"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, "overlap"),
        ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [5], 3, 8)}, "hole"),
        ({"a": entry("F33", [2], 0, 8)}, "unknown dtype"),
        ({"a": entry("F32", [-2], 0, 8)}, "whole numbers"),
        ({"a": entry("F32", [True, 2], 0, 8)}, "whole numbers"),
        ({"a": {"dtype": "F32"}}, "exactly"),
        ({"a": []}, "exactly"),
        ([], "not a JSON object"),
    ],
)
def test_a_lying_header_is_refused(tmp_path: Path, header: Any, match: str) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(HeaderError, match=match):
        read_header(tmp_path / "a")


@pytest.mark.parametrize(
    "raw", [b"", b"1234567", (2**63).to_bytes(8, "little") + b"{}", (3).to_bytes(8, "little") + b"{}"]
)
def test_a_header_longer_than_the_file_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "a").write_bytes(raw)
    with pytest.raises(HeaderError, match="bytes long"):
        read_header(tmp_path / "a")


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "[NaN]", "[-Infinity]", "[" * 100_000, "", "{", b"\xff\xfe"])
def test_json_with_freedoms_is_refused(text: str | bytes) -> None:
    with pytest.raises(HeaderError):
        parse_json(text)
