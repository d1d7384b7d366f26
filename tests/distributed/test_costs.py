"""Peak bytes of real steps beside what the planner counts: the engine on the CPU, storages watched one by one."""

import functools
from dataclasses import replace
from unittest import mock

import harness
import pytest
from checkpoint_pool import Pool
from harness import Case, batches_of, build, make_config, make_data, make_plan, make_stepper
from torch.distributed.tensor import DTensor

from shardwise.facts.config import model_from_config
from shardwise.levers.optimizer.cost import state_bytes
from shardwise.planner.memory import memory
from shardwise.trainer.data.store import from_samples
from shardwise.trainer.meter.memory import MemoryWatch
from shardwise.vocabulary.cluster import Cluster, Gpu, Link
from shardwise.vocabulary.job import Job, LoraSettings, OptimizerName
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.strategy import Checkpointing, Strategy

pytestmark = pytest.mark.distributed

ONE = Strategy(precision="bf16", micro_batch_size=4)
TWO = replace(ONE, dp_shard=2, zero_stage=3, micro_batch_size=2)
LORA = LoraSettings(r=4)
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


def predicted(case: Case, lora: LoraSettings = LORA) -> int:
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
        lora=lora,
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


def peak_with_dora(case: Case) -> int:
    """The same with adapters that train lengths of rows as well."""
    with mock.patch.object(harness, "LoraSettings", functools.partial(LoraSettings, use_dora=True)):
        return peak_of_step(case)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_peak_with_dora(ranks: Pool, checkpointing: Checkpointing) -> None:
    strategy = replace(ONE, tuning="lora", checkpointing=checkpointing)
    case = Case(strategy=strategy, hidden_size=128, layers=4, max_tokens=128, vocab_size=2048, steps=2)
    [measured] = ranks.run(1, peak_with_dora, case)
    assert predicted(case, LoraSettings(r=4, use_dora=True)) == pytest.approx(measured, rel=TOLERANCE)


def bytes_of_moments(case: Case) -> int:
    """Of all moments on this rank after a step."""
    skeleton, mesh = build(case)
    stepper = make_stepper(case, skeleton, mesh)
    data = make_data(case)
    plan = make_plan(case, data, case.strategy.data_parallel)
    batches = batches_of(data, plan, 0, mesh.data_rank, mesh.device)
    stepper.run(batches, len(batches), plan.num_supervised_tokens(0))
    states = [value for state in stepper.optimizer.state.values() for value in state.values() if value.ndim]
    local = [state.to_local() if isinstance(state, DTensor) else state for state in states]
    return sum(state.numel() * state.element_size() for state in local)


@pytest.mark.parametrize("name", ["adamw", "adamw_bf16_states", "adamw_8bit", "lamb", "sgd"])
def test_moments_are_those_that_the_planner_counts(ranks: Pool, name: OptimizerName) -> None:
    """In 8 bits: matrices with rows of 256; not the down projection's rows of 384, nor norms, embedding and head."""
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes", reason="8-bit optimizers need bitsandbytes")
    case = Case(strategy=replace(TWO, optimizer=name), hidden_size=256, layers=2, vocab_size=96)
    measured = ranks.run(2, bytes_of_moments, case)
    job = Job(model=model_from_config(make_config(case).to_dict(), "tiny"), optimizer=name)
    place = Placement(job=job, strategy=case.strategy)
    assert measured == [state_bytes(place) / 2] * 2
