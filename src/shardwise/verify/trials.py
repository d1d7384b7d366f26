"""A run file from its first word to its ledger: plan it, run it, lay prediction beside measurement.

The plan is written into the run folder before the first step and never touched again, so that the ledger compares what
was said with what came out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, DoesNotFitError, UsageError
from shardwise.facts.hub import find_model
from shardwise.planner.answer import make_plan
from shardwise.planner.search import Wishes
from shardwise.verify import opening
from shardwise.verify.ledger import ledger_json, make_ledger
from shardwise.verify.opening import CLUSTER_FILE, PLAN_FILE, RUN_FILE
from shardwise.vocabulary import codec
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job, LoraSettings, OptimizerName, Precision, SequenceLengths, TuningWish
from shardwise.vocabulary.ledger import Ledger
from shardwise.vocabulary.measured import Measured
from shardwise.vocabulary.plan import Candidate, Plan
from shardwise.vocabulary.restarts import restart_count
from shardwise.vocabulary.run import OptimizerKey, RunFile
from shardwise.vocabulary.strategy import Checkpointing, Strategy

LEDGER_FILE, MEASURED_FILE = "ledger.json", "measured.json"
USUAL_GLOBAL_BATCH = 32
_OPTIMIZERS: dict[OptimizerKey, OptimizerName] = {
    "adamw_torch_fused": "adamw",
    "adamw_torch": "adamw",
    "adamw_bf16_states": "adamw_bf16_states",
    "adamw_8bit": "adamw_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "lamb": "lamb",
    "sgd": "sgd",
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A run that is ready to start."""

    run: RunFile
    plan: Plan
    candidate: Candidate
    """The strategy that runs, with what was predicted for it."""

    @property
    def folder(self) -> Path:
        """Where everything is written."""
        return Path(self.run.output_dir)


def plan_run(run: RunFile, cluster: Cluster, lengths: SequenceLengths | None = None) -> Plan:
    """Plan a run file for a cluster.

    Args:
        run: What to train on what.
        cluster: The cards and wires.
        lengths: Of the data set after truncation, if it was looked at: time then follows the typical batch.

    Raises:
        ShardwiseError: If the model is unknown or the wishes cannot be met.
    """
    return make_plan(job_of(run, cluster, lengths), cluster, wishes_of(run))


def job_of(run: RunFile, cluster: Cluster, lengths: SequenceLengths | None = None) -> Job:
    """What a run file wants, apart from how."""
    tuning = tuning_of(run)
    longest = min(run.max_length, lengths.longest) if lengths is not None and not run.packing else run.max_length
    return Job(
        model=find_model(run.model_name_or_path, run.model_revision).shape,
        tuning=tuning,
        sequence_length=longest,
        global_batch_size=_global_batch(run, cluster),
        precision=precision_of(run),
        reduce_dtype=run.reduce_dtype,
        optimizer=_OPTIMIZERS[run.optim],
        lora=LoraSettings(
            r=run.lora_r,
            alpha=run.lora_alpha,
            dropout=run.lora_dropout,
            target_modules=run.lora_target_modules,
            use_dora=run.use_dora,
            use_rslora=run.use_rslora,
        ),
        attention=run.attn_implementation,
        packing=run.packing,
        lengths=lengths,
        num_train_epochs=run.num_train_epochs,
        max_steps=run.max_steps,
        learning_rate=run.learning_rate or (2e-5 if tuning == "full" else 2e-4),
    )


def tuning_of(run: RunFile) -> TuningWish:
    """What may be trained, from `tuning` or TRL's two switches."""
    if run.tuning is not None:
        return run.tuning
    if run.load_in_4bit:
        return "qlora"
    return "lora" if run.use_peft else "full"


def precision_of(run: RunFile) -> Precision:
    """The dtypes, from transformers' switch and ours."""
    if run.bf16_pure:
        return "bf16_pure"
    if run.fp8:
        return "fp8"
    return "bf16" if run.bf16 else "fp32"


def wishes_of(run: RunFile) -> Wishes:
    """What a run file has decided about the split."""
    checkpointing: Checkpointing | None
    if isinstance(run.gradient_checkpointing, bool):
        checkpointing = "full" if run.gradient_checkpointing else "none"
    else:
        checkpointing = run.gradient_checkpointing
    return Wishes(
        zero_stage=run.zero_stage,
        micro_batch_size=run.per_device_train_batch_size,
        accumulation=run.gradient_accumulation_steps,
        checkpointing=checkpointing,
        loss=run.loss,
        compile_blocks=run.torch_compile,
        offload=run.offload,
    )


def _global_batch(run: RunFile, cluster: Cluster) -> int:
    """Sequences of one optimizer step: as given, or what micro-batch and accumulation make, or about 32."""
    if run.global_batch_size is not None:
        return run.global_batch_size
    unit = (run.per_device_train_batch_size or 1) * (run.gradient_accumulation_steps or 1) * cluster.num_gpus
    if run.per_device_train_batch_size is not None and run.gradient_accumulation_steps is not None:
        return unit
    return -(-USUAL_GLOBAL_BATCH // unit) * unit


def prepare(run: RunFile, plan: Plan, strategy: Strategy | None = None) -> Trial:
    """Choose what runs: the plan's recommendation, or another of its candidates.

    Raises:
        DoesNotFitError: If nothing fits, with the plan's advice; or nothing is legal, with its refusals.
        ConfigError: If the strategy is not among the plan's candidates.
    """
    if strategy is not None:
        found = next((each for each in plan.candidates if each.strategy == strategy), None)
        if found is None:
            raise ConfigError(f"{strategy.name} is not among the candidates of this plan")
        return Trial(run=run, plan=plan, candidate=found)
    if plan.recommended is None and not plan.candidates:
        raise DoesNotFitError(plan.reason, *dict.fromkeys(refusal.message for refusal in plan.refusals))
    if plan.recommended is None:
        raise DoesNotFitError(plan.reason, *(f"{advice.message} {advice.command}".strip() for advice in plan.advice))
    return Trial(run=run, plan=plan, candidate=plan.recommended)


def execute(trial: Trial, *, cuda: bool, command: str = "") -> Ledger:
    """Run a trial on this machine (or join ranks that were started already), and settle its account.

    Args:
        trial: What runs.
        cuda: Whether on cards.
        command: The command line that does it again, for the report.

    Returns:
        The ledger, which is also in the run folder.

    Raises:
        ShardwiseError: Whatever the user, the machine or the training got wrong.
    """
    from shardwise.launch.local import LaunchOptions, launch
    from shardwise.trainer.run import RunWishes, run_training

    with opening.kept_until_a_step(trial.folder, _nouns(trial)):
        write_before(trial)
        options = LaunchOptions.of_run(trial.run, trial.candidate.strategy.num_ranks, cuda=cuda)
        launch(run_training, (trial.run, trial.candidate.strategy, RunWishes(command=command)), options)
    return settle(trial.folder, trial.candidate)


def write_before(trial: Trial) -> None:
    """Write the plan, the cluster and the run file into the run folder, before anything runs.

    Raises:
        CheckpointError: The folder holds an earlier run that nobody goes on with.
        UsageError: A file of the user's stands in the way.
        ResourceError: The folder cannot be written.
    """
    resumes = bool(trial.run.resume_from_checkpoint) or restart_count(os.environ) > 0
    opening.look(trial.folder, _nouns(trial), resumes=resumes)
    opening.write(trial.folder, _nouns(trial))


def _nouns(trial: Trial) -> dict[str, Any]:
    return {PLAN_FILE: trial.plan, CLUSTER_FILE: trial.plan.cluster, RUN_FILE: trial.run}


def settle(folder: Path, candidate: Candidate) -> Ledger:
    """Join what was predicted with what the run measured, and write ledger.json.

    Raises:
        UsageError: If the folder holds no measurements.
    """
    path = folder / MEASURED_FILE
    if not path.is_file():
        raise UsageError(f"{folder} holds no {MEASURED_FILE}: the run has not come to its end, or was not measured")
    ledger = make_ledger(candidate, codec.read_noun(Measured, path))
    (folder / LEDGER_FILE).write_text(ledger_json(ledger), encoding="utf-8")
    return ledger
