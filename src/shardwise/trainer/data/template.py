"""An example as text, with the characters that are learned.

[Note: three paths] Which characters of a rendered conversation are the assistant's?

    marks    the template encloses them in {% generation %} ... {% endgeneration %} and transformers reports them
    prefix   the conversation up to the answer, rendered with the generation prompt, is what the model sees when it has
             to answer; the rest of the rendering up to the end of the message is the answer. Checked, not assumed:
             the one rendering must really begin with the other, and the whole one with both
    probe    templates that render earlier turns differently (some drop their reasoning) or add a token at the very end
             fail that check. Then the answer is replaced by two different words: where the renderings begin to differ
             the content begins, where they agree again it ends; what closes the message is taken from a rendering
             that ends there

All three end with the token that ends the turn, without the line break that many templates write behind it: a model
never has to produce that. Where none of them is certain the row is a problem, never a guess.

[Note: empty reasoning] Some templates write `<think></think>` before an answer that has no reasoning. The model gets
it as part of the prompt when thinking is off, so it is not learned. Reasoning that the data contain is learned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import DataError
from shardwise.trainer.data.formats import ChatExample, CompletionExample, RowProblem, TextExample
from shardwise.trainer.data.options import DataOptions

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_EMPTY_REASONING = re.compile(r"\s*<think>\s*</think>\s*")
_REASONING = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_PROBES = ("QxProbeA7", "ZwTestB94")
"""Two words of equal length without a common prefix or suffix, which no template treats specially."""

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Text, and what of it is learned."""

    text: str
    """What is tokenized."""
    spans: tuple[tuple[int, int], ...]
    """Characters that are learned: starts and ends, in order."""
    path: str
    """How they were found: `all`, `completion`, `marks`, `prefix` or `probe` ([Note: three paths])."""
    add_special_tokens: bool = False
    """Whether the tokenizer adds its own first token; a chat template writes it itself."""
    append_eos: bool = False
    """Whether the end-of-text token follows, and is learned."""
    num_dropped_reasoning: int = 0
    """Answers whose reasoning the template leaves out of the text, so that it is not learned."""


class Renderer:
    """Turns examples into text. Built once for a set; may be sent to another process."""

    def __init__(self, tokenizer: Any, options: DataOptions) -> None:
        self.tokenizer = tokenizer
        self.assistant_only_loss = options.assistant_only_loss
        self.completion_only_loss = options.completion_only_loss
        self.template_override = _read_template(options.chat_template_path)
        added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        special = {str(token) for token in added.values() if getattr(token, "special", False)}
        self._special_tokens = tuple(sorted(special | set(tokenizer.all_special_tokens), key=len, reverse=True))

    def render(self, example: ChatExample | CompletionExample | TextExample) -> Rendered:
        """The text of an example and its learned characters.

        Raises:
            RowProblem: The template refuses the conversation, or the assistant's part cannot be found for certain.
        """
        if isinstance(example, ChatExample):
            return self._chat(example)
        if isinstance(example, TextExample):
            return self._plain(example.text, 0, "all")
        start = len(example.prompt) if self.completion_only_loss else 0
        return self._plain(example.prompt + example.completion, start, "completion" if start else "all")

    def _plain(self, text: str, start: int, path: str) -> Rendered:
        bos = self.tokenizer.bos_token
        return Rendered(
            text=text,
            spans=((start, len(text)),),
            path=path,
            add_special_tokens=not (bos and text.startswith(bos)),
            append_eos=self.tokenizer.eos_token_id is not None,
        )

    def _chat(self, example: ChatExample) -> Rendered:
        template = self._template(example.tools)
        chat = _Chat(tokenizer=self.tokenizer, template=template, messages=example.messages, tools=example.tools)
        first = example.num_prompt_messages if self.completion_only_loss else 0
        if not self.assistant_only_loss:
            if example.unsupervised:
                raise RowProblem("a message has weight 0, which needs assistant_only_loss: true")
            text = chat.render(len(chat.messages))
            start = chat.prompt_length(first, text) if first else 0
            return Rendered(text=text, spans=((start, len(text)),), path="completion" if start else "all")
        answers = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
        learned = [index for index in answers if index >= first and index not in example.unsupervised]
        if learned == answers and _MARKS.search(template):
            text, spans = chat.marks()
            if spans:
                return self._rendered(text, list(zip(spans, self._messages_of(spans, chat), strict=True)), "marks")
        return self._search(chat, learned)

    def _search(self, chat: _Chat, learned: Sequence[int]) -> Rendered:
        """The paths without marks, message by message."""
        text = chat.render(len(chat.messages))
        found: list[tuple[tuple[int, int], Message]] = []
        path = "prefix"
        for index in learned:
            span = chat.prefix_span(index, text)
            if span is None:
                span, path = chat.probe_span(index, text, self._special_tokens), "probe"
            found.append((span, chat.messages[index]))
        return self._rendered(text, found, path)

    def _rendered(self, text: str, found: Sequence[tuple[tuple[int, int], Message | None]], path: str) -> Rendered:
        spans = [self._trim(text, span, message) for span, message in found]
        dropped = sum(
            any(thought not in text[start:end] for thought in _reasoning(message)) for (start, end), message in found
        )
        return Rendered(
            text=text,
            spans=tuple(span for span in spans if span[0] < span[1]),
            path=path,
            num_dropped_reasoning=dropped,
        )

    def _trim(self, text: str, span: tuple[int, int], message: Message | None) -> tuple[int, int]:
        """Without empty reasoning in front ([Note: empty reasoning]) and the white space behind the last token."""
        start, end = span
        own = message is not None and (_reasoning(message) or "<think>" in message["content"])
        if not own and (empty := _EMPTY_REASONING.match(text, start, end)):
            start = empty.end()
        bare = text[start:end].rstrip()
        return (start, start + len(bare)) if bare.endswith(self._special_tokens) else (start, end)

    @staticmethod
    def _messages_of(spans: Sequence[tuple[int, int]], chat: _Chat) -> list[Message | None]:
        """The message of each span, where marks and assistant messages go one to one."""
        answers = [message for message in chat.messages if message["role"] == "assistant"]
        return list(answers) if len(answers) == len(spans) else [None] * len(spans)

    def _template(self, tools: Sequence[Any] | None) -> str:
        if self.template_override is not None:
            return self.template_override
        try:
            return self.tokenizer.get_chat_template(None, list(tools) if tools else None)
        except ValueError as error:
            raise DataError(
                "The data are conversations, but the model's tokenizer has no chat template to write them with. "
                "Set chat_template_path to a jinja file, take the instruct version of the model, or train on plain "
                "text with prompt and completion columns (column_map: {instruction: prompt, output: completion})."
            ) from error


@dataclass(frozen=True, kw_only=True)
class _Chat:
    """One conversation and its template."""

    tokenizer: Any
    template: str
    messages: Sequence[Message]
    tools: Sequence[Any] | None

    def render(self, num_messages: int, *, generation_prompt: bool = False, replaced: Message | None = None) -> str:
        """The first messages as text; `replaced` stands in for the last of them."""
        messages = [*self.messages[:num_messages]]
        if replaced is not None:
            messages[-1] = replaced
        return self._apply(messages, generation_prompt=generation_prompt)

    def _apply(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(self.tools) if self.tools else None,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except Exception as error:  # a template may do anything: jinja errors, TypeError, KeyError, IndexError
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RowProblem(f"the chat template refuses it: {reason}") from error

    def marks(self) -> tuple[str, list[tuple[int, int]]]:
        """The whole text, and the characters inside generation marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template  # partial types
        text = self.render(len(self.messages))
        try:
            texts, indices = render(
                conversations=[[dict(message) for message in self.messages]],
                tools=list(self.tools) if self.tools else None,
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:  # as in _apply
            raise RowProblem(f"the chat template refuses it: {error}") from error
        if texts[0] != text:
            raise RowProblem("the chat template renders differently each time, so its marks cannot be placed")
        return text, [(int(start), int(end)) for start, end in indices[0] if start < end]

    def prompt_length(self, num_messages: int, text: str) -> int:
        """Characters of the prompt in front of a message, generation prompt included."""
        before = self.render(num_messages, generation_prompt=True)
        if not text.startswith(before):
            raise RowProblem("the chat template renders the prompt differently when the completion follows it")
        return len(before)

    def prefix_span(self, index: int, text: str) -> tuple[int, int] | None:
        """The answer `index` by prefix rendering, or None if the renderings are not prefixes of each other."""
        if index == 0:
            return None  # nothing precedes it, so the header of the message would count as the answer
        try:
            before = self.render(index, generation_prompt=True)
            after = text if index + 1 == len(self.messages) else self.render(index + 1)
        except RowProblem:
            return None  # a template that refuses to end there
        if not (text.startswith(after) and after.startswith(before)):
            return None
        return len(before), len(after)

    def probe_span(self, index: int, text: str, special_tokens: tuple[str, ...]) -> tuple[int, int]:
        """The answer `index` by probing its content; raises RowProblem if that is not certain."""
        name = f"messages[{index}]"
        message = self.messages[index]
        if message.get("tool_calls"):
            raise RowProblem(
                f"{name} calls tools, and the chat template renders it differently when messages follow, so what to "
                "learn cannot be found; use a template with generation marks (chat_template_path)"
            )
        first, second = (self._with_content(index, probe) for probe in _PROBES)
        start = _num_common(first, second)
        num_behind = _num_common(first[::-1], second[::-1])
        end = len(text) - num_behind
        if (
            first[start:] != _PROBES[0] + first[len(first) - num_behind :]
            or text[:start] != first[:start]
            or text[end:] != first[len(first) - num_behind :]
            or end < start
        ):
            raise RowProblem(f"the chat template changes more than the content of {name}, so what to learn is unclear")
        return start, end + self._closing(index, text[end:], special_tokens)

    def _with_content(self, index: int, content: str) -> str:
        messages = [*self.messages]
        messages[index] = {**messages[index], "content": content}
        return self._apply(messages)

    def _closing(self, index: int, behind: str, special_tokens: tuple[str, ...]) -> int:
        """Characters behind the content that end the message: up to the first special token that also ends it alone."""
        alone = self.render(index + 1, replaced={**self.messages[index], "content": _PROBES[0]})
        closing = alone[alone.rindex(_PROBES[0]) + len(_PROBES[0]) :] if _PROBES[0] in alone else ""
        for token in special_tokens:
            at = closing.find(token)
            if at >= 0 and not closing[:at].strip() and behind.startswith(closing[: at + len(token)]):
                return at + len(token)
        return 0


def _reasoning(message: Message | None) -> list[str]:
    """The reasoning that a message carries, in a field of its own or inside its content; bare of white space around."""
    if message is None:
        return []
    fields = next((str(message[field]) for field in _REASONING_FIELDS if message.get(field)), "")
    thoughts = [fields, *_REASONING.findall(message["content"])]
    return [thought.strip() for thought in thoughts if thought.strip()]


def _num_common(first: str, second: str) -> int:
    """Characters that two texts begin with alike."""
    differing = (index for index, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(differing, min(len(first), len(second)))


def _read_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"chat_template_path {path} cannot be read: {error}. Give the path of a jinja file.") from error
