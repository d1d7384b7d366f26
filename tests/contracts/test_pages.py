"""README, docs and the picture show what the tool prints today."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.contracts import pages

SHOWN = [(path, command) for path in pages.page_files() for command in pages.commands(path.read_text(encoding="utf-8"))]


def test_there_is_something_to_compare() -> None:
    shown = {path.name for path, _ in SHOWN}
    assert {"README.md", "plan.md"} <= shown


@pytest.mark.parametrize("path", sorted({path for path, _ in SHOWN}), ids=lambda path: path.name)
def test_pages_show_what_the_tool_prints(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert pages.written_anew(text) == text, f"{path.name} is out of date; scripts/pages writes it anew"


def test_the_picture_is_today_s() -> None:
    path = pages.ROOT / pages.PICTURE[0]
    assert pages.picture() == path.read_text(encoding="utf-8"), "docs/plan.svg is out of date: scripts/pages"
