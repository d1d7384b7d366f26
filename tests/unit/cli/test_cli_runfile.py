from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli.runfile import read_run
from shardwise.errors import ConfigError

GOOD = """
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: chats.jsonl
learning_rate: 1e-5
eval_strategy: no
column_map: {question: prompt}
gradient_checkpointing: true
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def problems(folder: Path, text: str, flags: dict[str, Any] | None = None, **environ: str) -> tuple[str, ...]:
    path = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        read_run(path, flags or {}, environ)
    return tuple(problem.replace(str(path), "run.yaml") for problem in caught.value.problems)


def test_numbers_words_and_mappings(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, GOOD), {}, {})
    assert run.learning_rate == 1e-5
    assert run.eval_strategy == "no"
    assert run.column_map == {"question": "prompt"}
    assert run.gradient_checkpointing is True


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, GOOD), {"learning_rate": 3e-4, "max_steps": 20}, {})
    assert (run.learning_rate, run.max_steps, run.dataset_name) == (3e-4, 20, "chats.jsonl")


def test_flags_alone_are_enough() -> None:
    assert read_run(None, {"model_name_or_path": "m"}, {}).model_name_or_path == "m"


def test_variables(tmp_path: Path) -> None:
    text = "model_name_or_path: ${ROOT}/m\nmax_steps: ${STEPS}\noutput_dir: ${OUT:-runs/a}\nrun_name: $${ROOT}\n"
    run = read_run(write(tmp_path, text), {}, {"ROOT": "/models", "STEPS": "20"})
    assert (run.model_name_or_path, run.max_steps) == ("/models/m", 20)
    assert (run.output_dir, run.run_name) == ("runs/a", "${ROOT}")


def test_a_variable_cannot_bring_structure(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, "model_name_or_path: ${M}\n"), {}, {"M": "{a: b}"})
    assert run.model_name_or_path == "{a: b}"


def test_every_problem_at_once_each_with_its_line(tmp_path: Path) -> None:
    lines = (
        "model_name_or_path: m",
        "learning_rat: 1e-5",
        "max_length: long",
        "base_model: x",
        "fsdp: f",
        "run_name: ${NO}",
    )
    text = "\n".join(lines)
    assert problems(tmp_path, text, {"max_steps": "ten"}) == (
        "run.yaml: line 2: unknown key 'learning_rat'; did you mean 'learning_rate' or 'learning_rate_base_batch'?",
        "run.yaml: line 4: unknown key 'base_model'; here it is called 'model_name_or_path'",
        "run.yaml: line 5: fsdp is decided by the plan here; take it out "
        "(zero_stage and gradient_checkpointing pin what you want)",
        "run.yaml: line 6: run_name: the environment variable NO is not set; set it, or write ${NO:-a default}",
        "run.yaml: line 3: max_length must be a whole number, not 'long'",
        "max_steps must be a whole number, not 'ten'",
    )


@pytest.mark.parametrize(
    "text",
    [
        "hf_token: abc",
        "wandb_api_key: abc",
        "hub_token: abc",
        "run_name: hf_abcdefghijklmnopqrstuvwxyz012345",
        "run_name: ${HF_TOKEN}",
        "column_map: {a: ghp_abcdefghijklmnopqrstuvwxyz012345}",
        "run_name: ${INNOCENT}",
    ],
)
def test_secrets_are_refused_and_never_repeated(tmp_path: Path, text: str) -> None:
    secret = "hf_abcdefghijklmnopqrstuvwxyz012345"
    (problem,) = problems(tmp_path, "model_name_or_path: m\n" + text, HF_TOKEN=secret, INNOCENT=secret)
    assert "keep secrets in the environment" in problem
    assert "abcdefghijkl" not in problem
    assert problem.startswith("run.yaml: line 2: ")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"global_batch_size": 8, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}, "leave one out"),
        ({"eval_strategy": "steps", "eval_dataset_name": "x"}, "eval_steps is missing"),
        ({"eval_strategy": "epoch"}, "there is no eval_dataset_name"),
        ({"tuning": "full", "use_peft": True}, "tuning is full, and use_peft is true"),
        ({"bf16": False, "bf16_pure": True}, "bf16_pure is true, and bf16 is false"),
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, "are both given"),
        ({"max_length": 0}, "max_length must be at least 1, not 0"),
        ({"learning_rate": -1.0}, "learning_rate must be at least 0, not -1"),
        ({"lora_dropout": 1.0}, "lora_dropout must be below 1, not 1"),
        ({"num_train_epochs": 0}, "num_train_epochs must be more than 0"),
    ],
)
def test_contradictions_are_named(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_run(None, {"model_name_or_path": "m", **flags}, {})


@pytest.mark.parametrize(
    "text", ["- a\n- b\n", "3", "a: 1\na: 2\n", "a: &x 1\nb: *x\n", "a: [\n", "!!python/name:os.x ''"]
)
def test_a_file_that_is_no_run_file_is_refused(tmp_path: Path, text: str) -> None:
    assert problems(tmp_path, text)


@given(st.dictionaries(st.text(max_size=8), st.one_of(st.text(max_size=30), st.integers(), st.booleans(), st.none())))
def test_any_flags_are_read_or_refused(flags: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        assert read_run(None, {"model_name_or_path": "m", **flags}, {}).model_name_or_path


def test_a_text_is_a_list_of_one_where_transformers_takes_both(tmp_path: Path) -> None:
    text = "model_name_or_path: m\nreport_to: tensorboard\nlora_target_modules: all-linear\n"
    run = read_run(write(tmp_path, text), {}, {})
    assert run.report_to == ("tensorboard",)
    assert run.lora_target_modules == ("all-linear",)
