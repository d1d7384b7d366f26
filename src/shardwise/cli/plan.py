"""`shardwise plan`: memory and time of every way to split a fine-tune, and the one to take."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shardwise.cli.options import POSITIONAL, read_flags, spelled
from shardwise.errors import DoesNotFitError, UsageError
from shardwise.report.style import Style
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import (
    Job,
    LoraSettings,
    OptimizerName,
    Precision,
    ReduceDtype,
    SequenceLengths,
    TuningWish,
)
from shardwise.vocabulary.limits import Count, Degree, LoraRank, Positive
from shardwise.vocabulary.model import ModelShape
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Checkpointing, LossKind, Offload, PipelineSchedule, ZeroStage

if TYPE_CHECKING:
    from shardwise.planner.search import Wishes
    from shardwise.vocabulary.plan import Plan

T = TypeVar("T")
USUAL_GLOBAL_BATCH = 32
_DATA_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Predict memory and step time of every way to split a fine-tune over these cards, and pick one.

    Arithmetic only: no GPU, no torch, no download of weights.

    Examples:
      shardwise plan qwen2.5-7b --gpus 2xrtx-5090
      shardwise plan llama-3.1-8b --gpus 8xh100 --tuning full --seq 8192 --global-batch 64
      shardwise plan llama-3.1-70b --gpus 4x8xh200 --network ndr --explain
      shardwise plan ./my-model --cluster cluster.yaml --zero 3 --out plan.yaml
    """

    model: str = field(metadata=POSITIONAL)
    """A catalogue name, a folder or file with config.json, or a hub id."""

    # -- the machine
    gpus: str | None = None
    """Cards: 2xrtx-5090, or 2x8xh200 for two nodes of eight."""
    nodes: Degree | None = None
    """Machines with that many cards each."""
    cluster: str | None = None
    """A cluster file, as `shardwise probe` writes it; instead of --gpus."""
    link: str | None = None
    """Between the cards of a machine, such as nvlink4 or pcie5-x8."""
    network: str | None = None
    """Between machines, such as 10gbe or ndr."""

    # -- the job
    tuning: TuningWish = "any"
    """What may be trained."""
    seq: Count = 2048
    """Tokens of a sequence."""
    global_batch: Count | None = None
    """Sequences of one optimizer step over all cards; 32, or more where the cards ask for it, if nothing is said."""
    precision: Precision = "bf16"
    optimizer: OptimizerName = "adamw"
    reduce_dtype: ReduceDtype = "fp32"
    """In which gradients cross the wire."""
    lora_r: LoraRank = 16
    """Rank of the adapters."""
    data: str | None = None
    """Your data set: time then follows its lengths, memory its longest batch. Needs torch and the tokenizer."""
    epochs: Positive = 1.0
    """Passes over --data."""
    max_steps: Count | None = None
    """Optimizer steps of the whole job; wins over --epochs."""
    price: Positive | None = None
    """Of one card for one hour, in your currency."""

    # -- the split, where you want to decide
    zero: ZeroStage | None = None
    """ZeRO stage: 0 replicates, 3 shards everything."""
    split: str | None = None
    """The same by another name: FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, NO_SHARD, zero2, fsdp2, hsdp."""
    micro_batch: Count | None = None
    """Sequences of one forward pass on one card."""
    accumulation: Count | None = None
    """Micro-batches of one optimizer step."""
    checkpointing: Checkpointing | None = None
    """Activations recomputed in the backward pass."""
    loss: LossKind | None = None
    """Whole logits, logits in chunks, or a fused kernel."""
    compile: bool | None = None
    """Compile each block; on cards from Ampere on if nothing is said."""
    offload: Offload = "none"
    """What lives in the machine's memory between its uses."""
    keep_unsharded: bool = False
    """ZeRO 2 and 3: whole gradients between micro-batches, so that the wire is paid once a step."""
    tp: Degree | None = None
    """Degree of tensor parallel."""
    pp: Degree | None = None
    """Degree of pipeline parallel."""
    sequence_parallel: bool | None = None
    """With --tp: norms and residuals split along the sequence; yes if nothing is said."""
    pipeline_schedule: PipelineSchedule | None = None
    """With --pp."""
    virtual_stages: Degree = 1
    """With --pp: model chunks a rank in interleaved schedules."""
    dp_replicate: Degree | None = None
    """Copies of the (sharded) model."""
    dp_shard: Degree | None = None
    """Cards that one copy is sharded over."""

    # -- the answer
    all: bool = False
    """Every candidate and refusal."""
    explain: bool = False
    """The arithmetic, line by line, with your numbers."""
    json: bool = False
    """The whole plan as JSON on stdout."""
    out: str | None = None
    """Write the plan to this file (YAML, or JSON by its ending); `shardwise train` runs it."""


def run(options: Options) -> int:
    """Answer, and return 0, or 3 if nothing fits."""
    from shardwise.planner.answer import make_plan

    asked = read_asked(options)
    plan = completed(make_plan(asked.job, asked.cluster, asked.wishes), options)
    if options.out is not None:
        write_plan(plan, Path(options.out))
    sys.stdout.write(answer(plan, options))
    if plan.recommended is not None:
        return 0
    if options.json:
        sys.stderr.write(f"shardwise: {plan.reason}\n")
    return DoesNotFitError.exit_code


def answer(plan: Plan, options: Options) -> str:
    """The text for stdout, in the form that was asked for."""
    if options.json:
        from shardwise.report.data import plan_json

        return plan_json(plan)
    style = Style.of(sys.stdout)
    if options.explain:
        from shardwise.planner.explain import explain

        return style.plain(explain(plan))
    from shardwise.report.text import plan_page

    return plan_page(plan, style, every_candidate=options.all)


# ----------------------------------------------------------------------------------------- what a plan cannot know


def completed(plan: Plan, options: Options) -> Plan:
    """The plan with what only the command line knows: whole commands, what --split stands for, how to run it."""
    from shardwise.axes import engine
    from shardwise.vocabulary.plan import Advice

    advice = [replace(each, command=whole_command(options, each.command)) for each in plan.advice]
    if plan.recommended is not None and engine.runs(plan.recommended.strategy):
        advice.append(Advice(rule="run_it", message="To keep this plan and run it:", command=_run_command(options)))
    rules = plan.rules
    if options.split is not None:
        from shardwise.planner.aliases import explained

        rules = (explained(options.split), *rules)
    return replace(plan, advice=tuple(advice), rules=rules)


def whole_command(options: Options, change: str) -> str:
    """A command that can be run: these options with the flags of an advice laid over them.

    Args:
        options: As they were given.
        change: Flags of this command (`--tuning lora --zero=null`), or a whole command, or nothing.
    """
    if not change or change.startswith("shardwise "):
        return change
    from shardwise.vocabulary import codec

    given = read_flags(Options, shlex.split(change))
    assert not given.problems, given.problems
    values = {name: None if value == "null" else value for name, value in given.values.items()}
    plain = {each.name: getattr(options, each.name) for each in fields(options)}
    changed = codec.from_data(Options, {**plain, **values, "json": False, "all": False, "explain": False})
    if changed.tuning == "full":
        changed = replace(changed, lora_r=LoraSettings().r)
    return shlex.join(["shardwise", "plan", *spelled(changed)])


def _run_command(options: Options) -> str:
    out = options.out or "plan.yaml"
    train = shlex.join(["shardwise", "train", out, "--data", options.data or "chats.jsonl"])
    if options.out is not None:
        return train
    kept = replace(options, out=out, json=False, all=False, explain=False)
    return f"{shlex.join(['shardwise', 'plan', *spelled(kept)])} && {train}"


# ------------------------------------------------------------------------------------------------------- what is asked


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a command line asks the planner."""

    job: Job
    cluster: Cluster
    wishes: Wishes


def read_asked(options: Options) -> Asked:
    """Job, cards and wishes.

    Raises:
        UsageError: Every problem of the command line, of the files it names, and of the mesh, at once.
    """
    problems = _Problems()
    problems.of(lambda: refuse_ignored(options))
    problems.of(lambda: _look_for_data(options))
    cluster = problems.of(lambda: cluster_from(options))
    shape = problems.of(lambda: model_from(options))
    wishes = problems.of(lambda: wishes_from(options, cluster))
    if problems.found and cluster is not None and shape is not None:
        from shardwise.planner.search import check

        without_alias = wishes_from(replace(options, split=None), cluster)
        problems.of(lambda: check(_job(options, cluster, shape, None), cluster, wishes or without_alias))
    problems.raise_them()
    assert cluster is not None, "no cluster, and no problem"
    assert wishes is not None, "no wishes, and no problem"
    return Asked(job=job_from(options, cluster), cluster=cluster, wishes=wishes)


def _look_for_data(options: Options) -> None:
    """A file that is not there is told before anything is loaded for it.

    Raises:
        UsageError: --data is spelled like a file, and there is none.
    """
    if options.data is not None and Path(options.data).suffix in _DATA_FILES and not Path(options.data).exists():
        raise UsageError(f"--data {options.data}: there is no such file")


class _Problems:
    """Collects what several steps find wrong."""

    def __init__(self) -> None:
        self.found: list[UsageError] = []

    def of(self, step: Callable[[], T]) -> T | None:
        """What a step gives, or None and its problems."""
        try:
            return step()
        except UsageError as error:
            self.found.append(error)
            return None

    def raise_them(self) -> None:
        """The one error as it is, or all as one."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            raise UsageError(*dict.fromkeys(problem for error in self.found for problem in error.problems))


def refuse_ignored(options: Options) -> None:
    """Look for flags that would have no effect beside the others.

    Raises:
        UsageError: All of them at once.
    """
    one_tp = options.tp in (None, 1) and None in (options.pp, options.dp_replicate, options.dp_shard)
    one_pp = options.pp in (None, 1) and None in (options.tp, options.dp_replicate, options.dp_shard)
    without_effect = (
        (options.sequence_parallel is True and one_tp, "--sequence-parallel splits along --tp; give that too"),
        (options.pipeline_schedule is not None and one_pp, "--pipeline-schedule orders stages; give --pp too"),
        (options.virtual_stages != 1 and one_pp, "--virtual-stages divides stages; give --pp too"),
        (
            options.keep_unsharded and options.zero in (0, 1),
            f"--keep-unsharded is for ZeRO 2 and 3; at --zero {options.zero} gradients are whole anyway",
        ),
        (
            options.lora_r != LoraSettings().r and options.tuning == "full",
            f"--lora-r {options.lora_r} belongs to adapters, and --tuning full has none",
        ),
        (
            options.epochs != 1.0 and options.data is None,
            f"--epochs {options.epochs:g} are passes over --data; name it, or say --max-steps",
        ),
        (options.explain and options.json, "--explain is a text, and --json data; leave one out"),
        (options.explain and options.all, "--explain explains the one to take, and --all lists all; leave one out"),
    )
    problems = [problem for ignored, problem in without_effect if ignored]
    if problems:
        raise UsageError(*problems)


def cluster_from(options: Options) -> Cluster:
    """The cards and wires that were named.

    Raises:
        UsageError: If neither or both of --gpus and --cluster are given, or a name is unknown.
        ConfigError: If the cluster file is wrong.
    """
    if options.cluster is not None:
        given = ("gpus", "nodes", "link", "network")
        doubled = [f"--{name}" for name in given if getattr(options, name) is not None]
        if doubled:
            raise UsageError(f"--cluster {options.cluster} says what the machine is; leave out {', '.join(doubled)}")
        from shardwise.vocabulary import codec

        return codec.read_noun(Cluster, Path(options.cluster))
    if options.gpus is None:
        raise UsageError(
            "which cards? Say --gpus 2xrtx-5090 (or 2x8xh200 for two nodes), or --cluster FILE from `shardwise probe`"
        )
    from shardwise.facts.catalog import parse_gpus

    if "cpu" in options.gpus.casefold().replace("x", " ").split()[-1:]:
        raise UsageError(
            f"--gpus {options.gpus} names no card. To plan for this machine's processors, measure them (shardwise "
            "probe --out cluster.yaml) and say --cluster cluster.yaml; cards elsewhere go by name, such as h100"
        )
    return parse_gpus(options.gpus, options.nodes, options.network, options.link)


def model_from(options: Options) -> ModelShape:
    """The shape of the model.

    Raises:
        UsageError: If the model is unknown, or its config.json lacks something.
    """
    from shardwise.facts.hub import find_model

    return find_model(options.model).shape


def job_from(options: Options, cluster: Cluster) -> Job:
    """What is to be trained.

    Raises:
        UsageError: If the model is unknown.
    """
    from shardwise.facts.hub import find_model

    found = find_model(options.model)
    lengths = None if options.data is None else _lengths(options, found.weights or options.model)
    return _job(options, cluster, found.shape, lengths)


def _job(options: Options, cluster: Cluster, shape: ModelShape, lengths: SequenceLengths | None) -> Job:
    return Job(
        model=shape,
        tuning=options.tuning,
        sequence_length=options.seq if lengths is None else min(options.seq, lengths.longest),
        lengths=lengths,
        global_batch_size=options.global_batch or _usual_batch(options, cluster),
        precision=options.precision,
        reduce_dtype=options.reduce_dtype,
        optimizer=options.optimizer,
        lora=LoraSettings(r=options.lora_r, alpha=2 * options.lora_r),
        num_train_epochs=options.epochs,
        max_steps=options.max_steps,
        price_per_gpu_hour=options.price,
    )


def _lengths(options: Options, model: str) -> SequenceLengths | None:
    """Of the data set after truncation; tokenized now, and kept for the run."""
    from shardwise.cli.train import require_training

    require_training()
    from shardwise.trainer.run import data_lengths

    return data_lengths(RunFile(model_name_or_path=model, dataset_name=options.data, max_length=options.seq))


def _usual_batch(options: Options, cluster: Cluster) -> int:
    """What micro-batch and accumulation give, if both were said; else 32, rounded up to something the cards divide."""
    data_parallel = max(1, cluster.num_gpus // ((options.tp or 1) * (options.pp or 1)))
    if options.micro_batch and options.accumulation:
        return options.micro_batch * options.accumulation * data_parallel
    unit = data_parallel * (options.micro_batch or 1) * (options.accumulation or 1)
    return -(-USUAL_GLOBAL_BATCH // unit) * unit


def wishes_from(options: Options, cluster: Cluster | None) -> Wishes:
    """What the user decides about the split; of --split only the name is checked while no cluster is known.

    Raises:
        UsageError: If --split is no known name, or contradicts the other flags.
    """
    from shardwise.planner.search import Wishes

    wishes = Wishes(
        zero_stage=options.zero,
        micro_batch_size=options.micro_batch,
        accumulation=options.accumulation,
        checkpointing=options.checkpointing,
        loss=options.loss,
        compile_blocks=options.compile,
        offload=options.offload,
        keep_unsharded=options.keep_unsharded,
        sequence_parallel=options.sequence_parallel,
        pipeline_schedule=options.pipeline_schedule,
        virtual_stages=options.virtual_stages,
        every_candidate=options.all,
        tp=options.tp,
        pp=options.pp,
        dp_replicate=options.dp_replicate,
        dp_shard=options.dp_shard,
    )
    if options.split is None:
        return wishes
    from shardwise.planner.aliases import read_alias, with_alias

    if cluster is None:
        read_alias(options.split)
        return wishes
    return with_alias(wishes, options.split, cluster)


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan file.

    Raises:
        UsageError: If the file cannot be written.
    """
    from shardwise.vocabulary import codec

    text = codec.to_json(plan) if path.suffix == ".json" else codec.to_yaml(plan)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); choose another --out") from error
    sys.stderr.write(f"wrote {path}\n")
