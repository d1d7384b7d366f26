"""Peak bytes of real steps beside what the planner counts: the engine on the CPU, storages watched one by one."""

from dataclasses import replace

import pytest
from checkpoint_pool import Pool
from harness import Case, batches_of, build, make_config, make_plan, make_stepper

from shardwise.facts.config import model_from_config
from shardwise.planner.memory import memory
from shardwise.trainer.data.store import from_samples
from shardwise.trainer.meter.memory import MemoryWatch
from shardwise.vocabulary.cluster import Cluster, Gpu, Link
from shardwise.vocabulary.job import Job, LoraSettings
from shardwise.vocabulary.strategy import Strategy

pytestmark = pytest.mark.distributed

ONE = Strategy(precision="bf16", micro_batch_size=4)
TWO = replace(ONE, dp_shard=2, zero_stage=3, micro_batch_size=2)
TOLERANCE = 0.03
"""Of small tensors (rotary tables, masks, sums) that the planner does not count."""


def peak_of_step(case: Case) -> int:
    """Largest sum of living storages in the second step, with rows of full length; runs on every rank."""
    skeleton, mesh = build(case)
    stepper = make_stepper(case, skeleton, mesh)
    rows = [[(7 * i + j) % case.vocab_size for j in range(case.max_tokens)] for i in range(64)]
    data = from_samples(rows, [[1] * case.max_tokens for _ in rows])
    plan = make_plan(case, data, case.strategy.data_parallel)
    watch = MemoryWatch(skeleton.model, stepper.optimizer, mesh.device)
    for step in range(2):
        batches = batches_of(data, plan, step, mesh.data_rank, mesh.device)
        tokens = plan.num_supervised_tokens(step)
        if step == 0:
            stepper.run(batches, len(batches), tokens)
            continue
        with watch.watching():
            stepper.run(batches, len(batches), tokens)
    return watch.result().peak_bytes


def predicted(case: Case) -> int:
    strategy = case.strategy
    gpu = Gpu(
        name="cpu", memory_bytes=2**34, peak_flops={"bf16": 1e11}, memory_bandwidth_bytes_per_s=1e10, architecture="cpu"
    )
    link = Link(name="loopback", kind="loopback", bandwidth_bytes_per_s=1e9)
    job = Job(
        model=model_from_config(make_config(case).to_dict(), "tiny"),
        tuning=strategy.tuning,
        sequence_length=case.max_tokens,
        global_batch_size=strategy.global_batch_size,
        lora=LoraSettings(r=4),
    )
    cluster = Cluster(name="cpu", gpu=gpu, gpus_per_node=strategy.num_ranks, intra_node=link)
    return memory(job, cluster, strategy).allocated_bytes


@pytest.mark.parametrize(
    "strategy",
    [ONE, replace(ONE, checkpointing="full"), replace(ONE, checkpointing="selective"), replace(ONE, loss="chunked"),
     replace(ONE, loss="fused"), replace(TWO, loss="fused"), replace(ONE, loss="fused", tuning="lora"),
     replace(ONE, accumulation=2, micro_batch_size=2), replace(ONE, tuning="lora"),
     replace(ONE, tuning="lora", checkpointing="full"), TWO, replace(TWO, checkpointing="full"),
     replace(TWO, zero_stage=2, accumulation=2), replace(TWO, tuning="lora"),
     replace(TWO, zero_stage=0, dp_shard=1, dp_replicate=2)],
    ids=["plain", "full", "selective", "chunked", "fused", "fused-zero3", "fused-lora", "accumulated", "lora",
         "lora-full", "zero3", "zero3-full", "zero2", "lora-zero3", "ddp"],
)  # fmt: skip
def test_peak_is_what_the_planner_counts(ranks: Pool, strategy: Strategy) -> None:
    case = Case(strategy=strategy, hidden_size=128, layers=4, max_tokens=128, vocab_size=2048, steps=2)
    measured = max(ranks.run(strategy.num_ranks, peak_of_step, case))
    assert predicted(case) == pytest.approx(measured, rel=TOLERANCE)
