"""The model card names what others can find: hub ids, never a folder of this machine."""

from pathlib import Path

import pytest

from shardwise.trainer.export import ExportOptions
from shardwise.trainer.export.companions import hub_id, model_card


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("/home/me/models/qwen", None),
        ("./models/qwen", None),
        ("../models", None),
        ("C:\\models\\qwen", None),
        ("random:40", None),
        ("data/chats.jsonl", None),
        ("chats.jsonl", None),
        ("", None),
        ("/root/.cache/huggingface/hub/models--Qwen--Qwen2.5-0.5B/snapshots/abc123", "Qwen/Qwen2.5-0.5B"),
        ("/x/datasets--org--my-data/snapshots/main/train.jsonl", "org/my-data"),
    ],
)
def test_hub_ids(name: str, found: str | None) -> None:
    assert hub_id(name) == found


def test_a_folder_that_looks_like_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_id("models/mine") is None


def test_no_place_of_this_machine_stands_in_the_card() -> None:
    options = ExportOptions(base_model="/home/me/secret/qwen", datasets=("/home/me/secret/data.jsonl", "org/data"))
    card = model_card(options, adapter=False)
    assert "secret" not in card
    assert "base_model" not in card
    assert "A fine-tune of its base model" in card
    assert "datasets:\n- org/data" in card
    assert "base_model: org/base" in model_card(ExportOptions(base_model="org/base"), adapter=True)
