"""Predicted beside measured for real shapes on the cards of this machine: random weights, random tokens.

    PYTHONPATH=src python benchmarks/train.py --out FOLDER [--only '1.5b;lora'] [--cluster cluster.yaml] [--limit 500]

For each case the plan is made first (from the cluster file, or from data sheets) and kept as it was; then the same
`train` that users call runs it. Writes train.json: every prediction, every measurement, versions, machine and date.
A case is a child process with a time limit, so that one that fails or hangs costs only itself.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SEQUENCE = 4096
CASE_SECONDS = 170


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    name: str
    model: str
    cards: int
    keys: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keys of the run file beside the common ones."""
    steps: int = 9
    environment: dict[str, str] = field(default_factory=dict[str, str])


def _full(model: str, cards: int, stage: int, micro_batch: int, **keys: Any) -> Case:
    name = f"{model} full, {cards} cards, stage {stage}, mb {micro_batch}" + "".join(
        f", {k} {v}" for k, v in keys.items()
    )
    keys = {"zero_stage": stage, "per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": 1} | keys
    keys.setdefault("gradient_checkpointing", "none")
    return Case(name=name, model=model, cards=cards, keys=keys)


def _lora(model: str, cards: int, micro_batch: int, **keys: Any) -> Case:
    return Case(
        name=f"{model} lora r16, {cards} cards, mb {micro_batch}" + "".join(f", {k} {v}" for k, v in keys.items()),
        model=model,
        cards=cards,
        keys={"tuning": "lora", "per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": 1,
              "gradient_checkpointing": "none", "zero_stage": 0} | keys,
    )  # fmt: skip


HOST_MEMORY = {"NCCL_P2P_DISABLE": "1"}
CASES = (
    _full("qwen2.5-1.5b", 2, 3, 4),
    _full("qwen2.5-1.5b", 2, 0, 4),
    _full("qwen2.5-1.5b", 2, 1, 4),
    _full("qwen2.5-1.5b", 2, 2, 4),
    _full("qwen2.5-1.5b", 1, 0, 4),
    _full("qwen2.5-1.5b", 2, 1, 2, gradient_accumulation_steps=4),
    _full("qwen2.5-7b", 2, 3, 2, loss="chunked"),
    _full("qwen2.5-7b", 2, 3, 4, loss="chunked", gradient_checkpointing="full"),
    _full("qwen2.5-7b", 2, 2, 2, loss="chunked", gradient_checkpointing="full"),
    _full("qwen2.5-7b", 2, 3, 2, loss="chunked", torch_compile=False, gradient_checkpointing="selective"),
    _full("qwen2.5-7b", 1, 0, 1, loss="chunked", gradient_checkpointing="full"),
    _lora("llama-3.1-8b", 1, 2),
    _lora("llama-3.1-8b", 2, 2),
    Case(name="qwen2.5-1.5b full, planner's choice", model="qwen2.5-1.5b", cards=0, keys={"global_batch_size": 32}),
    Case(name="qwen2.5-7b full, planner's choice", model="qwen2.5-7b", cards=0, keys={"global_batch_size": 32}),
    Case(name="llama-3.1-8b lora, planner's choice", model="llama-3.1-8b", cards=0,
         keys={"global_batch_size": 32, "tuning": "lora"}),
    Case(name="qwen2.5-1.5b full, host-memory wire, planner's choice", model="qwen2.5-1.5b", cards=0,
         keys={"global_batch_size": 32}, environment=HOST_MEMORY),
)  # fmt: skip


def run_file(case: Case, cards: int, folder: Path) -> dict[str, Any]:
    """The run file of a case; its config.json comes from the catalogue."""
    from shardwise.facts import catalog

    model_folder = folder / "model"
    model_folder.mkdir(parents=True, exist_ok=True)
    config = catalog.model_file(case.model).config
    (model_folder / "config.json").write_text(json.dumps(dict(config)))
    keys: dict[str, Any] = {
        "model_name_or_path": str(model_folder),
        "random_init": True,
        "max_length": SEQUENCE,
        "max_steps": case.steps,
        "output_dir": str(folder / "run"),
        "learning_rate": 1e-5,
        "save_strategy": "no",
        "save_final": False,
    } | case.keys
    batch = keys.get("global_batch_size") or (
        keys["per_device_train_batch_size"] * keys["gradient_accumulation_steps"] * cards
    )
    keys["dataset_name"] = f"random:{batch * case.steps}"
    return keys


def run_case(name: str, cluster_file: str | None) -> dict[str, Any]:
    """Plan, run and compare one case in this process."""
    import torch

    from shardwise.facts import catalog
    from shardwise.verify import trials
    from shardwise.vocabulary import codec
    from shardwise.vocabulary.cluster import Cluster
    from shardwise.vocabulary.run import RunFile

    case = next(case for case in CASES if case.name == name)
    cards = case.cards or torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as scratch:
        run = codec.from_data(RunFile, run_file(case, cards, Path(scratch)))
        if cluster_file:
            cluster = codec.read_noun(Cluster, Path(cluster_file))
        else:
            cluster = catalog.parse_gpus(f"{cards}x{torch.cuda.get_device_name(0)}")
        if cluster.num_gpus != cards:
            cluster = codec.from_data(Cluster, codec.to_data(cluster) | {"num_nodes": 1, "gpus_per_node": cards})
        trial = trials.prepare(run, trials.plan_run(run, cluster))
        started = time.perf_counter()
        ledger = trials.execute(trial, cuda=True)
        measured = json.loads((trial.folder / trials.MEASURED_FILE).read_text())
    measured["step"] = {k: v for k, v in (measured["step"] or {}).items() if k != "spans"}
    candidate = trial.candidate
    return {
        "strategy": codec.to_data(candidate.strategy),
        "predicted": {
            "allocated_bytes": candidate.memory.allocated_bytes,
            "reserved_bytes": candidate.memory.reserved_bytes,
            "device_bytes": candidate.memory.device_bytes,
            "by_category": {k.value: v for k, v in candidate.memory.by_category().items()},
            "peak_instant": candidate.memory.peak_instant.value,
            "step": {k: v for k, v in codec.to_data(candidate.step).items() if k != "spans"},
            "tokens_per_s_per_card": candidate.tokens_per_s / cards,
        },
        "measured": measured,
        "ledger": codec.to_data(ledger)["rows"],
        "seconds_in_all": time.perf_counter() - started,
        "cluster": "measured" if cluster_file else "datasheet",
    }


def child(case: Case, cluster: str | None) -> dict[str, Any]:
    """Run a case in a child process with a time limit."""
    command = [sys.executable, __file__, "--case", case.name, *(["--cluster", cluster] if cluster else [])]
    environment = os.environ | case.environment
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
                          start_new_session=True) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=CASE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            out, err = process.communicate()
            return {"failed": f"took more than {CASE_SECONDS} s", "stderr": err[-3000:]}
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    if process.returncode or not lines:
        return {"failed": f"exit code {process.returncode}", "stderr": err[-3000:]}
    return json.loads(lines[-1].removeprefix("RESULT "))


def versions() -> dict[str, str]:
    """What it was measured with."""
    import torch
    import transformers

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "nccl": nccl,
        "python": sys.version.split()[0],
    }


def show(name: str, result: dict[str, Any], cards: int) -> None:
    """One line a case."""
    if "failed" in result:
        print(f"{name}: {result['failed']}\n{result['stderr'][-1500:]}", flush=True)
        return
    p, m = result["predicted"], result["measured"]
    rows = [
        (f"{key[:-6]}", p[key] / 1e9, (m.get(key) or 0) / 1e9)
        for key in ("allocated_bytes", "reserved_bytes", "device_bytes")
    ]
    step = (p["step"]["seconds"], (m["step"] or {}).get("seconds") or 0.0)
    tokens = (p["tokens_per_s_per_card"], (m.get("tokens_per_s") or 0) / cards)
    text = "  ".join(f"{key} {a:.1f}/{b:.1f} GB" for key, a, b in rows)
    print(f"{name} [{result['strategy']['loss']}, compile {result['strategy']['compile_blocks']}, ckpt "
          f"{result['strategy']['checkpointing']}]: {text}  step {step[0]:.3f}/{step[1]:.3f} s  tokens/s/card "
          f"{tokens[0]:,.0f}/{tokens[1]:,.0f}  ({result['seconds_in_all']:.0f} s in all)", flush=True)  # fmt: skip


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--only", default="", help="parts of case names, separated by semicolons")
    parser.add_argument("--cluster", help="a measured cluster file")
    parser.add_argument("--limit", type=float, default=540, help="seconds in all")
    parser.add_argument("--case", help="run this case here (a child does)")
    given = parser.parse_args()
    if given.case:
        print("RESULT " + json.dumps(run_case(given.case, given.cluster)))
        return
    import torch

    started, results = time.perf_counter(), dict[str, Any]()
    wished = [part for part in given.only.split(";") if part]
    for case in CASES:
        if wished and not any(part in case.name for part in wished):
            continue
        if time.perf_counter() - started > given.limit - 60:
            results[case.name] = {"failed": "not reached within the time limit", "stderr": ""}
            continue
        cards = case.cards or torch.cuda.device_count()
        if cards > torch.cuda.device_count():
            continue
        results[case.name] = {"case": asdict(case), **child(case, given.cluster)}
        show(case.name, results[case.name], cards)
        record = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}",
            "versions": versions(),
            "sequence": SEQUENCE,
            "results": results,
        }
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "train.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
