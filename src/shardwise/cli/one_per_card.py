"""`shardwise train A B C --one-per-card`: reads the jobs, gives each a card, shows all of them on one page."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from shardwise.cli.options import spelled
from shardwise.cli.target import Target, read_target
from shardwise.errors import ConfigError, UsageError
from shardwise.report.style import Style
from shardwise.report.table import Column, render_table
from shardwise.verify.queue import JobQueue, JobStatus, QueuedJob, Slot, card_slots, core_slots, is_finished
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.units import format_count, format_seconds

if TYPE_CHECKING:
    from shardwise.cli.train_options import Options

COLORS = {"done": "green", "failed": "red", "stopped": "yellow", "running": "bold", "waiting": "dim", "skipped": "dim"}
SAID_SHARE = 0.1
"""Without a terminal, a line is said each time a job has come this share further."""


def run_jobs(options: Options, flags: Mapping[str, Any]) -> int:
    """Runs every target on a card of its own; returns 0 if all have come to their end, otherwise 1.

    Args:
        options: Of `shardwise train`, with all targets.
        flags: The keys of a run file that the command line gave.

    Raises:
        UsageError: The jobs cannot run side by side; all problems.
    """
    names = [name for name in (options.target, *options.more) if name is not None]
    targets = {name: read_target(name, flags) for name in names}
    folders = _folders(names, targets, options.out)
    _refuse(names, targets, folders)
    with tempfile.TemporaryDirectory(prefix="shardwise-queue-") as place:
        cluster = None
        if any(target.plan is None for target in targets.values()):
            cluster = _one_card(options, Path(place))
        jobs = [job_of(options, name, folders[name], None if targets[name].plan else cluster) for name in names]
        on_cpu = _is_cpu(targets, place)
        queue = JobQueue(jobs, _slots(len(jobs), on_cpu=on_cpu), JobPage(sys.stderr))
        ended = queue.run()
    sys.stdout.write("\n".join(table(ended, Style.of(sys.stdout))) + "\n")
    failed = [status for status in ended if status.state == "failed"]
    for status in failed:
        sys.stderr.write(f"{status.job.name}: {status.reason}\n")
    return 1 if failed else 0


def _folders(names: Sequence[str], targets: Mapping[str, Target], parent: str | None) -> dict[str, Path]:
    """The run folder of each job: under the parent if one is given, otherwise its own."""
    if parent is None:
        return {name: Path(targets[name].run.output_dir) for name in names}
    return {name: Path(parent) / (Path(name).name if Path(name).is_dir() else Path(name).stem) for name in names}


def _refuse(names: Sequence[str], targets: Mapping[str, Target], folders: Mapping[str, Path]) -> None:
    problems = [f"{name} is named {count} times" for name, count in Counter(names).items() if count > 1]
    for folder, count in Counter(folders.values()).items():
        if count > 1 and not problems:
            sharing = " and ".join(name for name in names if folders[name] == folder)
            problems.append(
                f"{sharing} would all write to {folder}; give each an output_dir, or one folder for all with --out"
            )
    for name, target in targets.items():
        recommended = target.plan.recommended if target.plan is not None else None
        if recommended is not None and recommended.strategy.num_ranks != 1:
            problems.append(
                f"{name} is a plan for {recommended.strategy.num_ranks} cards, and --one-per-card gives each job one; "
                "plan again for one card, such as with --gpus rtx-5090"
            )
        if target.run.dataset_name is None:
            problems.append(f"{name} names nothing to train on; give dataset_name, or --data for all")
    if problems:
        raise UsageError(*problems)


def _one_card(options: Options, place: Path) -> Path:
    """A cluster file of one card of this machine, written once for all jobs."""
    from shardwise.cli.train_options import cluster_of
    from shardwise.vocabulary import codec

    cluster = cluster_of(options, place, ranks=1)
    path = place / "one-card.yaml"
    one = dataclasses.replace(cluster, name=f"one {cluster.gpu.name}", gpus_per_node=1, num_nodes=1, inter_node=None)
    path.write_text(codec.to_yaml(one), encoding="utf-8")
    return path


def _is_cpu(targets: Mapping[str, Target], place: str) -> bool:
    """Whether the jobs were planned for a machine without cards."""
    from shardwise.vocabulary import codec

    clusters = [target.plan.cluster for target in targets.values() if target.plan is not None]
    path = Path(place) / "one-card.yaml"
    if path.is_file():
        clusters.append(codec.read_noun(Cluster, path))
    kinds = {cluster.gpu.architecture == "cpu" for cluster in clusters}
    if len(kinds) > 1:
        raise ConfigError("some plans are for cards and some for a machine without; run them apart")
    return kinds.pop()


def _slots(num_jobs: int, *, on_cpu: bool) -> list[Slot]:
    if on_cpu:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return core_slots(num_jobs, cores)
    import torch

    slots = card_slots(os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count())
    if not slots:
        raise UsageError("the jobs are planned for cards, and torch sees none here; look with shardwise probe")
    return slots


def job_of(options: Options, name: str, folder: Path, cluster: Path | None) -> QueuedJob:
    """One target as a command line of its own.

    Args:
        options: Of all jobs.
        name: The target.
        folder: Its run folder.
        cluster: The file to plan with; None if the target is planned already.
    """
    keys = {key: value for key, value in options.keys.items() if key != "output_dir"}
    own = dataclasses.replace(
        options,
        target=name,
        more=(),
        one_per_card=False,
        out=str(folder),
        cluster=None if cluster is None else str(cluster),
        gpus=None,
        keys=keys,
    )
    finished = options.resume and is_finished(folder)
    return QueuedJob(name=name, words=tuple(spelled(own)), folder=folder, skipped=finished)


class JobPage:
    """All jobs on one page: renewed in place on a terminal, plain lines elsewhere.

    Args:
        stream: Where to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._renews = stream.isatty() and "CI" not in os.environ
        self._num_lines = 0
        self._said: dict[str, tuple[str, int]] = {}

    def __call__(self, jobs: Sequence[JobStatus]) -> None:
        """The status of all jobs, once more."""
        if self._renews:
            lines = table(jobs, Style.of(self._stream))
            up = f"\033[{self._num_lines}A" if self._num_lines else ""
            self._stream.write(up + "".join(f"\033[2K{line}\n" for line in lines))
            self._num_lines = len(lines)
        else:
            for status in jobs:
                share = int((status.step or 0) / status.num_steps / SAID_SHARE) if status.num_steps else 0
                if self._said.get(status.job.name) != (status.state, share) and status.state != "waiting":
                    self._said[status.job.name] = (status.state, share)
                    self._stream.write(_line(status) + "\n")
        self._stream.flush()


def _line(status: JobStatus) -> str:
    parts = [f"{status.job.name}: {status.state}", status.slot, _steps(status), _loss(status.loss), status.reason]
    return " | ".join(part for part in parts if part)


def _steps(status: JobStatus) -> str:
    return "" if status.step is None else f"step {status.step}/{status.num_steps}"


def _loss(value: float | None) -> str:
    return "" if value is None else f"loss {value:.4f}"


def table(jobs: Sequence[JobStatus], style: Style) -> list[str]:
    """All jobs as lines of a table."""

    def figure(value: float | None) -> str:
        return "" if value is None else f"{value:.4f}"

    columns: list[Column[JobStatus]] = [
        Column(title="job", cell=lambda one: one.job.name, right=False),
        Column(title="state", cell=lambda one: one.state, right=False, colors=lambda one: (COLORS[one.state],)),
        Column(title="on", cell=lambda one: one.slot, right=False, priority=2),
        Column(title="step", cell=lambda one: _steps(one).removeprefix("step ")),
        Column(title="loss", cell=lambda one: figure(one.loss)),
        Column(title="held-out", cell=lambda one: figure(one.eval_loss), priority=1),
        Column(
            title="tokens/s",
            cell=lambda one: "" if one.tokens_per_s is None else format_count(round(one.tokens_per_s)),
            priority=1,
        ),
        Column(title="time", cell=lambda one: format_seconds(one.seconds) if one.seconds else "", priority=2),
        Column(title="folder", cell=lambda one: str(one.job.folder), right=False, priority=3),
    ]
    return render_table(columns, jobs, style)
