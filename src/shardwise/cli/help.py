"""The help page of a command, made from its options: their order, groups, types, defaults and the text under each."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import typing
from typing import Any

from shardwise.cli.options import describe

_GROUP = re.compile(r"\s*# -- (.+)")
_INDENT = 26


def command_help(name: str, kind: type, width: int = 100) -> str:
    """Help of one command: what it does, a worked example, and every flag.

    Args:
        name: The command's name.
        kind: Its options; the docstring's first paragraph says what it does, the rest is shown as it stands.
        width: Columns to wrap at.
    """
    fields = dataclasses.fields(typing.cast("Any", kind))
    texts, _groups = field_texts(kind)
    words = [field for field in fields if field.metadata.get("positional")]
    usage = " ".join(f"[{f.name.upper()}]" if _has_default(f) else f.name.upper() for f in words)
    lines = [f"usage: shardwise {name} {usage} [flags]".replace("  ", " "), ""]
    lines += [inspect.cleandoc(kind.__doc__ or ""), ""]
    for field in words:
        lines += _entry(field.name.upper(), texts.get(field.name, ""), width)
    seen: set[str] = set()
    lines += _flags(kind, seen, width)
    for field in fields:
        if "flags_of" in field.metadata:
            lines += _flags(field.metadata["flags_of"], seen, width)
    return "\n".join(lines) + "\n"


def _flags(kind: type, seen: set[str], width: int) -> list[str]:
    """Every flag of a dataclass, in its groups; those in `seen` were explained already."""
    texts, groups = field_texts(kind)
    hints = typing.get_type_hints(kind)
    lines: list[str] = []
    title = ""
    for field in dataclasses.fields(typing.cast("Any", kind)):
        if field.metadata or field.name in seen:
            continue
        seen.add(field.name)
        group = groups.get(field.name, "flags")
        if group != title:
            title = group
            lines += ["", f"{title}:"]
        values = describe(hints[field.name])
        negated = "[no-]" if field.default is True else ""
        flag = f"--{negated}{field.name.replace('_', '-')} {values}".rstrip()
        lines += _entry(flag, _with_default(field, texts.get(field.name, "")), width)
    return lines


def field_texts(kind: type) -> tuple[dict[str, str], dict[str, str]]:
    """The text under each field of a dataclass, and the `# -- title` group that it stands in, read from its source."""
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except OSError:  # installed without sources: help without texts
        return {}, {}
    body = typing.cast("ast.ClassDef", ast.parse(source).body[0]).body
    lines = source.splitlines()
    texts: dict[str, str] = {}
    groups: dict[str, str] = {}
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name = statement.target.id
        above = (match for line in reversed(lines[: statement.lineno]) if (match := _GROUP.match(line)))
        group = next(above, None)
        if group is not None:
            groups[name] = group[1]
        match following:
            case ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
            case _:
                pass
    return texts, groups


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _with_default(field: dataclasses.Field[Any], text: str) -> str:
    default = field.default
    if default is dataclasses.MISSING or default is None or default is False or default == ():
        return text
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default).replace("True", "true")
    return f"{text} (default: {shown})".lstrip()


def _entry(head: str, text: str, width: int) -> list[str]:
    body = textwrap.wrap(text, max(width - _INDENT, 30)) or [""]
    first = f"  {head}"
    if len(first) > _INDENT - 2:
        return [first, *(" " * _INDENT + line for line in body if line)]
    return [f"{first:<{_INDENT}}{body[0]}".rstrip(), *(" " * _INDENT + line for line in body[1:])]
