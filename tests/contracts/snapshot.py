"""Texts that people rely on, kept as files: a change is seen in review. Write them anew with SHARDWISE_UPDATE=1."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "snapshots"


def check(name: str, text: str) -> None:
    """Compare with the kept text, or keep this one if SHARDWISE_UPDATE is set."""
    path = FOLDER / name
    if os.environ.get("SHARDWISE_UPDATE"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"{name} is not kept yet; run with SHARDWISE_UPDATE=1 and review the file"
    assert text == path.read_text(encoding="utf-8"), f"{name} has changed; if that is meant, SHARDWISE_UPDATE=1"
