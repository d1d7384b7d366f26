"""Flags from a frozen dataclass: a field is a flag, the text under it is its help, `# -- title` starts a group.

[Note: flags]
A flag and a line of a run file must never mean different things, so both are read by the same rules: the flag's text
becomes plain data here, and `vocabulary/codec.py` checks it against the field's type. `--global-batch` and
`--global_batch` are the same flag, `--packing`, `--packing true` and `--no-packing` are understood, `--name=value` is
`--name value`, and flags are never abbreviated. Every problem of a command line is told at once.

There is no argument library behind this: building a parser for 25 flags costs tyro 100 ms (60 of them its import),
a third of what `plan` may take in all, and argparse tells one problem at a time.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from shardwise.errors import ConfigError, UsageError, nearest_names
from shardwise.vocabulary import codec

T = TypeVar("T")

POSITIONAL: Mapping[str, bool] = {"positional": True}
"""Metadata of a field that is given without a flag: `model: str = field(metadata=POSITIONAL)`."""


def flags_of(kind: type) -> Mapping[str, type]:
    """Metadata of a `dict[str, Any]` field that collects the flags of another dataclass, unchecked.

    For a command whose flags override a file: what was given is laid over the file before either is checked.
    """
    return {"flags_of": kind}


_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a command line says, before anything is checked against types."""

    values: Mapping[str, Any]
    """Plain data by field name; only what was given."""
    problems: tuple[str, ...] = ()


def parse(kind: type[T], argv: Sequence[str]) -> T:
    """The options of a command from its command line.

    Args:
        kind: A frozen dataclass; fields with `POSITIONAL` metadata are given without a flag, in order.
        argv: The words after the command's name.

    Raises:
        UsageError: With every problem: unknown flags (and the nearest names), missing or wrong values.
    """
    given = read_flags(kind, argv)
    problems = list(given.problems)
    try:
        options = codec.from_data(kind, dict(given.values))
    except ConfigError as error:
        known = {field.name for field in dataclasses.fields(typing.cast("Any", kind))}
        problems += [_as_flags(problem, known, kind) for problem in error.problems]
    else:
        if not problems:
            return options
    raise UsageError(*problems)


def read_flags(kind: type, argv: Sequence[str]) -> Given:
    """Plain data of every flag and word given; unknown flags and missing values are listed as problems."""
    reader = _Reader(kind)
    words = list(argv)
    while words:
        reader.take(words)
    return Given(values=reader.values, problems=tuple(reader.problems))


class _Reader:
    """Eats a command line from its front; one instance a command line."""

    def __init__(self, kind: type) -> None:
        self.hints: dict[str, Any] = {}
        self.flags: set[str] = set()
        self.collected_in: dict[str, str] = {}
        """Field that collects a flag of another dataclass, by flag."""
        self._know(kind)
        fields = dataclasses.fields(typing.cast("Any", kind))
        self.positionals = [field.name for field in fields if field.metadata.get("positional")]
        self.values: dict[str, Any] = {}
        self.given: set[str] = set()
        self.problems: list[str] = []
        self.only_words = False

    def _know(self, kind: type, collector: str | None = None) -> None:
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(typing.cast("Any", kind)):
            other = field.metadata.get("flags_of")
            if other is not None:
                self._know(other, field.name)
            elif field.name not in self.hints:
                self.hints[field.name] = hints[field.name]
                if not field.metadata.get("positional"):
                    self.flags.add(field.name)
                if collector is not None:
                    self.collected_in[field.name] = collector

    def take(self, words: list[str]) -> None:
        word = words.pop(0)
        if word == "--" and not self.only_words:
            self.only_words = True
        elif word.startswith("--") and not self.only_words:
            self._take_flag(word, words)
        elif word.startswith("-") and len(word) > 1 and not _FLOAT.fullmatch(word) and not self.only_words:
            self.problems.append(f"{word!r} is not known; flags have two dashes, such as --{word.lstrip('-')}")
        else:
            self._take_word(word)

    def _take_word(self, word: str) -> None:
        name = next((name for name in self.positionals if name not in self.values), None)
        if name is None and self.positionals and _shape(self.hints[self.positionals[-1]]) == "list":
            self.values[self.positionals[-1]].append(word)
        elif name is not None and _shape(self.hints[name]) == "list":
            self.values[name] = [word]
        elif name is None:
            expected = ", ".join(map(str.upper, self.positionals)) or "no words"
            self.problems.append(f"{word!r} is one word too many; expected {expected} and flags")
        else:
            self.values[name] = _plain(self.hints[name], word)

    def _take_flag(self, word: str, words: list[str]) -> None:
        flag, equals, inline = word[2:].partition("=")
        name = flag.replace("-", "_")
        if name not in self.flags and name.startswith("no_") and _may_be_bool(self.hints.get(name[3:])):
            name, equals, inline = name[3:], "=", "false"
        if name not in self.flags:
            self._unknown(word, words)
            return
        if name in self.given:
            self.problems.append(f"--{flag} is given twice")
        self.given.add(name)
        hint = self.hints[name]
        texts = [inline] if equals else list(_values_after(hint, words))
        if not texts and not _may_be_bool(hint):
            self.problems.append(f"--{flag} needs a value: {describe(hint)}")
        elif _shape(hint) == "mapping":
            self._keep(name, self._pairs(flag, hint, texts))
        elif _shape(hint) == "list":
            self._keep(name, [_plain(get_args(_without_none(hint))[0], text) for text in texts])
        else:
            self._keep(name, _plain(hint, texts[0]) if texts else True)

    def _keep(self, name: str, value: Any) -> None:
        collector = self.collected_in.get(name)
        values = self.values if collector is None else self.values.setdefault(collector, {})
        values[name] = value

    def _pairs(self, flag: str, hint: Any, texts: list[str]) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        for text in texts:
            key, equals, value = text.partition("=")
            if not equals:
                self.problems.append(f"--{flag} takes NAME=VALUE, not {text!r}")
            pairs[key] = _plain(get_args(_without_none(hint))[1], value)
        return pairs

    def _unknown(self, word: str, words: list[str]) -> None:
        flag = word[2:].partition("=")[0]
        near = nearest_names(flag.replace("_", "-"), [name.replace("_", "-") for name in sorted(self.flags)])
        hint = "did you mean " + " or ".join(f"--{name}" for name in near) + "?" if near else "see --help"
        self.problems.append(f"unknown flag --{flag}; {hint}")
        if "=" not in word and words and not words[0].startswith("--"):
            words.pop(0)  # most likely its value; a second message about it would only confuse


def _values_after(hint: Any, words: list[str]) -> Iterator[str]:
    """Take the values of a flag from the front of `words`."""
    shape = _shape(hint)
    if _may_be_bool(hint):
        others = [text for option in _options(hint) if get_origin(option) is Literal for text in get_args(option)]
        takes_text = str in _options(hint) and bool(words) and not words[0].startswith("--")
        if words and (takes_text or words[0].casefold() in ("true", "false") or words[0] in others):
            yield words.pop(0)
    elif shape == "one":
        if words and not words[0].startswith("--"):
            yield words.pop(0)
    else:
        while words and not words[0].startswith("--"):
            yield words.pop(0)


def _plain(hint: Any, text: str) -> Any:
    """Plain data for a flag's text: text where only text is meant, else what YAML 1.2 would read."""
    options = _options(hint)
    literals = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
    return text if text in literals or all(option is str for option in options) else read_scalar(text)


def read_scalar(text: str) -> Any:
    """A text as YAML 1.2 would read it where nothing else is known: true, null, a number, or the text."""
    if text.casefold() in _WORDS:
        return _WORDS[text.casefold()]
    if _INT.fullmatch(text) and len(text) <= codec.MAX_DIGITS:
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def spelled(options: Any) -> list[str]:
    """The words that give these options: the inverse of `parse`, defaults left out."""
    words: list[str] = []
    flags: list[str] = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if "flags_of" in field.metadata:
            for key, given in value.items():
                flags += _spelled_flag(key, given)
        elif value != default:
            several = isinstance(value, (tuple, list))
            texts = [str(one) for one in typing.cast("Sequence[Any]", value)] if several else [str(value)]
            if field.metadata.get("positional"):
                words += texts
            else:
                flags += _spelled_flag(field.name, value)
    return words + flags


def _spelled_flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else f"--no-{name.replace('_', '-')}"]
    if value is None:
        return [f"{flag}=null"]
    if isinstance(value, Mapping):
        return [flag, *(f"{key}={one}" for key, one in typing.cast("Mapping[str, Any]", value).items())]
    if isinstance(value, (tuple, list)):
        return [flag, *map(str, typing.cast("Sequence[Any]", value))]
    return [flag, str(value)]


def _options(hint: Any) -> list[Any]:
    """The members of a union, None left out; nested unions are flat already."""
    if get_origin(hint) in (Union, types.UnionType):
        return [option for option in get_args(hint) if option is not type(None)]
    return [hint]


def _without_none(hint: Any) -> Any:
    return _options(hint)[0]


def _may_be_bool(hint: Any) -> bool:
    return hint is not None and bool in _options(hint)


def _shape(hint: Any) -> Literal["one", "list", "mapping"]:
    origin = get_origin(_without_none(hint))
    return "list" if origin is tuple else "mapping" if origin is dict else "one"


def describe(hint: Any) -> str:
    """The values a flag takes, as help shows them: `N`, `TEXT`, `full|lora|qlora`; nothing for a switch."""
    names = {int: "N", float: "NUMBER", str: "TEXT"}
    shape = _shape(hint)
    if shape == "mapping":
        return "NAME=VALUE ..."
    if shape == "list":
        return f"{describe(get_args(_without_none(hint))[0])} ..."
    parts: list[str] = []
    for option in _options(hint):
        parts += map(str, get_args(option)) if get_origin(option) is Literal else [names.get(option, "")]
    text = "|".join(part for part in parts if part)
    return f"[{text}]" if text and _may_be_bool(hint) else text


def _as_flags(problem: str, known: set[str], kind: type) -> str:
    """A codec problem in the words of a command line: `seq must be ...` becomes `--seq must be ...`."""
    positional = {
        field.name for field in dataclasses.fields(typing.cast("Any", kind)) if field.metadata.get("positional")
    }
    match = re.match(r"'?(\w+)((?:\.\w+|\[\d+\])?)'?( is missing| must be )(.*)", problem, re.DOTALL)
    if match is None or match[1] not in known:
        return problem
    shown = match[1].upper() if match[1] in positional else "--" + match[1].replace("_", "-")
    return f"{shown}{match[2]}{match[3]}{match[4]}"


def again(command: str, options: Any) -> str:
    """The command line that does the same again, started as this process was.

    `shardwise` is only on the PATH where it was installed; from a checkout it is `python -m shardwise`.

    Args:
        command: The command's name.
        options: Its options.
    """
    start = ["python", "-m", "shardwise"] if Path(sys.argv[0]).name == "__main__.py" else ["shardwise"]
    return shlex.join([*start, command, *spelled(options)])
