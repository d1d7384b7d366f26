"""What the sentinels cost: time inside each of their calls over a short run, in a table.

    python benchmarks/sentinels.py [MODEL] [--ranks N] [--steps N] [--batch N]

CPU time of the main thread and elapsed time; the exchange that a look at gradients or replicas waits in is in the
latter. On a card the looks wait for the queue to drain, which the elapsed time of a step shows, not this table.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from shardwise.launch.local import LaunchOptions, launch
from shardwise.trainer.packaged import smollm2_folder
from shardwise.trainer.run import RunWishes, run_training
from shardwise.trainer.sentinels.hang import HangWatch
from shardwise.trainer.sentinels.watch import StepWatch
from shardwise.trainer.step import Stepper
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy

Samples = dict[str, list[tuple[float, float]]]
WATCHED: tuple[tuple[Any, str], ...] = (
    (Stepper, "run"),
    (StepWatch, "begin"),
    (StepWatch, "backward"),
    (StepWatch, "end"),
    (StepWatch, "numbers"),
    (StepWatch, "judge"),
    (StepWatch, "boundary"),
    (HangWatch, "at"),
)


def timed(samples: Samples, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        cpu, wall = time.thread_time(), time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            samples[name].append((time.thread_time() - cpu, time.perf_counter() - wall))

    return run


def measure(run: RunFile, strategy: Strategy) -> Samples:
    """A run with every call of the sentinels timed; on each rank, rank 0's samples come back."""
    samples: Samples = defaultdict(list)
    for owner, name in WATCHED:
        setattr(owner, name, timed(samples, f"{owner.__name__}.{name}", getattr(owner, name)))
    run_training(run, strategy, RunWishes(measure=False))
    return dict(samples)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    arguments = parser.parse_args()
    run = RunFile(
        model_name_or_path=arguments.model or str(smollm2_folder()),
        random_init=True,
        dataset_name=f"random:{4 * arguments.batch}",
        max_length=64,
        max_steps=arguments.steps,
        save_strategy="no",
        save_final=False,
        output_dir=tempfile.mkdtemp(prefix="shardwise-sentinels-"),
    )
    strategy = Strategy(
        dp_replicate=arguments.ranks, accumulation=max(1, arguments.batch // arguments.ranks // 4), micro_batch_size=4
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    samples: Samples = launch(measure, (run, strategy), LaunchOptions(num_ranks=arguments.ranks, device=device))
    print(f"{'call':<22}{'calls':>6}{'median cpu':>13}{'median wall':>13}{'largest wall':>14}")
    for name, taken in samples.items():
        cpu, wall = (statistics.median(part) * 1e3 for part in zip(*taken, strict=True))
        print(f"{name:<22}{len(taken):>6}{cpu:>10.3f} ms{wall:>10.3f} ms{max(w for _, w in taken) * 1e3:>11.1f} ms")


if __name__ == "__main__":
    main()
