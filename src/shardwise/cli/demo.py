"""`shardwise demo`: the main job from end to end on whatever this machine has."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardwise.cli.options import again
from shardwise.errors import UsageError
from shardwise.report.style import Style
from shardwise.vocabulary.limits import Count, Degree
from shardwise.vocabulary.strategy import ZeroStage
from shardwise.vocabulary.units import format_seconds

if TYPE_CHECKING:
    from shardwise.verify.trials import Trial
    from shardwise.vocabulary.cluster import Cluster
    from shardwise.vocabulary.ledger import Ledger
    from shardwise.vocabulary.run import RunFile

TRAIN_FILE, HELD_OUT_FILE = "multi_gpu_qa.jsonl", "multi_gpu_qa_heldout.jsonl"
REPORT_FILE = "report.html"
PROMPT = "What does ZeRO stage 3 shard?"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Probe this machine, plan, fine-tune a real 135M model, verify the prediction, and report.

    Uses the CUDA cards if there are any, otherwise two ranks on the CPU. Needs no download: the weights come with a
    package, the questions and answers with the project.

    Examples:
      shardwise demo
      shardwise demo --tuning lora --steps 40 --out runs/lora
    """

    out: str | None = None
    """The run folder; runs/demo-<time> if nothing is said."""
    model: str | None = None
    """Another model: a folder, a catalogue name or a hub id."""
    data: str | None = None
    """The folder with the two data files; examples/data of the project if nothing is said."""
    steps: Count = 20
    """Optimizer steps."""
    global_batch: Count = 8
    """Packed rows of 256 tokens in one optimizer step."""
    tuning: Literal["any", "full", "lora"] = "any"
    """What may be trained; any plans both and lets the rules decide."""
    ranks: Degree | None = None
    """Ranks; all cards, or two without a card, if nothing is said."""
    zero: ZeroStage | None = None
    """ZeRO stage to run instead of the planner's choice."""


def run(options: Options) -> int:
    """Everything, in order; returns 0 when the run is verified."""
    from shardwise.report.folder import read_folder
    from shardwise.report.html import write_report
    from shardwise.report.verdict import verdict
    from shardwise.verify import trials
    from shardwise.verify.busy import read_cpu_times, share_of_others

    started = time.perf_counter()
    say = _Teller(started)
    folder = Path(options.out or f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty; name another folder with --out")
    say.chapter("1 of 5", "Probe: what are the cards and the wire like?")
    cluster = _probe(options, folder)
    say.chapter("2 of 5", "Plan: which split, and what will it cost?")
    run_file = _run_file(options, folder)
    trial = _plan(options, run_file, cluster)
    say.chapter("3 of 5", f"Train: {trial.candidate.strategy.name}, {options.steps} steps")
    before = read_cpu_times()
    ledger = trials.execute(trial, cuda=cluster.gpu.architecture != "cpu", command=again("demo", options))
    others = share_of_others(before, read_cpu_times())
    say.chapter("4 of 5", "Verify: was the plan right?")
    sys.stdout.write("".join(f"{text}\n" for text in verdict(trial.candidate, ledger, others)) + "\n")
    sys.stdout.write(_ledger_text(ledger))
    say.chapter("5 of 5", "Report")
    write_report(read_folder(folder), folder / REPORT_FILE)
    say.result(folder)
    return 0


class _Teller:
    """Chapter headings with the time since the start."""

    def __init__(self, started: float) -> None:
        self.started = started

    def chapter(self, number: str, title: str) -> None:
        """A heading."""
        sys.stdout.flush()
        elapsed = format_seconds(time.perf_counter() - self.started)
        sys.stderr.write(f"\n== {number} ({elapsed}) == {title}\n")
        sys.stderr.flush()

    def result(self, folder: Path) -> None:
        """Where everything lies; the page's path is the last line."""
        elapsed = format_seconds(time.perf_counter() - self.started)
        sys.stdout.write(
            f"The run folder {folder} holds plan.yaml, cluster.yaml, ledger.json, metrics.jsonl, a checkpoint and the\n"
            f"exported model in {folder / 'final'} (loads with AutoModelForCausalLM). It all took {elapsed}.\n"
            f"{folder / REPORT_FILE}\n"
        )


def _probe(options: Options, folder: Path) -> Cluster:
    from shardwise.probe.launch import probe
    from shardwise.probe.options import ProbeOptions
    from shardwise.probe.page import report_page
    from shardwise.verify.opening import CLUSTER_FILE

    folder.mkdir(parents=True, exist_ok=True)
    report = probe(ProbeOptions(quick=True, ranks=options.ranks, out=folder / CLUSTER_FILE, checkpoint_dir=folder))
    sys.stdout.write(report_page(report))
    return report.cluster


def _run_file(options: Options, folder: Path) -> RunFile:
    from shardwise.trainer.packaged import smollm2_folder
    from shardwise.vocabulary.run import RunFile

    data = _data_folder(options)
    return RunFile(
        model_name_or_path=options.model or str(smollm2_folder()),
        dataset_name=str(data / TRAIN_FILE),
        eval_dataset_name=str(data / HELD_OUT_FILE),
        output_dir=str(folder),
        max_length=256,
        packing=True,
        global_batch_size=options.global_batch,
        max_steps=options.steps,
        learning_rate=1e-3 if options.tuning == "lora" else 1e-4,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        eval_strategy="steps",
        eval_steps=options.steps,
        save_steps=options.steps,
        tuning=options.tuning,
        sample_prompt=PROMPT,
        zero_stage=options.zero,
    )


def _data_folder(options: Options) -> Path:
    """The folder with the questions and answers: as given, of the checkout, or of the current folder."""
    checkout = Path(__file__).parents[3] / "examples" / "data"
    wished = [Path(options.data)] if options.data is not None else [checkout, Path("examples/data")]
    for folder in wished:
        if (folder / TRAIN_FILE).is_file() and (folder / HELD_OUT_FILE).is_file():
            return folder
    names = " or ".join(str(folder) for folder in wished)
    raise UsageError(f"{TRAIN_FILE} and {HELD_OUT_FILE} are not in {names}; name their folder with --data")


def _plan(options: Options, run: RunFile, cluster: Cluster) -> Trial:
    """Plan for the data as it is, and show the page."""
    from shardwise.report.text import plan_page
    from shardwise.trainer.run import data_lengths
    from shardwise.verify import trials

    plan = trials.plan_run(run, cluster, data_lengths(run))
    sys.stdout.write(plan_page(plan, Style.of(sys.stdout)))
    sys.stdout.flush()
    return trials.prepare(run, plan)


def _ledger_text(ledger: Ledger) -> str:
    from shardwise.report.text import ledger_page

    return ledger_page(ledger, Style.of(sys.stdout))
