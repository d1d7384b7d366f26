"""The shipped question-and-answer set: well formed, without duplicates, and with arithmetic that holds.

Answers write their sums out as `a x b = c`. `equations` finds these and recomputes them; the tolerance is
what the printed digits promise. What no formula can check (is the advice right?) is a reader's job.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).resolve().parents[2] / "examples" / "data"
TRAIN = DATA / "multi_gpu_qa.jsonl"
HELD_OUT = DATA / "multi_gpu_qa_heldout.jsonl"
FILES = pytest.mark.parametrize("path", [TRAIN, HELD_OUT], ids=lambda path: path.stem)

WORDS_PER_ANSWER = range(20, 111)
SENTENCES_PER_ANSWER = range(1, 6)  # four, and one more for a short opening such as "No."


def read(path: Path) -> list[list[dict[str, str]]]:
    lines = path.read_text(encoding="ascii").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def contents(path: Path, role: str) -> list[str]:
    return [m["content"] for messages in read(path) for m in messages if m["role"] == role]


def normalised(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


# --- form ---------------------------------------------------------------------------------------------------


@FILES
def test_every_line_is_one_conversation_that_ends_with_the_assistant(path: Path) -> None:
    for number, line in enumerate(path.read_text(encoding="ascii").splitlines(), start=1):
        record: dict[str, Any] = json.loads(line)
        assert list(record) == ["messages"], number
        roles = [message["role"] for message in record["messages"]]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns[:1] == ["user"], (number, roles)
        assert turns == ["user", "assistant"] * (len(turns) // 2), (number, roles)
        for message in record["messages"]:
            assert list(message) == ["role", "content"], number
            assert message["content"].strip(), number
            assert message["content"] == message["content"].strip(), number


@FILES
def test_text_is_printable_ascii_on_one_line(path: Path) -> None:
    for messages in read(path):
        for message in messages:
            assert re.fullmatch(r"[ -~]+", message["content"]), message["content"]


@FILES
def test_answers_are_short_paragraphs(path: Path) -> None:
    for answer in contents(path, "assistant"):
        assert len(answer.split()) in WORDS_PER_ANSWER, (len(answer.split()), answer)
        sentences = re.findall(r"[.?!](?= [A-Z0-9]|$)", answer)
        assert len(sentences) in SENTENCES_PER_ANSWER, (len(sentences), answer)


def test_there_are_enough_conversations_of_each_kind() -> None:
    train, held_out = read(TRAIN), read(HELD_OUT)
    assert len(train) >= 200
    assert len(held_out) >= 20
    assert sum(1 for messages in train if messages[0]["role"] == "system") >= 20
    assert sum(1 for messages in train if sum(m["role"] == "user" for m in messages) > 1) >= 25


# --- no leak from the training file to the held-out file -----------------------------------------------------


def test_no_opening_question_or_answer_occurs_twice() -> None:
    for role in ("user", "assistant"):
        seen: set[str] = set()
        for path in (TRAIN, HELD_OUT):
            for text in contents(path, role):
                assert normalised(text) not in seen, text
                seen.add(normalised(text))


def test_no_two_questions_are_nearly_the_same_words() -> None:
    questions = [(path.stem, text) for path in (TRAIN, HELD_OUT) for text in contents(path, "user")]
    bags = [set(normalised(text).split()) for _, text in questions]
    for i, one in enumerate(bags):
        for j in range(i + 1, len(bags)):
            overlap = len(one & bags[j]) / len(one | bags[j])
            assert overlap < 0.65, (overlap, questions[i], questions[j])


# --- arithmetic ---------------------------------------------------------------------------------------------

SCALE = {
    "billion": 1e9, "million": 1e6, "trillion": 1e12,
    "GB/s": 1e9, "Gbit/s": 1e9, "GB": 1e9, "MB": 1e6,
    "tokens/s": 1, "bytes": 1, "ms": 1e-3, "us": 1e-6, "s": 1, "%": 1e-2,
}  # fmt: skip
UNIT = "|".join(re.escape(unit) for unit in sorted(SCALE, key=len, reverse=True))
TERM = rf"\d+(?:,\d{{3}})*(?:\.\d+)?(?:\s?(?:{UNIT})(?![\w/]))*"
EQUATION = re.compile(rf"(?<![\w.,/])((?:\(*{TERM}\)* [x/+-] )+\(*{TERM}\)*) = ({TERM})")


def equations(text: str) -> Iterator[tuple[str, float, float, float]]:
    """Yield (as written, left value, right value, tolerance) for each `left = right` made of plain numbers."""
    for match in EQUATION.finditer(text):
        left = match[1].lstrip("(") if match[1].count("(") > match[1].count(")") else match[1]
        source = re.sub(TERM, lambda term: repr(_value(term[0])[0]), left).replace("x", "*")
        assert re.fullmatch(r"[-+*/(). \de]+", source), source  # arithmetic and nothing else
        right, last_digit = _value(match[2])
        yield match[0], float(eval(source)), right, 0.5001 * last_digit


def _value(term: str) -> tuple[float, float]:
    """The value of `7.62 billion bytes`, and what one in its last printed digit is worth."""
    digits = re.match(r"[\d,.]*\d", term)
    assert digits is not None
    scale = 1.0
    for unit in re.findall(UNIT, term[digits.end() :]):
        scale *= SCALE[unit]
    decimals = len(digits[0].partition(".")[2])
    return float(digits[0].replace(",", "")) * scale, scale * 10**-decimals


@pytest.mark.parametrize(
    ("text", "left", "right"),
    [
        ("so 7 billion x 16 bytes = 112 GB before", 112e9, 112e9),
        ("That gives 4 + 12 / 2 = 10 bytes a parameter", 10.0, 10.0),
        ("is 3 / (12 + 3) = 20%. More", 0.2, 0.2),
        ("then 3.08 GB / 900 GB/s = 3.42 ms on", 3.08 / 900, 3.42e-3),
    ],
)
def test_the_reader_of_equations_itself(text: str, left: float, right: float) -> None:
    ((_, got_left, got_right, _),) = equations(text)
    assert got_left == pytest.approx(left)
    assert got_right == pytest.approx(right)


def test_the_reader_of_equations_sees_a_wrong_sum() -> None:
    ((_, left, right, tolerance),) = equations("it takes 7 billion x 16 bytes = 114 GB in all")
    assert abs(left - right) > tolerance


@FILES
def test_sums_in_answers_come_out_as_printed(path: Path) -> None:
    found = [equation for answer in contents(path, "assistant") for equation in equations(answer)]
    wrong = [f"{written}  (is {left:.6g})" for written, left, right, by in found if abs(left - right) > by]
    assert not wrong, "\n".join(wrong)
    assert len(found) >= {TRAIN: 100, HELD_OUT: 10}[path], "the pattern finds too little to mean anything"


@FILES
def test_zero_stage_figures_follow_the_formula(path: Path) -> None:
    """`s + r / N = b bytes` where s and r are a stage's replicated and sharded bytes, so s + r is 16."""
    for answer in contents(path, "assistant"):
        for kept, shared in re.findall(r"(?<![\d.])(\d+) \+ (\d+) / \d+ = [\d.]+ bytes", answer):
            assert int(kept) + int(shared) == 16, answer


@FILES
def test_ring_factors_follow_the_formula(path: Path) -> None:
    """`2 x (n-1) / n = f`: whoever writes this sum must have n-1 over n in it."""
    for answer in contents(path, "assistant"):
        for before, ranks in re.findall(r"\b2 x (\d+) / (\d+) = ", answer):
            assert int(before) == int(ranks) - 1, answer
