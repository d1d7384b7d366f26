"""What `shardwise train` may be told, and the machine that it plans for: for one run, and for a queue of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.options import POSITIONAL, flags_of
from shardwise.errors import UsageError
from shardwise.vocabulary.run import RunFile

if TYPE_CHECKING:
    from shardwise.vocabulary.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Options:
    """Fine-tune: plan the split, run it on this machine's cards, lay prediction beside measurement, report.

    TARGET is a model (catalogue name, folder or hub id), a run file, a plan file, or the folder of an earlier run.
    Started by torchrun or Slurm, it joins the ranks that are there. Every key of a run file is a flag, and flags win.

    Examples:
      shardwise train Qwen/Qwen2.5-0.5B --data chats.jsonl --cluster cluster.yaml
      shardwise train run.yaml --learning-rate 1e-5 --max-steps 100
      shardwise train plan.yaml --data chats.jsonl --out runs/first
      shardwise train runs/first --resume
      shardwise train a.yaml b.yaml c.yaml --one-per-card
      torchrun --nproc-per-node=4 -m shardwise train plan.yaml --data chats.jsonl
    """

    target: str | None = field(default=None, metadata=POSITIONAL)
    """A model, a run file, a plan file, or the folder of an earlier run."""
    more: tuple[str, ...] = field(default=(), metadata=POSITIONAL)
    """Further ones, with --one-per-card."""
    one_per_card: bool = False
    """Run every target as a job of its own, one on each card, the rest waiting; --out is then the folder of all."""
    data: str | None = None
    """The same as --dataset-name."""
    out: str | None = None
    """The same as --output-dir."""
    resume: bool = False
    """Go on after the newest good checkpoint of the run folder."""
    cluster: str | None = None
    """The cluster file to plan with, as `shardwise probe` writes it; measured now (within 20 s) if nothing is said."""
    gpus: str | None = None
    """Plan with data sheets instead, such as 2xrtx-5090."""
    keys: dict[str, Any] = field(default_factory=dict[str, Any], metadata=flags_of(RunFile))
    """The keys of a run file that were given as flags."""


def cluster_of(options: Options, folder: Path, ranks: int | None = None) -> Cluster:
    """The machine to plan for: a file, data sheets, or what is measured now.

    Args:
        options: For --cluster and --gpus.
        folder: Where the disk is measured.
        ranks: How many ranks to measure with; None: all cards.

    Raises:
        ShardwiseError: The file or the cards cannot be read, or measuring has failed.
    """
    from shardwise.vocabulary import codec
    from shardwise.vocabulary.cluster import Cluster

    if options.cluster is not None and options.gpus is not None:
        raise UsageError("--cluster and --gpus both say what the machine is; say one of them")
    if options.cluster is not None:
        return codec.read_noun(Cluster, Path(options.cluster))
    if options.gpus is not None:
        from shardwise.facts.catalog import parse_gpus

        return parse_gpus(options.gpus)
    from shardwise.probe.launch import measure
    from shardwise.probe.options import ProbeOptions

    say("Measuring the cards and the wire (within 20 s; --cluster FILE skips this)")
    folder.mkdir(parents=True, exist_ok=True)
    return measure(ProbeOptions(quick=True, ranks=ranks, checkpoint_dir=folder))


def say(text: str) -> None:
    """One line for the person who waits, beside the output."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
