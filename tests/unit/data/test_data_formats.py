from __future__ import annotations

import json
from typing import Any

import pytest
from data_helpers import Write, chat

from shardwise.errors import DataError
from shardwise.trainer.data.formats import (
    ChatExample,
    CompletionExample,
    Example,
    ExampleReader,
    TextExample,
    TokenExample,
    detect_form,
)
from shardwise.trainer.data.options import DataOptions
from shardwise.trainer.data.sources import open_source


def reader(path: str, **options: Any) -> ExampleReader:
    made = DataOptions(source=path, **options)
    return ExampleReader(open_source(made), made)


def one(write: Write, row: dict[str, Any], **options: Any) -> Example:
    found = reader(write([row]), **options)
    examples = [numbered.example for numbered in found]
    assert not found.problems.lines()
    return examples[0]


def problem(write: Write, row: dict[str, Any]) -> str:
    """What is wrong with a row, behind a row of the same form that is right."""
    found = reader(write([row]))
    assert list(found) == []
    return found.problems.lines()[0]


def roles(example: Example) -> list[tuple[str, str]]:
    assert isinstance(example, ChatExample)
    return [(message["role"], message["content"]) for message in example.messages]


QA = [("user", "q"), ("assistant", "a")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (chat("q", "a"), QA),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, QA),
        ({"conversations": [{"role": "user", "content": "q"}, {"role": "Assistant", "content": "a"}]}, QA),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
         [("system", "s"), *QA]),
        ({"instruction": "q", "output": "a"}, QA),
        ({"instruction": "q", "input": "", "output": "a"}, QA),
        ({"instruction": "q", "input": "x", "output": "a", "system": "s", "history": [["q0", "a0"]]},
         [("system", "s"), ("user", "q0"), ("assistant", "a0"), ("user", "q\n\nx"), ("assistant", "a")]),
        ({"messages": json.dumps(chat("q", "a")["messages"])}, QA),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]},
                       {"role": "assistant", "content": "a"}]}, QA),
        ({"prompt": chat("q")["messages"], "completion": [{"role": "assistant", "content": "a"}]}, QA),
    ],
)  # fmt: skip
def test_conversations(write: Write, row: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert roles(one(write, row)) == expected


def test_plain_forms(write: Write) -> None:
    assert one(write, {"prompt": "q", "completion": "a"}) == CompletionExample(prompt="q", completion="a")
    assert one(write, {"text": "t"}) == TextExample(text="t")
    tokens = TokenExample(input_ids=(5, 6), supervised=(False, True))
    assert one(write, {"input_ids": [5, 6], "labels": [-100, 6]}) == tokens
    assert one(write, {"input_ids": [5, 6, 0], "labels": [-100, 6, -100], "attention_mask": [1, 1, 0]}) == tokens
    assert one(write, {"input_ids": [5]}) == TokenExample(input_ids=(5,), supervised=(True,))


def test_column_map(write: Write) -> None:
    row = {"question": "q", "answer": "a"}
    example = one(write, row, column_map={"question": "prompt", "answer": "completion"})
    assert example == CompletionExample(prompt="q", completion="a")
    with pytest.raises(DataError) as caught:
        list(reader(write([row]), column_map={"questions": "prompt", "answer": "reply"}))
    assert "Did you mean 'question'?" in caught.value.problems[0]
    assert "'answer' to 'reply', which nobody reads" in caught.value.problems[1]


def test_the_choice_is_named(write: Write) -> None:
    found = reader(write([{**chat("q", "a"), "id": 3, "text": "x"}]))
    list(found)
    assert found.form is not None
    assert found.form.describe() == "read as messages (columns messages); not read: id, text"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["question", "answer"], r"column_map: {question: prompt, answer: completion}"),
        (["chosen", "rejected"], r"preference pairs.*column_map: {chosen: messages}"),
        (["a", "b"], r"columns a, b; none of the known forms fits: input_ids, messages"),
        ([], r"columns \(none\)"),
    ],
)
def test_unknown_columns(columns: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        detect_form(columns, "x.jsonl")


def messages(*entries: Any) -> dict[str, Any]:
    return {"messages": list(entries)}


USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": None}, "has no messages; its columns are messages"),
        ({"messages": []}, "messages is empty"),
        ({"messages": "hello"}, "messages is a str, not a list"),
        ({"messages": "[hello"}, "looks like a JSON list but is not"),
        (messages("q"), r"messages[0] is a str, not an object with role and content"),
        (messages({"content": "q"}), "messages[0] has no role"),
        (messages({"role": "narrator", "content": "q"}), "has the role 'narrator'; known are assistant"),
        (messages(USER), "has no message of the assistant"),
        (messages(USER, {"role": "assistant", "content": "  "}), "messages[1] is an empty answer"),
        (messages(USER, {"role": "assistant", "content": 5}), "messages[1]: content is a number, not text"),
        (messages(USER, {**ANSWER, "weight": 0.5}), "has weight 0.5; it must be 0 or 1"),
        (messages(USER, {"role": "assistant", "content": "\ud800"}), "holds half a character (U+D800) at position 1"),
        (messages({"role": "user", "content": [{"type": "image"}]}, ANSWER), "a part of type 'image'"),
        ({"prompt": "q", "completion": ""}, "completion is empty"),
        ({"prompt": 1, "completion": "a"}, "prompt is a number, not text"),
        ({"instruction": "q", "output": " "}, "output is empty"),
        ({"text": "\n"}, "text is empty"),
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [1, 2.5]}, "input_ids holds a number that is no integer"),
        ({"input_ids": [1, -3]}, "holds -3, which is no token id"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "labels must not be shifted"),
        ({"input_ids": [1, 2], "labels": [1]}, "has 2 input_ids, 1 labels"),
    ],
)
def test_what_is_wrong_with_a_row(write: Write, row: dict[str, Any], message: str) -> None:
    assert message in problem(write, row)


def test_a_row_of_another_form_is_a_problem(write: Write) -> None:
    found = reader(write([chat("q", "a"), {"text": "t"}, chat("q", "a")]))
    assert [numbered.number for numbered in found] == [1, 3]
    assert found.problems.lines() == ("line 2: has no messages; its columns are text",)


def test_tool_calls_keep_their_arguments_as_an_object(write: Write) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    example = one(write, {**messages(USER, {"role": "assistant", "tool_calls": [call]}), "tools": [{"name": "f"}]})
    assert isinstance(example, ChatExample)
    assert example.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert example.tools == ({"name": "f"},)
    bad = {"function": {"name": "f", "arguments": "{x"}}
    assert "arguments are not valid JSON" in problem(write, messages(USER, {"role": "assistant", "tool_calls": [bad]}))


def test_weight_zero_excludes_an_answer_and_the_template_never_sees_it(write: Write) -> None:
    example = one(write, messages(USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}))
    assert isinstance(example, ChatExample)
    assert example.unsupervised == {1}
    assert all("weight" not in message for message in example.messages)
