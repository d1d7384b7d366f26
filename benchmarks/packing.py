"""Short chats, packed against padded: tokens a second that are not padding, on one card or on the CPU.

    PYTHONPATH=src python benchmarks/packing.py --out packing.json [--model qwen2.5-1.5b] [--max-length 2048]

Two sets: the project's questions and answers by SmolLM2's tokenizer, and lengths drawn from a log-normal distribution
(median 180 tokens, sigma 0.9, 16 to max_length; a usual spread of single-turn chats). Each is trained on by the engine
itself, one process a case; the median step counts, without the first two. On a CPU that others use too, seconds of its
own CPU time are counted, on a card those of the clock:

    padded, as drawn    micro-batches in shuffled order, padded to their longest: what trainers do by default
    padded, sorted      the engine's own plan: rows of like length side by side in each step
    packed              rows of max_length tokens, documents kept apart by a mask (sdpa)
    packed, flash       the same by variable-length flash attention, where flash-attn is installed (cards only)

A micro-batch has as many rows in every case, so none needs more memory than the packed one.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CASE_SECONDS = 600
NUM_WARM_UP = 2
SMALL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 8192, "hidden_size": 256,
    "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
"""About 8M parameters: what a CPU trains in a minute."""
LAYOUTS = ("padded, as drawn", "padded, sorted", "packed", "packed, flash")
SETS = ("questions and answers", "log-normal")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all cases share."""

    model: str
    max_length: int
    rows: int
    """Of a micro-batch."""
    steps: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step."""

    real: int
    """Tokens that are data."""
    padded: int
    """Tokens of the tensors."""
    seconds: float


def lengths_of(name: str, max_length: int) -> list[int]:
    """Tokens of each sample of a set."""
    if name == "log-normal":
        drawn = np.random.default_rng(7).lognormal(np.log(180), 0.9, size=4096)
        return np.clip(drawn.round(), 16, max_length).astype(int).tolist()
    from transformers import AutoTokenizer

    from shardwise.trainer.data.options import DataOptions
    from shardwise.trainer.data.tokenize import prepare
    from shardwise.trainer.packaged import smollm2_folder

    source = Path(__file__).parents[1] / "examples" / "data" / "multi_gpu_qa.jsonl"
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_folder())
    return prepare(DataOptions(source=str(source), max_length=max_length), tokenizer).lengths.tolist()


def write_set(path: Path, lengths: list[int], vocab_size: int) -> None:
    """Random tokens of these lengths, the second half of each learned."""
    draw = np.random.default_rng(0)
    with path.open("w") as file:
        for length in lengths:
            ids = draw.integers(1, vocab_size, size=length).tolist()
            labels = [-100 if place < length // 2 else token for place, token in enumerate(ids)]
            file.write(json.dumps({"input_ids": ids, "labels": labels}) + "\n")


def run_case(data: str, layout: str, setting: Setting) -> dict[str, Any]:
    """Trains in this process, as its only rank."""
    import torch

    from shardwise.facts import catalog
    from shardwise.trainer.data.batches import BatchPlan
    from shardwise.trainer.run import RunWishes, run_training
    from shardwise.vocabulary.run import RunFile
    from shardwise.vocabulary.strategy import Strategy

    cuda = torch.cuda.is_available()
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29577",
    }
    if layout == "padded, as drawn":
        cut = BatchPlan._groups  # pyright: ignore[reportPrivateUsage]  # the plan itself never does this

        def as_drawn(self: BatchPlan, step: int) -> list[list[int]]:
            rows, size = self.row_indices(step).tolist(), self.options.micro_batch
            assert cut is not None
            return [rows[start : start + size] for start in range(0, len(rows), size)]

        BatchPlan._groups = as_drawn  # pyright: ignore[reportPrivateUsage]
    packs = layout.startswith("packed")
    lengths = lengths_of(data, setting.max_length)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = SMALL if setting.model == "small" else dict(catalog.model_file(setting.model).config)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(config))
        write_set(folder / "data.jsonl", lengths, int(config["vocab_size"]))
        accumulation = 1 if packs else max(1, round(setting.max_length / np.mean(lengths)))  # as many tokens a step
        from transformers import AutoTokenizer

        from shardwise.trainer.packaged import smollm2_folder

        AutoTokenizer.from_pretrained(smollm2_folder()).save_pretrained(folder / "model")
        run = RunFile(
            model_name_or_path=str(folder / "model"),
            random_init=True,
            dataset_name=str(folder / "data.jsonl"),
            max_length=setting.max_length,
            packing=packs,
            attn_implementation="flash" if layout.endswith("flash") else "sdpa",
            max_steps=setting.steps,
            learning_rate=1e-5,
            save_strategy="no",
            save_final=False,
            output_dir=str(folder / "run"),
        )
        strategy = Strategy(
            precision="bf16" if cuda else "fp32",
            micro_batch_size=setting.rows,
            accumulation=accumulation,
            compile_blocks=cuda,
            loss="fused",
        )
        steps = watched_steps(cuda)
        run_training(run, strategy, RunWishes(measure=False, cache_dir=str(folder / "cache")))
    counted = steps[NUM_WARM_UP:]
    return {
        "set": data,
        "layout": layout,
        "real_tokens_per_s": statistics.median(step.real / step.seconds for step in counted),
        "data_share": sum(step.real for step in counted) / sum(step.padded for step in counted),
        "step_s": statistics.median(step.seconds for step in counted),
        "accumulation": accumulation,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "mean_length": float(np.mean(lengths)),
        "torch": torch.__version__,
    }


def watched_steps(cuda: bool) -> list[Step]:
    """Every step that the engine computes from here on, with its tokens and seconds."""
    import torch

    from shardwise.trainer.step import Stepper

    steps: list[Step] = []
    original: Any = Stepper.run

    def timed(self: Any, batches: Any, *arguments: Any, **more: Any) -> Any:
        made = list(batches)
        if cuda:
            torch.cuda.synchronize()
        started = time.perf_counter() if cuda else time.process_time()
        outcome = original(self, iter(made), *arguments, **more)
        if cuda:
            torch.cuda.synchronize()
        spent = (time.perf_counter() if cuda else time.process_time()) - started
        real, padded = sum(one.num_tokens for one in made), sum(one.input_ids.numel() for one in made)
        steps.append(Step(real=real, padded=padded, seconds=spent))
        return outcome

    Stepper.run = timed
    return steps


def child(data: str, layout: str, arguments: list[str]) -> dict[str, Any]:
    """A case in a process of its own, with a time limit."""
    command = [sys.executable, __file__, "--case", data, layout, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CASE_SECONDS)
    except subprocess.TimeoutExpired:
        return {"set": data, "layout": layout, "failed": f"took more than {CASE_SECONDS} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        return {"set": data, "layout": layout, "failed": done.stderr[-1500:]}
    return json.loads(lines[-1].removeprefix("RESULT "))


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--model", default="small")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--case", nargs=2, default=None)
    options = parser.parse_args()
    setting = Setting(model=options.model, max_length=options.max_length, rows=options.rows, steps=options.steps)
    if options.case:
        print("RESULT " + json.dumps(run_case(*options.case, setting)))
        return 0
    arguments = [
        "--model", setting.model, "--max-length", str(setting.max_length), "--rows", str(setting.rows),
        "--steps", str(setting.steps),
    ]  # fmt: skip
    cuda = torch.cuda.is_available()
    flash = cuda and importlib.util.find_spec("flash_attn") is not None
    results: list[dict[str, Any]] = []
    for data in SETS:
        for layout in LAYOUTS if flash else LAYOUTS[:-1]:
            found = child(data, layout, arguments)
            results.append(found)
            first = results[-1 - LAYOUTS.index(layout)].get("real_tokens_per_s")
            ratio = found.get("real_tokens_per_s", 0) / first if first else float("nan")
            said = (
                found["failed"]
                if "failed" in found
                else f"{found['real_tokens_per_s']:10,.0f} tokens/s ({found['data_share']:.0%} data), {ratio:.2f} x"
            )
            print(f"{data:22} {layout:18} {said}", flush=True)
    if options.out is not None:
        page = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": torch.cuda.get_device_name(0) if cuda else f"{os.cpu_count()} cores, {platform.machine()}",
            "setting": vars(setting) | {"load_average_at_end": os.getloadavg()[0]},
            "results": results,
        }
        options.out.write_text(json.dumps(page, indent=1) + "\n")
    return int(any("failed" in one for one in results))


if __name__ == "__main__":
    sys.exit(main())
