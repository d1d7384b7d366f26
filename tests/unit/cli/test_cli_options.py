from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli.help import command_help
from shardwise.cli.options import POSITIONAL, flags_of, parse, read_flags
from shardwise.errors import UsageError
from shardwise.vocabulary.run import RunFile


@dataclass(frozen=True, kw_only=True)
class Options:
    """Does a thing.

    Examples:
      shardwise thing MODEL --rate 1e-5
    """

    model: str = field(metadata=POSITIONAL)
    """What."""

    # -- numbers
    count: int | None = None
    """How many."""
    rate: float = 0.5
    stage: Literal[0, 1, 2, 3] | None = None

    # -- words
    answer: Literal["no", "yes"] = "yes"
    name: str | None = None
    names: tuple[str, ...] = ()
    columns: dict[str, str] = field(default_factory=dict[str, str])
    loud: bool = False
    """Say more."""
    level: bool | Literal["none", "full"] | None = None
    resume: bool | str = False


def read(*words: str) -> dict[str, Any]:
    options = parse(Options, ["m", *words])
    return {key: getattr(options, key) for key in options.__dataclass_fields__ if key != "model"}


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--count", "3"], "count", 3),
        (["--count=3"], "count", 3),
        (["--rate", "1e-5"], "rate", 1e-5),
        (["--rate", "-2"], "rate", -2.0),
        (["--rate", "3"], "rate", 3.0),
        (["--stage", "2"], "stage", 2),
        (["--answer", "no"], "answer", "no"),
        (["--name", "123"], "name", "123"),
        (["--name", "true"], "name", "true"),
        (["--name=--odd"], "name", "--odd"),
        (["--names", "a", "b"], "names", ("a", "b")),
        (["--columns", "question=prompt", "a=b=c"], "columns", {"question": "prompt", "a": "b=c"}),
        (["--loud"], "loud", True),
        (["--loud", "false"], "loud", False),
        (["--loud", "True"], "loud", True),
        (["--no-loud"], "loud", False),
        (["--no_loud"], "loud", False),
        (["--level"], "level", True),
        (["--level", "full"], "level", "full"),
        (["--level", "false"], "level", False),
        (["--resume"], "resume", True),
        (["--resume", "runs/a"], "resume", "runs/a"),
    ],
)
def test_a_flag_is_read_by_its_field_type(words: list[str], key: str, value: Any) -> None:
    assert read(*words)[key] == value
    assert type(read(*words)[key]) is type(value)


def test_dashes_and_underscores_are_the_same() -> None:
    given = read_flags(RunFile, ["--learning-rate", "2e-5", "--lora_target_modules", "q_proj", "v_proj"])
    assert given.values == {"learning_rate": 2e-5, "lora_target_modules": ["q_proj", "v_proj"]}
    assert not given.problems


def test_after_two_dashes_everything_is_a_word() -> None:
    assert parse(Options, ["--loud", "--", "--help"]).model == "--help"


def test_a_switch_does_not_swallow_the_next_word() -> None:
    assert parse(Options, ["--loud", "m"]).model == "m"


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        parse(Options, ["m", "extra", "--cuont", "3", "--stage", "7", "--rate", "fast", "--name", "-x", "--count"])
    problems = caught.value.problems
    assert problems == (
        "'extra' is one word too many; expected MODEL and flags",
        "unknown flag --cuont; did you mean --count?",
        "--count needs a value: N",
        "--rate must be a finite number, not 'fast'",
        "--stage must be one of 0, 1, 2, 3, not 7",
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "MODEL is missing"),
        (["m", "--count", "1", "--count", "2"], "--count is given twice"),
        (["m", "-v"], "'-v' is not known; flags have two dashes, such as --v"),
        (["m", "--columns", "a"], "--columns takes NAME=VALUE, not 'a'"),
        (["m", "--rate", "nan"], "--rate must be a finite number, not 'nan'"),
        (["m", "--rate", "1e999"], "--rate must be a finite number, not inf"),
        (["m", "--coun", "1"], "unknown flag --coun; did you mean --count or --columns?"),
        (["m", "--zzz"], "unknown flag --zzz; see --help"),
    ],
)
def test_a_problem_names_the_flag_and_the_way_out(words: list[str], problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(Options, words)
    assert problem in caught.value.problems


@given(st.lists(st.text(max_size=12), max_size=8))
def test_any_command_line_is_read_or_refused(words: list[str]) -> None:
    given = read_flags(Options, words)
    assert all(given.problems)
    with contextlib.suppress(UsageError):
        assert isinstance(parse(Options, words).model, str)


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers())
def test_numbers_survive(rate: float, count: int) -> None:
    options = parse(Options, ["m", "--rate", repr(rate), "--count", str(count)])
    assert (options.rate, options.count) == (rate, count)


def test_help_shows_groups_types_defaults_and_texts() -> None:
    page = command_help("thing", Options, width=80)
    assert page.startswith("usage: shardwise thing MODEL [flags]\n\nDoes a thing.\n")
    assert "  shardwise thing MODEL --rate 1e-5\n" in page
    assert "\nnumbers:\n  --count N               How many.\n  --rate NUMBER           (default: 0.5)\n" in page
    assert "\nwords:\n  --answer no|yes         (default: yes)\n" in page
    assert "  --level [none|full]\n" in page
    assert "  --columns NAME=VALUE ...\n" in page
    assert max(map(len, page.splitlines())) <= 80


@dataclass(frozen=True, kw_only=True)
class Overriding:
    """Lays flags over a file.

    Examples:
      shardwise thing run.yaml
    """

    file: str | None = field(default=None, metadata=POSITIONAL)
    """The file."""
    count: int = 1
    """Of this command."""
    thing: dict[str, Any] = field(default_factory=dict[str, Any], metadata=flags_of(Options))


def test_flags_of_another_dataclass_are_collected_unchecked() -> None:
    options = parse(Overriding, ["run.yaml", "--count", "2", "--rate", "3", "--loud", "--stage", "9"])
    assert (options.file, options.count) == ("run.yaml", 2)
    assert options.thing == {"rate": 3, "loud": True, "stage": 9}
    with pytest.raises(UsageError, match="did you mean --rate"):
        parse(Overriding, ["--rte", "3"])


def test_help_shows_collected_flags_once() -> None:
    page = command_help("thing", Overriding)
    assert page.count("--count ") == 1
    assert "Of this command. (default: 1)" in page
    assert "--answer no|yes" in page
    assert "--thing" not in page
    assert "MODEL" not in page


@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_of_hundreds_of_digits_is_refused(digits: int) -> None:
    from shardwise.cli import plan

    with pytest.raises(UsageError) as caught:
        parse(plan.Options, ["m", "--seq", "9" * digits, "--price", "1" + "0" * digits])
    assert len(caught.value.problems) == 2
