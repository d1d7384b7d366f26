"""Flags are promises: each command's are frozen here, so that none goes or changes unseen."""

from __future__ import annotations

import dataclasses
import importlib
import typing
from typing import Any

import pytest
from tests.contracts import snapshot

from shardwise.cli.help import command_help, field_texts
from shardwise.cli.main import COMMANDS
from shardwise.cli.options import describe


def options_of(command: str) -> Any:
    return importlib.import_module(COMMANDS[command].module).Options


def flag_lines(kind: Any) -> list[str]:
    hints = typing.get_type_hints(kind)
    lines: list[str] = []
    for field in dataclasses.fields(kind):
        if "flags_of" in field.metadata:
            lines.append(f"and the flags of {field.metadata['flags_of'].__name__}")
            continue
        name = field.name.upper() if field.metadata.get("positional") else "--" + field.name.replace("_", "-")
        default = "" if field.default is dataclasses.MISSING else f" = {field.default}"
        lines.append(f"{name} {describe(hints[field.name])}".rstrip() + default)
    return lines


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_flags_are_frozen(command: str) -> None:
    snapshot.check(f"flags/{command}.txt", "\n".join(flag_lines(options_of(command))) + "\n")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_has_a_worked_example_and_fits(command: str) -> None:
    kind = options_of(command)
    page = command_help(command, kind, width=100)
    assert "Examples:\n  " in page
    assert f"shardwise {command}" in page.split("Examples:")[1]
    assert max(map(len, page.splitlines())) <= 120


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_options_are_frozen_keyword_only_and_explained(command: str) -> None:
    kind = options_of(command)
    assert kind.__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(kind))
    texts, _groups = field_texts(kind)
    obvious = {"precision", "optimizer"}
    missing = [
        field.name for field in dataclasses.fields(kind) if field.name not in texts and field.name not in obvious
    ]
    assert not missing
