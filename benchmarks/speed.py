"""Tokens a second of `shardwise train` on the cases that people compare trainers by, with peers beside it.

    PYTHONPATH=src python benchmarks/speed.py --out FOLDER [--only '8b full;lora'] [--cluster cluster.yaml]
        [--peers FOLDER_WITH_bench_trl.py] [--limit 560] [--dry]

Every row is `shardwise train` as a user types it, with nothing but model, data and cards: micro-batch, checkpointing,
stage and loss are the planner's choice. A row is a process of its own with a time limit, so that one that fails or
hangs costs only itself. Rows fit into one call of ten minutes by `--only` and `--limit`; results are added to
`speed.json`, so that several calls fill one table.

What is written of a row: the plan as it was before the first step (tokens/s, memory), tokens/s a card over tokens that
are not padding, model FLOPs utilization, peak allocated and reserved, and seconds from the start of the process to the
first step's numbers.

MFU = tokens/s a card x FLOPs a token / rate. FLOPs a token: 6 a matrix parameter, head included and embedding not (4
under LoRA and QLoRA, whose frozen matrices need no weight gradient), and causal attention in as many passes, half of
the square counted (PaLM, arXiv:2204.02311, appendix B). Rate: the data sheet's dense bf16, and what `probe` measured.

`--dry` runs every row with a tiny model on the CPU in a minute each: it proves the script, not the speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SEQUENCE, STEPS = 4096, 12
ROW_SECONDS = 240
HOST_MEMORY = {"NCCL_P2P_DISABLE": "1"}
"""NCCL then goes through host memory, as between consumer cards."""
LONGEST_CHAT, MEDIAN_CHAT, CHAT_SPREAD = 4096, 250, 0.9
"""Tokens of a chat: log-normal, cut at the longest; `--chats` takes the lengths of a file instead."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case of the table."""

    name: str
    model: str
    cards: int
    keys: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keys of the run file beside model, data and length: what is wanted, never how it is split."""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    data: str = "dense"
    """dense: rows of random tokens, all of full length. chats: rows of chat lengths. disk: dense, weights from disk."""
    must: float = 0.0
    """Tokens/s a card that the table asks for."""
    peer: tuple[str, ...] = ()
    """Flags of bench_trl.py for the same case; empty: no peer to carry."""


ROWS = (
    Row(name="8b full, 4 cards", model="llama-3.1-8b", cards=4, keys={"global_batch_size": 16}, must=12_000,
        peer=("--shape", "8b", "--mb", "4", "--ckpt", "0", "--liger", "1")),
    Row(name="8b full fp8, 4 cards", model="llama-3.1-8b", cards=4, keys={"global_batch_size": 16, "fp8": True},
        must=15_800),
    Row(name="8b full, 4 cards, host memory", model="llama-3.1-8b", cards=4, keys={"global_batch_size": 64},
        environment=HOST_MEMORY, must=10_500, peer=("--shape", "8b", "--mb", "4", "--ckpt", "0", "--liger", "1")),
    Row(name="8b full, 4 cards, host memory, bf16 reductions", model="llama-3.1-8b", cards=4,
        keys={"global_batch_size": 64, "reduce_dtype": "bf16"}, environment=HOST_MEMORY, must=10_500),
    Row(name="8b lora r16, 1 card", model="llama-3.1-8b", cards=1, keys={"global_batch_size": 8, "tuning": "lora"},
        must=17_000, peer=("--shape", "8b", "--mb", "2", "--ckpt", "0", "--liger", "1", "--lora", "1")),
    Row(name="7b qlora, 1 card", model="qwen2.5-7b", cards=1, keys={"global_batch_size": 8, "tuning": "qlora"}),
    Row(name="1.5b full, 4 cards", model="qwen2.5-1.5b", cards=4, keys={"global_batch_size": 32}, must=51_000,
        peer=("--shape", "1.5b", "--mb", "4", "--ckpt", "0", "--liger", "1", "--fsdp", "0")),
    Row(name="1.5b full, 1 card", model="qwen2.5-1.5b", cards=1, keys={"global_batch_size": 4}, must=48_559,
        peer=("--shape", "1.5b", "--mb", "4", "--ckpt", "0", "--liger", "1", "--fsdp", "0")),
    Row(name="1.5b chats packed, 1 card", model="qwen2.5-1.5b", cards=1, data="chats",
        keys={"global_batch_size": 8, "packing": True}),
    Row(name="1.5b chats padded, 1 card", model="qwen2.5-1.5b", cards=1, data="chats",
        keys={"global_batch_size": 64}),
    Row(name="8b full, 4 cards, bf16 reductions", model="llama-3.1-8b", cards=4,
        keys={"global_batch_size": 16, "reduce_dtype": "bf16"}),
    Row(name="8b full, 4 cards, from disk, cold", model="llama-3.1-8b", cards=4, data="disk",
        keys={"global_batch_size": 16, "max_steps": 4}),
    Row(name="8b full, 4 cards, from disk, warm", model="llama-3.1-8b", cards=4, data="disk",
        keys={"global_batch_size": 16, "max_steps": 4}),
)  # fmt: skip
TINY = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One call of this script."""

    out: Path
    scratch: Path
    cluster: str | None
    """Measured, for rows on the usual wire; None: `train` measures for itself, and rows of one kind share it."""
    peers: Path | None
    chats: Path | None
    dry: bool
    deadline: float
    """time.perf_counter() when no further row may begin."""


def model_folder(bench: Bench, row: Row) -> Path:
    """A folder with the config.json of a row's model."""
    from shardwise.facts import catalog

    folder = bench.scratch / ("tiny" if bench.dry else row.model)
    folder.mkdir(parents=True, exist_ok=True)
    config = TINY if bench.dry else dict(catalog.model_file(row.model).config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def chat_file(bench: Bench, vocab_size: int) -> Path:
    """Rows of random tokens as long as chats; the first third of each is a prompt and not learned."""
    path, draw = bench.scratch / "chats.jsonl", random.Random(5)
    if path.exists():
        return path
    longest = 128 if bench.dry else LONGEST_CHAT
    if bench.chats is not None:
        lengths = [max(8, len(line) // 4) for line in bench.chats.read_text().splitlines() if line]
    else:
        scale = 16 if bench.dry else MEDIAN_CHAT
        lengths = [round(draw.lognormvariate(0, CHAT_SPREAD) * scale) + 8 for _ in range(300 if bench.dry else 6000)]
    with path.open("w") as file:
        for length in (min(length, longest) for length in lengths):
            ids = [draw.randrange(10, vocab_size) for _ in range(length)]
            file.write(json.dumps({"input_ids": ids, "labels": [-100] * (length // 3) + ids[length // 3 :]}) + "\n")
    return path


def run_keys(bench: Bench, row: Row) -> dict[str, Any]:
    """The run file of a row."""
    folder = model_folder(bench, row)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    keys: dict[str, Any] = {
        "model_name_or_path": str(folder), "random_init": True, "max_length": 128 if bench.dry else SEQUENCE,
        "max_steps": 5 if bench.dry else STEPS, "output_dir": str(run_folder(bench, row)), "learning_rate": 1e-5,
        "save_strategy": "no", "save_final": False,
    } | row.keys  # fmt: skip
    if bench.dry:  # what a processor cannot do
        keys.pop("fp8", None)
        keys["tuning"] = "lora" if keys.get("tuning") == "qlora" else keys.get("tuning", "full")
        keys["max_steps"] = min(5, keys["max_steps"])
    if row.data == "chats":
        keys["dataset_name"] = str(chat_file(bench, vocab))
    else:
        keys["dataset_name"] = f"random:{keys['global_batch_size'] * keys['max_steps']}"
    if row.data == "disk":
        keys |= {"model_name_or_path": str(weights_on_disk(bench, row)), "random_init": False}
    return keys


def run_folder(bench: Bench, row: Row) -> Path:
    """Where a row's run writes."""
    return bench.scratch / "runs" / re.sub(r"\W+", "-", row.name)


def weights_on_disk(bench: Bench, row: Row) -> Path:
    """Random weights of a row's model as safetensors in bf16, made once a call."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = bench.scratch / f"disk-{'tiny' if bench.dry else row.model}"
    if (folder / "model.safetensors.index.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.from_pretrained(model_folder(bench, row))
    with torch.device("meta"):
        shapes = {name: one.shape for name, one in AutoModelForCausalLM.from_config(config).named_parameters()}
    device = "cuda" if torch.cuda.is_available() and not bench.dry else "cpu"
    where, part, held, number = dict[str, str](), dict[str, Any](), 0, 0
    names = list(shapes)
    for name in names:
        values = torch.randn(shapes[name], device=device, dtype=torch.bfloat16) * 0.02
        part[name] = (torch.ones_like(values) if len(values.shape) == 1 else values).cpu()
        held += part[name].nbytes
        if held > 4e9 or name is names[-1]:
            file, number = f"model-{number:05d}.safetensors", number + 1
            save_file(part, folder / file, metadata={"format": "pt"})
            where |= dict.fromkeys(part, file)
            part, held = {}, 0
    config.save_pretrained(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def cluster_flags(bench: Bench, row: Row) -> list[str]:
    """With which cluster a row is planned: the one given, the one that an earlier row has measured, or a new one."""
    kept = bench.scratch / f"cluster-{row.cards}-{'host' if row.environment else 'usual'}.yaml"
    if bench.dry:
        kept.write_text(cpu_cluster(row.cards))
    elif bench.cluster and not row.environment and not kept.exists():
        kept.write_text(with_cards(Path(bench.cluster), row.cards))
    return ["--cluster", str(kept)] if kept.exists() else []


def keep_cluster(bench: Bench, row: Row) -> None:
    """What a row has measured serves the next one on the same cards and wire."""
    kept = bench.scratch / f"cluster-{row.cards}-{'host' if row.environment else 'usual'}.yaml"
    measured = run_folder(bench, row) / "cluster.yaml"
    if not kept.exists() and measured.exists():
        kept.write_text(measured.read_text())


def with_cards(path: Path, cards: int) -> str:
    """A cluster file for another number of cards of the same machine."""
    from shardwise.vocabulary import codec
    from shardwise.vocabulary.cluster import Cluster

    cluster = codec.read_noun(Cluster, path)
    return codec.to_yaml(dataclasses.replace(cluster, num_nodes=1, gpus_per_node=cards))


def cpu_cluster(cards: int) -> str:
    """Processors in place of cards, for `--dry`."""
    from shardwise.facts import catalog
    from shardwise.vocabulary import codec

    usual = catalog.parse_gpus(f"{cards}xrtx-4090")
    gpu = dataclasses.replace(
        usual.gpu, name="cpu", architecture="cpu", memory_bytes=8 * 2**30, peak_flops={"fp32": 1e11, "bf16": 1e11}
    )
    return codec.to_yaml(dataclasses.replace(usual, gpu=gpu))


def run_row(bench: Bench, row: Row) -> dict[str, Any]:
    """Trains one row in a process of its own and reads what it left."""
    keys = run_keys(bench, row)
    run_file = bench.scratch / f"{run_folder(bench, row).name}.yaml"
    run_file.write_text(json.dumps(keys))  # JSON is YAML
    command = [sys.executable, "-m", "shardwise", "train", str(run_file), *cluster_flags(bench, row)]
    environment = os.environ | row.environment
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(bench.scratch / ("cold" if "cold" in row.name else "compiled"))}
    if "warm" in row.name:
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(bench.scratch / "cold")
    if bench.dry:
        environment["OMP_NUM_THREADS"] = "1"
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(row.cards)))
    limit = max(30.0, min(ROW_SECONDS, bench.deadline + 60 - time.perf_counter()))
    done = watched(command, environment, limit)
    keep_cluster(bench, row)
    if done["failed"]:
        return done
    return done | outcome(run_folder(bench, row), row, keys)


def watched(command: list[str], environment: dict[str, str], limit: float) -> dict[str, Any]:
    """Runs a command with a time limit; notes when its first step was told."""
    started, lines, first = time.perf_counter(), list[str](), list[float]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
                          start_new_session=True) as process:  # fmt: skip
        timer = threading.Timer(limit, lambda: os.killpg(process.pid, signal.SIGKILL))
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if not first and re.match(r"step 1/", line):
                first.append(time.perf_counter() - started)
        code = process.wait()
        timer.cancel()
    failed = f"exit code {code} after {time.perf_counter() - started:.0f} s" if code else ""
    return {
        "failed": failed,
        "seconds_to_first_step": first[0] if first else None,
        "seconds_in_all": time.perf_counter() - started,
        "output_tail": "".join(lines)[-3000:] if failed else "",
        "command": [Path(part).name for part in command],
    }


def outcome(folder: Path, row: Row, keys: dict[str, Any]) -> dict[str, Any]:
    """Prediction and measurement of a run that has come to its end."""
    from shardwise.planner.compute import model_flops_per_token
    from shardwise.vocabulary import codec
    from shardwise.vocabulary.placement import Placement
    from shardwise.vocabulary.plan import Plan

    plan = codec.read_noun(Plan, folder / "plan.yaml")
    chosen = plan.recommended
    assert chosen is not None, "a run without a plan"
    measured = json.loads((folder / "measured.json").read_text())
    real = (measured["real_tokens_per_s"] or 0.0) / row.cards
    flops = model_flops_per_token(Placement(job=plan.job, strategy=chosen.strategy))
    gpu, points = plan.cluster.gpu, plan.cluster.measurements.matmul_flops.get("bf16", ())
    best = max((point.rate for point in points), default=0.0)
    step = {key: value for key, value in (measured["step"] or {}).items() if key != "spans"}
    return {
        "strategy": codec.to_data(chosen.strategy),
        "predicted": {
            "tokens_per_s_per_card": chosen.tokens_per_s / row.cards,
            "allocated_bytes": chosen.memory.allocated_bytes,
            "reserved_bytes": chosen.memory.reserved_bytes,
            "step_seconds": chosen.step.seconds,
        },
        "measured": {
            "tokens_per_s_per_card": real,
            "padded_tokens_per_s_per_card": (measured["tokens_per_s"] or 0.0) / row.cards,
            "allocated_bytes": measured["allocated_bytes"],
            "reserved_bytes": measured["reserved_bytes"],
            "step": step,
            "flops_per_token": flops,
            "mfu_datasheet": real * flops / gpu.peak_flops["bf16"],
            "mfu_measured_matmul": real * flops / best if best else None,
        },
        "must": row.must,
        "run_file": {key: value for key, value in keys.items() if not str(value).startswith("/")},
    }


def run_peer(bench: Bench, row: Row) -> dict[str, Any]:
    """TRL on the same case, by the scripts in `--peers`; its own words are kept."""
    assert bench.peers is not None
    script, flags = str(bench.peers / "bench_trl.py"), list(row.peer)
    if row.cards == 1:
        command = [sys.executable, script, *flags, "--fsdp", "0"]
    elif "--fsdp" in flags:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={row.cards}", script, *flags]
    else:
        config = bench.scratch / "fsdp2.yaml"
        text = (bench.peers / "fsdp2.yaml").read_text()
        text = re.sub(r"(fsdp_activation_checkpointing:).*", r"\1 false", text)
        config.write_text(re.sub(r"(num_processes:).*", rf"\1 {row.cards}", text))
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), script, *flags]
    environment = os.environ | row.environment | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(row.cards)))}
    limit = max(30.0, min(150.0, bench.deadline + 60 - time.perf_counter()))
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=limit, cwd=bench.scratch, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {limit:.0f} s"}
    said = [line for line in done.stdout.splitlines() if line.startswith(("TRL", "wrapped"))]
    found = re.search(r"tok/s/gpu (\d+)", "\n".join(said))
    return {
        "failed": "" if found else f"exit code {done.returncode}",
        "tokens_per_s_per_card": float(found.group(1)) if found else None,
        "said": said,
        "stderr": "" if found else done.stderr[-2000:],
        "seconds_in_all": time.perf_counter() - started,
    }


def line_of(row: Row, result: dict[str, Any]) -> str:
    """One line of the table."""
    if result["failed"]:
        return f"{row.name}: {result['failed']}\n{result['output_tail'][-1200:]}"
    predicted, measured, strategy = result["predicted"], result["measured"], result["strategy"]
    peer = (result.get("peer") or {}).get("tokens_per_s_per_card")
    how = (
        f"stage {strategy['zero_stage']}, mb {strategy['micro_batch_size']} x {strategy['accumulation']}, "
        f"ckpt {strategy['checkpointing']}, {strategy['loss']}"
    )
    first = result["seconds_to_first_step"]
    return (
        f"{row.name} [{how}]: {measured['tokens_per_s_per_card']:,.0f} tokens/s/card (predicted "
        f"{predicted['tokens_per_s_per_card']:,.0f}, asked {row.must:,.0f}, TRL {peer or 0:,.0f}), MFU "
        f"{measured['mfu_datasheet']:.3f}, allocated {(measured['allocated_bytes'] or 0) / 1e9:.1f} GB (predicted "
        f"{predicted['allocated_bytes'] / 1e9:.1f}), first step after {first or 0:.0f} s"
    )


def machine(dry: bool) -> dict[str, Any]:
    """On what, with what, and when."""
    import torch
    import transformers

    cards = torch.cuda.device_count()
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{cards} x {torch.cuda.get_device_name(0)}" if cards and not dry else "CPU, tiny models",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__,
                     "python": sys.version.split()[0]},
        "sequence": 128 if dry else SEQUENCE,
    }  # fmt: skip


def main() -> None:
    """Runs the rows and keeps what they gave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--only", default="", help="parts of row names, separated by semicolons")
    parser.add_argument("--cluster", help="a measured cluster file for the usual wire")
    parser.add_argument("--peers", type=Path, help="folder with bench_trl.py and fsdp2.yaml")
    parser.add_argument("--chats", type=Path, help="JSON lines whose lengths (characters / 4) chats take")
    parser.add_argument("--limit", type=float, default=560, help="seconds in all; no row begins in the last 60")
    parser.add_argument("--dry", action="store_true", help="tiny models on the CPU")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / ("speed_dry.json" if given.dry else "speed.json")
    record = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    record |= machine(given.dry)
    wished = [part.strip() for part in given.only.split(";") if part.strip()]
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(
            out=given.out,
            scratch=Path(scratch),
            cluster=given.cluster,
            peers=given.peers and given.peers.resolve(),
            chats=given.chats,
            dry=given.dry,
            deadline=time.perf_counter() + given.limit - 60,
        )
        for row in ROWS:
            if wished and not any(part in row.name for part in wished):
                continue
            if time.perf_counter() > bench.deadline:
                print(f"{row.name}: not begun within the time limit", flush=True)
                continue
            result = run_row(bench, row)
            if bench.peers is not None and row.peer and not bench.dry:
                result["peer"] = run_peer(bench, row)
            record["rows"][row.name] = result
            path.write_text(json.dumps(record, indent=1))
            print(line_of(row, result), flush=True)


if __name__ == "__main__":
    main()
