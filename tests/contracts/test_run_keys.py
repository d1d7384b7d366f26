"""The run file's keys: spelled as transformers and TRL spell them, all of them read, none of another tool's."""

from __future__ import annotations

import ast
import dataclasses
import typing
from pathlib import Path

from tests.contracts import snapshot

from shardwise.cli.options import describe
from shardwise.cli.runfile import DECIDED_BY_THE_PLAN, ELSEWHERE
from shardwise.vocabulary.run import RunFile

SRC = Path(__file__).parents[2] / "src" / "shardwise"
READERS = ("trainer", "verify", "launch")
"""The rooms in which a key must be read for it to have an effect."""
TRL_KEYS = {
    "model_name_or_path", "model_revision", "trust_remote_code", "attn_implementation", "dataset_name",
    "max_length", "packing", "assistant_only_loss", "completion_only_loss", "per_device_train_batch_size",
    "per_device_eval_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "learning_rate",
    "lr_scheduler_type", "warmup_steps", "warmup_ratio", "optim", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "max_grad_norm", "seed", "use_peft", "load_in_4bit", "lora_r", "lora_alpha", "lora_dropout",
    "lora_target_modules", "gradient_checkpointing", "bf16", "torch_compile", "output_dir",
    "resume_from_checkpoint", "logging_steps", "eval_strategy", "eval_steps", "save_strategy", "save_steps",
    "save_total_limit", "report_to", "run_name",
}  # fmt: skip


def keys() -> list[str]:
    return [field.name for field in dataclasses.fields(RunFile)]


def test_keys_are_frozen() -> None:
    hints = typing.get_type_hints(RunFile)
    lines = [f"{key}: {describe(hints[key]) or 'true|false'}" for key in keys()]
    snapshot.check("run_keys.txt", "\n".join(lines) + "\n")


def test_keys_are_spelled_as_trl_spells_them() -> None:
    assert set(keys()) >= TRL_KEYS


def test_words_of_other_tools_are_answered_with_ours() -> None:
    assert set(ELSEWHERE.values()) <= set(keys())
    assert not (set(ELSEWHERE) | set(DECIDED_BY_THE_PLAN)) & set(keys())


def test_every_key_is_read_where_it_can_have_an_effect() -> None:
    read: set[str] = set()
    for room in READERS:
        for path in (SRC / room).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_a_run(node.value)}
    assert sorted(set(keys()) - read) == []


def _is_a_run(node: ast.expr) -> bool:
    """`run.x`, `self.run.x`, `parts.run.x`, `self._run.x`."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.strip("_") in ("run", "run_file")
