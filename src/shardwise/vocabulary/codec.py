"""Nouns to and from YAML and JSON, strictly: nothing is guessed, nothing is dropped, all problems are told at once.

[Note: YAML]
PyYAML follows YAML 1.1, where `1e-5` is text, `no` is False, `010` is 8 and `12:30` is 750. Files here are read by the
core schema of YAML 1.2: `1e-5` is a number, `no` is text, `010` is 10, `12:30` is text. Duplicate keys, aliases, tags
and files over 16 MiB are refused, so that a file cannot run code or grow in memory.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar, Union, cast, get_args, get_origin, runtime_checkable

from shardwise.errors import ConfigError, UnknownNameError, nearest_names

T = TypeVar("T")
MAX_FILE_BYTES = 16 * 2**20
MAX_DIGITS = 4300
"""Of a whole number; Python converts no more of them from text."""


@runtime_checkable
class Checked(Protocol):
    """A noun whose fields can be right one by one and wrong together."""

    def contradictions(self) -> Iterable[str]:
        """One sentence each, beginning with the field's name."""
        ...


# ---------------------------------------------------------------------------------------------- nouns to plain data


def to_data(value: Any) -> Any:
    """Plain data (dict, list, str, int, float, bool, None) for a noun. Fields that hold their default are kept."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_data(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (tuple, list)):
        return [to_data(item) for item in cast("tuple[Any, ...]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} cannot be written; unknown is None")
    return value


def to_json(value: Any) -> str:
    """JSON text for a noun."""
    return json.dumps(to_data(value), indent=2, ensure_ascii=False)


def to_yaml(value: Any) -> str:
    """YAML text for a noun or plain data; floats are written so that every YAML reader takes them for numbers."""
    import yaml

    return yaml.dump(to_data(value), Dumper=_dumper(), sort_keys=False, allow_unicode=True, width=120)


@functools.cache
def _dumper() -> Any:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes what YAML 1.1 and 1.2 readers both understand."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent_float(dumper: Any, value: float) -> Any:
        text = repr(value)
        if "e" in text and "." not in text:
            text = text.replace("e", ".0e")
        return dumper.represent_scalar("tag:yaml.org,2002:float", text)

    Dumper.add_representer(float, represent_float)
    return Dumper


# ---------------------------------------------------------------------------------------------- plain data to nouns


def from_data(kind: type[T], data: Any, where: str = "") -> T:
    """A noun from plain data.

    Args:
        kind: The dataclass to build.
        data: What YAML or JSON gave.
        where: The name of the file, for the messages.

    Raises:
        ConfigError: If anything is unknown, missing or of the wrong type; carries every problem.
    """
    problems: list[str] = []
    value = _build(kind, data, "", problems)
    if problems:
        prefix = f"{where}: " if where else ""
        raise ConfigError(*(prefix + problem for problem in problems))
    return cast("T", value)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _build(kind: Any, data: Any, path: str, problems: list[str]) -> Any:
    """Build a value of type `kind`; on a problem append it and return None."""
    for applies, build in _BUILDERS:
        if applies(kind):
            return build(kind, data, path, problems)
    raise TypeError(f"no rule for reading {kind}")


def _wrong(path: str, expected: str, data: Any, problems: list[str]) -> None:
    try:
        shown = repr(data)
    except ValueError:  # more digits than Python prints
        shown = "a number of thousands of digits"
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    problems.append(f"{path or 'the file'} must be {expected}, not {shown}")


def _build_dataclass(kind: Any, data: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(data, dict):
        return _wrong(path, f"a mapping of {kind.__name__}'s keys", data, problems)
    given = cast("dict[Any, Any]", data)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    before = len(problems)
    for key in given:
        if key not in fields:
            near = nearest_names(str(key), list(fields), count=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(fields)}"
            problems.append(f"unknown key {_join(path, str(key))!r}{hint}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in given:
            values[name] = _build(_hints(kind)[name], given[name], _join(path, name), problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"{_join(path, name)!r} is missing")
    if len(problems) > before:
        return None
    value = kind(**values)
    if isinstance(value, Checked):
        problems.extend(_join(path, problem) for problem in value.contradictions())
    return value


def _build_union(kind: Any, data: Any, path: str, problems: list[str]) -> Any:
    options = [option for option in get_args(kind) if option is not type(None)]
    if data is None and len(options) < len(get_args(kind)):
        return None
    attempts: list[list[str]] = []
    for option in options:
        attempt: list[str] = []
        value = _build(option, data, path, attempt)
        if not attempt:
            return value
        attempts.append(attempt)
    problems.extend(min(attempts, key=len))
    return None


def _build_tuple(kind: Any, data: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(data, (list, tuple)):
        return _wrong(path, "a list", data, problems)
    items = list(cast("list[Any]", data))
    args = get_args(kind)
    if len(args) == 2 and args[1] is Ellipsis:
        args = (args[0],) * len(items)
    if len(items) != len(args):
        return _wrong(path, f"a list of {len(args)}", data, problems)
    return tuple(
        _build(arg, item, f"{path}[{i}]", problems) for i, (arg, item) in enumerate(zip(args, items, strict=True))
    )


def _build_mapping(kind: Any, data: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(data, dict):
        return _wrong(path, "a mapping", data, problems)
    key_kind, item_kind = get_args(kind) or (str, Any)
    mapping = cast("dict[Any, Any]", data)
    return {
        _build(key_kind, key, path, problems): _build(item_kind, item, _join(path, str(key)), problems)
        for key, item in mapping.items()
    }


def _build_literal(kind: Any, data: Any, path: str, problems: list[str]) -> Any:
    choices = get_args(kind)
    if data in choices and not (isinstance(data, bool) and not any(isinstance(choice, bool) for choice in choices)):
        return data
    near = nearest_names(data, [str(choice) for choice in choices], count=1) if isinstance(data, str) else []
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return _wrong(path, f"one of {', '.join(map(str, choices))}{hint}", data, problems)


def _build_enum(kind: Any, data: Any, path: str, problems: list[str]) -> Any:
    choices = [member.value for member in kind]
    return kind(data) if data in choices else _wrong(path, f"one of {', '.join(choices)}", data, problems)


def _build_within(kind: Any, data: Any, path: str, problems: list[str]) -> Any:
    """A number with its limits; see limits.py."""
    inner, limits = get_args(kind)
    before = len(problems)
    value = _build(inner, data, path, problems)
    broken = limits.broken_by(value) if len(problems) == before else None
    return value if broken is None else _wrong(path, broken, data, problems)


def _build_scalar(kind: Any, data: Any, path: str, problems: list[str]) -> Any:
    if kind is float and isinstance(data, (int, float)) and not isinstance(data, bool) and _is_finite(data):
        return float(data)
    if kind is not float and isinstance(data, kind) and not (kind is int and isinstance(data, bool)):
        return data
    names = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
    return _wrong(path, names[kind], data, problems)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


_BUILDERS: tuple[tuple[Callable[[Any], bool], Callable[[Any, Any, str, list[str]], Any]], ...] = (
    (lambda kind: kind is Any, lambda _kind, data, _path, _problems: data),
    (lambda kind: kind in (int, float, bool, str), _build_scalar),
    (lambda kind: get_origin(kind) is Annotated, _build_within),
    (lambda kind: get_origin(kind) is Literal, _build_literal),
    (lambda kind: get_origin(kind) in (Union, types.UnionType), _build_union),
    (lambda kind: get_origin(kind) is tuple, _build_tuple),
    (lambda kind: isinstance(get_origin(kind), type) and issubclass(get_origin(kind), Mapping), _build_mapping),
    (lambda kind: isinstance(kind, type) and issubclass(kind, Enum), _build_enum),
    (dataclasses.is_dataclass, _build_dataclass),
)


# ------------------------------------------------------------------------------------------------------------- files


def read_text(path: Path) -> str:
    """The text of a user's file.

    Raises:
        ConfigError: If it is missing, unreadable, over 16 MiB or not UTF-8.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ConfigError(f"{path} is no regular file; a device or a pipe may never end")
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has {size:,} bytes; the limit for a configuration file is {MAX_FILE_BYTES:,}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from error


def parse_yaml(text: str, where: str = "") -> Any:
    """Plain data from YAML or JSON text; see [Note: YAML].

    Raises:
        ConfigError: With the line, if the text is not YAML, repeats a key, or uses aliases or tags.
    """
    import yaml

    prefix = f"{where}: " if where else ""
    try:
        if "&" in text or "*" in text:
            _refuse_aliases(text, prefix)
        return yaml.load(text, Loader=_loader())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        raise ConfigError(f"{prefix}{line}{getattr(error, 'problem', None) or error}") from error
    except RecursionError as error:
        raise ConfigError(f"{prefix}nested too deeply to be a configuration") from error


def read_yaml(path: Path) -> Any:
    """Plain data from a YAML or JSON file."""
    return parse_yaml(read_text(path), str(path))


def read_noun(kind: type[T], path: Path) -> T:
    """A noun from a YAML or JSON file.

    Raises:
        ConfigError: With every problem and, where it can be found, its line.
    """
    text = read_text(path)
    data = parse_yaml(text, str(path))
    try:
        return from_data(kind, data, str(path))
    except UnknownNameError:
        raise
    except ConfigError as error:
        lines = key_lines(text)
        raise ConfigError(*(_with_line(problem, lines) for problem in error.problems)) from None


def key_lines(text: str) -> dict[str, int]:
    """The line (from 1) of every key of a YAML text, by dotted path. Empty if the text cannot be read."""
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return {}
    return dict(_walk_lines(root, ""))


def _walk_lines(node: Any, path: str) -> Iterator[tuple[str, int]]:
    import yaml

    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = _join(path, str(key.value))
            yield inner, key.start_mark.line + 1
            yield from _walk_lines(value, inner)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield f"{path}[{i}]", value.start_mark.line + 1
            yield from _walk_lines(value, f"{path}[{i}]")


def _with_line(problem: str, lines: dict[str, int]) -> str:
    for word in problem.split():
        line = lines.get(word.strip("'\";:,"))
        if line is not None:
            return f"line {line}: {problem}"
    return problem


def _refuse_aliases(text: str, prefix: str) -> None:
    import yaml

    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(
                f"{prefix}line {event.start_mark.line + 1}: YAML aliases are not read; write the value out"
            )


@functools.cache
def _loader() -> Any:
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):
        """YAML 1.2's core schema; refuses duplicate keys."""

        yaml_implicit_resolvers: typing.ClassVar[dict[str, Any]] = {}

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key, _value in node.value:
                name = str(key.value)
                if name in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {name!r} is given twice", key.start_mark
                    )
                seen.add(name)
            return super().construct_mapping(node, deep=deep)

    rules = (
        ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
        ("null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
        ("int", r"[-+]?[0-9]+", "-+0123456789"),
        ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", "-+0123456789."),
    )
    for name, pattern, first in rules:
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"(?:{pattern})$"), list(first))
    Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
    Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
    return Loader


def _construct_int(loader: Any, node: Any) -> int:
    text = loader.construct_scalar(node)
    if len(text) > MAX_DIGITS:
        import yaml

        problem = f"a whole number of {len(text):,} digits; the limit is {MAX_DIGITS:,}"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    return int(text)


def _construct_float(loader: Any, node: Any) -> float:
    return float(loader.construct_scalar(node).replace(".inf", "inf").replace(".nan", "nan"))
