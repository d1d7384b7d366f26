"""Does the plan change where the wire says so, and was it right? Two machines on a shaped link, trained for real.

Needs what shaped_link.py needs, and torch and transformers:

    PYTHONPATH=src python benchmarks/shaped_link_plan.py --out benchmarks/results

A small Llama of random weights, one long sequence a rank and step, fp32, gloo. The card is said to be so small that
replicated weights fit only if every block is recomputed, while weights whose optimizer states are sharded fit with
selective recomputation. So the choice is between more compute (DDP) and more wire (ZeRO-1), and the wire decides it.
For each rate the link is probed, the job planned with the measured cluster, and both contenders are run for a few
steps, turn by turn; the plan is right if the one it chose is the faster one.

On a machine that others use, wall time says how busy it was. So the processor time of a step is taken as well (rank 0,
all threads, gloo's among them), which a full machine does not stretch.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from shaped_link import in_both, probe_shaped, shaped_link, why_impossible

from shardwise.planner.answer import make_plan
from shardwise.verify.trials import job_of, wishes_of
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.codec import read_noun, to_yaml
from shardwise.vocabulary.plan import Candidate, Plan
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy

HIDDEN, LAYERS, VOCABULARY, SEQUENCE = 256, 8, 2048, 1024
STEPS = 5
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 4 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": SEQUENCE,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
MORE_COMPUTE, MORE_WIRE = ("DDP", "full"), ("ZeRO-1", "selective")
"""The contenders: name of the strategy, and checkpointing."""
SAME = 0.05
"""Contenders nearer than this to each other are a draw: either choice is right."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[50, 200, 1000], help="Mbit/s")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of probing for each rate")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each contender")
    parser.add_argument("--plan-only", action="store_true", help="do not train")
    parser.add_argument("--out", type=Path, help="folder for the result")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        return train_in_namespace(arguments.child)
    why = why_impossible()
    if why:
        print(f"cannot shape a link here: {why}")
        return 2
    with tempfile.TemporaryDirectory() as name:
        result = examine(Path(name), arguments)
    print(json.dumps(result, indent=2))
    if arguments.out is not None:
        (arguments.out / "plan_shaped_link.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(row["choice_was_right"] is not False for row in result["rows"]) else 1


def examine(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Probe, plan and train at every rate."""
    load = os.getloadavg()[0]
    run = run_file(folder)
    clusters = {
        rate: probe_shaped(rate, arguments.budget, ("compute", "wire")).cluster for rate in arguments.rates
    }  # fmt: skip
    memory = contested_memory(run, clusters[arguments.rates[0]])
    rows: list[dict[str, Any]] = []
    for rate, cluster in clusters.items():
        plan = plan_for(run, cluster, memory)
        runs = {} if arguments.plan_only else trained(folder, rate, run, plan, arguments.repeats)
        rows.append(row(rate, plan, runs))
        print(f"{rate:g} Mbit/s: {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
    return {
        "what": "plans from a probe over a link of known rate, and the steps of both contenders, measured",
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
        "load_before": load,
        "model": f"Llama, {LAYERS} layers of {HIDDEN}, one sequence of {SEQUENCE} tokens a rank, fp32",
        "card_memory_bytes": memory,
        "choices": {f"{rate:g}": row["chosen"] for rate, row in zip(clusters, rows, strict=True)},
        "rows": rows,
    }


def run_file(folder: Path) -> RunFile:
    """The job."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    return RunFile(
        model_name_or_path=str(model), random_init=True, dataset_name=f"random:{4 * STEPS}", max_length=SEQUENCE,
        per_device_train_batch_size=1, gradient_accumulation_steps=1, bf16=False, tuning="full", loss="plain",
        torch_compile=False, max_steps=STEPS, save_strategy="no", save_final=False,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a contender's run measured."""

    step_seconds: tuple[float, ...]
    """Of each step but the first. The fastest counts: other programs on the machine only ever slow a step down."""
    cpu_seconds: tuple[float, ...]
    """Processor time of rank 0 in each step but the first."""
    load: float
    """The machine's load average when it was over."""


def plan_for(run: RunFile, cluster: Cluster, memory: int | None = None) -> Plan:
    """Every candidate, for cards of `memory` bytes."""
    if memory is not None:
        cluster = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, memory_bytes=memory))
    wishes = dataclasses.replace(wishes_of(run), every_candidate=True)
    return make_plan(job_of(run, cluster), cluster, wishes)


def contender(plan: Plan, which: tuple[str, str]) -> Candidate:
    """The candidate of that name and checkpointing."""
    return next(each for each in plan.candidates if (each.strategy.name, each.strategy.checkpointing) == which)


def contested_memory(run: RunFile, cluster: Cluster) -> int:
    """The least with which both contenders fit; DDP must not fit there without recomputing everything."""

    def fit(plan: Plan, which: tuple[str, str]) -> bool:
        return contender(plan, which).fits

    largest = max(contender(plan_for(run, cluster), which).memory.device_bytes for which in (MORE_COMPUTE, MORE_WIRE))
    for percent in range(90, 200):
        memory = largest * percent // 100
        plan = plan_for(run, cluster, memory)
        if fit(plan, MORE_COMPUTE) and fit(plan, MORE_WIRE):
            if fit(plan, ("DDP", "selective")):
                break
            return memory
    raise SystemExit("no memory separates the contenders; take a longer sequence or a larger model")


def trained(folder: Path, rate: float, run: RunFile, plan: Plan, repeats: int) -> dict[tuple[str, str], list[Run]]:
    """Both contenders, run over the shaped link, turn by turn."""
    found: dict[tuple[str, str], list[Run]] = {MORE_COMPUTE: [], MORE_WIRE: []}
    with shaped_link(rate):
        for repeat in range(repeats):
            for which, runs in found.items():
                place = folder / f"{rate:g}-{which[0]}-{repeat}"
                place.mkdir()
                mine = dataclasses.replace(run, output_dir=str(place))
                (place / "told-run.yaml").write_text(to_yaml(mine))
                (place / "told-strategy.yaml").write_text(to_yaml(contender(plan, which).strategy))
                in_both(900, __file__, "--child", str(place))
                cpu = json.loads((place / "cpu.json").read_text())
                runs.append(Run(step_seconds=step_times(place)[1:], cpu_seconds=tuple(cpu), load=os.getloadavg()[0]))
    return found


def step_times(place: Path) -> tuple[float, ...]:
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return tuple(float(line["step_time"]) for line in lines if "step_time" in line)


class CpuClock(threading.Thread):
    """Reads this process's processor time whenever a step has been written down."""

    def __init__(self, file: Path) -> None:
        super().__init__(daemon=True)
        self._file = file
        self._over = threading.Event()
        self.marks: list[float] = []

    def run(self) -> None:
        while not self._over.wait(0.02):
            done = self._file.read_text().count('"step_time"') if self._file.exists() else 0
            while len(self.marks) < done:
                self.marks.append(time.process_time())

    def of_steps(self) -> list[float]:
        """Between one step's end and the next one's; a step whose end was missed counts with its neighbor."""
        self._over.set()
        self.join()
        return [after - before for before, after in itertools.pairwise(self.marks)]


def train_in_namespace(place: Path) -> int:
    """One rank."""
    from shardwise.launch.local import LaunchOptions, launch
    from shardwise.trainer.run import run_training

    run, strategy = read_noun(RunFile, place / "told-run.yaml"), read_noun(Strategy, place / "told-strategy.yaml")
    clock = CpuClock(place / "metrics.jsonl")
    clock.start()
    launch(run_training, (run, strategy), LaunchOptions(num_ranks=2, device="cpu"))
    if os.environ["RANK"] == "0":
        (place / "cpu.json").write_text(json.dumps(clock.of_steps()))
    return 0


def row(rate: float, plan: Plan, measured: dict[tuple[str, str], list[Run]]) -> dict[str, Any]:
    """Choice, predictions and measurements at one rate."""
    best = plan.recommended
    chosen = None if best is None else (best.strategy.name, best.strategy.checkpointing)
    contenders: list[dict[str, Any]] = []
    for which in (MORE_COMPUTE, MORE_WIRE):
        candidate, runs = contender(plan, which), measured.get(which, [])
        seconds = [each for found in runs for each in found.step_seconds]
        cpu = [each for found in runs for each in found.cpu_seconds]
        fastest = min(seconds, default=None)
        contenders.append({
            "strategy": which[0],
            "checkpointing": which[1],
            "fits": candidate.fits,
            "predicted_seconds": candidate.step.seconds,
            "predicted_compute_seconds": candidate.step.compute_seconds,
            "predicted_wire_seconds": candidate.step.wire_seconds,
            "measured_seconds": fastest,
            "measured_median_seconds": statistics.median(seconds) if seconds else None,
            "measured_cpu_seconds": statistics.median(cpu) if cpu else None,
            "every_step_seconds": [found.step_seconds for found in runs],
            "predicted_over_measured": None if fastest is None else candidate.step.seconds / fastest,
            "load": [found.load for found in runs],
        })  # fmt: skip
    network = plan.cluster.inter_node
    assert network is not None
    return {
        "shaped_mbit_per_s": rate,
        "link_mbit_per_s": network.bandwidth_bytes_per_s * network.attained_fraction * 8 / 1e6,
        "chosen": chosen,
        "contenders": contenders,
        "choice_was_right": was_right(chosen, contenders),
    }


def was_right(chosen: tuple[str, str] | None, contenders: list[dict[str, Any]]) -> bool | None:
    """Whether the chosen contender was the faster one, or as fast; None if nothing was measured."""
    times = {(each["strategy"], each["checkpointing"]): each["measured_seconds"] for each in contenders}
    if any(seconds is None for seconds in times.values()):
        return None
    if chosen not in times:
        return False
    return times[chosen] <= (1 + SAME) * min(times.values())


if __name__ == "__main__":
    sys.exit(main())
