"""How fast the planner answers: a usual plan from a cold start, and every split of 512 cards.

    python benchmarks/planner_speed.py [--out benchmarks/results/planner_speed.json]

Targets: 300 ms for `shardwise plan qwen2.5-7b --gpus 2xrtx-5090` with Python's own start, 20,000 candidates under 2 s,
memory flat (a large search holds no more than what it answers with).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import shardwise
from shardwise.facts import catalog
from shardwise.planner.answer import make_plan
from shardwise.planner.search import Wishes, strategies, survey
from shardwise.vocabulary.job import Job

COMMAND = ("-m", "shardwise", "plan", "qwen2.5-7b", "--gpus", "2xrtx-5090")


def cold_start(runs: int) -> dict[str, float]:
    """Seconds of the whole command, new process each time; the first, which may compile bytecode, not counted."""
    environment = os.environ | {"PYTHONPATH": str(Path(shardwise.__file__).parents[1])}
    wall, processor = list[float](), list[float]()
    for _ in range(runs + 1):
        before, start = os.times(), time.perf_counter()
        subprocess.run([sys.executable, *COMMAND], check=True, capture_output=True, env=environment)
        after = os.times()
        wall.append(time.perf_counter() - start)
        processor.append(after.children_user - before.children_user + after.children_system - before.children_system)
    return {
        "median_wall_seconds": round(statistics.median(wall[1:]), 3),
        "best_wall_seconds": round(min(wall[1:]), 3),
        "median_processor_seconds": round(statistics.median(processor[1:]), 3),
    }


def large_search() -> dict[str, Any]:
    """Every mesh, stage, micro-batch, checkpointing and loss of 512 cards."""
    cluster = catalog.parse_gpus("64x8xh100")
    job = Job(model=catalog.model("llama-3.1-70b"), global_batch_size=1024)
    wishes = Wishes(every_axis=True)
    count = sum(1 for _ in strategies(job, cluster, wishes))
    start, processor = time.perf_counter(), time.process_time()
    candidates, _ = survey(job, cluster, wishes)
    wall, processor = time.perf_counter() - start, time.process_time() - processor
    tracemalloc.start()
    survey(job, cluster, wishes)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "candidates": count,
        "answers": len(candidates),
        "wall_seconds": round(wall, 3),
        "processor_seconds": round(processor, 3),
        "candidates_per_processor_second": round(count / processor),
        "peak_python_bytes": peak,
    }


def usual_plan(runs: int) -> dict[str, float]:
    """make_plan alone, in a warm process."""
    cluster = catalog.parse_gpus("2xrtx-5090")
    job = Job(model=catalog.model("qwen2.5-7b"), tuning="any")
    seconds = list[float]()
    for _ in range(runs):
        start = time.process_time()
        make_plan(job, cluster)
        seconds.append(time.process_time() - start)
    return {"median_processor_seconds": round(statistics.median(seconds), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "planner_speed.json")
    options = parser.parse_args()
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 1),
        "cold_start": cold_start(options.runs),
        "usual_plan": usual_plan(options.runs),
        "large_search": large_search(),
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
