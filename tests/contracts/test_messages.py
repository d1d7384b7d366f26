"""What a user reads after a mistake, word for word: the value, the limit, the way out."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from tests.contracts import snapshot

from shardwise.cli.main import main

COMMAND_LINES = (
    "plam qwen2.5-7b",
    "plan qwen2.5-7b",
    "plan qwen2.5-7x --gpus 2xrtx-5090",
    "plan qwen2.5-7b --gpus 2xrtx-5099",
    "plan qwen2.5-7b --gpus 0xh100",
    "plan qwen2.5-7b --gpus 8xh100 --cluster cluster.yaml",
    "plan qwen2.5-7b --cluster nowhere.yaml",
    "plan qwen2.5-7b --cluster broken.yaml",
    "plan qwen2.5-7b --gpus 2xh100 --zero 4 --seq many --glbal-batch 3",
    "plan qwen2.5-7b --gpus 2xh100 --seq 0 --micro-batch -1",
    "plan qwen2.5-7b --gpus 8xh100 --tp 3",
    "plan qwen2.5-7b --gpus 2x8xh100 --network 11gbe",
    "plan qwen2.5-7b --gpus 2xh100 --split FULL_SHRD",
    "plan qwen2.5-7b --gpus 2xh100 --split FULL_SHARD --zero 2",
    "plan ./nowhere/config.json --gpus h100",
    "plan broken --gpus h100",
    "report",
    "report nowhere",
    "report --plan broken.yaml",
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "broken.yaml").write_text("name: here\ngpus: 3\nintra_node: fast\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("place")
def test_messages(capsys: pytest.CaptureFixture[str]) -> None:
    parts: list[str] = []
    for line in COMMAND_LINES:
        code = main(shlex.split(line))
        out, err = capsys.readouterr()
        assert out == "", line
        parts.append(f"$ shardwise {line}\n{err}exit code {code}\n")
    snapshot.check("messages.txt", "\n".join(parts))
