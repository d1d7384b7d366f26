"""docs/facts.md is executed: its session runs, its examples are the files that they show."""

import doctest
import re
from pathlib import Path

import pytest

from shardwise.facts import catalog
from shardwise.facts.entries import CardFile, LinkFile, ModelFile
from shardwise.vocabulary.codec import from_data, parse_yaml

DOC = Path(__file__).parents[3] / "docs" / "facts.md"


def test_the_session_runs() -> None:
    outcome = doctest.testfile(str(DOC), module_relative=False)
    assert outcome.attempted >= 8
    assert outcome.failed == 0


@pytest.mark.parametrize(
    ("label", "kind", "shown"),
    [
        ("card", CardFile, catalog.card_file("rtx-4080")),
        ("link", LinkFile, catalog.link_file("25gbe")),
        ("model", ModelFile, catalog.model_file("qwen2.5-7b")),
    ],
)
def test_an_example_is_an_entry_of_the_catalogue(label: str, kind: type, shown: object) -> None:
    blocks = re.findall(rf"```yaml {label}\n(.*?)```", DOC.read_text(), re.S)
    assert len(blocks) == 1
    assert from_data(kind, parse_yaml(blocks[0])) == shown
