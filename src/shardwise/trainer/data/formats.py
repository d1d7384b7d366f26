"""What the columns of a row mean.

    messages                    [{role, content, ...}]       a conversation; `tools` beside it goes to the template
    conversations               [{from, value}]              the same in ShareGPT's words
    instruction, input, output  text                         a conversation of one turn; `system`, `history` too
    prompt, completion          text, or lists of messages   text is taken as it is, without a template
    text                        text                         everything is learned
    input_ids, labels           token ids                    labels -100 where nothing is learned

The first row decides the form for the whole source. `column_map` renames columns before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from shardwise.errors import DataError, nearest_names
from shardwise.trainer.data.options import DataOptions
from shardwise.trainer.data.sources import START, Place, Problems, Row, Source


class RowProblem(Exception):
    """A row cannot be used; the text says why and is shown behind the row's number. Never reaches the user as such."""


@dataclass(frozen=True, kw_only=True)
class ChatExample:
    """A conversation."""

    messages: tuple[Mapping[str, Any], ...]
    """Messages with `role` and `content`, and whatever else the template reads."""
    tools: tuple[Any, ...] | None = None
    """Tool schemas for the template."""
    num_prompt_messages: int = 0
    """Messages that come from a `prompt` column."""
    unsupervised: frozenset[int] = frozenset()
    """Assistant messages that the row itself excludes by `weight: 0`."""


@dataclass(frozen=True, kw_only=True)
class CompletionExample:
    """Text to continue, and its continuation."""

    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True)
class TextExample:
    """Plain text."""

    text: str


@dataclass(frozen=True, kw_only=True)
class TokenExample:
    """Tokens that somebody else made."""

    input_ids: tuple[int, ...]
    supervised: tuple[bool, ...]
    """Whether each token is learned. [tokens]"""


Example = ChatExample | CompletionExample | TextExample | TokenExample

ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "ipython": "ipython",
}  # fmt: skip
"""Names of roles in the wild -> the name that chat templates know."""
_FORMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "input_ids": (("input_ids",), ("labels", "attention_mask")),
    "messages": (("messages",), ("tools",)),
    "conversations": (("conversations",), ("system", "tools")),
    "prompt+completion": (("prompt", "completion"), ("tools",)),
    "instruction+output": (("instruction", "output"), ("input", "system", "history")),
    "text": (("text",), ()),
}
"""Form -> the columns it needs, the columns it also reads. In order of preference."""
_SYNONYMS = {
    "prompt": ("question", "query", "problem", "input", "instruction", "context"),
    "completion": ("answer", "response", "output", "target", "solution", "chosen"),
    "messages": ("chosen", "conversation", "dialog", "dialogue", "chat"),
    "text": ("content", "document", "passage"),
}
"""Column -> what it is called in the wild; only ever proposed, never assumed."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """The meaning of a source's columns."""

    name: str
    """Such as `messages`."""
    read: tuple[str, ...]
    """Columns that are read, after renaming."""
    ignored: tuple[str, ...]
    """Columns that are there and not read."""

    def describe(self) -> str:
        """The choice in words."""
        text = f"read as {self.name} (columns {', '.join(self.read)})"
        return text + (f"; not read: {', '.join(self.ignored)}" if self.ignored else "")


def detect_form(columns: Sequence[str], source: str) -> Form:
    """The form of a source with these columns.

    Raises:
        DataError: None fits; proposes a `column_map` if the columns have well-known other names.
    """
    for name, (needed, optional) in _FORMS.items():
        if all(column in columns for column in needed):
            read = tuple(column for column in (*needed, *optional) if column in columns)
            return Form(name=name, read=read, ignored=tuple(one for one in columns if one not in read))
    forms = ", ".join(_FORMS)
    text = f"{source} has the columns {', '.join(columns) or '(none)'}; none of the known forms fits: {forms}."
    if "chosen" in columns and "rejected" in columns:
        text += " These are preference pairs; fine-tuning learns from one side:"
    proposal = _propose(columns)
    if proposal:
        text += f" Perhaps column_map: {{{', '.join(f'{old}: {new}' for old, new in proposal.items())}}}."
    raise DataError(text)


def _propose(columns: Sequence[str]) -> dict[str, str]:
    """A `column_map` that would give a known form, or nothing."""
    for needed, _ in _FORMS.values():
        proposal: dict[str, str] = {}
        for column in needed:
            if column in columns:
                continue
            found = [one for one in _SYNONYMS.get(column, ()) if one in columns and one not in proposal]
            if not found:
                break
            proposal[found[0]] = column
        else:
            return proposal
    return {}


@dataclass(frozen=True, kw_only=True)
class NumberedExample:
    """An example and the row that it came from."""

    number: int
    example: Example
    end: Place = START
    """The place behind the row."""


class ExampleReader:
    """Reads a source row by row into examples. Bad rows go to `problems`; `form` is known after the first row.

    Args:
        source: What to read.
        options: For the names of columns.
        after: Where to begin.
        form: What the columns mean, if an earlier reader of the same source has found out.
    """

    def __init__(self, source: Source, options: DataOptions, *, after: Place = START, form: Form | None = None) -> None:
        self.source = source
        self.problems = Problems(source.name, source.unit)
        self.form = form
        self.num_rows = 0
        self._after = after
        self._column_map = options.column_map

    def __iter__(self) -> Iterator[NumberedExample]:
        """The usable examples, in order.

        Raises:
            DataError: The columns of the first row fit no form, or `column_map` names a column that is not there.
        """
        for row in self.source.rows(self.problems, self._after):
            self.num_rows += 1
            end = Place(number=row.number, byte=row.end, num_rows=self._after.num_rows + self.num_rows)
            try:
                yield NumberedExample(number=row.number, example=self._example(row), end=end)
            except RowProblem as problem:
                self.problems.add(row.number, str(problem))

    def _example(self, row: Row) -> Example:
        if self.form is None:
            self._check_column_map(list(row.columns))
            renamed = [self._column_map.get(column, column) for column in row.columns]
            self.form = detect_form(renamed, self.source.name)
        columns = {self._column_map.get(column, column): value for column, value in row.columns.items()}
        missing = [column for column in _FORMS[self.form.name][0] if columns.get(column) is None]
        if missing:
            raise RowProblem(f"has no {' and no '.join(missing)}; its columns are {', '.join(columns) or 'none'}")
        return _READ[self.form.name](columns)

    def _check_column_map(self, columns: list[str]) -> None:
        targets = sorted({column for needed, optional in _FORMS.values() for column in (*needed, *optional)})
        problems = [
            f"column_map renames {old!r}, but {self.source.name} has the columns {', '.join(columns)}."
            + "".join(f" Did you mean {near!r}?" for near in nearest_names(old, columns, 1))
            for old in self._column_map
            if old not in columns
        ]
        problems += [
            f"column_map renames {old!r} to {new!r}, which nobody reads; known are {', '.join(targets)}."
            for old, new in self._column_map.items()
            if new not in targets
        ]
        if problems:
            raise DataError(*problems)


# ------------------------------------------------------------------------------------------------- one row


def _text(value: object, name: str) -> str:
    """The value as text that a tokenizer accepts."""
    if not isinstance(value, str):
        raise RowProblem(f"{name} is {_kind(value)}, not text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = f"U+{ord(value[error.start]):04X}"
            raise RowProblem(f"{name} holds half a character ({half}) at position {error.start + 1}") from None
    return value


def _kind(value: object) -> str:
    names: dict[type, str] = {
        type(None): "missing", bool: "true or false", int: "a number", float: "a number", list: "a list",
        dict: "an object",
    }  # fmt: skip
    return names.get(type(value), f"a {type(value).__name__}")


def _list(value: object, name: str) -> list[Any]:
    """The value as a list; JSON text of one is accepted, since CSV has no lists."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowProblem(f"{name} is text that looks like a JSON list but is not: {error}") from None
    if not isinstance(value, (list, tuple)):
        raise RowProblem(f"{name} is {_kind(value)}, not a list")
    return list(cast("Sequence[Any]", value))


def _content(value: object, name: str) -> str:
    """The text of a message; a list of text parts is joined."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return _text(value, f"{name}: content")
    texts: list[str] = []
    for part in cast("list[object]", value):
        fields = cast("dict[str, object]", part) if isinstance(part, dict) else {"type": "text", "text": part}
        if fields.get("type", "text") != "text":
            raise RowProblem(f"{name}: content has a part of type {fields['type']!r}; only text can be trained on")
        texts.append(_text(fields.get("text"), f"{name}: content part"))
    return "".join(texts)


def _message(value: object, name: str) -> dict[str, Any]:
    """One message in the spelling of chat templates; `weight` stays inside."""
    if not isinstance(value, dict):
        raise RowProblem(f"{name} is {_kind(value)}, not an object with role and content")
    fields = {key: one for key, one in cast("dict[str, Any]", value).items() if one is not None}
    role = fields.pop("from", None) if "role" not in fields else fields.pop("role")
    content = fields.pop("value", None) if "content" not in fields else fields.pop("content")
    if not isinstance(role, str):
        raise RowProblem(f"{name} has no role")
    if role.casefold() not in ROLES:
        known = ", ".join(sorted(ROLES))
        raise RowProblem(f"{name} has the role {role!r}; known are {known}")
    message: dict[str, Any] = {"role": ROLES[role.casefold()], "content": _content(content, name), **fields}
    if message["role"] == "assistant":
        if not (message["content"].strip() or fields.get("tool_calls") or fields.get("reasoning_content")):
            raise RowProblem(f"{name} is an empty answer of the assistant")
        if fields.get("weight", 1) not in (0, 1):
            raise RowProblem(f"{name} has weight {fields['weight']!r}; it must be 0 or 1")
    if "tool_calls" in fields:
        message["tool_calls"] = [_tool_call(call, name) for call in _list(fields["tool_calls"], f"{name}: tool_calls")]
    return message


def _tool_call(value: object, name: str) -> dict[str, Any]:
    """A call whose arguments are an object: templates write them with `tojson`, which would quote JSON text again."""
    if not isinstance(value, dict):
        raise RowProblem(f"{name} has a tool call that is {_kind(value)}, not an object")
    call = dict(cast("dict[str, Any]", value))
    function = call.get("function")
    holder: dict[str, Any] = dict(cast("dict[str, Any]", function)) if isinstance(function, dict) else call
    if isinstance(holder.get("arguments"), str):
        try:
            holder["arguments"] = json.loads(holder["arguments"])
        except (ValueError, RecursionError):
            raise RowProblem(f"{name} has a tool call whose arguments are not valid JSON") from None
    return {**call, "function": holder} if isinstance(function, dict) else holder


def _messages(value: object, name: str) -> list[dict[str, Any]]:
    messages = [_message(one, f"{name}[{index}]") for index, one in enumerate(_list(value, name))]
    if not messages:
        raise RowProblem(f"{name} is empty")
    return messages


def _chat(messages: list[dict[str, Any]], columns: Mapping[str, object], num_prompt_messages: int = 0) -> ChatExample:
    if not any(message["role"] == "assistant" for message in messages):
        raise RowProblem("has no message of the assistant, so there is nothing to learn")
    unsupervised = frozenset(index for index, message in enumerate(messages) if message.pop("weight", 1) == 0)
    tools = columns.get("tools")
    return ChatExample(
        messages=tuple(messages),
        tools=tuple(_list(tools, "tools")) or None if tools else None,
        num_prompt_messages=num_prompt_messages,
        unsupervised=unsupervised,
    )


def _read_messages(columns: Mapping[str, object]) -> Example:
    return _chat(_messages(columns["messages"], "messages"), columns)


def _read_conversations(columns: Mapping[str, object]) -> Example:
    messages = _messages(columns["conversations"], "conversations")
    return _chat(_system(columns) + messages, columns)


def _system(columns: Mapping[str, object]) -> list[dict[str, Any]]:
    system = columns.get("system")
    return [{"role": "system", "content": _text(system, "system")}] if system else []


def _read_instruction(columns: Mapping[str, object]) -> Example:
    question = _text(columns["instruction"], "instruction")
    if extra := columns.get("input"):
        question = f"{question}\n\n{_text(extra, 'input')}"
    messages = _system(columns)
    for index, pair in enumerate(_list(columns.get("history") or [], "history")):
        both = _list(pair, f"history[{index}]")
        if len(both) != 2:
            raise RowProblem(f"history[{index}] has {len(both)} entries; expected a question and an answer")
        for role, text in zip(("user", "assistant"), both, strict=True):
            messages.append({"role": role, "content": _text(text, f"history[{index}]")})
    answer = _text(columns["output"], "output")
    if not answer.strip():
        raise RowProblem("output is empty")
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _chat(messages, {})


def _read_completion(columns: Mapping[str, object]) -> Example:
    prompt, completion = columns["prompt"], columns["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        before, after = _messages(prompt, "prompt"), _messages(completion, "completion")
        return _chat(before + after, columns, len(before))
    answer = _text(completion, "completion")
    if not answer.strip():
        raise RowProblem("completion is empty")
    return CompletionExample(prompt=_text(prompt, "prompt"), completion=answer)


def _read_text(columns: Mapping[str, object]) -> Example:
    text = _text(columns["text"], "text")
    if not text.strip():
        raise RowProblem("text is empty")
    return TextExample(text=text)


def _read_tokens(columns: Mapping[str, object]) -> Example:
    ids = _integers(columns["input_ids"], "input_ids")
    if not ids:
        raise RowProblem("input_ids is empty")
    if negative := [token for token in ids if not 0 <= token < 2**31]:
        raise RowProblem(f"input_ids holds {negative[0]}, which is no token id")
    labels = ids if columns.get("labels") is None else _integers(columns["labels"], "labels")
    attended = [1] * len(ids)
    if columns.get("attention_mask") is not None:
        attended = _integers(columns["attention_mask"], "attention_mask")
    if not len(ids) == len(labels) == len(attended):
        raise RowProblem(f"has {len(ids)} input_ids, {len(labels)} labels and an attention_mask of {len(attended)}")
    other = [index for index, label in enumerate(labels) if label not in (-100, ids[index])]
    if other:
        raise RowProblem(
            f"label {labels[other[0]]} at position {other[0]} is neither -100 nor the token there ({ids[other[0]]}); "
            "labels must not be shifted"
        )
    kept = [index for index, one in enumerate(attended) if one]
    if not kept:
        raise RowProblem("attention_mask is 0 everywhere")
    return TokenExample(
        input_ids=tuple(ids[index] for index in kept), supervised=tuple(labels[index] != -100 for index in kept)
    )


def _integers(value: object, name: str) -> list[int]:
    values = _list(value, name)
    if wrong := [one for one in values if type(one) is not int]:
        raise RowProblem(f"{name} holds {_kind(wrong[0])} that is no integer")
    return cast("list[int]", values)


_READ = {
    "input_ids": _read_tokens,
    "messages": _read_messages,
    "conversations": _read_conversations,
    "prompt+completion": _read_completion,
    "instruction+output": _read_instruction,
    "text": _read_text,
}


def example_text(example: Example) -> str:
    """Everything a person would read in an example, to find duplicates; token ids as numbers."""
    if isinstance(example, ChatExample):
        return "\n".join(f"{one['role']}: {one['content']} {one.get('tool_calls') or ''}" for one in example.messages)
    if isinstance(example, CompletionExample):
        return f"{example.prompt}\n{example.completion}"
    return example.text if isinstance(example, TextExample) else " ".join(map(str, example.input_ids))
