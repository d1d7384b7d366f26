"""What must hold for every job, machine and strategy, whatever the numbers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.facts import catalog
from shardwise.levers.loss.cost import logit_bytes
from shardwise.planner.answer import make_plan
from shardwise.planner.memory import Footprint, memory
from shardwise.planner.pricing import price
from shardwise.planner.search import Wishes, meshes, strategies, survey
from shardwise.planner.timeline import Parts, sends
from shardwise.planner.uncertainty import fits
from shardwise.vocabulary import codec
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job, LoraSettings, TuningWish
from shardwise.vocabulary.memory import Category, Instant
from shardwise.vocabulary.model import ModelShape
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.plan import Plan
from shardwise.vocabulary.strategy import Axis, Strategy, ZeroStage

QUICK = settings(max_examples=60, deadline=None)
STATIC = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER)
TUNINGS: tuple[TuningWish, ...] = ("full", "any", "lora")
CARDS = ("rtx-4090", "h200", "a100-80gb-sxm", "v100-32gb")
SMALL = ModelShape(
    name="small", model_type="llama", hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
    num_attention_heads=8, num_key_value_heads=8, head_dim=64, vocab_size=4096,
)  # fmt: skip


@functools.cache
def cluster_of(card: str, nodes: int, cards: int) -> Cluster:
    return catalog.parse_gpus(f"{nodes}x{cards}x{card}")


@st.composite
def models(draw: st.DrawFn) -> ModelShape:
    heads = draw(st.sampled_from((8, 16, 32)))
    experts = draw(st.sampled_from((0, 0, 0, 8)))
    return dataclasses.replace(
        SMALL,
        hidden_size=heads * 64,
        intermediate_size=draw(st.sampled_from((1024, 2816, 8192))),
        num_hidden_layers=draw(st.integers(4, 40)),
        num_attention_heads=heads,
        num_key_value_heads=draw(st.sampled_from((8, heads))),
        vocab_size=draw(st.sampled_from((32_000, 151_936))),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        num_experts=experts,
        num_experts_per_tok=2 if experts else 0,
    )


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    return Job(
        model=draw(models()),
        tuning=draw(st.sampled_from(("full", "lora", "qlora"))),
        sequence_length=draw(st.sampled_from((256, 1024, 4096))),
        precision=draw(st.sampled_from(("bf16", "bf16_pure", "fp32"))),
        reduce_dtype=draw(st.sampled_from(("fp32", "bf16"))),
        optimizer=draw(st.sampled_from(("adamw", "adamw_8bit", "lamb", "sgd"))),
        attention=draw(st.sampled_from(("sdpa", "eager"))),
        lora=draw(st.sampled_from((LoraSettings(), LoraSettings(r=64, dropout=0.05, adapter_dtype="bf16")))),
    )


@st.composite
def splits(draw: st.DrawFn, job: Job) -> Strategy:
    stage: ZeroStage = draw(st.sampled_from((0, 1, 2, 3)))
    replicate = draw(st.sampled_from((1, 2, 8)))
    return Strategy(
        dp_replicate=replicate,
        dp_shard=draw(st.sampled_from((2, 4, 8))) if stage else 1,
        tp=draw(st.sampled_from((1, 1, 2))),
        zero_stage=stage,
        micro_batch_size=draw(st.integers(1, 8)),
        accumulation=draw(st.integers(1, 5)),
        tuning=job.tuning if job.tuning != "any" else "full",
        checkpointing=draw(st.sampled_from(("none", "selective", "full"))),
        loss=draw(st.sampled_from(("plain", "chunked", "fused"))),
        precision=job.precision,
        reduce_dtype=job.reduce_dtype,
        optimizer=job.optimizer,
        compile_blocks=draw(st.booleans()),
        offload=draw(st.sampled_from(("none", "none", "optimizer", "parameters"))),
        keep_unsharded=stage >= 2 and draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Job, Strategy]:
    job = draw(jobs())
    strategy = draw(splits(job))
    return dataclasses.replace(job, global_batch_size=strategy.global_batch_size), strategy


def static(job: Job, strategy: Strategy) -> int:
    used = memory(job, cluster_of("h200", 8, 8), strategy).by_category(Instant.OPTIMIZER)
    return sum(used[category] for category in STATIC)


@QUICK
@given(case=cases(), pp=st.sampled_from((1, 2, 4)))
def test_stages_of_a_pipeline_hold_the_whole_model(case: tuple[Job, Strategy], pp: int) -> None:
    job, strategy = case
    strategy = dataclasses.replace(strategy, pp=pp, tp=1, tuning="full")
    held = sum(Placement(job=job, strategy=strategy, stage=stage).trainable for stage in range(pp))
    twice = job.model.embedding_parameters if job.model.tie_word_embeddings and pp > 1 else 0
    assert held == job.model.num_parameters + twice


@QUICK
@given(case=cases(), shards=st.integers(2, 64))
def test_shards_sum_to_the_whole(case: tuple[Job, Strategy], shards: int) -> None:
    job, strategy = case
    strategy = dataclasses.replace(strategy, dp_shard=shards, zero_stage=3, offload="none")
    place = Placement(job=job, strategy=strategy)
    terms = {term.name: term.bytes for term in memory(job, cluster_of("h200", 8, 8), strategy).terms}
    whole = place.trainable * place.master_bytes
    assert whole <= terms["trainable weights"] * shards < whole + shards


@QUICK
@given(case=cases())
def test_tensor_ranks_hold_at_least_the_whole(case: tuple[Job, Strategy]) -> None:
    job, strategy = case
    one = Placement(job=job, strategy=dataclasses.replace(strategy, tp=1, tuning="full"))
    two = Placement(job=job, strategy=dataclasses.replace(strategy, tp=2, tuning="full"))
    whole, halves = one.trainable, 2 * two.trainable
    norms = job.model.num_hidden_layers * job.model.norm_parameters_per_block + job.model.hidden_size
    routers = job.model.num_hidden_layers * job.model.num_experts * job.model.hidden_size
    biases = job.model.num_hidden_layers * 4 * (job.model.query_size + job.model.hidden_size)
    assert whole <= halves <= whole + norms + routers + biases


@QUICK
@given(case=cases())
def test_more_cards_never_more_static_memory(case: tuple[Job, Strategy]) -> None:
    job, strategy = case
    for axis in ("dp_shard", "tp"):
        if axis == "dp_shard" and strategy.zero_stage == 0:
            continue
        more = dataclasses.replace(strategy, **{axis: 2 * getattr(strategy, axis)})
        assert static(job, more) <= static(job, strategy)


@QUICK
@given(case=cases(), shards=st.sampled_from((2, 4, 8)))
def test_a_lower_stage_never_sends_more(case: tuple[Job, Strategy], shards: int) -> None:
    """Stage 0 is compared where gradients travel in bf16: in fp32 its all_reduce moves 8 bytes, stage 1 moves 6."""
    job, strategy = case
    stages: tuple[ZeroStage, ...] = (1, 2, 3)
    bf16 = strategy.reduce_dtype == "bf16" and strategy.precision != "fp32" and strategy.tuning == "full"
    if bf16:
        stages = (0, *stages)
    wire: list[int] = []
    for stage in stages:
        degrees = {"dp_replicate": 1, "dp_shard": shards} if stage else {"dp_replicate": shards, "dp_shard": 1}
        same = dataclasses.replace(strategy, zero_stage=stage, keep_unsharded=False, offload="none", **degrees)
        sent = sends(Placement(job=job, strategy=same))
        wire.append(sum(message.wire_bytes for message in sent if message.axis in (Axis.DP_REPLICATE, Axis.DP_SHARD)))
    rounding = 64
    assert all(low <= high + rounding for low, high in itertools.pairwise(wire))


@QUICK
@given(case=cases())
def test_memory_grows_with_batch_and_sequence(case: tuple[Job, Strategy]) -> None:
    job, strategy = case
    cluster = cluster_of("h200", 8, 8)
    before = memory(job, cluster, strategy)
    wider = memory(job, cluster, dataclasses.replace(strategy, micro_batch_size=strategy.micro_batch_size + 1))
    longer = memory(dataclasses.replace(job, sequence_length=job.sequence_length + 128), cluster, strategy)
    # One chunk of the fused loss more makes all of them smaller.
    chunk = logit_bytes(Placement(job=job, strategy=strategy)) if strategy.loss == "fused" else 0
    for after in (wider, longer):
        assert after.allocated_bytes >= before.allocated_bytes - chunk
        assert after.reserved_bytes >= before.reserved_bytes - 2 * chunk
        assert after.device_bytes >= before.device_bytes - 2 * chunk


@QUICK
@given(case=cases())
def test_peak_holds_every_term_and_totals_are_ordered(case: tuple[Job, Strategy]) -> None:
    used = memory(case[0], cluster_of("h200", 8, 8), case[1])
    assert all(term.bytes >= 0 for term in used.terms)
    for term in used.terms:
        peak = max(used.at(instant, "device") for instant in term.alive)
        assert used.at(used.peak_instant, "device") >= term.bytes or term.bytes <= peak
    steps = [term for term in used.terms if used.peak_instant in term.alive and term.level == "allocated"]
    assert used.allocated_bytes == sum(term.bytes for term in steps)
    assert used.allocated_bytes <= used.reserved_bytes <= used.device_bytes


@QUICK
@given(case=cases(), card=st.sampled_from(CARDS))
def test_predictions_are_finite_and_positive(case: tuple[Job, Strategy], card: str) -> None:
    candidate = price(case[0], cluster_of(card, 8, 8), case[1])
    step = candidate.step
    parts = (step.compute_seconds, step.exposed_wire_seconds, step.bubble_seconds, step.host_seconds)
    assert math.isfinite(step.seconds)
    assert step.seconds > 0
    assert all(part >= 0 for part in parts)
    assert math.isclose(sum(parts), step.seconds, rel_tol=1e-9)
    assert step.exposed_wire_seconds <= step.wire_seconds * (1 + 1e-9)
    assert candidate.tokens_per_s > 0
    assert 0 <= candidate.probability_of_oom <= 1
    needed, (low, high) = candidate.memory.needed_bytes, candidate.memory_interval_bytes
    assert low <= needed <= high
    assert needed + candidate.memory.cached_bytes == candidate.memory.device_bytes


@QUICK
@given(case=cases(), card=st.sampled_from(CARDS), pp=st.sampled_from((1, 1, 2)))
def test_the_quick_look_is_the_breakdowns_verdict(case: tuple[Job, Strategy], card: str, pp: int) -> None:
    """What a search counts for a variant is what its breakdown says, whatever was looked at before it."""
    job, strategy = case
    cluster = cluster_of(card, 8, 8)
    strategy = dataclasses.replace(strategy, pp=pp)
    footprint = Footprint(job, cluster)
    changes: tuple[dict[str, Any], ...] = (
        {}, {"checkpointing": "full"}, {"loss": "chunked"}, {"micro_batch_size": 3, "accumulation": 7},
        {"accumulation": 1},
    )  # fmt: skip
    for change in changes:
        variant = dataclasses.replace(strategy, **change)
        used = memory(job, cluster, variant)
        assert footprint.look(variant) == (fits(used, cluster), used.needed_bytes)


@QUICK
@given(case=cases())
def test_what_a_split_works_out_once_holds_for_its_variants(case: tuple[Job, Strategy]) -> None:
    job, strategy = case
    other = dataclasses.replace(strategy, micro_batch_size=5, accumulation=2, checkpointing="selective", loss="chunked")
    first = Placement(job=job, strategy=strategy)
    cluster = cluster_of("h200", 8, 8)
    Parts.of(first, cluster)  # fills what is kept
    assert Parts.of(first.variant(other), cluster) == Parts.of(Placement(job=job, strategy=other), cluster)


@QUICK
@given(case=cases(), card=st.sampled_from(CARDS))
def test_chance_and_interval_are_of_the_same_memory(case: tuple[Job, Strategy], card: str) -> None:
    """An interval that ends below the card leaves at most 5 % to run out, and the other way round."""
    cluster = cluster_of(card, 8, 8)
    candidate = price(case[0], cluster, case[1])
    total = cluster.gpu.cuda_memory_bytes or cluster.gpu.memory_bytes
    chance, high = candidate.probability_of_oom, candidate.memory_interval_bytes[1]
    assert (high <= total) == (chance <= 0.05) or math.isclose(high, total, rel_tol=1e-3)
    if candidate.fits:
        assert candidate.memory.device_bytes <= total, "cached blocks are given back before they would not fit"


@QUICK
@given(gpus=st.integers(1, 512), pp=st.sampled_from((None, 1, 2, 4)), tp=st.sampled_from((None, 1, 8)))
def test_a_mesh_never_forgets_an_axis(gpus: int, pp: int | None, tp: int | None) -> None:
    found = list(meshes(gpus, Wishes(pp=pp, tp=tp, every_axis=True)))
    assert len(found) == len(set(found))
    assert all(math.prod(mesh) == gpus for mesh in found)
    assert bool(found) == (gpus % ((pp or 1) * (tp or 1)) == 0)


@given(nodes=st.sampled_from((1, 2)), cards=st.sampled_from((1, 2, 4, 8)))
@settings(max_examples=8, deadline=None)
def test_every_strategy_of_a_search_uses_every_card(nodes: int, cards: int) -> None:
    job = Job(model=SMALL, global_batch_size=32, tuning="any")
    cluster = cluster_of("h200", nodes, cards)
    found = list(strategies(job, cluster, Wishes(every_axis=True)))
    assert found
    assert all(strategy.num_ranks == cluster.num_gpus for strategy in found)


@given(cards=st.sampled_from((1, 2, 4)), tuning=st.sampled_from(TUNINGS))
@settings(max_examples=6, deadline=None)
def test_plans_survive_json_and_yaml(cards: int, tuning: TuningWish) -> None:
    job = Job(model=SMALL, global_batch_size=8, tuning=tuning)
    plan = make_plan(job, cluster_of("h200", 1, cards), Wishes(checkpointing="none"))
    assert codec.from_data(Plan, json.loads(codec.to_json(plan))) == plan
    assert codec.from_data(Plan, codec.parse_yaml(codec.to_yaml(plan))) == plan


def test_survey_is_sorted_and_deduplicated() -> None:
    job = Job(model=SMALL, global_batch_size=32, tuning="any")
    candidates, _ = survey(job, cluster_of("rtx-4090", 1, 2), Wishes())
    fitting = [each.step.seconds for each in candidates if each.fits]
    assert fitting == sorted(fitting)
    names = [(each.strategy.tuning, each.strategy.name) for each in candidates]
    assert len(names) == len(set(names))
