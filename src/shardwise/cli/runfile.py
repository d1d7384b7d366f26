"""Reads a run file and lays flags over it.

[Note: run file]
The file is strict: an unknown key is an error with the nearest name, and a key of another trainer is answered with
our word for it. `${NAME}` and `${NAME:-default}` take a value from the environment, `$${NAME}` is the text itself.
Because the run folder keeps a copy of what was read, secrets are refused: as keys, as values, and as interpolated
variables. All problems are told at once, each with its line.
"""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwise.cli.options import read_scalar
from shardwise.errors import ConfigError, nearest_names
from shardwise.vocabulary import codec
from shardwise.vocabulary.run import RunFile

_VARIABLE = re.compile(r"\$(\$?)\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_SECRET_NAME = re.compile(
    r"(?:^|[_.-])(?:password|passwd|secret|api_?key|access_?key|private_?key|(?:hf|hub|auth|access|wandb)_?token|token)$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b"
)
_WAY_OUT = "a run file is copied into the run folder; keep secrets in the environment (HF_TOKEN, WANDB_API_KEY)"

ELSEWHERE: Mapping[str, str] = {
    # axolotl, LLaMA-Factory, ms-swift, torchtitan and others -> the word of transformers and TRL
    "base_model": "model_name_or_path",
    "model": "model_name_or_path",
    "sequence_len": "max_length",
    "cutoff_len": "max_length",
    "max_seq_length": "max_length",
    "seq_len": "max_length",
    "micro_batch_size": "per_device_train_batch_size",
    "local_batch_size": "per_device_train_batch_size",
    "batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "lora_rank": "lora_r",
    "lora_target": "lora_target_modules",
    "sample_packing": "packing",
    "activation_checkpointing": "gradient_checkpointing",
    "dataset": "dataset_name",
    "datasets": "dataset_name",
    "adapter": "tuning",
    "finetuning_type": "tuning",
    "tuner_type": "tuning",
    "quantization_bit": "load_in_4bit",
    "optimizer": "optim",
    "lr": "learning_rate",
}
DECIDED_BY_THE_PLAN = ("fsdp", "fsdp_config", "deepspeed", "ddp_timeout", "accelerator_config")
"""Keys of transformers that have no place here, because the plan is what they configure."""


def read_run(path: Path | None, flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> RunFile:
    """The run that a file and flags describe; flags win.

    Args:
        path: A YAML or JSON file; None if there are flags only.
        flags: Plain data by key, as `options.read_flags` gives it.
        environ: For interpolation; the process's own if None.

    Raises:
        ConfigError: With every problem of the file and the flags, and the lines where they stand.
    """
    data, lines = ({}, {}) if path is None else _read(path)
    problems: list[str] = []
    env = os.environ if environ is None else environ

    def at(key: str) -> str:
        line = lines.get(key)
        return "" if path is None or key in flags else f"{path}: line {line}: " if line else f"{path}: "

    for key in list(data):
        complaint = _foreign_or_secret(key)
        if complaint is not None:
            problems.append(at(key) + complaint)
            del data[key]
        else:
            data[key] = _interpolated(
                data[key], env, lambda problem, key=key: problems.append(f"{at(key)}{key}: {problem}")
            )
    merged = {key: _listed(key, value) for key, value in {**data, **flags}.items()}
    for key, value in flags.items():
        _refuse_secret_values(value, lambda problem, key=key: problems.append(f"--{key}: {problem}"))
    try:
        run = codec.from_data(RunFile, merged)
    except ConfigError as error:
        problems += [at(_subject(problem)) + problem for problem in error.problems]
    else:
        problems += contradictions(run)
        if not problems:
            return run
    raise ConfigError(*problems)


def contradictions(run: RunFile) -> list[str]:
    """What is readable and makes no sense together."""
    problems: list[str] = []
    given = (run.global_batch_size, run.per_device_train_batch_size, run.gradient_accumulation_steps)
    if all(value is not None for value in given):
        problems.append(
            f"global_batch_size ({given[0]}), per_device_train_batch_size ({given[1]}) and gradient_accumulation_steps "
            f"({given[2]}) are all given; leave one out, it follows from the others and the number of cards"
        )
    if run.eval_strategy == "steps" and run.eval_steps is None:
        problems.append("eval_strategy is steps, and eval_steps is missing; say every how many")
    if run.eval_strategy != "no" and run.eval_dataset_name is None:
        problems.append(f"eval_strategy is {run.eval_strategy}, and there is no eval_dataset_name; name one or say no")
    if run.tuning == "full" and (run.use_peft or run.load_in_4bit):
        key = "use_peft" if run.use_peft else "load_in_4bit"
        problems.append(f"tuning is full, and {key} is true; take one of them out")
    if run.bf16_pure and not run.bf16:
        problems.append("bf16_pure is true, and bf16 is false; take one of them out")
    if run.fp8 and (run.bf16_pure or not run.bf16):
        problems.append(
            f"fp8 is true, which keeps fp32 masters and computes the rest in bf16, but bf16 is {run.bf16} and "
            f"bf16_pure is {run.bf16_pure}; take fp8 out, or the other"
        )
    if run.learning_rate_base_batch is not None and run.learning_rate is None:
        problems.append(
            f"learning_rate_base_batch is {run.learning_rate_base_batch}, and there is no learning_rate that belongs "
            "to it; give both"
        )
    if run.merge_adapters and not run.save_final:
        problems.append("merge_adapters is true, and save_final is false; nothing would be exported, take one out")
    if not run.output_dir.strip():
        problems.append("output_dir is empty; name a folder for what the run writes")
    if run.warmup_steps and run.warmup_ratio:
        problems.append(
            f"warmup_steps ({run.warmup_steps}) and warmup_ratio ({run.warmup_ratio}) are both given; one decides"
        )
    return problems


def known_keys() -> tuple[str, ...]:
    """Every key of a run file, in the order of its page."""
    return tuple(field.name for field in dataclasses.fields(RunFile))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    text = codec.read_text(path)
    data = codec.parse_yaml(text, str(path))
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold `key: value` lines, not {type(data).__name__}")
    return {str(key): value for key, value in typing.cast("dict[Any, Any]", data).items()}, codec.key_lines(text)


def _listed(key: str, value: Any) -> Any:
    """`report_to: tensorboard` and `lora_target_modules: all-linear` are texts or lists in transformers and PEFT."""
    return [value] if key in _LISTS and isinstance(value, str) else value


_LISTS = ("report_to", "lora_target_modules")


def _foreign_or_secret(key: str) -> str | None:
    if key in known_keys():
        return None
    if _SECRET_NAME.search(key):
        return f"{key} looks like a secret; {_WAY_OUT}"
    if key in DECIDED_BY_THE_PLAN:
        return (
            f"{key} is decided by the plan here; take it out (zero_stage and gradient_checkpointing pin what you want)"
        )
    if key in ELSEWHERE:
        return f"unknown key {key!r}; here it is called {ELSEWHERE[key]!r}"
    near = nearest_names(key, list(known_keys()))
    hint = "did you mean " + " or ".join(map(repr, near)) + "?" if near else "shardwise train --help lists all keys"
    return f"unknown key {key!r}; {hint}"


def _subject(problem: str) -> str:
    """The key that a codec problem is about."""
    match = re.match(r"'?([A-Za-z_]\w*)", problem)
    return match[1] if match else ""


def _interpolated(value: Any, env: Mapping[str, str], complain: Callable[[str], None]) -> Any:
    """The value with its variables filled in; a value that is one variable alone is read as YAML would read it."""
    if isinstance(value, dict):
        items = typing.cast("dict[Any, Any]", value).items()
        return {key: _interpolated(item, env, complain) for key, item in items}
    if isinstance(value, list):
        return [_interpolated(item, env, complain) for item in typing.cast("list[Any]", value)]
    if not isinstance(value, str):
        return value

    def fill(match: re.Match[str]) -> str:
        escaped, name, default = match[1], match[2], match[3]
        if escaped:
            return match[0][1:]
        if _SECRET_NAME.search(name):
            complain(f"${{{name}}} is a secret; {_WAY_OUT}")
            return ""
        if name not in env and default is None:
            complain(f"the environment variable {name} is not set; set it, or write ${{{name}:-a default}}")
            return ""
        return env.get(name) or default or ""

    filled = _VARIABLE.sub(fill, value)
    _refuse_secret_values(filled, complain)
    alone = _VARIABLE.fullmatch(value)
    return read_scalar(filled) if alone is not None and not alone[1] else filled


def _refuse_secret_values(value: Any, complain: Callable[[str], None]) -> None:
    if isinstance(value, str) and _SECRET_VALUE.search(value):
        complain(f"the value looks like an access token; {_WAY_OUT}")
    elif isinstance(value, dict):
        for item in typing.cast("dict[Any, Any]", value).values():
            _refuse_secret_values(item, complain)
    elif isinstance(value, list):
        for item in typing.cast("list[Any]", value):
            _refuse_secret_values(item, complain)
