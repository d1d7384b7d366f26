"""How long a save keeps the training waiting, and how much slower the steps are while it is being written.

    PYTHONPATH=src python benchmarks/checkpoint_blocking.py --model llama-3.1-8b --ranks 4 --folder /fast/disk
    PYTHONPATH=src python benchmarks/checkpoint_blocking.py --model smollm2-135m --ranks 2 --steps 1

Random weights, random tokens, ZeRO-3 with fp32 masters and AdamW (12 bytes a parameter in the checkpoint). After two
steps of warm-up come: steps without a save; a save in the background, with steps until it is durable; and a second
save, whose plan and memory are there already. A save blocks for what `save` takes on the host, and for what the step
after it takes longer than others, because the optimizer waits for the copies. The slowest rank counts.

Target for the 8B shape on four cards: 0.3 s. The first save counts too, since `prepare` has pinned the memory before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.launch.local import LaunchOptions, launch
from shardwise.trainer.feeder import Feeder
from shardwise.trainer.loop import LoopParts
from shardwise.trainer.mesh import build_mesh, choose_device, join_ranks, local_rank
from shardwise.trainer.prepare import RunWishes, prepare_run
from shardwise.trainer.run import RunStart, assemble, guarded
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy

NUM_WARM, TARGET_S = 2, 0.3
MOST_STEPS = 400


@dataclass(frozen=True, kw_only=True)
class Save:
    """One save in the background, in seconds; the slowest rank's."""

    call_s: float
    """The call of `save`."""
    next_step_s: float
    """The step right after it."""
    durable_s: float
    """From the call until it is durable."""
    other_steps_s: float
    """Median of the further steps while it was written."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured."""

    prepare_s: float
    """The call of `prepare`, after the first step."""
    step_s: float
    """Median step without a save."""
    checkpoint_bytes: int
    saves: tuple[Save, ...]

    def blocked_s(self, save: Save) -> float:
        """What the training has waited for."""
        return save.call_s + max(save.next_step_s - self.step_s, 0.0)


class Timed:
    """Steps of a run one by one, each timed until the card is done."""

    def __init__(self, parts: LoopParts) -> None:
        self.parts, self.feeder, self.done = parts, Feeder(parts.train), 0
        self.num_saved = self.num_bytes = 0

    def step(self) -> float:
        """One optimizer step; returns seconds."""
        started, plan = time.perf_counter(), self.parts.train.plan
        batches = self.feeder.take(self.done)
        tokens = plan.num_supervised_tokens(self.done)
        self.parts.stepper.run(self.feeder.on_device(batches), len(batches), tokens)
        self.done += 1
        self.parts.position.next_step = self.done
        synchronize()
        return time.perf_counter() - started

    def save(self) -> Save:
        """A save in the background, and steps until it is durable on every rank."""
        started, checkpointer = time.perf_counter(), self.parts.checkpointer
        checkpointer.save(self.parts.app_state, self.done, blocking=False)
        call = time.perf_counter() - started
        following, others = self.step(), [self.step()]
        report = checkpointer.poll()
        while not self._agree(report is not None) and self.done < MOST_STEPS // 2 * (1 + self.num_saved):
            others.append(self.step())
            report = report or checkpointer.poll()
        report = report or checkpointer.wait()
        assert report is not None, "the save has no report"
        self.num_saved += 1
        self.num_bytes = report.num_bytes
        mine = [call, following, report.total_s, statistics.median(others)]
        worst = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self.parts.stepper.mesh.control)
        call, following, durable, other = worst.tolist()
        return Save(call_s=call, next_step_s=following, durable_s=durable, other_steps_s=other)

    def _agree(self, done: bool) -> bool:
        """Whether every rank says yes, so that all take the same number of steps."""
        flag = torch.tensor(int(done))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.parts.stepper.mesh.control)
        return bool(flag.item())


def synchronize() -> None:
    """Wait for the card."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(run: RunFile, strategy: Strategy, num_steps: int) -> Result:
    """On every rank: warm up, plain steps, two saves."""
    device = choose_device(local_rank())
    wishes = RunWishes(measure=False)
    prepared = prepare_run(run, strategy, wishes)
    join_ranks(device)
    try:
        mesh = build_mesh(strategy, device)
        start = RunStart(run=run, strategy=strategy, wishes=wishes, prepared=prepared, mesh=mesh)
        with guarded(start):
            parts, _ = assemble(start)
            timed = Timed(parts)
            timed.step()
            began = time.perf_counter()
            parts.checkpointer.prepare(parts.app_state)
            prepare_s = time.perf_counter() - began
            for _ in range(NUM_WARM - 1):
                timed.step()
            step_s = statistics.median(timed.step() for _ in range(num_steps))
            parts.checkpointer.wait_until_prepared()
            saves = (timed.save(), timed.save())
            timed.feeder.close()
            parts.checkpointer.close()
        return Result(prepare_s=prepare_s, step_s=step_s, checkpoint_bytes=timed.num_bytes, saves=saves)
    finally:
        dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="without a save")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--folder", type=Path, help="on the disk to write to; default: the temporary folder")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "checkpoint_blocking.json")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="blocking-", dir=arguments.folder) as folder:
        run = RunFile(
            model_name_or_path=arguments.model, random_init=True, bf16=cuda, max_length=arguments.length,
            dataset_name=f"random:{MOST_STEPS * arguments.ranks}", max_steps=MOST_STEPS, num_train_epochs=1,
            save_strategy="steps", save_steps=MOST_STEPS, save_total_limit=1, save_final=False,
            output_dir=str(Path(folder) / "run"), gradient_checkpointing=True, loss="chunked",
        )  # fmt: skip
        strategy = Strategy(
            precision="bf16" if cuda else "fp32", micro_batch_size=1, accumulation=1, dp_shard=arguments.ranks,
            zero_stage=3 if arguments.ranks > 1 else 0, checkpointing="full", loss="chunked",
        )  # fmt: skip
        options = LaunchOptions(num_ranks=arguments.ranks, device="cuda" if cuda else "cpu")
        result: Result = launch(measure, (run, strategy, arguments.steps), options)
    record: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, "
        + (f"{arguments.ranks} x {torch.cuda.get_device_name()}" if cuda else "CPU, gloo"),
        "torch": torch.__version__,
        "model": arguments.model,
        "strategy": strategy.name,
        "target_s": TARGET_S,
        "blocked_s": [round(result.blocked_s(save), 4) for save in result.saves],
        **asdict(result),
    }
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
