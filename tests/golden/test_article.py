"""Every figure of article.yaml comes out of the planner: its envelope, its catalogue, its meshes and real plans.

Numbers are compared in the digits that are printed: 15.2 to one decimal, 240 (from 238.1) to two figures. The values
on both sides are read from the file; nothing is repeated here but the arithmetic's name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.facts import catalog
from shardwise.planner import headline
from shardwise.planner.answer import make_plan
from shardwise.planner.pricing import price
from shardwise.planner.search import Wishes, meshes
from shardwise.planner.timeline import sends
from shardwise.planner.wire import group_shape
from shardwise.vocabulary.codec import read_yaml
from shardwise.vocabulary.job import Job, TuningWish
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.plan import Plan
from shardwise.vocabulary.strategy import Axis, Strategy, ZeroStage
from shardwise.vocabulary.units import GB, MB, MILLISECOND

ARTICLE: dict[str, Any] = read_yaml(Path(__file__).parent / "article.yaml")
ROWS = {row["id"]: row for section in ("memory", "wire", "mesh") for row in ARTICLE[section]}
LINKS = {
    "nvlink_h100": "nvlink4",
    "nvlink_a100": "nvlink3",
    "pcie5_x16": "pcie5-x16",
    "pcie5_x8_each_of_two_cards": "pcie5-x8",
}
CARDS = {32: "rtx-5090", 80: "h100-sxm"}


def agrees(computed: float, printed: float) -> bool:
    """True if `computed` rounds to what is printed, in the digits that are printed."""
    text = repr(printed)
    if isinstance(printed, float) and not text.endswith(".0"):
        return math.isclose(round(computed, len(text.split(".")[1])), printed)
    zeros = len(str(int(printed))) - len(str(int(printed)).rstrip("0"))
    return round(computed, -zeros) == printed or round(computed) == printed


def stated_bandwidth(link: str) -> float:
    return catalog.link(LINKS[link]).headline_bandwidth_bytes_per_s


def given(row: str, *names: str) -> list[Any]:
    return [ROWS[row]["given"][name] for name in names]


@functools.cache
def plan(
    model: str, gpus: str, tuning: TuningWish = "full", stage: ZeroStage | None = None, batch: int = 32, seq: int = 2048
) -> Plan:
    cluster = catalog.parse_gpus(gpus)
    job = Job(model=catalog.model(model), tuning=tuning, global_batch_size=batch, sequence_length=seq)
    return make_plan(job, cluster, Wishes(zero_stage=stage))


# --------------------------------------------------------------------------------------------------- facts and units


def test_digits() -> None:
    assert agrees(15.24, 15.2)
    assert agrees(238.1, 240)
    assert agrees(43.75, 43.75)
    assert not agrees(15.36, 15.2)
    assert not agrees(262, 240)
    assert not agrees(121, 122)


def test_bytes_per_parameter() -> None:
    expected = ARTICLE["bytes_per_parameter"]
    assert expected["weights"] == headline.WEIGHT_BYTES
    assert expected["gradients"] == headline.GRADIENT_BYTES
    assert expected["optimizer"] == headline.OPTIMIZER_BYTES
    assert expected["total"] == headline.STATIC_BYTES == headline.static_bytes_per_parameter()


@pytest.mark.parametrize("link", ARTICLE["links_headline_gb_per_s"])
def test_headline_bandwidth(link: str) -> None:
    assert stated_bandwidth(link) / GB == ARTICLE["links_headline_gb_per_s"][link]


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen2.5-1.5b"])
def test_model(name: str) -> None:
    model, expected = catalog.model(name), ARTICLE["models"][name]
    assert agrees(model.num_parameters / 1e9, expected["parameters"] / 1e9)
    assert model.num_hidden_layers == expected["layers"]


def test_block_class() -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    expected = ARTICLE["models"]["qwen2.5-1.5b"]["block_class"]
    config = transformers.AutoConfig.for_model(catalog.model("qwen2.5-1.5b").model_type)
    kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    assert expected in kind._no_split_modules


# ------------------------------------------------------------------------------------------------------------- memory


def static_gb(row: str) -> float:
    facts = ROWS[row]["given"]
    return headline.static_bytes(facts["parameters"], facts.get("cards", 1), facts.get("stage", 0)) / GB


def bytes_per_parameter(row: str) -> bool:
    cards, stage = given(row, "cards", "stage")
    return agrees(headline.static_bytes_per_parameter(cards, stage), ROWS[row]["bytes_per_parameter_per_card"])


def full_ft_7b_static() -> bool:
    parameters, each = given("full-ft-7b-static", "parameters", "bytes_per_parameter")
    assert each == headline.STATIC_BYTES
    return agrees(headline.static_bytes(parameters) / GB, ROWS["full-ft-7b-static"]["gb"])


def seven_b_on_eight() -> bool:
    found = plan("qwen2.5-7b", f"8x{CARDS[32]}", stage=3)
    assert found.recommended is not None, "fits a 32 GB card"
    assert found.recommended.strategy.zero_stage == 3
    return agrees(static_gb("7b-zero3-8cards"), ROWS["7b-zero3-8cards"]["gb_per_card"])


def seven_b_on_two() -> bool:
    row = "7b-2cards-any-stage"
    parameters, cards, card_gb = given(row, "parameters", "cards", "card_gb")
    stages: tuple[ZeroStage, ...] = (1, 2, 3)
    static = [headline.static_bytes(parameters, cards, stage) / GB for stage in stages]
    printed = [float(text) for text in ROWS[row]["verdict"].split("(")[1].split(" GB")[0].split(" / ")]
    assert all(agrees(*pair) for pair in zip(static, printed, strict=True))
    assert min(static) > card_gb
    full = plan("qwen2.5-7b", f"{cards}x{CARDS[card_gb]}")
    assert full.recommended is None, "no stage fits"
    assert {candidate.strategy.zero_stage for candidate in full.candidates} == {0, 1, 2, 3}
    assert any("LoRA" in advice.message for advice in full.advice)
    open_plan = plan("qwen2.5-7b", f"{cards}x{CARDS[card_gb]}", tuning="any")
    assert open_plan.recommended is not None
    return open_plan.recommended.strategy.tuning in ("lora", "qlora")


def seventy_b_static() -> bool:
    return agrees(static_gb("70b-static"), ROWS["70b-static"]["gb"])


def seventy_b_on_eight() -> bool:
    row = "70b-zero3-8x80"
    cards, card_gb = given(row, "cards", "card_gb")
    assert static_gb(row) > card_gb
    assert plan("llama-2-70b", f"{cards}x{CARDS[card_gb]}").recommended is None
    return agrees(static_gb(row), ROWS[row]["gb_per_card"])


def seventy_b_on_sixteen() -> bool:
    row = "70b-zero3-16x80"
    cards, card_gb = given(row, "cards", "card_gb")
    found = plan("llama-2-70b", f"{cards}x{CARDS[card_gb]}", batch=16)
    assert found.recommended is not None, "fits"
    share = found.recommended.memory.device_bytes / found.cluster.gpu.memory_bytes
    assert share > 0.85, "tight"
    assert found.recommended.strategy.zero_stage == 3
    return agrees(static_gb(row), ROWS[row]["gb_per_card"]) and static_gb(row) < card_gb


def seven_b_ddp() -> bool:
    found = plan("llama-2-7b", f"8x{CARDS[80]}", stage=0)
    assert found.recommended is None, "does not fit 80 GB"
    return agrees(static_gb("7.0b-ddp"), ROWS["7.0b-ddp"]["gb_per_card"])


def seven_b_fsdp() -> bool:
    return agrees(static_gb("7.0b-fsdp8"), ROWS["7.0b-fsdp8"]["gb_per_card"])


def seven_b_fsdp_with_buffer() -> bool:
    row = "7.0b-fsdp8-with-gather-buffer"
    cards, buffer_gb, card_gb = given(row, "cards", "gather_buffer_gb", "card_gb")
    budget = headline.Budget(static=static_gb(row) * GB, gather_buffer=buffer_gb * GB)
    assert budget.fits(card_gb * GB)
    assert plan("llama-2-7b", f"{cards}x{CARDS[card_gb]}", stage=3).recommended is not None
    return agrees(budget.total / GB, ROWS[row]["gb_per_card"])


def gpt3_on_64() -> bool:
    return agrees(static_gb("175b-fsdp64"), ROWS["175b-fsdp64"]["gb_per_card"])


def gpt3_on_1024() -> bool:
    row = "175b-fsdp1024-full-budget"
    buffer_gb, activations_gb, card_gb = given(row, "gather_buffer_gb", "activations_gb", "card_gb")
    budget = headline.Budget(static=static_gb(row) * GB, gather_buffer=buffer_gb * GB, activations=activations_gb * GB)
    assert budget.fits(card_gb * GB)
    assert budget.largest == ROWS[row]["largest_term"]
    return agrees(budget.total / GB, ROWS[row]["gb_per_card"])


def is_replicated_or_says_why(found: Plan) -> bool:
    """What fits one card is replicated, never fully sharded; ZeRO-1 or 2 where they are faster, and the answer says so.

    They send no more than DDP does, and each card updates a part of the weights: so it is on H200s (docs/accuracy.md).
    """
    assert found.recommended is not None
    stage = found.recommended.strategy.zero_stage
    return stage == 0 or (stage < 3 and any("time wins" in rule and "DDP fits" in rule for rule in found.rules))


def small_under_ddp() -> bool:
    (card_gb,) = given("1.3b-ddp", "card_gb")
    found = plan("llama-3.2-1b", f"8x{CARDS[card_gb]}", batch=256)
    assert found.recommended is not None
    assert is_replicated_or_says_why(found), "sharding only costs"
    assert static_gb("1.3b-ddp") < card_gb
    return agrees(static_gb("1.3b-ddp"), ROWS["1.3b-ddp"]["gb_per_card"])


def pipeline_of_shards() -> bool:
    stage_gb, cards = given("pipeline4-fsdp4", "stage_gb", "cards_per_stage")
    return agrees(stage_gb / headline.solve_degree(cards), ROWS["pipeline4-fsdp4"]["gb_per_card"])


def one_activation() -> bool:
    batch, sequence, hidden, element = given("gpt3-activation-one-tensor", "batch", "sequence", "hidden", "bytes")
    assert hidden == ARTICLE["models"]["gpt-3"]["hidden"]
    return headline.activation_bytes(batch, sequence, hidden, element) == ROWS["gpt3-activation-one-tensor"]["bytes"]


def all_activations() -> bool:
    (layers,) = given("gpt3-activation-96-layers", "layers")
    assert layers == ARTICLE["models"]["gpt-3"]["layers"]
    batch, sequence, hidden, element = given("gpt3-activation-one-tensor", "batch", "sequence", "hidden", "bytes")
    total = layers * headline.activation_bytes(batch, sequence, hidden, element)
    return agrees(total / GB, ROWS["gpt3-activation-96-layers"]["gb"])


def checkpointing() -> bool:
    row = ROWS["checkpointing"]
    extra, forward, backward = given("checkpointing", "extra_compute", "forward_ms", "backward_ms")
    assert extra == headline.CHECKPOINTING_EXTRA_COMPUTE
    kept, full = (_activations_of_7b(kind) for kind in ("none", "full"))
    assert kept / full > 10, "about 10x and more: sdpa saves little to begin with"
    step = headline.checkpointed_step_seconds(forward * MILLISECOND, backward * MILLISECOND)
    return agrees(step / MILLISECOND, row["step_ms"])


def _activations_of_7b(kind: Any) -> int:
    strategy = Strategy(dp_shard=8, zero_stage=3, micro_batch_size=4, checkpointing=kind)
    job = Job(model=catalog.model("qwen2.5-7b"), global_batch_size=32)
    terms = price(job, catalog.parse_gpus("8xh100"), strategy).memory.terms
    return max(term.bytes for term in terms if term.name == "saved activations")


# --------------------------------------------------------------------------------------------------------------- wire


def gradient(row: str) -> bool:
    parameters, element = given(row, "parameters", "bytes")
    assert element == headline.GRADIENT_BYTES
    moved = headline.gradient_bytes(parameters)
    assert agrees(moved / GB, ROWS[row]["gb"])
    seconds = {link: headline.transfer_seconds(moved, stated_bandwidth(link)) for link in ROWS[row]["ms"]}
    assert all(agrees(seconds[link] / MILLISECOND, printed) for link, printed in ROWS[row]["ms"].items())
    slow, fast = max(seconds.values()), min(seconds.values())
    return "ratio" not in ROWS[row] or agrees(slow / fast, ROWS[row]["ratio"])


def accumulation() -> bool:
    (steps,) = given("accumulation-8", "accumulation")
    assert ROWS["accumulation-8"]["all_reduces_per_epoch"] == f"divided by {steps}"
    assert headline.all_reduces(1024, 1) / headline.all_reduces(1024, steps) == steps
    once, often = _ddp_wire_and_compute(1, steps), _ddp_wire_and_compute(steps, 1)
    assert often[0] == once[0] * steps
    return math.isclose(once[1], often[1], rel_tol=0.15)


def _ddp_wire_and_compute(num_steps: int, accumulation: int) -> tuple[float, float]:
    """Bytes on the wire and seconds of compute for 8 micro-batches in so many optimizer steps."""
    strategy = Strategy(dp_replicate=2, micro_batch_size=4, accumulation=accumulation)
    job = Job(model=catalog.model("qwen2.5-1.5b"), global_batch_size=strategy.global_batch_size)
    candidate = price(job, catalog.parse_gpus("2xh100"), strategy)
    wire = sum(message.wire_bytes for message in candidate.collectives)
    return num_steps * wire, num_steps * (candidate.step.compute_seconds - candidate.step.optimizer_seconds)


def effective_batch() -> bool:
    cards, micro_batch, steps = given("effective-batch", "cards", "micro_batch", "accumulation")
    printed = ROWS["effective-batch"]["effective_batch"]
    strategy = Strategy(dp_shard=cards, zero_stage=3, micro_batch_size=micro_batch, accumulation=steps)
    return headline.effective_batch(cards, micro_batch, steps) == printed == strategy.global_batch_size


def lora() -> bool:
    parameters, fraction = given("lora-1-percent", "parameters", "trainable_fraction")
    moved = headline.gradient_bytes(parameters * fraction)
    seconds = headline.transfer_seconds(moved, stated_bandwidth("pcie5_x8_each_of_two_cards"))
    row = ROWS["lora-1-percent"]
    return agrees(moved / MB, row["mb_per_step"]) and agrees(seconds / MILLISECOND, row["ms_at_64_gb_per_s"])


def all_reduce() -> bool:
    total, mean = headline.all_reduced(given("all-reduce-example", "card_a", "card_b"))
    row = ROWS["all-reduce-example"]
    return math.isclose(total, row["sum"]) and math.isclose(mean, row["mean"])


def traffic_passes() -> bool:
    row = ROWS["traffic-passes"]
    assert row["ddp_passes"] == headline.DDP_PASSES
    assert row["fsdp_passes"] == headline.FSDP_PASSES
    ddp, fsdp = (_bf16_wire_passes(stage) for stage in (0, 3))
    assert math.isclose(ddp, headline.DDP_PASSES)
    return 2.8 < fsdp <= headline.FSDP_PASSES  # the root is gathered once, not twice


def _bf16_wire_passes(stage: ZeroStage) -> float:
    """Bytes that one of eight cards sends in a step, as passes over the bf16 model."""
    replicate, shard = (8, 1) if stage == 0 else (1, 8)
    strategy = Strategy(dp_replicate=replicate, dp_shard=shard, zero_stage=stage, reduce_dtype="bf16")
    job = Job(model=catalog.model("qwen2.5-7b"), global_batch_size=8, reduce_dtype="bf16")
    sent = sum(message.wire_bytes for message in sends(Placement(job=job, strategy=strategy)))
    return sent / (2 * job.model.num_parameters * 7 / 8)


def all_gather_received() -> bool:
    layer_mb, cards = given("all-gather-700mb-8", "layer_mb", "cards")
    return agrees(headline.gathered_bytes_received(layer_mb, cards), ROWS["all-gather-700mb-8"]["received_mb_per_card"])


def slow_wire() -> bool:
    row = "all-gather-10gbps"
    layer_mb, gbit, printed = *given(row, "layer_mb", "link_gbit_per_s"), ROWS[row]
    link = catalog.link(f"{gbit}gbe")
    one = headline.transfer_seconds(layer_mb * MB, link.headline_bandwidth_bytes_per_s)
    three = headline.FSDP_PASSES * one
    hiding = headline.hiding(three, printed["compute_ms"] * MILLISECOND)
    assert agrees(one / MILLISECOND, printed["one_all_gather_ms"])
    assert agrees(three / MILLISECOND, printed["three_collectives_ms"])
    assert f"above {headline.HIDDEN_SHARE}" in printed["rule"]
    assert not hiding.hides
    return agrees(hiding.ratio, printed["ratio"])


def shared_lanes() -> bool:
    cards, lanes = given("four-cards-on-16-lanes", "cards", "lanes")
    row, each = ROWS["four-cards-on-16-lanes"], headline.lanes_each(lanes, cards)
    bandwidth = catalog.link(f"pcie5-x{each}").headline_bandwidth_bytes_per_s
    assert each == row["lanes_each"]
    assert f"pcie5-x{each}" in catalog.parse_gpus(f"{cards}xrtx-5090").intra_node.name
    return agrees(bandwidth / GB, row["gb_per_s_each"])


# --------------------------------------------------------------------------------------------------------------- mesh


def cube() -> bool:
    gpus, data, pipeline = given("cube", "gpus", "data", "pipeline")
    (solved,) = {tp for _, _, _, tp in meshes(gpus, Wishes(pp=pipeline, dp_shard=data, dp_replicate=1))}
    return headline.solve_degree(gpus, data=data, pipeline=pipeline) == solved == ROWS["cube"]["tensor"]


def thirty_b() -> bool:
    nodes, per_node = given("30b-64gpus", "nodes", "gpus_per_node")
    cluster = catalog.parse_gpus(f"{nodes}x{per_node}xh100")
    tensor, shard = (int(ROWS["30b-64gpus"][key].split()[0]) for key in ("tensor", "data_shard"))
    job = Job(model=catalog.model("qwen2.5-32b"), global_batch_size=64)
    found = make_plan(job, cluster, Wishes(tp=tensor, dp_replicate=1))
    assert found.recommended is not None
    strategy = found.recommended.strategy
    assert group_shape(cluster, strategy, Axis.TP).nodes == 1, "inside the node"
    assert group_shape(cluster, strategy, Axis.DP_SHARD).nodes == nodes, "across nodes"
    return (strategy.tp, strategy.dp_shard) == (tensor, shard)


CHECKS: dict[str, Callable[[], bool]] = {
    "full-ft-7b-static": full_ft_7b_static,
    **{
        row: functools.partial(bytes_per_parameter, row)
        for row in ("zero1-2cards", "zero2-2cards", "zero3-2cards", "zero3-8cards", "zero3-16cards")
    },
    "7b-zero3-8cards": seven_b_on_eight,
    "7b-2cards-any-stage": seven_b_on_two,
    "70b-static": seventy_b_static,
    "70b-zero3-8x80": seventy_b_on_eight,
    "70b-zero3-16x80": seventy_b_on_sixteen,
    "7.0b-ddp": seven_b_ddp,
    "7.0b-fsdp8": seven_b_fsdp,
    "7.0b-fsdp8-with-gather-buffer": seven_b_fsdp_with_buffer,
    "175b-fsdp64": gpt3_on_64,
    "175b-fsdp1024-full-budget": gpt3_on_1024,
    "1.3b-ddp": small_under_ddp,
    "pipeline4-fsdp4": pipeline_of_shards,
    "gpt3-activation-one-tensor": one_activation,
    "gpt3-activation-96-layers": all_activations,
    "checkpointing": checkpointing,
    "1.5b-gradient": functools.partial(gradient, "1.5b-gradient"),
    "7b-gradient": functools.partial(gradient, "7b-gradient"),
    "accumulation-8": accumulation,
    "effective-batch": effective_batch,
    "lora-1-percent": lora,
    "all-reduce-example": all_reduce,
    "traffic-passes": traffic_passes,
    "all-gather-700mb-8": all_gather_received,
    "all-gather-10gbps": slow_wire,
    "four-cards-on-16-lanes": shared_lanes,
    "cube": cube,
    "30b-64gpus": thirty_b,
}


def test_every_row_has_a_check() -> None:
    assert set(CHECKS) == set(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_figure(row: str) -> None:
    assert CHECKS[row]()


# -------------------------------------------------------------------------------------------------- rules and verdicts


def test_rules_are_the_ones_tested_below() -> None:
    starts = ("fits one card", "does not fit, LoRA", "must be a full", "tensor parallel never", "at scale tensor",
              "keep 2 to 3 GB", "the all-reduce of gradient")  # fmt: skip
    rules = ARTICLE["strategy_rules"]
    assert len(rules) == len(starts)
    assert all(rule.startswith(start) for rule, start in zip(rules, starts, strict=True))


def test_fits_one_card_is_never_fully_sharded() -> None:
    found = plan("llama-3.2-1b", "8xh100", tuning="any", batch=256)
    assert found.recommended is not None
    assert is_replicated_or_says_why(found)
    assert found.recommended.strategy.tuning == "full"
    assert any(rule.startswith("fits on one card") for rule in found.rules)


def test_adapters_come_before_sharding() -> None:
    found = plan("qwen2.5-7b", "2xrtx-5090", tuning="any")
    assert found.recommended is not None
    assert found.recommended.strategy.tuning in ("lora", "qlora")
    assert any("LoRA" in rule for rule in found.rules)


def test_full_fine_tune_takes_the_lowest_stage_that_fits() -> None:
    found = plan("llama-2-13b", "8xh100", batch=64)
    assert found.recommended is not None
    fitting = {each.strategy.zero_stage for each in found.candidates if each.fits}
    near = [each for each in found.candidates if each.fits and each.step.seconds <= found.recommended.step.seconds]
    lowest = min(fitting)
    chosen = found.recommended.strategy.zero_stage
    assert lowest > 0
    assert chosen == lowest or any("time wins" in rule for rule in found.rules) or near == [found.recommended]
    assert any("lowest sharding stage" in rule for rule in found.rules)


def test_slow_wire_accumulates() -> None:
    cluster = catalog.parse_gpus("2x1xh200", network="10gbe")
    job = Job(model=catalog.model("llama-3.1-8b"), global_batch_size=64)
    found = make_plan(job, cluster, Wishes(micro_batch_size=1))
    assert found.recommended is not None
    assert found.recommended.strategy.zero_stage <= 1, "stages 2 and 3 pay the wire for every micro-batch"
    assert found.recommended.strategy.accumulation >= 8


def test_tensor_parallel_never_on_a_slow_wire() -> None:
    cluster = catalog.parse_gpus("4xrtx-4090")
    job = Job(model=catalog.model("qwen2.5-7b"), global_batch_size=8, tuning="lora")
    found = make_plan(job, cluster, Wishes(tp=4))
    assert found.recommended is None
    assert "no_tensor_on_slow_wire" in {refusal.rule for refusal in found.refusals}
    across = make_plan(job, catalog.parse_gpus("2x2xh100"), Wishes(tp=4))
    assert "tensor_inside_node" in {refusal.rule for refusal in across.refusals}


def test_at_scale_tensor_inside_pipeline_across_data_on_top() -> None:
    cluster = catalog.parse_gpus("64x8xh100")
    strategy = Strategy(pp=8, dp_replicate=8, tp=8, accumulation=16)
    assert strategy.num_ranks == cluster.num_gpus
    shapes = {axis: group_shape(cluster, strategy, axis) for axis in Axis}
    assert shapes[Axis.TP].nodes == 1
    assert shapes[Axis.PP].nodes > 1
    assert shapes[Axis.DP_REPLICATE].nodes > 1


def test_two_to_three_gb_stay_free() -> None:
    from shardwise.planner.uncertainty import HEADROOM_BYTES, usable_bytes

    cluster = catalog.parse_gpus("rtx-5090")
    total = cluster.gpu.cuda_memory_bytes or cluster.gpu.memory_bytes
    assert 2 * GB <= total - usable_bytes(cluster) == HEADROOM_BYTES <= 3 * GB


def test_gradient_hides_behind_backward_and_the_rest_is_exposed() -> None:
    exposed: dict[str, float] = {}
    for link in ("nvlink4", "pcie5-x8-host"):
        cluster = catalog.parse_gpus("2xh100", link_name=link)
        job = Job(model=catalog.model("qwen2.5-1.5b"), global_batch_size=16)
        strategy = Strategy(dp_replicate=2, micro_batch_size=8, checkpointing="full")
        step = price(job, cluster, strategy).step
        assert step.exposed_wire_seconds < step.wire_seconds
        exposed[link] = step.exposed_wire_seconds
    assert exposed["nvlink4"] < 0.3 * exposed["pcie5-x8-host"]


def test_large_batch_advice() -> None:
    expected = ARTICLE["large_batch"]
    job = Job(model=catalog.model("llama-3.2-1b"), global_batch_size=4096, sequence_length=512)
    found = make_plan(job, catalog.parse_gpus("8xh100"), Wishes())
    spoken = " ".join(advice.message for advice in found.advice if advice.rule == "learning_rate")
    assert "linear" in spoken
    assert "warm-up" in expected["linear_scaling"]
    assert "warm-up" in spoken
    assert "LAMB" in expected["ceiling"]
    assert "LAMB" in spoken


def test_stage_two_against_stage_three() -> None:
    verdict = next(row for row in ARTICLE["exercise_verdicts"] if row["id"] == "stage2-vs-stage3")
    job = Job(model=catalog.model("qwen2.5-7b"), global_batch_size=8, reduce_dtype="bf16")
    wire: dict[int, dict[tuple[str, str], int]] = {}
    stages: tuple[ZeroStage, ...] = (2, 3)
    for stage in stages:
        strategy = Strategy(dp_shard=8, zero_stage=stage, checkpointing="full", reduce_dtype="bf16")
        found: dict[tuple[str, str], int] = {}
        for message in sends(Placement(job=job, strategy=strategy)):
            key = (message.op, message.during)
            found[key] = found.get(key, 0) + message.wire_bytes
        wire[stage] = found
    assert "replicated 2-byte weights" in verdict["memory"]
    extra = headline.static_bytes_per_parameter(8, 2) - headline.static_bytes_per_parameter(8, 3)
    assert extra == headline.WEIGHT_BYTES * 7 / 8
    assert "backward all-gather" in verdict["traffic"]
    backward = ("all_gather", "backward")
    assert backward not in wire[2]
    assert {key: size for key, size in wire[3].items() if key != backward} == wire[2]


def test_inherited_environment_is_the_doctors() -> None:
    """The verdict on inherited NCCL switches is tested with the doctor's checks; here only that it is still asked."""
    verdict = next(row for row in ARTICLE["exercise_verdicts"] if row["id"] == "inherited-datacentre-env")
    assert "NCCL_P2P_DISABLE" in verdict["suspect"]
