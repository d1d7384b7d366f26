"""Which characters and tokens are learned, by each of the three paths."""

from __future__ import annotations

from typing import Any

import pytest
from data_helpers import MARKED_TEMPLATE, PLAIN_TEMPLATE, TAIL, THINKING_TEMPLATE, MakeTokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.errors import DataError
from shardwise.trainer.data.encode import Encoder
from shardwise.trainer.data.formats import (
    ChatExample,
    CompletionExample,
    Example,
    NumberedExample,
    RowProblem,
    TextExample,
)
from shardwise.trainer.data.options import DataOptions
from shardwise.trainer.data.template import Renderer

ROLES = ("user", "assistant")


def conversation(*texts: str, **more: Any) -> ChatExample:
    made = tuple({"role": ROLES[index % 2], "content": text} for index, text in enumerate(texts))
    return ChatExample(messages=made, **more)


def learned(tokenizer: Any, example: ChatExample | CompletionExample | TextExample, **options: Any) -> list[str]:
    rendered = Renderer(tokenizer, DataOptions(source="x", **options)).render(example)
    return [rendered.text[start:end] for start, end in rendered.spans]


def path(tokenizer: Any, example: ChatExample, **options: Any) -> str:
    return Renderer(tokenizer, DataOptions(source="x", **options)).render(example).path


def encode(tokenizer: Any, example: Example, **options: Any) -> tuple[list[int], list[int], Any]:
    encoder = Encoder(tokenizer, DataOptions(source="x", **options))
    chunk = encoder.encode([NumberedExample(number=1, example=example)])
    assert not chunk.problems
    return chunk.input_ids.tolist(), chunk.supervised.tolist(), chunk


def learned_tokens(tokenizer: Any, example: Example, **options: Any) -> str:
    ids, marks, _ = encode(tokenizer, example, **options)
    return tokenizer.decode([token for token, mark in zip(ids, marks, strict=True) if mark])


def test_both_paths_learn_the_answers_and_the_end_of_turn(make_tokenizer: MakeTokenizer) -> None:
    example = conversation("hello", "the wire", "more", "of a layer\n")
    for template, expected in ((PLAIN_TEMPLATE, "prefix"), (MARKED_TEMPLATE, "marks")):
        tokenizer = make_tokenizer(template)
        assert path(tokenizer, example) == expected
        assert learned(tokenizer, example) == ["the wire<|im_end|>", "of a layer\n<|im_end|>"]
        assert learned_tokens(tokenizer, example) == "the wire<|im_end|>of a layer\n<|im_end|>"


texts = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), min_size=1, max_size=20).filter(str.strip)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=60)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
def test_marks_and_prefixes_give_equal_masks(make_tokenizer: MakeTokenizer, turns: list[tuple[str, str]]) -> None:
    example = conversation(*(text for turn in turns for text in turn))
    tokenizer = make_tokenizer()
    plain = encode(tokenizer, example)
    tokenizer.chat_template = MARKED_TEMPLATE
    assert encode(tokenizer, example)[:2] == plain[:2]
    wanted = "".join(answer + "<|im_end|>" for _, answer in turns)
    assert tokenizer.decode([t for t, mark in zip(*plain[:2], strict=True) if mark]) == wanted


def test_our_marks_are_transformers_own(make_tokenizer: MakeTokenizer) -> None:
    tokenizer, example = make_tokenizer(MARKED_TEMPLATE), conversation("hello", "the wire", "x", "    if y:")
    theirs = tokenizer.apply_chat_template(
        [dict(one) for one in example.messages], return_dict=True, return_assistant_tokens_mask=True
    )
    ids, marks, _ = encode(tokenizer, example)
    assert ids == theirs["input_ids"]
    # Newer versions mark whole spans; all agree on every token that has a width, see [Note: coverage].
    assert all(ours >= other for ours, other in zip(marks, theirs["assistant_masks"], strict=True))
    assert sum(marks) - sum(theirs["assistant_masks"]) <= 2


def test_tokens_of_spaces_only_are_learned(make_tokenizer: MakeTokenizer) -> None:
    """Offsets without leading spaces would leave the indentation of code out."""
    assert learned_tokens(make_tokenizer(), conversation("x", "a\n    if x:\n        b ")) == (
        "a\n    if x:\n        b <|im_end|>"
    )


def test_a_template_that_rewrites_earlier_turns_is_probed(make_tokenizer: MakeTokenizer) -> None:
    tokenizer, example = make_tokenizer(THINKING_TEMPLATE), conversation("q", "one", "q2", "two")
    assert path(tokenizer, example) == "probe"
    assert learned(tokenizer, example) == ["one<|im_end|>", "two<|im_end|>"]


def test_a_generation_prompt_that_opens_reasoning(make_tokenizer: MakeTokenizer) -> None:
    """Like DeepSeek's distilled models: the prompt ends in an opened <think>, and history drops what was in it."""
    tokenizer = make_tokenizer(
        "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}"
        "{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
    )
    example = conversation("q", "<think>\nso</think>one", "q2", "two")
    assert path(tokenizer, example) == "probe"
    assert learned(tokenizer, example) == ["one<|im_end|>", "two<|im_end|>"]
    _, _, chunk = encode(tokenizer, example)
    assert chunk.counts["num_dropped_reasoning"] == 1


def test_empty_reasoning_is_prompt_and_real_reasoning_is_learned(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(THINKING_TEMPLATE)
    assert learned(tokenizer, conversation("q", "two")) == ["two<|im_end|>"]
    message = {"role": "assistant", "content": "two", "reasoning_content": "so"}
    example = ChatExample(messages=({"role": "user", "content": "q"}, message))
    assert learned(tokenizer, example) == ["<think>\nso\n</think>\n\ntwo<|im_end|>"]
    assert encode(tokenizer, example)[2].counts["num_dropped_reasoning"] == 0


CALLING_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{MARK}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}({{ c.function.arguments | tojson }})</call>"
    "{% endfor %}"
    "<|im_end|>{ENDMARK}\n{% endfor %}" + TAIL
)


@pytest.mark.parametrize("marked", [True, False])
def test_tools_system_prompt_and_several_turns(make_tokenizer: MakeTokenizer, *, marked: bool) -> None:
    """Calls are the model's words and learned; tools, the system prompt, users and what tools answer are not."""
    if marked:
        mark = "{% if m.role == 'assistant' %}{% generation %}"
        body = CALLING_TEMPLATE.split("{MARK}")[1].split("{ENDMARK}")[0]
        branch = f"{mark}{body}{{% endgeneration %}}{{% else %}}{body}{{% endif %}}"
        template = CALLING_TEMPLATE.split("{MARK}")[0] + branch + CALLING_TEMPLATE.split("{ENDMARK}")[1]
    else:
        template = CALLING_TEMPLATE.replace("{MARK}", "").replace("{ENDMARK}", "")
    call = {"type": "function", "function": {"name": "wire", "arguments": {"layer": 3}}}
    example = ChatExample(
        messages=(
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "which wire?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "nvlink"},
            {"role": "assistant", "content": "the wire of a layer"},
            {"role": "user", "content": "and now?"},
            {"role": "assistant", "content": "hello"},
        ),
        tools=({"type": "function", "function": {"name": "wire"}},),
    )
    tokenizer = make_tokenizer(template)
    assert path(tokenizer, example) == ("marks" if marked else "prefix")
    wanted = ['<call>wire({"layer": 3})</call><|im_end|>', "the wire of a layer<|im_end|>", "hello<|im_end|>"]
    assert learned(tokenizer, example) == wanted
    assert learned_tokens(tokenizer, example) == "".join(wanted)


def test_a_conversation_that_starts_with_the_assistant(make_tokenizer: MakeTokenizer) -> None:
    example = ChatExample(messages=({"role": "assistant", "content": "hi"}, {"role": "user", "content": "q"}))
    assert learned(make_tokenizer(), example) == ["hi<|im_end|>"]


def test_a_token_at_the_very_end_only(make_tokenizer: MakeTokenizer) -> None:
    """A template that closes the whole text makes no rendering a prefix of it, and must not confuse the search."""
    tokenizer = make_tokenizer("{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}</doc>")
    example = conversation("q", "one", "q2", "two")
    assert learned(tokenizer, example) == ["one<|im_end|>", "two<|im_end|>"]


def test_what_is_unclear_is_a_problem_and_never_a_guess(make_tokenizer: MakeTokenizer) -> None:
    doubled = make_tokenizer("{% for m in messages %}{{ m.content }}/{{ m.content }};{% endfor %}</doc>")
    with pytest.raises(RowProblem, match=r"changes more than the content of messages\[1\]"):
        learned(doubled, conversation("q", "one"))
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    example = ChatExample(messages=({"role": "user", "content": "q"}, message, *conversation("q", "a").messages))
    with pytest.raises(RowProblem, match=r"messages\[1\] calls tools"):
        learned(make_tokenizer(THINKING_TEMPLATE), example)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "the chat template refuses it"),
        ("{% for", "the chat template refuses it"),
    ],
)
def test_a_template_that_refuses(make_tokenizer: MakeTokenizer, template: str, message: str) -> None:
    with pytest.raises(RowProblem, match=message):
        learned(make_tokenizer(template), conversation("q", "a"))


def test_no_template_at_all(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(DataError, match=r"no chat template to write them with\. Set chat_template_path"):
        learned(make_tokenizer(None), conversation("q", "a"))


def test_a_file_overrides_the_template(make_tokenizer: MakeTokenizer, tmp_path: Any) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}@{{ m.content }}{% endfor %}" + TAIL)
    options = {"chat_template_path": str(file), "assistant_only_loss": False}
    assert learned(make_tokenizer(), conversation("q", "a"), **options) == ["@q@a"]
    with pytest.raises(DataError, match="cannot be read"):
        learned(make_tokenizer(), conversation("q", "a"), chat_template_path=str(tmp_path / "none.jinja"))


def test_excluded_answers(make_tokenizer: MakeTokenizer) -> None:
    for template in (PLAIN_TEMPLATE, MARKED_TEMPLATE):
        example = conversation("q", "one", "q2", "two", unsupervised=frozenset({1}))
        assert learned(make_tokenizer(template), example) == ["two<|im_end|>"]
        with pytest.raises(RowProblem, match="weight 0, which needs assistant_only_loss"):
            learned(make_tokenizer(template), example, assistant_only_loss=False)


def test_a_prompt_of_messages(make_tokenizer: MakeTokenizer) -> None:
    example = conversation("q", "one", "q2", "two", num_prompt_messages=3)
    assert learned(make_tokenizer(), example) == ["two<|im_end|>"]
    assert learned(make_tokenizer(), example, completion_only_loss=False) == ["one<|im_end|>", "two<|im_end|>"]
    assert learned(make_tokenizer(), example, assistant_only_loss=False) == ["two<|im_end|>\n"]


def test_plain_completions_and_texts_end_with_eos(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer()
    example = CompletionExample(prompt="hello", completion=" world")
    assert learned_tokens(tokenizer, example) == " world<|im_end|>"
    ids, marks, _ = encode(tokenizer, TextExample(text="hello world"))
    assert tokenizer.decode(ids) == "hello world<|im_end|>"
    assert marks == [0] + [1] * (len(ids) - 1)
    assert learned_tokens(tokenizer, example, completion_only_loss=False).endswith(" world<|im_end|>")


def test_special_tokens_are_not_written_twice(make_tokenizer: MakeTokenizer) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(bos_token="<s>")
    ids = {one: tokenizer.convert_tokens_to_ids(one) for one in ("<s>", "<|im_end|>")}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=list(ids.items())
    )
    assert tokenizer.decode(encode(tokenizer, TextExample(text="hello"))[0]) == "<s>hello<|im_end|>"
    assert tokenizer.decode(encode(tokenizer, TextExample(text="<s>hello"))[0]) == "<s>hello<|im_end|>"
    ids, marks, chunk = encode(tokenizer, CompletionExample(prompt="hello", completion=" world"))
    assert tokenizer.decode(ids) == "<s>hello world<|im_end|>"
    assert chunk.counts["num_merged_boundaries"] == 0
    assert tokenizer.decode([t for t, mark in zip(ids, marks, strict=True) if mark]) == " world<|im_end|>"


def test_a_token_across_the_end_of_the_prompt_is_learned_and_counted(make_tokenizer: MakeTokenizer) -> None:
    _, _, clean = encode(make_tokenizer(), CompletionExample(prompt="hello", completion=" hello"))
    assert clean.counts["num_merged_boundaries"] == 0
    tokenizer = make_tokenizer()
    example = CompletionExample(prompt="hello ", completion="hello")
    _, _, merged = encode(tokenizer, example)
    assert merged.counts["num_merged_boundaries"] == 1
    assert learned_tokens(tokenizer, example) == " hello<|im_end|>"


class _Slow:
    """The same tokenizer without offsets."""

    is_fast = False

    def __init__(self, fast: Any) -> None:
        self._fast = fast

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fast, name)

    def __call__(self, text: str, **options: Any) -> Any:
        assert "return_offsets_mapping" not in options
        return self._fast(text, **options)


def test_a_slow_tokenizer_gives_the_same(make_tokenizer: MakeTokenizer) -> None:
    fast = make_tokenizer()
    examples: list[Example] = [
        conversation("hello", "the wire", "x", "y"),
        CompletionExample(prompt="hello", completion=" world"),
        TextExample(text="of a layer"),
    ]
    for example in examples:
        assert encode(_Slow(fast), example)[:2] == encode(fast, example)[:2]
    chunk = Encoder(_Slow(fast), DataOptions(source="x")).encode(
        [NumberedExample(number=9, example=CompletionExample(prompt="hello ", completion="hello"))]
    )
    assert chunk.problems[0][0] == 9
    assert "use the fast tokenizer" in chunk.problems[0][1]
