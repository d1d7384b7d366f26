"""Data is ready before any rank waits for another, so nobody tokenizes behind a collective's timeout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.trainer import rehearse, run
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy


class _MetError(Exception):
    """The ranks would meet now."""


@pytest.mark.parametrize("module", [run, rehearse])
def test_tokens_come_before_the_process_group(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def prepared(*_: object) -> Any:
        order.append("tokenize")

    def met(_: object) -> None:
        order.append("meet")
        raise _MetError

    monkeypatch.setattr(module, "prepare_run", prepared)
    monkeypatch.setattr(module, "join_ranks", met)
    monkeypatch.setattr(module, "choose_device", lambda _: torch.device("cpu"))  # type: ignore[misc]
    monkeypatch.setattr(rehearse, "longest_of", prepared)
    act = run.run_training if module is run else rehearse.rehearse
    with pytest.raises(_MetError):
        act(RunFile(model_name_or_path="m", dataset_name="d"), Strategy(precision="fp32"))
    assert order[0] == "tokenize"
    assert order[-1] == "meet"
