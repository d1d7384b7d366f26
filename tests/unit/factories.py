"""Synthetic plans, ledgers and run folders, built from the vocabulary alone: plausible in size, exact in nothing.

For tests of what comes after the planner. The figures follow the shape of a 1.5B fine-tune on two cards.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from shardwise.vocabulary import codec
from shardwise.vocabulary.cluster import Cluster, Gpu, Link
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.ledger import Ledger, LedgerRow
from shardwise.vocabulary.memory import ALWAYS, Category, Instant, MemoryBreakdown, Term
from shardwise.vocabulary.model import ModelShape
from shardwise.vocabulary.plan import Advice, Candidate, Fact, Headline, Plan, Refusal
from shardwise.vocabulary.strategy import Axis, Strategy
from shardwise.vocabulary.timeline import Collective, Span, StepTimeline


def make_model(**changes: Any) -> ModelShape:
    shape = ModelShape(
        name="qwen2.5-1.5b",
        model_type="qwen2",
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
        attention_bias=True,
    )
    return dataclasses.replace(shape, **changes)


def make_cluster(**changes: Any) -> Cluster:
    gpu = Gpu(
        name="rtx-5090",
        memory_bytes=32607 * 2**20,
        peak_flops={"bf16": 209.5e12},
        memory_bandwidth_bytes_per_s=1.792e12,
        architecture="blackwell",
        url="https://example.org/rtx-5090.pdf",
    )
    link = Link(name="pcie5-x8", kind="pcie", bandwidth_bytes_per_s=31.5e9, attained_fraction=0.7)
    return dataclasses.replace(Cluster(name="2xrtx-5090", gpu=gpu, gpus_per_node=2, intra_node=link), **changes)


def make_job(**changes: Any) -> Job:
    return dataclasses.replace(Job(model=make_model(), sequence_length=2048, global_batch_size=32), **changes)


def make_memory(strategy: Strategy, model: ModelShape) -> MemoryBreakdown:
    """Weights, gradients, states, activations and the rest, cut by the stage."""
    shards = strategy.dp_shard
    count = model.num_parameters
    saved = 34 * strategy.micro_batch_size * 2048 * model.hidden_size * model.num_hidden_layers
    if strategy.checkpointing == "full":
        saved //= 12
    backward = (Instant.BACKWARD_FIRST, Instant.BACKWARD_LAST, Instant.OPTIMIZER)
    rows = (
        (Category.PARAMETER, "master weights", 4 * count // (shards if strategy.zero_stage else 1), ALWAYS, "4 B x P"),
        (Category.PARAMETER, "compute weights", 2 * count // (shards if strategy.zero_stage == 3 else 1), ALWAYS, ""),
        (Category.GRADIENT, "gradients", 4 * count // (shards if strategy.zero_stage > 1 else 1), backward, "4 B x P"),
        (Category.OPTIMIZER, "Adam moments", 8 * count // (shards if strategy.zero_stage else 1), ALWAYS, "8 B x P"),
        (Category.ACTIVATION, "saved activations", saved, (Instant.FORWARD, Instant.LOSS, Instant.BACKWARD_FIRST), ""),
        (Category.TEMPORARY, "logits", 6 * strategy.micro_batch_size * 2048 * model.vocab_size, (Instant.LOSS,), ""),
    )
    terms = [
        Term(category=category, name=name, bytes=size, alive=alive, formula=formula)
        for category, name, size, alive, formula in rows
    ]
    terms.append(Term(category=Category.RUNTIME, name="cache", bytes=700_000_000, alive=ALWAYS, level="reserved"))
    terms.append(Term(category=Category.RUNTIME, name="context", bytes=600_000_000, alive=ALWAYS, level="device"))
    return MemoryBreakdown(terms=tuple(terms))


def make_timeline(seconds: float = 1.92, exposed: float = 0.21, num_micro_batches: int = 3) -> StepTimeline:
    """Forward and backward by turns, a wire lane under them, and the optimizer at the end."""
    optimizer = 0.06 * seconds
    compute = seconds - exposed
    piece = (compute - optimizer) / (3 * num_micro_batches)
    spans: list[Span] = []
    now = 0.0
    for i in range(num_micro_batches):
        for name, length in (("forward", piece), ("backward", 2 * piece)):
            spans.append(Span(lane="compute", kind="compute", name=f"{name} {i}", start_seconds=now, seconds=length))
            now += length
    spans.append(
        Span(lane="dp_shard", kind="wire", name="reduce_scatter", start_seconds=now - piece, seconds=piece + exposed)
    )
    now += exposed
    spans.append(Span(lane="compute", kind="optimizer", name="AdamW", start_seconds=now, seconds=optimizer))
    return StepTimeline(
        seconds=seconds,
        compute_seconds=compute,
        exposed_wire_seconds=exposed,
        wire_seconds=piece + exposed,
        optimizer_seconds=optimizer,
        spans=tuple(spans),
    )


def make_candidate(
    strategy: Strategy | None = None, *, job: Job | None = None, cluster: Cluster | None = None, seconds: float = 1.92
) -> Candidate:
    job, cluster = job or make_job(), cluster or make_cluster()
    strategy = strategy or Strategy(dp_shard=2, zero_stage=2, micro_batch_size=2, accumulation=8)
    memory = make_memory(strategy, job.model)
    device = memory.device_bytes
    fits = device < cluster.gpu.memory_bytes
    sends = Collective(
        op="all_reduce" if strategy.zero_stage == 0 else "reduce_scatter",
        axis=Axis.DP_REPLICATE if strategy.zero_stage == 0 else Axis.DP_SHARD,
        ranks=2,
        bytes=2 * job.model.num_parameters,
        count=1 if strategy.zero_stage < 2 else strategy.accumulation,
        site="block",
        during="backward",
        every="step",
    )
    return Candidate(
        strategy=strategy,
        memory=memory,
        step=make_timeline(seconds, exposed=0.11 * seconds),
        collectives=(sends,),
        tokens_per_s=job.tokens_per_step / seconds,
        model_flops_utilization=0.41,
        fits=fits,
        probability_of_oom=0.02 if fits else 0.97,
        memory_interval_bytes=(round(0.93 * device), round(1.08 * device)),
        step_interval_seconds=(0.9 * seconds, 1.13 * seconds),
    )


def make_plan(**changes: Any) -> Plan:
    """ZeRO-2 is taken, others fit or do not, one is refused."""
    job, cluster = make_job(), make_cluster()

    def candidate(seconds: float, **fields: Any) -> Candidate:
        return make_candidate(Strategy(**fields), job=job, cluster=cluster, seconds=seconds)

    taken = candidate(1.92, dp_shard=2, zero_stage=2, micro_batch_size=2, accumulation=8)
    candidates = (
        taken,
        candidate(2.05, dp_shard=2, zero_stage=3, micro_batch_size=2, accumulation=8),
        candidate(2.31, dp_shard=2, zero_stage=3, micro_batch_size=4, accumulation=4, checkpointing="full"),
        candidate(1.97, dp_shard=2, zero_stage=1, micro_batch_size=2, accumulation=8),
        candidate(1.88, dp_replicate=2, zero_stage=0, micro_batch_size=2, accumulation=8),
    )
    plan = Plan(
        job=job,
        cluster=cluster,
        recommended=taken,
        reason="ZeRO-2 is the lowest stage that fits, and the fastest of those that do.",
        rules=("must be a full fine-tune: lowest sharding stage that fits",),
        candidates=candidates,
        refusals=(
            Refusal(
                strategy=Strategy(tp=2, micro_batch_size=2, accumulation=16),
                rule="tensor_parallel_needs_a_fast_link",
                message="31.5 GB/s one way is below the 100 GB/s that tensor parallel needs; keep tp at 1",
            ),
        ),
        advice=(
            Advice(
                rule="lora_first",
                message="LoRA needs 5.1 GB a card and trains 1.2 times as fast.",
                command="shardwise plan qwen2.5-1.5b --gpus 2xrtx-5090 --tuning lora",
                price="adapters instead of all weights",
            ),
        ),
        headline=(
            Headline(name="static memory", value=24.6e9, unit="bytes", formula="16 B x 1.54e9", calibrated=27.8e9),
            Headline(name="gradients over the wire", value=0.0481, unit="seconds", formula="3.08 GB / 64 GB/s"),
        ),
        facts=(Fact(name="card memory", value="32607 MiB", source="nvidia-smi, driver 580"),),
        version="0.1.0",
    )
    return dataclasses.replace(plan, **changes)


def make_ledger() -> Ledger:
    rows = (
        LedgerRow(kind="memory", name="parameter", unit="bytes", predicted=6.18e9, measured=6.18e9),
        LedgerRow(kind="memory", name="activation", unit="bytes", predicted=6.0e9, measured=6.4e9),
        LedgerRow(kind="memory", name="allocated", unit="bytes", predicted=24.1e9, measured=25.0e9),
        LedgerRow(
            kind="memory", name="device", unit="bytes", predicted=25.4e9, note="no driver figure on this machine"
        ),
        LedgerRow(kind="time", name="step", unit="seconds", predicted=1.92, measured=2.04),
        LedgerRow(kind="time", name="exposed wire", unit="seconds", predicted=0.21, measured=0.16),
        LedgerRow(kind="wire", name="reduce_scatter", unit="messages", predicted=29, measured=29),
    )
    return Ledger(strategy_name="ZeRO-2", rows=rows, versions={"torch": "2.13.0", "nccl": "2.28.9"})


def make_run_folder(folder: Path, *, num_steps: int = 20) -> Path:
    """A run folder with every part that the report reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.yaml").write_text(codec.to_yaml(make_plan()))
    (folder / "ledger.json").write_text(codec.to_json(make_ledger()))
    lines: list[dict[str, Any]] = []
    for step in range(1, num_steps + 1):
        loss = 1.1 + 1.6 / step**0.6 + 0.05 * (-1) ** step
        lines.append({"step": step, "loss": loss, "learning_rate": 2e-5, "grad_norm": 1.0})
        if step % 5 == 0:
            lines.append({"step": step, "eval_loss": loss + 0.1})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sample = {
        "prompt": "Why is full sharding slow on a thin wire?",
        "before": "Sharding is a way to break glass.",
        "after": "Because every micro-batch gathers all weights twice and reduces all gradients once.",
    }
    measured = {
        "step": codec.to_data(make_timeline(2.04, exposed=0.16)),
        "samples": [sample],
        "command": "shardwise train plan.yaml --data chats.jsonl",
        "versions": {"python": "3.12.3"},
    }
    (folder / "measured.json").write_text(json.dumps(measured))
    return folder
