"""What a card's memory moves besides products: gradients, loss, optimizer; and what checkpointing does not repeat."""

from __future__ import annotations

import dataclasses

import pytest

from shardwise.axes.fully_shard import gradient_traffic_bytes
from shardwise.facts import catalog
from shardwise.levers.checkpointing.cost import recomputed
from shardwise.levers.offload import cost as offload_cost
from shardwise.levers.optimizer import cost as optimizer_cost
from shardwise.levers.optimizer.cost import kept, step_traffic_bytes
from shardwise.levers.precision import cost as precision_cost
from shardwise.planner.compute import compute_times, head_gradient_bytes, logit_traffic_bytes
from shardwise.planner.pricing import price
from shardwise.vocabulary.job import Job, LoraSettings, OptimizerName
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.strategy import Strategy

JOB = Job(model=catalog.model("llama-3.1-8b"), global_batch_size=8, sequence_length=4096)
ONE = Strategy(micro_batch_size=2, accumulation=4)
ZERO_3 = Strategy(dp_shard=4, zero_stage=3, micro_batch_size=2, accumulation=4)
H200 = catalog.parse_gpus("4xh200")


def each(strategy: Strategy, *, first: bool, last: bool, job: Job = JOB) -> float:
    """Bytes an element of a block."""
    place = Placement(job=job, strategy=strategy)
    block = place.group("block")
    assert block is not None
    return gradient_traffic_bytes(place, block, first=first, last=last) / block.trainable


def test_one_micro_batch_is_copied_into_the_reduction() -> None:
    alone = dataclasses.replace(ZERO_3, accumulation=1)
    assert each(alone, first=True, last=True) == 2 + 4
    assert each(dataclasses.replace(ONE, accumulation=1), first=True, last=True) == 2 + 4 + 4 + 4
    narrow = dataclasses.replace(alone, reduce_dtype="bf16")
    assert each(narrow, first=True, last=True) == 2 + 2 + (2 + 4) / 4


def test_whole_gradients_are_cast_once_and_added_to() -> None:
    stage_1 = dataclasses.replace(ZERO_3, zero_stage=1)
    assert each(stage_1, first=True, last=False) == 2 + 4
    assert each(stage_1, first=False, last=False) == 2 + 4 + 4
    assert each(stage_1, first=False, last=True) == (2 + 4 + 4) + (4 + 4)


def test_sharded_gradients_are_added_after_their_reduction() -> None:
    assert each(ZERO_3, first=True, last=False) == 2 + 4
    assert each(ZERO_3, first=False, last=False) == 2 + 4 + 3 * 4 / 4


def test_accumulation_costs_time_on_the_card() -> None:
    """Of the same tokens in four micro-batches instead of one, whole gradients are added three times."""
    stage_1 = dataclasses.replace(ZERO_3, zero_stage=1, compile_blocks=True, micro_batch_size=1)
    times = compute_times(Placement(job=JOB, strategy=stage_1), H200)
    assert times.gradients[False][False].block > times.gradients[True][False].block > 0
    job = dataclasses.replace(JOB, global_batch_size=16)
    four = price(job, H200, stage_1).step.compute_seconds
    one = price(job, H200, dataclasses.replace(stage_1, accumulation=1, micro_batch_size=4)).step.compute_seconds
    added = sum(times.gradients[first][last].block for first, last in ((True, False), (False, False), (False, False)))
    assert four - one > JOB.model.num_hidden_layers * added


def test_full_checkpointing_does_not_repeat_the_last_product() -> None:
    full = dataclasses.replace(ONE, checkpointing="full")
    model = JOB.model
    down = model.linears[-1].matrix_parameters / model.active_block_parameters
    assert recomputed(Placement(job=JOB, strategy=full)).matrices == pytest.approx(1 - down)
    lora = dataclasses.replace(full, tuning="lora")
    narrow = recomputed(Placement(job=JOB, strategy=lora)).matrices
    assert 0.99 < narrow < 1.0, "in eager code the adapter of down_proj comes after it"
    attention = dataclasses.replace(JOB, lora=LoraSettings(target_modules=("q_proj",)))
    assert recomputed(Placement(job=attention, strategy=lora)).matrices == pytest.approx(1 - down, abs=0.01)
    compiled = dataclasses.replace(lora, compile_blocks=True)
    assert recomputed(Placement(job=JOB, strategy=compiled)).matrices == pytest.approx(1 - down, abs=0.01)


def test_loss_moves_more_where_it_is_made_twice() -> None:
    moved = {
        kind: logit_traffic_bytes(Placement(job=JOB, strategy=dataclasses.replace(ONE, loss=kind, compile_blocks=True)))
        for kind in ("plain", "chunked", "fused")
    }
    assert moved["fused"] < moved["plain"] < moved["chunked"]
    assert moved["plain"] == (2 + 4) + 16 + 20 + (2 + 4)


def test_chunks_add_up_the_heads_gradient() -> None:
    place = Placement(job=JOB, strategy=dataclasses.replace(ONE, loss="chunked"))
    assert head_gradient_bytes(place) == 7 * 6 * JOB.model.embedding_parameters
    assert head_gradient_bytes(Placement(job=JOB, strategy=ONE)) == 0
    frozen = dataclasses.replace(ONE, loss="chunked", tuning="lora")
    assert head_gradient_bytes(Placement(job=JOB, strategy=frozen)) == 0


def test_frozen_weights_are_as_wide_as_compute() -> None:
    """`levers/precision/apply.py` casts what is not trained to the dtype of the products."""
    lora = Placement(job=JOB, strategy=dataclasses.replace(ONE, tuning="lora"))
    wide = Placement(job=JOB, strategy=dataclasses.replace(ONE, tuning="lora", precision="fp32"))
    assert lora.frozen_bytes == 2 * lora.frozen
    assert wide.frozen_bytes == 4 * wide.frozen
    packed = Placement(job=JOB, strategy=dataclasses.replace(ONE, tuning="qlora", precision="fp32"))
    assert packed.frozen_bytes == pytest.approx(0.516 * packed.quantized + 4 * (packed.frozen - packed.quantized), 1e-3)


def test_fp8_reaches_linear_layers_only() -> None:
    """Experts are fused parameters and stay in bf16, so fp8 saves a mixture less than a dense model."""
    strategy = dataclasses.replace(ONE, compile_blocks=True)
    saved: dict[str, float] = {}
    for name in ("llama-3.1-8b", "mixtral-8x7b"):
        job = dataclasses.replace(JOB, model=catalog.model(name))
        times = {
            precision: compute_times(
                Placement(job=job, strategy=dataclasses.replace(strategy, precision=precision)), H200
            ).block_forward
            for precision in ("bf16", "fp8")
        }
        saved[name] = 1 - times["fp8"] / times["bf16"]
    assert 0 < saved["mixtral-8x7b"] < saved["llama-3.1-8b"] / 2


def test_fp8_is_refused_for_sides_that_do_not_divide() -> None:
    odd = dataclasses.replace(JOB.model, intermediate_size=14_340)
    strategy = dataclasses.replace(ONE, precision="fp8")
    refusals = precision_cost.legal(dataclasses.replace(JOB, model=odd), H200, strategy)
    assert [refusal.rule for refusal in refusals] == ["fp8_sides_divide"]
    assert "down_proj (4,096 x 14,340)" in refusals[0].message
    assert precision_cost.legal(JOB, H200, strategy) == ()


def test_offload_of_the_optimizer_is_refused_under_stage_3() -> None:
    """As the engine refuses it."""
    refusals = offload_cost.legal(JOB, H200, dataclasses.replace(ZERO_3, offload="optimizer"))
    assert [refusal.rule for refusal in refusals] == ["optimizer_offload_keeps_weights"]


def test_an_8_bit_optimizer_keeps_tables_in_32_bits() -> None:
    place = Placement(job=JOB, strategy=dataclasses.replace(ONE, optimizer="adamw_8bit"))
    tables = 2 * JOB.model.embedding_parameters
    assert kept(place).exactly == tables + JOB.model.hidden_size * (2 * JOB.model.num_hidden_layers + 1)
    paged = Placement(job=JOB, strategy=dataclasses.replace(ONE, optimizer="paged_adamw_8bit"))
    [on_card] = optimizer_cost.stores(paged)
    assert on_card.bytes == pytest.approx(8 * kept(place).exactly + 8 / 256 * kept(place).in_8_bit)
    narrow = Placement(job=JOB, strategy=dataclasses.replace(ONE, optimizer="adamw_8bit", tuning="lora"))
    assert 0 < kept(narrow).in_8_bit < narrow.trainable, "A has long rows, B has rows of the rank"


def test_lamb_sends_its_norms() -> None:
    place = Placement(job=JOB, strategy=dataclasses.replace(ZERO_3, optimizer="lamb"))
    [message] = optimizer_cost.sends(place)
    assert (message.op, message.ranks, message.bytes) == ("all_reduce", 4, 8 * (7 * 32 + 2))
    assert optimizer_cost.sends(Placement(job=JOB, strategy=dataclasses.replace(ONE, optimizer="lamb"))) == ()


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("adamw", 28, 28), ("adamw_8bit", 40, 60), ("adamw_bf16_states", 100, 140), ("lamb", 100, 140), ("sgd", 20, 20)],
)
def test_traffic_of_an_update(name: OptimizerName, least: float, most: float) -> None:
    """Bytes an element, clipping (12 B) apart."""
    place = Placement(job=JOB, strategy=dataclasses.replace(ONE, optimizer=name))
    assert least <= step_traffic_bytes(place) / place.trainable - 12 <= most
