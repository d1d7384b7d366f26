"""`shardwise train`: plan, run, verify, report."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.options import again
from shardwise.cli.train_options import Options, cluster_of, say
from shardwise.errors import ConfigError, MissingExtraError, ResourceError, ShardwiseError, UsageError
from shardwise.vocabulary.run import RunFile

if TYPE_CHECKING:
    from shardwise.verify.trials import Trial
    from shardwise.vocabulary.plan import Plan

NEEDED = ("torch", "transformers", "peft", "safetensors")
REPORT_FILE = "report.html"


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A run with its plan, on a machine that has what it needs."""

    trial: Trial
    cuda: bool
    """Whether it runs on cards."""
    speaks: bool
    """Whether this process is the one that speaks and writes: the first of several that a launcher has started."""


def run(options: Options) -> int:
    """Everything, in order; returns 0 when the run has come to its end."""
    if options.one_per_card:
        from shardwise.cli.one_per_card import run_jobs

        require_training()
        return run_jobs(options, {key: value for key, value in key_flags(options).items() if key != "output_dir"})
    if options.more:
        raise UsageError(
            f"{1 + len(options.more)} targets are given; to run each on a card of its own say --one-per-card"
        )
    return _train(get_ready(options), again("train", options))


def get_ready(options: Options) -> Ready:
    """Reads the target, plans if there is no plan yet, and looks whether this machine has the cards.

    Raises:
        ShardwiseError: Whatever the command line, the files or the machine got wrong.
    """
    from shardwise.cli.target import read_target
    from shardwise.launch.environment import rank_environment
    from shardwise.verify import trials

    require_training()
    target = read_target(options.target, key_flags(options))
    if target.run.dataset_name is None:
        raise ConfigError("nothing to train on: name a file, a hub id or random:N with --data")
    joined = rank_environment(os.environ)
    if joined is not None and target.plan is None and options.cluster is None and options.gpus is None:
        raise UsageError(
            f"{joined.launcher} started {joined.world_size} ranks, and each would measure and plan for itself; give "
            "them one plan file, or --cluster FILE"
        )
    prepared = dataclasses.replace(target.run, model_name_or_path=_weights_of(target.run, options))
    plan = target.plan or _plan(options, prepared)
    cuda = plan.cluster.gpu.architecture != "cpu"
    _check_cards(plan, cuda=cuda)
    return Ready(trial=trials.prepare(prepared, plan), cuda=cuda, speaks=joined is None or joined.rank == 0)


def require_training() -> None:
    """Say what is missing before anything is read.

    Raises:
        MissingExtraError: If a package of the extra `train` is not installed.
    """
    for module in NEEDED:
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError("Training", "train", module)


def key_flags(options: Options) -> dict[str, Any]:
    """The keys of a run file that the command line gave, the short spellings included.

    Raises:
        UsageError: If a key is given in both spellings.
    """
    flags = dict(options.keys)
    for key, short, value in (("dataset_name", "data", options.data), ("output_dir", "out", options.out)):
        if value is None:
            continue
        if key in flags:
            raise UsageError(f"--{short} and --{key.replace('_', '-')} are the same; say one of them")
        flags[key] = value
    if options.resume:
        flags.setdefault("resume_from_checkpoint", True)
    return flags


def _weights_of(run: RunFile, options: Options) -> str:
    """The same as `_weights`; a name that is neither a model nor a run to go on with is told as both."""
    try:
        return _weights(run)
    except ShardwiseError as error:
        if not options.resume or options.target is None or run.model_name_or_path != options.target:
            raise
        raise UsageError(
            f"--resume: {options.target} is not the folder of an earlier run (it holds no plan.yaml and run.yaml), and "
            f"as a model: {error}"
        ) from error


def _weights(run: RunFile) -> str:
    """What transformers can load: a folder or a hub id."""
    from shardwise.facts.hub import find_model

    found = find_model(run.model_name_or_path, run.model_revision)
    if found.weights is None and not run.random_init:
        raise ConfigError(
            f"{run.model_name_or_path} is a config file without weights; name its folder, or say --random-init"
        )
    return found.weights or run.model_name_or_path


def _plan(options: Options, run: RunFile) -> Plan:
    from shardwise.trainer.run import data_lengths
    from shardwise.verify import trials

    cluster = cluster_of(options, Path(run.output_dir))
    return trials.plan_run(run, cluster, data_lengths(run))


def _train(ready: Ready, command: str) -> int:
    from shardwise.verify import trials

    trial, cuda = ready.trial, ready.cuda
    if not ready.speaks:
        from shardwise.launch.local import LaunchOptions, launch
        from shardwise.trainer.run import run_training

        ranks = LaunchOptions.of_run(trial.run, trial.candidate.strategy.num_ranks, cuda=cuda)
        launch(run_training, (trial.run, trial.candidate.strategy), ranks)
        return 0
    _say_plan(trial)
    ledger = trials.execute(trial, cuda=cuda, command=command)
    from shardwise.report.folder import read_folder
    from shardwise.report.html import write_report
    from shardwise.report.style import Style
    from shardwise.report.text import ledger_page

    sys.stdout.write(ledger_page(ledger, Style.of(sys.stdout)))
    write_report(read_folder(trial.folder), trial.folder / REPORT_FILE)
    sys.stdout.write(f"{trial.folder / REPORT_FILE}\n")
    return 0


def _check_cards(plan: Plan, *, cuda: bool) -> None:
    """Raises ResourceError if this machine lacks cards that the plan counts on."""
    import torch

    wanted = plan.cluster.gpus_per_node
    if cuda and torch.cuda.device_count() < wanted:
        raise ResourceError(
            f"the plan is for {wanted} × {plan.cluster.gpu.name} a machine, and torch sees {torch.cuda.device_count()} "
            "here; plan for this machine (shardwise probe), or look with shardwise probe --inventory"
        )


def _say_plan(trial: Trial) -> None:
    from shardwise.report import words

    strategy, job = trial.candidate.strategy, trial.plan.job
    say(f"{words.full_name(strategy)}: {words.describe_settings(strategy)}")
    say("  " + words.describe_batch(strategy, job))
    for text in words.sentence_about(trial.candidate, trial.plan):
        say("  " + text)
    say(f"  Why: {trial.plan.reason}")
