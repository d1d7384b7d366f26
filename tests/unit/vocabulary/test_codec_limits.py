"""What a file may say: numbers within limits, tables that rise, no file that never ends, no traceback."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.facts.catalog import parse_gpus
from shardwise.vocabulary import codec
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job


def cluster_data() -> dict[str, Any]:
    data = codec.to_data(parse_gpus("2x2xh100", None, None, None))
    data["intra_node"]["curves"] = [
        {"op": "all_reduce", "ranks": 2, "points": [{"bytes": 8, "seconds": 1e-5}, {"bytes": 64, "seconds": 2e-5}]}
    ]
    data["measurements"]["matmul_flops"] = {"bf16": [{"size": 512, "rate": 1e12}, {"size": 1024, "rate": 2e12}]}
    return data


def changed(path: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(cluster_data())
    *outer, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    inner: Any = data
    for part in outer:
        inner = inner[part]
    inner[last] = value
    return data


def test_every_number_of_the_catalogue_lies_within() -> None:
    data = cluster_data()
    assert codec.to_data(codec.from_data(Cluster, data)) == data


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("num_nodes", 0, "num_nodes must be at least 1, not 0"),
        ("gpus_per_node", 2**63, "gpus_per_node must be at most 65,536"),
        ("gpus_per_node", 65_536, "131,072 cards; the limit is 65,536"),
        ("inter_node", None, "inter_node is missing, and there are 2 machines"),
        ("gpu.memory_bytes", -1, "gpu.memory_bytes must be at least 1, not -1"),
        ("gpu.peak_flops.bf16", 0, "gpu.peak_flops.bf16 must be at least 1, not 0"),
        ("intra_node.bandwidth_bytes_per_s", -450e9, "bandwidth_bytes_per_s must be at least 1"),
        ("intra_node.latency_seconds", 10**400, "latency_seconds must be a finite number, not 1000"),
        ("intra_node.attained_fraction", 1.5, "attained_fraction must be at most 1, not 1.5"),
        ("intra_node.curves.0.points.0.seconds", -1.0, "seconds must be at least 1e-12"),
        ("intra_node.curves.0.points.0.bytes", 64, "points must rise in bytes, and 64 follows 64"),
        ("intra_node.curves.0.points", [], "points is empty"),
        ("measurements.matmul_flops.bf16.0.size", 4096, "matmul_flops.bf16 must rise in size"),
        ("measurements.wire_slowdown_under_matmul", 0.5, "must be at least 1, not 0.5"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(path: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        codec.from_data(Cluster, changed(path, value))
    assert words in str(caught.value)


def test_all_limits_are_told_at_once() -> None:
    job = {
        "model": codec.to_data(_model()), "sequence_length": 0, "global_batch_size": 10**30, "max_steps": -1,
        "lora": {"dropout": 1.0},
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        codec.from_data(Job, job)
    assert len(caught.value.problems) == 4


def _model() -> Any:
    from shardwise.facts import catalog

    return catalog.model("qwen2.5-0.5b")


def test_a_device_or_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cluster.yaml")
    for path in (tmp_path / "cluster.yaml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="no regular file"):
            codec.read_text(path)


def test_aliases_that_multiply_are_refused_at_once(tmp_path: Path) -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]")
    path = tmp_path / "cluster.yaml"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ConfigError, match="aliases are not read"):
        codec.read_noun(Cluster, path)


def test_a_line_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("name: a\nname: b\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        codec.read_noun(Cluster, path)
    assert str(caught.value) == f"{path}: line 2: the key 'name' is given twice"


def test_numbers_of_thousands_of_digits_are_refused() -> None:
    with pytest.raises(ConfigError, match="line 2: a whole number of 6,000 digits"):
        codec.parse_yaml("a: 1\nb: " + "9" * 6000)
