"""What the planner answers: offload, other names of splits, time and money, other axes, refusals all at once."""

from __future__ import annotations

import dataclasses
import math

import pytest

from shardwise.errors import ConfigError, UnknownNameError
from shardwise.facts import catalog
from shardwise.planner import duration
from shardwise.planner.aliases import with_alias
from shardwise.planner.answer import make_plan
from shardwise.planner.memory import memory
from shardwise.planner.pricing import price
from shardwise.planner.search import Wishes, survey
from shardwise.planner.uncertainty import needed_bytes, usable_bytes
from shardwise.vocabulary.job import Job, SequenceLengths
from shardwise.vocabulary.memory import CACHED, Category, Instant
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.strategy import Checkpointing, Strategy
from shardwise.vocabulary.units import GB

SEVEN = Job(model=catalog.model("qwen2.5-7b"), global_batch_size=32)
ZERO3 = Strategy(dp_shard=8, zero_stage=3, micro_batch_size=2, accumulation=2, checkpointing="full")
EIGHT = catalog.parse_gpus("8xh100")


def terms(job: Job, strategy: Strategy) -> dict[str, int]:
    return {term.name: term.bytes for term in memory(job, EIGHT, strategy).terms}


# ------------------------------------------------------------------------------------------------------------- offload


def test_offload_moves_states_to_the_host() -> None:
    kept = price(SEVEN, EIGHT, ZERO3)
    optimizer = price(SEVEN, EIGHT, dataclasses.replace(ZERO3, offload="optimizer"))
    everything = price(SEVEN, EIGHT, dataclasses.replace(ZERO3, offload="parameters"))
    sizes = [each.memory.device_bytes for each in (everything, optimizer, kept)]
    hosts = [each.host_bytes for each in (kept, optimizer, everything)]
    assert sizes == sorted(sizes)
    assert hosts == sorted(hosts)
    assert kept.step.seconds < optimizer.step.seconds
    assert kept.step.seconds < everything.step.seconds
    states = everything.memory.by_category(Instant.OPTIMIZER)
    assert states[Category.OPTIMIZER] == states[Category.PARAMETER] == states[Category.GRADIENT] == 0


def test_offloaded_weights_cross_pcie_for_every_gather() -> None:
    wire = {
        steps: price(
            dataclasses.replace(SEVEN, global_batch_size=16 * steps),
            EIGHT,
            dataclasses.replace(ZERO3, offload="parameters", accumulation=steps),
        ).step.wire_seconds
        for steps in (1, 3)
    }
    assert math.isclose(wire[3], 3 * wire[1], rel_tol=0.01)


def test_offload_is_refused_where_nothing_is_sharded_or_the_host_is_small() -> None:
    _, refusals = survey(SEVEN, EIGHT, Wishes(zero_stage=1, offload="parameters"))
    assert {"offload_needs_shards"} <= {refusal.rule for refusal in refusals}
    small = dataclasses.replace(EIGHT, host_memory_bytes=64 * GB)
    _, refusals = survey(SEVEN, small, Wishes(zero_stage=3, offload="parameters"))
    assert any(refusal.rule == "host_has_room" and "64.0 GB" in refusal.message for refusal in refusals)


# ------------------------------------------------------------------------------------------------------ cached blocks


def test_cached_blocks_never_decide() -> None:
    job = dataclasses.replace(SEVEN, tuning="lora")
    cluster = catalog.parse_gpus("rtx-5090")
    for size in (1, 2, 4, 8):
        strategy = Strategy(tuning="lora", micro_batch_size=size, accumulation=32 // size, checkpointing="full")
        used = memory(job, cluster, strategy)
        cached = sum(term.bytes for term in used.terms if term.name == CACHED)
        assert cached >= 0
        if needed_bytes(used) <= usable_bytes(cluster):
            assert used.device_bytes <= usable_bytes(cluster)


# -------------------------------------------------------------------------------------------------------- selective


def test_selective_lies_between_none_and_full() -> None:
    kinds: tuple[Checkpointing, ...] = ("full", "selective", "none")
    for compiled in (False, True):
        priced = [
            price(SEVEN, EIGHT, dataclasses.replace(ZERO3, checkpointing=kind, compile_blocks=compiled))
            for kind in kinds
        ]
        sizes = [each.memory.at(Instant.FORWARD) for each in priced]
        times = [each.step.seconds for each in priced]
        assert sizes == sorted(sizes)
        assert times == sorted(times, reverse=True)


def test_fp8_keeps_less_and_is_faster() -> None:
    bf16 = dataclasses.replace(ZERO3, checkpointing="none", compile_blocks=True, micro_batch_size=4, accumulation=1)
    fp8 = dataclasses.replace(bf16, precision="fp8")
    job = dataclasses.replace(SEVEN, sequence_length=4096)
    slow = price(job, EIGHT, bf16)
    fast = price(dataclasses.replace(job, precision="fp8"), EIGHT, fp8)
    assert fast.step.seconds < slow.step.seconds
    assert fast.memory.allocated_bytes < slow.memory.allocated_bytes


# ------------------------------------------------------------------------------------------------------------ mixtures


def test_mixture_is_stored_whole_and_computed_by_the_active_part() -> None:
    mixture = Job(model=catalog.model("qwen3-30b-a3b"), global_batch_size=16)
    model = mixture.model
    place = Placement(job=mixture, strategy=ZERO3)
    assert place.trainable == model.num_parameters
    dense = dataclasses.replace(model, num_experts_per_tok=model.num_experts)
    strategy = dataclasses.replace(ZERO3, accumulation=1)
    active = price(mixture, EIGHT, strategy)
    all_experts = price(dataclasses.replace(mixture, model=dense), EIGHT, strategy)
    assert active.step.compute_seconds < all_experts.step.compute_seconds / 3
    for category in (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER):
        sizes = {each.memory.by_category(Instant.OPTIMIZER)[category] for each in (active, all_experts)}
        assert len(sizes) == 1


def test_mixture_refuses_qlora() -> None:
    job = Job(model=catalog.model("qwen3-30b-a3b"), global_batch_size=16, tuning="qlora")
    plan = make_plan(job, EIGHT)
    assert plan.recommended is None
    assert {refusal.rule for refusal in plan.refusals} == {"qlora_packs_matrices"}


# ---------------------------------------------------------------------------------------------------------- pipelines


def test_pipeline_schedules_trade_bubble_for_memory() -> None:
    job = Job(model=catalog.model("llama-3-70b"), global_batch_size=64)
    cluster = catalog.parse_gpus("8x8xh100")
    base = Strategy(pp=4, tp=8, dp_replicate=2, accumulation=32, sequence_parallel=True, pipeline_schedule="1f1b")
    found = {
        name: price(job, cluster, dataclasses.replace(base, pipeline_schedule=name, virtual_stages=stages))
        for name, stages in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 4), ("zero_bubble", 1))
    }
    bubbles = {name: each.step.bubble_seconds / each.step.seconds for name, each in found.items()}
    assert math.isclose(bubbles["gpipe"], bubbles["1f1b"])
    assert bubbles["interleaved_1f1b"] < bubbles["zero_bubble"] < bubbles["1f1b"]
    sizes = {name: each.memory.allocated_bytes for name, each in found.items()}
    for less_bubble in ("interleaved_1f1b", "zero_bubble"):
        assert sizes["1f1b"] <= sizes[less_bubble] < sizes["gpipe"]


def test_other_axes_are_recommended_only_where_nothing_else_fits() -> None:
    job = Job(model=catalog.model("llama-2-13b"), global_batch_size=8, sequence_length=4096)
    cluster = dataclasses.replace(EIGHT)
    open_plan = make_plan(job, cluster)
    assert open_plan.recommended is not None
    assert open_plan.recommended.strategy.tp == open_plan.recommended.strategy.pp == 1
    long = dataclasses.replace(job, model=catalog.model("llama-3.1-8b"), sequence_length=131_072, tuning="full")
    plan = make_plan(long, cluster)
    assert plan.recommended is not None
    assert plan.recommended.strategy.tp > 1
    assert any("no data-parallel strategy fits" in rule for rule in plan.rules)


# -------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "stage"),
    [("FULL_SHARD", 3), ("SHARD_GRAD_OP", 2), ("NO_SHARD", 0), ("full_shard auto_wrap", 3), ("zero1", 1), ("ddp", 0)],
)
def test_other_names_of_stages(name: str, stage: int) -> None:
    assert with_alias(Wishes(), name, EIGHT).zero_stage == stage


def test_hybrid_names_shard_inside_a_machine() -> None:
    cluster = catalog.parse_gpus("4x8xh100")
    for name, stage in (("HYBRID_SHARD", 3), ("_HYBRID_SHARD_ZERO2", 2)):
        wishes = with_alias(Wishes(), name, cluster)
        assert (wishes.zero_stage, wishes.dp_shard) == (stage, 8)
        plan = make_plan(dataclasses.replace(SEVEN, global_batch_size=64), cluster, wishes)
        assert plan.recommended is not None
        assert plan.recommended.strategy.dp_replicate == 4


def test_names_that_contradict_or_do_not_exist() -> None:
    with pytest.raises(UnknownNameError, match="FULL_SHARD"):
        with_alias(Wishes(), "FULL_SHRAD", EIGHT)
    with pytest.raises(ConfigError) as caught:
        with_alias(Wishes(zero_stage=1), "HYBRID_SHARD", EIGHT)
    assert len(caught.value.problems) == 2
    assert with_alias(Wishes(), "full_shard offload", EIGHT).offload == "parameters"


# ------------------------------------------------------------------------------------------------------ time and money


def lengths() -> SequenceLengths:
    return SequenceLengths(
        num_sequences=10_000, total_tokens=4_000_000, supervised_tokens=2_000_000, longest=2048, mean=400.0, p50=300,
        p95=1500, quantiles=(50, 300, 2048),
    )  # fmt: skip


def test_hours_and_price_of_the_data_set() -> None:
    job = dataclasses.replace(SEVEN, lengths=lengths(), num_train_epochs=3.0, price_per_gpu_hour=2.0)
    candidate = price(job, EIGHT, ZERO3)
    found = duration.duration(job, EIGHT, candidate)
    assert found is not None
    assert found.num_steps == math.ceil(10_000 / 32 * 3)
    assert math.isclose(found.seconds, found.num_steps * candidate.step.seconds)
    assert found.price is not None
    assert math.isclose(found.price, 8 * found.seconds / 3600 * 2.0)
    plan = make_plan(job, EIGHT)
    assert {"how_long", "packing_saves"} <= {advice.rule for advice in plan.advice}


def test_steps_without_data_and_with_packing() -> None:
    assert duration.num_steps(SEVEN) is None
    assert duration.num_steps(dataclasses.replace(SEVEN, max_steps=7)) == 7
    packed = dataclasses.replace(SEVEN, lengths=lengths(), packing=True)
    assert duration.num_steps(packed) == math.ceil(math.ceil(4_000_000 / 2048) / 32)
    assert duration.padding_share(packed, price(packed, EIGHT, ZERO3)) == 0.0


# ---------------------------------------------------------------------------------------------------------- bad input


def test_every_problem_at_once() -> None:
    job = dataclasses.replace(SEVEN, sequence_length=10**6, global_batch_size=33)
    with pytest.raises(ConfigError) as caught:
        make_plan(job, EIGHT, Wishes(pp=64, tp=8, dp_shard=8, zero_stage=0))
    text = "\n".join(caught.value.problems)
    for piece in ("multiply to", "dp_shard", "longer", "attention heads", "layers, fewer"):
        assert piece in text
    with pytest.raises(ConfigError, match="32 and 40 divide by 8"):
        make_plan(dataclasses.replace(SEVEN, global_batch_size=33), EIGHT)


def test_one_card_is_one_job_a_card() -> None:
    job = Job(model=catalog.model("qwen2.5-0.5b"), global_batch_size=32)
    plan = make_plan(job, catalog.parse_gpus("2xrtx-5090"))
    assert any(rule.startswith("fits on one card") for rule in plan.rules)
    assert any(advice.rule == "do_more_cards_help" for advice in plan.advice)


def test_every_tuning_is_tried_on_one_card() -> None:
    plan = make_plan(dataclasses.replace(SEVEN, tuning="any"), catalog.parse_gpus("rtx-4090"))
    assert {candidate.strategy.tuning for candidate in plan.candidates} == {"full", "lora", "qlora"}
    assert plan.recommended is not None
    assert plan.recommended.strategy.tuning in ("lora", "qlora")


def test_one_micro_batch_may_fit_where_accumulation_does_not() -> None:
    """Whole gradients that are kept between micro-batches are what a single one does without."""
    job = Job(model=catalog.model("qwen2.5-1.5b"), global_batch_size=8, sequence_length=512)
    cluster = catalog.parse_gpus("rtx-5090")
    candidates, _ = survey(job, cluster, Wishes(checkpointing="full", loss="chunked"))
    everything, _ = survey(job, cluster, Wishes(checkpointing="full", loss="chunked", every_candidate=True))
    assert any(candidate.fits for candidate in candidates) == any(candidate.fits for candidate in everything)


@pytest.mark.parametrize("gpus", ["rtx-5090", "4xrtx-4090", "8xh100", "2x4xa100"])
@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "llama-3.1-8b"])
def test_bounds_lose_no_answer(gpus: str, name: str) -> None:
    """The pruned search recommends what pricing every variant would."""
    job = Job(model=catalog.model(name), global_batch_size=32, tuning="any", sequence_length=1024)
    cluster = catalog.parse_gpus(gpus)
    pruned, _ = survey(job, cluster, Wishes())
    everything, _ = survey(job, cluster, Wishes(every_candidate=True))
    best = {
        (each.strategy.tuning, each.strategy.name): min(
            other.step.seconds
            for other in everything
            if other.fits and (other.strategy.tuning, other.strategy.name) == (each.strategy.tuning, each.strategy.name)
        )
        for each in pruned
        if each.fits
    }
    for each in pruned:
        if each.fits:
            assert each.step.seconds <= 1.05 * best[each.strategy.tuning, each.strategy.name]
    fitting = {(each.strategy.tuning, each.strategy.name) for each in everything if each.fits}
    assert fitting == set(best)


UNEVEN = SequenceLengths(
    num_sequences=10_000, total_tokens=4_000_000, supervised_tokens=2_000_000, longest=2048, mean=400.0, p50=300,
    p95=1500, quantiles=(50, 300, 2048),
)  # fmt: skip


@pytest.mark.parametrize("lengths_of", [None, UNEVEN], ids=["equal rows", "uneven rows"])
@pytest.mark.parametrize("wishes", [Wishes(every_axis=True), Wishes(keep_unsharded=True)], ids=["meshes", "whole"])
def test_bounds_lose_no_answer_of_other_meshes_and_rows(wishes: Wishes, lengths_of: SequenceLengths | None) -> None:
    """The same for pipelines, whose bubble grows with the micro-batch, and for rows whose padding does."""
    job = Job(model=catalog.model("llama-2-13b"), global_batch_size=32, sequence_length=2048, lengths=lengths_of)
    cluster = catalog.parse_gpus("8xa100-40gb-sxm")
    pruned, _ = survey(job, cluster, wishes)
    everything, _ = survey(job, cluster, dataclasses.replace(wishes, every_candidate=True))
    best: dict[str, float] = {}
    for each in everything:
        if each.fits:
            best[each.strategy.name] = min(each.step.seconds, best.get(each.strategy.name, math.inf))
    assert {each.strategy.name for each in pruned if each.fits} == set(best)
    fastest = min(best.values())
    for each in pruned:
        if each.fits and best[each.strategy.name] <= 1.15 * fastest:
            assert each.step.seconds <= 1.05 * best[each.strategy.name], each.strategy


def test_a_packed_model_is_planned_unpacked_and_the_plan_says_so() -> None:
    model = dataclasses.replace(catalog.model("qwen2.5-0.5b"), stored_as="gptq, 4 bits")
    plan = make_plan(Job(model=model, global_batch_size=8), catalog.parse_gpus("rtx-4090"))
    [fact] = [fact for fact in plan.facts if "quantization_config" in fact.source]
    assert "gptq, 4 bits" in fact.value
    assert "unpacked" in fact.value
    plain = make_plan(Job(model=catalog.model("qwen2.5-0.5b"), global_batch_size=8), catalog.parse_gpus("rtx-4090"))
    assert plan.recommended is not None
    assert plain.recommended is not None
    assert plan.recommended.memory == plain.recommended.memory
    assert not any("quantization_config" in fact.source for fact in plain.facts)


def test_zero_bubble_leaves_off_what_would_forbid_it() -> None:
    job = dataclasses.replace(SEVEN, global_batch_size=32)
    plan = make_plan(job, EIGHT, Wishes(pp=2, pipeline_schedule="zero_bubble"))
    assert plan.recommended is not None
    strategy = plan.recommended.strategy
    assert (strategy.pp, strategy.compile_blocks, strategy.loss, strategy.checkpointing) == (2, False, "plain", "none")
    _, refusals = survey(job, EIGHT, Wishes(pp=2, pipeline_schedule="zero_bubble", compile_blocks=True))
    assert "zero_bubble_splits_backward" in {refusal.rule for refusal in refusals}
