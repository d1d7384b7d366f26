"""What `shardwise train` is pointed at: a model, a run file, a plan file, or the folder of an earlier run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from shardwise.cli.runfile import read_run
from shardwise.errors import ConfigError, PlanMismatchError, UsageError
from shardwise.vocabulary import codec
from shardwise.vocabulary.job import OptimizerName
from shardwise.vocabulary.plan import Plan
from shardwise.vocabulary.run import OptimizerKey, RunFile

PLAN_FILE, RUN_FILE = "plan.yaml", "run.yaml"
_FILE_ENDINGS = (".yaml", ".yml", ".json")
_OPTIMIZER_KEYS: Mapping[OptimizerName, OptimizerKey] = {
    "adamw": "adamw_torch_fused",
    "adamw_bf16_states": "adamw_bf16_states",
    "adamw_8bit": "adamw_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "lamb": "lamb",
    "sgd": "sgd",
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """What to run, and the plan for it if there is one already."""

    run: RunFile
    plan: Plan | None = None


def read_target(name: str | None, flags: Mapping[str, Any]) -> Target:
    """Find out what a word means and lay the flags over it.

    Args:
        name: A model (catalogue name, folder, hub id), a run file, a plan file, or a run folder; None: flags only.
        flags: Plain data by key of a run file.

    Raises:
        ConfigError: If a file is wrong; carries every problem.
        PlanMismatchError: If flags differ from what a plan has decided.
    """
    if name is None:
        return Target(run=read_run(None, flags))
    path = Path(name)
    if (path / PLAN_FILE).is_file() and (path / RUN_FILE).is_file():
        return _earlier_run(path, flags)
    if path.suffix in _FILE_ENDINGS and (path.suffix != ".json" or path.is_file()):
        keys = _keys(path)
        if {"candidates", "cluster", "job"} <= keys:
            return _planned(path, flags)
        if not {"model_type", "architectures"} & keys:
            return Target(run=read_run(path, flags))
    if flags.get("model_name_or_path", name) != name:
        raise UsageError(f"{name!r} and --model-name-or-path {flags['model_name_or_path']!r} name two models; say one")
    return Target(run=read_run(None, {"model_name_or_path": name, **flags}))


def _keys(path: Path) -> set[str]:
    data = codec.read_yaml(path)
    return set(map(str, cast("dict[Any, Any]", data))) if isinstance(data, dict) else set()


def _earlier_run(folder: Path, flags: Mapping[str, Any]) -> Target:
    plan = codec.read_noun(Plan, folder / PLAN_FILE)
    here = {"output_dir": str(folder), "resume_from_checkpoint": False}
    before = read_run(folder / RUN_FILE, here)
    after = read_run(folder / RUN_FILE, {**here, **flags})
    _refuse_changes(codec.to_data(before), codec.to_data(after), f"the run in {folder}")
    return Target(run=after, plan=plan)


def _planned(path: Path, flags: Mapping[str, Any]) -> Target:
    plan = codec.read_noun(Plan, path)
    decided = keys_of(plan)
    _refuse_changes(decided, flags, f"the plan in {path}")
    return Target(run=read_run(None, {**decided, **flags}), plan=plan)


def keys_of(plan: Plan) -> dict[str, Any]:
    """The keys of a run file that a plan has decided.

    Raises:
        ConfigError: If nothing fits in that plan.
    """
    if plan.recommended is None:
        raise ConfigError(f"the plan has nothing to run: {plan.reason}")
    job, strategy = plan.job, plan.recommended.strategy
    return {
        "model_name_or_path": job.model.name,
        "max_length": job.sequence_length,
        "packing": job.packing,
        "attn_implementation": job.attention,
        "per_device_train_batch_size": strategy.micro_batch_size,
        "gradient_accumulation_steps": strategy.accumulation,
        "optim": _OPTIMIZER_KEYS[strategy.optimizer],
        "tuning": strategy.tuning,
        "lora_r": job.lora.r,
        "lora_alpha": job.lora.alpha,
        "lora_dropout": job.lora.dropout,
        "lora_target_modules": list(job.lora.target_modules),
        "zero_stage": strategy.zero_stage,
        "gradient_checkpointing": strategy.checkpointing,
        "use_dora": job.lora.use_dora,
        "use_rslora": job.lora.use_rslora,
        "offload": strategy.offload,
        "bf16": strategy.precision != "fp32",
        "fp8": strategy.precision == "fp8",
        "bf16_pure": strategy.precision == "bf16_pure",
        "reduce_dtype": strategy.reduce_dtype,
        "torch_compile": strategy.compile_blocks,
        "loss": strategy.loss,
    }


_DECIDED = (
    "model_name_or_path", "max_length", "packing", "attn_implementation", "per_device_train_batch_size",
    "gradient_accumulation_steps", "global_batch_size", "optim", "tuning", "use_peft", "load_in_4bit", "lora_r",
    "lora_alpha", "lora_dropout", "lora_target_modules", "zero_stage", "gradient_checkpointing", "bf16", "bf16_pure",
    "fp8", "reduce_dtype", "torch_compile", "loss", "offload", "use_dora", "use_rslora",
)  # fmt: skip
"""Keys that a plan rests on."""
_PLAN_FLAGS = {
    "max_length": "--seq", "per_device_train_batch_size": "--micro-batch",
    "gradient_accumulation_steps": "--accumulation", "global_batch_size": "--global-batch", "tuning": "--tuning",
    "lora_r": "--lora-r", "zero_stage": "--zero", "loss": "--loss", "offload": "--offload",
    "reduce_dtype": "--reduce-dtype",
}  # fmt: skip
"""Flags of `shardwise plan` that say the same in the same words."""


def _refuse_changes(before: Mapping[str, Any], after: Mapping[str, Any], where: str) -> None:
    def spelled(value: Any) -> Any:
        """gradient_checkpointing has two spellings."""
        return {True: "full", False: "none"}.get(value, value) if isinstance(value, bool) else value

    def differ(key: str) -> bool:
        old, new = before.get(key), after[key]
        return spelled(old) != spelled(new) if key == "gradient_checkpointing" else old != new

    def again(key: str) -> str:
        return f" with {_PLAN_FLAGS[key]} {after[key]}" if key in _PLAN_FLAGS else ""

    changed = [
        f"{where} rests on {key} = {before.get(key)}, and {after[key]} is asked for; plan again{again(key)}, or leave "
        "it out"
        for key in _DECIDED
        if key in after and differ(key)
    ]
    if changed:
        raise PlanMismatchError(*changed)
