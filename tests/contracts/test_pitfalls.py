"""docs/pitfalls.md: every numbered trap is there, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "pitfalls.md"
NUM_TRAPS = 20
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
OUTCOMES = ("cannot happen", "refused", "caught", "told")


def rows() -> list[list[str]]:
    """The cells of every table row."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_named_test_exists() -> None:
    named = _TEST.findall(PAGE.read_text(encoding="utf-8"))
    assert len(named) > 50
    missing = [f"{path}::{name}" for path, name in named if name not in names_in(ROOT / path)]
    assert missing == []


def test_every_trap_has_an_outcome_and_a_proof() -> None:
    traps = [row for row in rows() if row[0] not in ("#", "trap")]
    numbered = [row for row in traps if row[0].isdigit()]
    assert [int(row[0]) for row in numbered] == list(range(1, NUM_TRAPS + 1))
    for row in traps:
        here, proof = row[-2], row[-1]
        assert any(f"**{outcome}" in here.lower() for outcome in OUTCOMES), row[0]
        assert _TEST.search(proof), row[0]
