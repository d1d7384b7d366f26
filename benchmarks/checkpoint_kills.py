"""Kill ranks of a run with SIGKILL at seeded points, resume, and compare with the run that nobody has killed.

    PYTHONPATH=src python benchmarks/checkpoint_kills.py --points 30 --seed 0

Points are events of one rank, counted while the uninterrupted run goes: of the run (a step's batches are taken, its
gradients clipped, its numbers exchanged, a line logged) or of a save (a write, fsync, rename, unlink, mkdir or rmdir).
One rank or all of them die there; what a launcher would end then is killed a moment later. The resumed run may be split
otherwise. Asked of each case:

    a good checkpoint is found, or none was made yet; nothing is called damaged
    every step's samples are trained, none left out, none twice beyond what the checkpoint had not seen
    metrics.jsonl holds every step once, with the losses of the uninterrupted run: bit by bit under the same strategy,
    to rounding under another; under the same one the files of the last checkpoint have the same hashes too
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from shardwise.trainer.checkpoint import newest_good, read_manifest, tensorfile
from shardwise.trainer.feeder import Feeder
from shardwise.trainer.loop import Loop
from shardwise.trainer.run import RunWishes, run_training
from shardwise.trainer.step import Stepper
from shardwise.trainer.tracking import METRICS_FILE, Tracking
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy

NUM_STEPS, SAVE_STEPS, GLOBAL_BATCH = 12, 3, 8
TOLERANCE = 5e-6
"""Of a loss, where sums are taken in another order."""
LIMIT_S = 300.0
ZERO_3 = Strategy(precision="fp32", micro_batch_size=1, accumulation=4, dp_shard=2, zero_stage=3)
STRATEGIES: dict[str, Strategy] = {
    "zero-3 x 2": ZERO_3,
    "zero-2 x 2": replace(ZERO_3, zero_stage=2),
    "zero-1 x 2": replace(ZERO_3, zero_stage=1),
    "ddp x 2": replace(ZERO_3, zero_stage=0, dp_shard=1, dp_replicate=2),
    "one": replace(ZERO_3, zero_stage=0, dp_shard=1, accumulation=8),
    "zero-3 x 4": replace(ZERO_3, dp_shard=4, accumulation=2),
    "hsdp 2 x 2": replace(ZERO_3, dp_replicate=2, accumulation=2),
}
Kind = Literal["run", "save"]
EVENTS: dict[Kind, tuple[tuple[Any, str], ...]] = {
    "run": ((Feeder, "take"), (Stepper, "clip"), (Stepper, "_update"), (Loop, "_settle"), (Loop, "save"),
            (Tracking, "log")),
    "save": ((tensorfile.HashingFile, "write"), (os, "fsync"), (Path, "rename"), (Path, "unlink"), (Path, "mkdir"),
             (Path, "rmdir")),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where ranks die, and what goes on afterwards."""

    kind: Kind
    at: int
    """Before the n-th event of that kind, on each rank that dies."""
    ranks: tuple[int, ...]
    others_after_s: float
    """How long the ranks that are left live on."""
    resumed_as: str


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a run."""

    run: RunFile
    strategy: Strategy
    notes: Path
    """A folder for what the ranks note."""
    point: Point | None = None


@dataclass(kw_only=True)
class Noted:
    """What the ranks of one start have noted."""

    samples: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Trained samples by step, over all ranks."""
    tokens: dict[int, int] = field(default_factory=dict[int, int])
    """Sum of the token numbers by step: what has really been read."""
    events: dict[Kind, int] = field(default_factory=dict[Kind, int])
    """Events of rank 0."""


def make_model(folder: Path) -> Path:
    """A tiny model without dropout: random streams are compared in `tests/distributed/test_checkpoint_resume.py`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    return folder / "model"


def run_of(model: Path, folder: Path) -> RunFile:
    return RunFile(
        model_name_or_path=str(model),
        dataset_name="random:72",
        max_length=16,
        max_steps=NUM_STEPS,
        num_train_epochs=2,
        learning_rate=1e-3,
        save_steps=SAVE_STEPS,
        save_total_limit=2,
        save_final=False,
        hang_timeout=0.0,
        output_dir=str(folder),
    )


# On the ranks ---------------------------------------------------------------------------------------------------------


def train_rank(rank: int, store: str, start: Start) -> None:
    """One rank of one start; its words go to a file."""
    log = (start.notes / f"log-{rank}.txt").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(start.strategy.num_ranks), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=start.strategy.num_ranks)
    counts: Counter[Kind] = Counter()
    for kind, owners in EVENTS.items():
        for owner, name in owners:
            setattr(owner, name, _counted(getattr(owner, name), kind, counts, start.point, rank))
    note_samples(start.notes / f"samples-{rank}.jsonl")
    run_training(start.run, start.strategy, RunWishes(measure=False))
    (start.notes / f"events-{rank}.json").write_text(json.dumps(counts))
    os._exit(0)


def _counted(
    work: Callable[..., Any], kind: Kind, counts: Counter[Kind], point: Point | None, rank: int
) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[kind] += 1
        if point is not None and point.kind == kind and rank in point.ranks and counts[kind] == point.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return work(*args, **kwargs)

    return counted


def note_samples(path: Path) -> None:
    """Note what every step trains on: the samples by the plan, and the tokens that have come."""
    take, file = Feeder.take, path.open("w")

    def taking(self: Any, step: int) -> Any:
        batches, source = take(self, step), self._source
        rows = [row for micro in source.plan.for_rank(step, source.data_rank) for row in micro.rows]
        samples = [int(sample) for row in rows for sample in row]
        tokens = sum(int(batch.input_ids.sum()) for batch in batches)
        file.write(json.dumps({"step": step, "samples": samples, "tokens": tokens}) + "\n")
        file.flush()
        return batches

    Feeder.take = taking


# From outside ---------------------------------------------------------------------------------------------------------


def carry_out(start: Start) -> list[int | None]:
    """Start the ranks and wait for their end; returns exit codes."""
    start.notes.mkdir(parents=True)
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shardwise.trainer.run", "transformers.models.qwen2.modeling_qwen2", "peft"])
    store = str(start.notes / "store")
    ranks = [
        context.Process(target=train_rank, args=(rank, store, start), daemon=True)
        for rank in range(start.strategy.num_ranks)
    ]
    for process in ranks:
        process.start()
    limit = time.monotonic() + LIMIT_S
    while all(process.exitcode is None for process in ranks) and time.monotonic() < limit:
        time.sleep(0.01)
    if any(process.exitcode for process in ranks) and start.point is not None:
        time.sleep(start.point.others_after_s)
        for process in ranks:
            process.kill()
    for process in ranks:
        process.join(max(limit - time.monotonic(), 0.1))
        process.kill()
        process.join()
    return [process.exitcode for process in ranks]


def read_notes(start: Start) -> Noted:
    noted = Noted()
    for rank in range(start.strategy.num_ranks):
        path = start.notes / f"samples-{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            record = json.loads(line)
            noted.samples.setdefault(record["step"], []).extend(record["samples"])
            noted.tokens[record["step"]] = noted.tokens.get(record["step"], 0) + record["tokens"]
    events = start.notes / "events-0.json"
    if events.exists():
        noted.events = json.loads(events.read_text())
    return noted


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def weights_hashes(folder: Path) -> dict[str, str]:
    """Of the tensors of the last checkpoint, optimizer states included."""
    files = read_manifest(folder / f"checkpoint-{NUM_STEPS}").files
    return {name: record.sha256 for name, record in files.items() if name.endswith(".safetensors")}


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The run that nobody has killed."""

    folder: Path
    noted: Noted


def make_reference(place: Path) -> Reference:
    """Train without being killed."""
    model = make_model(place)
    start = Start(run=run_of(model, place / "whole"), strategy=ZERO_3, notes=place / "whole-notes")
    codes = carry_out(start)
    assert codes == [0, 0], (start.notes / "log-0.txt").read_text()
    return Reference(folder=place / "whole", noted=read_notes(start))


def draw_points(reference: Reference, num_points: int, seed: int) -> list[Point]:
    """Half of them in saves; two of three resume as they were."""
    chance, points = random.Random(seed), list[Point]()
    others = [name for name in STRATEGIES if name != "zero-3 x 2"]
    for number in range(num_points):
        kind: Kind = "save" if number % 2 else "run"
        points.append(
            Point(
                kind=kind,
                at=chance.randint(1, reference.noted.events[kind]),
                ranks=chance.choice(((0,), (1,), (0, 1))),
                others_after_s=chance.choice((0.0, 0.05, 0.5)),
                resumed_as=others[number // 3 % len(others)] if number % 3 == 2 else "zero-3 x 2",
            )
        )
    return points


def check(reference: Reference, point: Point, place: Path) -> dict[str, Any]:
    """Kill, resume, compare; what came out, with a list of problems."""
    run = run_of(reference.folder.parent / "model", place / "run")
    killed = Start(run=run, strategy=ZERO_3, notes=place / "killed", point=point)
    codes = carry_out(killed)
    result: dict[str, Any] = {"kind": point.kind, "at": point.at, "ranks": list(point.ranks), "exit_codes": codes}
    found = newest_good(place / "run")
    problems = [f"called damaged: {text}" for text in found.damaged]
    resumed = Start(
        run=replace(run, resume_from_checkpoint=True),
        strategy=STRATEGIES[point.resumed_as],
        notes=place / "resumed",
    )
    ended = carry_out(resumed)
    result |= {"resumed_after": found.step or 0, "unfinished": len(found.unfinished), "resumed_as": point.resumed_as}
    if -signal.SIGKILL not in codes:
        problems.append(f"nobody died: {codes}")
    if any(ended):
        problems.append(f"the resumed run ended with {ended}: {(resumed.notes / 'log-0.txt').read_text()[-600:]}")
    else:
        problems += compare(reference, (killed, resumed), found.step or 0)
    return {**result, "problems": problems}


def compare(reference: Reference, starts: tuple[Start, Start], done: int) -> list[str]:
    """Samples, losses and weights of a killed and resumed run against those of the whole one."""
    problems: list[str] = []
    before, after = (read_notes(start) for start in starts)
    if sorted(after.samples) != list(range(done, NUM_STEPS)):
        problems.append(f"resumed after {done}, but trained the steps {sorted(after.samples)}")
    if any(step not in before.samples for step in range(done)):
        problems.append(f"a checkpoint of step {done}, but trained only {sorted(before.samples)}")
    for step in range(NUM_STEPS):
        noted, whole = (after if step >= done else before), reference.noted
        if sorted(noted.samples.get(step, [])) != sorted(whole.samples[step]):
            problems.append(f"step {step} trained other samples")
        elif noted.tokens[step] != whole.tokens[step]:
            problems.append(f"step {step} trained other tokens")
    folder, same = Path(starts[0].run.output_dir), starts[1].strategy == ZERO_3
    found, expected = losses(folder), losses(reference.folder)
    if [step for step, _ in found] != list(range(1, NUM_STEPS + 1)):
        problems.append(f"metrics.jsonl holds the steps {[step for step, _ in found]}")
    else:
        worst = max(abs(a - b) for (_, a), (_, b) in zip(found, expected, strict=True))
        if worst > (0.0 if same else TOLERANCE):
            problems.append(f"a loss differs by {worst:.3g}")
    if same and weights_hashes(folder) != weights_hashes(reference.folder):
        problems.append("the last checkpoint holds other weights or optimizer states")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "checkpoint_kills.json")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    place, started = Path(tempfile.mkdtemp(prefix="kills-")), time.monotonic()
    reference = make_reference(place)
    cases: list[dict[str, Any]] = []
    for number, point in enumerate(draw_points(reference, arguments.points, arguments.seed)):
        cases.append(check(reference, point, place / str(number)))
        print(json.dumps(cases[-1]), flush=True)
        if not cases[-1]["problems"]:
            shutil.rmtree(place / str(number))
    failed = sum(bool(case["problems"]) for case in cases)
    result = {
        "date": date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, gloo",
        "torch": torch.__version__,
        "seed": arguments.seed,
        "strategy": ZERO_3.name,
        "steps": NUM_STEPS,
        "save_steps": SAVE_STEPS,
        "events_of_a_run": reference.noted.events,
        "num_cases": len(cases),
        "num_failed": failed,
        "seconds": round(time.monotonic() - started, 1),
        "cases": cases,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(cases) - failed} of {len(cases)} cases hold; {arguments.out}")
    if not failed:
        shutil.rmtree(place)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
