"""A pipeline gives what one process gives, sends what its costs say, and leaves checkpoints for any other split."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_pool import Pool
from harness import (
    VOCAB,
    Case,
    Trace,
    batches_of,
    build,
    make_config,
    make_plan,
    make_skeleton,
    make_stepper,
    seeded,
    train,
    train_plain,
)
from peft import PeftModel
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining import schedules as torch_schedules
from transformers import AutoModelForCausalLM, GPT2Config, GraniteConfig, Qwen2Config, Qwen2ForCausalLM

from shardwise.axes.pipeline import apply as pipeline
from shardwise.errors import ConfigError, PlanMismatchError
from shardwise.facts.config import model_from_config
from shardwise.planner.memory import memory
from shardwise.planner.timeline import sends
from shardwise.trainer.data.batches import MicroBatch
from shardwise.trainer.data.collate import CollateOptions, collate
from shardwise.trainer.data.store import TokenizedSet, from_samples
from shardwise.trainer.evaluate import losses_of
from shardwise.trainer.meter.memory import MemoryWatch, stored_bytes
from shardwise.trainer.meter.wire import Tally, WireCount, counting_calls
from shardwise.trainer.model import build_skeleton, parameters_on_meta
from shardwise.trainer.parallelize import refuse_unsupported
from shardwise.trainer.run import RunWishes, run_training
from shardwise.trainer.sentinels import verify_wrapping
from shardwise.trainer.step import model_inputs
from shardwise.vocabulary.cluster import Cluster, Gpu, Link
from shardwise.vocabulary.job import Job, LoraSettings
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy

pytestmark = pytest.mark.distributed

ONE = Strategy(precision="fp32", micro_batch_size=1, accumulation=8)
F1B = replace(ONE, pp=2)
GPIPE = replace(F1B, pipeline_schedule="gpipe")
INTERLEAVED = replace(F1B, pipeline_schedule="interleaved_1f1b", virtual_stages=2)
ZERO_BUBBLE = replace(F1B, pipeline_schedule="zero_bubble")
DDP = replace(F1B, dp_replicate=2, accumulation=4)
ZERO_1 = replace(F1B, dp_shard=2, zero_stage=1, accumulation=4)
ZERO_2, ZERO_3 = replace(ZERO_1, zero_stage=2), replace(ZERO_1, zero_stage=3)
TENSOR = replace(F1B, tp=2, sequence_parallel=True)
LAYERS = 5
"""Uneven over 2 stages and over 4 chunks; with 45 samples the last step of an epoch has 5 micro-batches of 8."""
FP64 = {"loss": 1e-13, "norm": 1e-13, "weight": 2e-12}


def case_of(strategy: Strategy, *, tied: bool = False) -> Case:
    vocab = VOCAB if strategy.tp == 1 else VOCAB - 1
    return Case(strategy=strategy, tied=tied, model="qwen2", layers=LAYERS, double=True, vocab_size=vocab)


TWO = {
    "gpipe": case_of(GPIPE),
    "gpipe-tied": case_of(GPIPE, tied=True),
    "1f1b": case_of(F1B),
    "1f1b-tied": case_of(F1B, tied=True),
    "interleaved": case_of(INTERLEAVED),
    "interleaved-tied": case_of(INTERLEAVED, tied=True),
    "zero-bubble": case_of(ZERO_BUBBLE),
    "zero-bubble-tied": case_of(replace(ZERO_BUBBLE, virtual_stages=2), tied=True),
    "full-chunked": case_of(replace(F1B, checkpointing="full", loss="chunked"), tied=True),
    "selective-fused": case_of(replace(INTERLEAVED, checkpointing="selective", loss="fused")),
    "lora": case_of(replace(F1B, tuning="lora"), tied=True),
    "lora-zero-bubble": case_of(replace(ZERO_BUBBLE, tuning="lora")),
}
FOUR = {
    "ddp-tied": case_of(DDP, tied=True),
    "zero1": case_of(ZERO_1),
    "zero1-tied": case_of(ZERO_1, tied=True),
    "zero2-tied": case_of(ZERO_2, tied=True),
    "zero3": case_of(ZERO_3),
    "gpipe-zero2": case_of(replace(ZERO_2, pipeline_schedule="gpipe")),
    "interleaved-zero2": case_of(replace(INTERLEAVED, accumulation=4, dp_shard=2, zero_stage=2)),
    "zero-bubble-zero1-tied": case_of(replace(ZERO_BUBBLE, accumulation=4, dp_shard=2, zero_stage=1), tied=True),
    "zero-bubble-ddp": case_of(replace(ZERO_BUBBLE, accumulation=4, dp_replicate=2)),
    "four-stages-tied": case_of(replace(F1B, pp=4), tied=True),
    "tensor-tied": case_of(TENSOR, tied=True),
    "lora-zero2": case_of(replace(ZERO_2, tuning="lora")),
}


def several(function: Callable[[Case], Any], cases: list[Case]) -> list[Any]:
    """Many cases in one start of the ranks."""
    return [function(case) for case in cases]


@cache
def reference(tied: bool, vocab_size: int, tuning: Any) -> Trace:
    case = case_of(replace(ONE, tuning=tuning), tied=tied)
    return train_plain(replace(case, vocab_size=vocab_size))


def thirds(num_ranks: int, everything: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """In launches of a few cases, each within the pool's patience on a busy machine."""
    names = list(everything)
    return [(num_ranks, {name: everything[name] for name in names[start::3]}) for start in range(3)]


@pytest.mark.parametrize(("num_ranks", "cases"), [*thirds(2, TWO), *thirds(4, FOUR)])
def test_equals_one_process(ranks: Pool, num_ranks: int, cases: dict[str, Case]) -> None:
    """Losses, norms and weights in fp64 over six steps, the last of which has fewer micro-batches."""
    everyone = ranks.run(num_ranks, several, train, list(cases.values()))
    wrong: dict[str, Any] = {}
    for name, case, *traces in zip(cases, cases.values(), *everyone, strict=True):
        wanted = reference(case.tied, case.vocab_size, case.strategy.tuning)
        found = [trace.difference(wanted) for trace in traces]
        if any(one[what] > limit for one in found for what, limit in FP64.items()):
            wrong[name] = found
        held = set[str]().union(*(trace.weights for trace in traces))
        assert held == set(wanted.weights), name
    assert not wrong


# Costs ----------------------------------------------------------------------------------------------------------------

COSTS_TWO = {
    "gpipe-tied": replace(GPIPE, accumulation=4),
    "1f1b-tied": replace(F1B, accumulation=4),
    "interleaved": replace(INTERLEAVED, accumulation=4),
    "zero-bubble-tied": replace(ZERO_BUBBLE, accumulation=4),
    "lora": replace(F1B, accumulation=4, tuning="lora"),
    "compiled": replace(F1B, accumulation=2, compile_blocks=True),
}
COSTS_FOUR = {
    "ddp-tied": DDP,
    "zero1-tied": ZERO_1,
    "zero2-tied": ZERO_2,
    "zero3": ZERO_3,
    "interleaved-zero2": replace(INTERLEAVED, accumulation=4, dp_shard=2, zero_stage=2),
    "zero-bubble-zero1": replace(ZERO_BUBBLE, accumulation=4, dp_shard=2, zero_stage=1),
    "four-stages-tied": replace(F1B, pp=4, accumulation=4),
}


def full_rows(case: Case) -> TokenizedSet:
    rows = [[(7 * i + j) % case.vocab_size for j in range(case.max_tokens)] for i in range(64)]
    return from_samples(rows, [[1] * case.max_tokens for _ in rows])


def cost_case(name: str, strategy: Strategy) -> Case:
    return Case(
        strategy=replace(strategy, micro_batch_size=2, precision="bf16"), tied=name.endswith("tied"), hidden_size=128,
        layers=4, max_tokens=128, vocab_size=2048, steps=2,
    )  # fmt: skip


def second_step(case: Case) -> tuple[Counter[tuple[str, int, int]], int, int]:
    """Messages, stored bytes at the update and the peak of a step with rows of full length."""
    skeleton, mesh = build(case)
    stepper = make_stepper(case, skeleton, mesh)
    data = full_rows(case)
    plan = make_plan(case, data, case.strategy.data_parallel)
    watch, tally, stored = MemoryWatch(skeleton.model, stepper.optimizer, mesh.device), Tally(), list[int]()

    def note(*_: object) -> None:
        now = stored_bytes(skeleton.model, stepper.optimizer)
        stored.append(now.parameters + now.gradients + now.optimizer)

    for step in range(2):
        batches = batches_of(data, plan, step, mesh.data_rank, mesh.device)
        tokens = plan.num_supervised_tokens(step)
        if step == 0:
            stepper.run(batches, len(batches), tokens)
            stepper.optimizer.register_step_pre_hook(note)
        elif case.strategy.compile_blocks:
            with counting_calls(tally):
                stepper.run(batches, len(batches), tokens)
        else:
            with watch.watching(), WireCount(tally):
                stepper.run(batches, len(batches), tokens)
    counts = Counter({(one.op, one.ranks, one.bytes): one.count for one in tally.counts()})
    peak = 0 if case.strategy.compile_blocks else watch.result().peak_bytes
    return counts, stored[0], peak


def job_of(case: Case) -> Job:
    return Job(
        model=model_from_config(make_config(case).to_dict(), "tiny"),
        tuning=case.strategy.tuning,
        sequence_length=case.max_tokens,
        global_batch_size=case.strategy.global_batch_size,
        lora=LoraSettings(r=4),
    )


def predicted_peak(case: Case) -> int:
    """Of the fullest rank."""
    gpu = Gpu(
        name="cpu", memory_bytes=2**34, peak_flops={"bf16": 1e11}, memory_bandwidth_bytes_per_s=1e10, architecture="cpu"
    )
    link = Link(name="loopback", kind="loopback", bandwidth_bytes_per_s=1e9)
    cluster = Cluster(name="cpu", gpu=gpu, gpus_per_node=case.strategy.num_ranks, intra_node=link)
    return memory(job_of(case), cluster, case.strategy).allocated_bytes


@pytest.mark.parametrize(("num_ranks", "strategies"), [*thirds(2, COSTS_TWO), *thirds(4, COSTS_FOUR)])
def test_costs_are_those_of_a_step(ranks: Pool, num_ranks: int, strategies: dict[str, Strategy]) -> None:
    """Every message by op, group and size; what is stored to the byte; the peak of the fullest rank within 8 %."""
    cases = {name: cost_case(name, strategy) for name, strategy in strategies.items()}
    everyone = ranks.run(num_ranks, several, second_step, list(cases.values()))
    for number, (name, case) in enumerate(cases.items()):
        strategy = case.strategy
        for rank in range(num_ranks):
            counts, stored, _ = everyone[rank][number]
            place = Placement(job=job_of(case), strategy=strategy, stage=rank // (num_ranks // strategy.pp))
            wanted = Counter[tuple[str, int, int]]()
            for message in sends(place):
                if message.ranks > 1:
                    wanted[message.op, message.ranks, message.bytes] += message.count
            assert counts == wanted, (name, rank, wanted - counts, counts - wanted)
            # 4 bytes each of master, gradient and two moments; AdamW counts its steps in 4 bytes a tensor besides
            assert 0 <= stored - 16 * place.trainable // strategy.dp_shard < 1000, (name, rank)
        peak = max(everyone[rank][number][2] for rank in range(num_ranks))
        if peak and strategy.pipeline_schedule != "gpipe":
            assert predicted_peak(case) == pytest.approx(peak, rel=0.08), name
        elif peak:  # counts gradients beside all activations, of which the first have gone when the last gradients come
            assert peak <= predicted_peak(case) <= 1.15 * peak


class FakeStage:
    """What torch's schedules ask of a stage when they are made."""

    def __init__(self, number: int, total: int, size: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = number, total, size, number % size
        self.is_first, self.is_last, self.submod = number == 0, number == total - 1, torch.nn.Identity()


@pytest.mark.parametrize(("pp", "chunks", "micro_batches"), [(2, 1, 4), (2, 2, 4), (4, 1, 8), (4, 2, 16), (4, 3, 12)])
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zero_bubble"])
def test_micro_batches_in_flight_are_torchs(schedule: Any, pp: int, chunks: int, micro_batches: int) -> None:
    make: Any = ScheduleInterleaved1F1B if schedule == "interleaved_1f1b" else ScheduleInterleavedZeroBubble
    strategy = Strategy(pp=pp, accumulation=micro_batches, pipeline_schedule=schedule, virtual_stages=chunks)
    done = (torch_schedules.FULL_BACKWARD, torch_schedules.BACKWARD_WEIGHT)
    for stage in range(pp):
        stages = [FakeStage(stage + pp * turn, pp * chunks, pp) for turn in range(chunks)]
        order = make(stages, micro_batches, loss_fn=max).pipeline_order[stage]
        held, most = 0, 0
        for action in order:
            kind = None if action is None else action.computation_type
            held += (kind == torch_schedules.FORWARD) - (kind in done)
            most = max(most, held)
        place = Placement(job=job_of(case_of(strategy)), strategy=strategy, stage=stage)
        assert most == place.micro_batches_in_flight * chunks


# What reaches the stages ----------------------------------------------------------------------------------------------


def loss_of_packed(case: Case) -> float:
    """Of rows that hold several documents, forward only; the sum over the ranks is the loss."""
    skeleton, mesh = build(case)
    stepper = make_stepper(case, skeleton, mesh)
    share = losses_of(stepper, packed_batches(case))
    dist.all_reduce(share)
    return share.item()


def packed_batches(case: Case) -> list[Any]:
    data = full_rows(replace(case, max_tokens=9))
    micros = [MicroBatch(rows=((0, 1, 2), (3, 4))), MicroBatch(rows=((5, 6),)), MicroBatch(rows=())]
    return [collate(data, micro, CollateOptions(pad_token_id=0, layout="packed")) for micro in micros]


def test_positions_and_masks_reach_every_stage(ranks: Pool) -> None:
    case = replace(case_of(INTERLEAVED, tied=True), model="gemma3")
    skeleton = make_skeleton(replace(case, strategy=ONE))
    seeded(skeleton, torch.device("cpu"))
    wanted = 0.0
    with torch.no_grad():
        for batch in packed_batches(case):
            logits = skeleton.model(**model_inputs(batch, "sdpa")).logits
            targets = torch.nn.functional.pad(batch.labels, (0, 1), value=-100)[:, 1:]
            wanted += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100
            ).item()
    for found in ranks.run(2, loss_of_packed, case):
        assert found == pytest.approx(wanted, rel=1e-6)  # gemma's norms compute in fp32


# Whole runs -----------------------------------------------------------------------------------------------------------

RUNS = {
    "one": replace(ONE, accumulation=4),
    "pp": replace(F1B, accumulation=4),
    "interleaved": replace(INTERLEAVED, accumulation=4),
    "dp": replace(ONE, accumulation=2, dp_shard=2, zero_stage=3),
    "pp-dp": replace(ZERO_1, accumulation=2),
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    model.save_pretrained(folder)
    return folder


def stay(*_: Any) -> None:
    """Instead of leaving the ranks' group: the next run needs it."""


def run_all(runs: list[tuple[RunFile, Strategy]]) -> None:
    """Whole runs, one after the other, in one start of the ranks."""
    for run, strategy in runs:
        world = dist.get_world_size()
        assert strategy.num_ranks == world
        destroy, dist.destroy_process_group = dist.destroy_process_group, stay
        try:
            run_training(run, strategy, RunWishes(measure=run.output_dir.endswith("pp")))
        finally:
            dist.destroy_process_group = destroy


def lines_of(folder: str | Path, key: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def test_runs_go_on_across_meshes_and_leave_plain_models(ranks: Pool, model_folder: Path, tmp_path: Path) -> None:
    """The same losses from one process, pp and pp x dp; checkpoints of each go on under the others; exports are equal.

    Loading, the comparison with the plain model, evaluation, the meter and every sentinel run along.
    """
    run = RunFile(
        model_name_or_path=str(model_folder), dataset_name="random:42", eval_dataset_name="random:7", max_length=16,
        max_steps=6, learning_rate=1e-3, warmup_steps=2, save_steps=3,
    )  # fmt: skip
    first = {name: replace(run, output_dir=str(tmp_path / name)) for name in RUNS}
    first["pp"] = replace(first["pp"], sample_prompt="which nobody is asked, because the layers lie on two stages")
    going_on = [
        ("pp", "one"),
        ("one", "pp"),
        ("pp", "dp"),
        ("dp", "interleaved"),
        ("interleaved", "pp-dp"),
        ("pp-dp", "pp"),
    ]
    orders: dict[int, list[tuple[RunFile, Strategy]]] = {1: [], 2: [], 4: []}
    for name, strategy in RUNS.items():
        orders[strategy.num_ranks].append((first[name], strategy))
    for size, order in orders.items():
        ranks.run(size, run_all, order)
    wanted, held_out = lines_of(tmp_path / "one", "loss"), lines_of(tmp_path / "one", "eval_loss")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "final").state_dict()
    for name in RUNS:
        assert lines_of(tmp_path / name, "loss") == pytest.approx(wanted, abs=3e-6), name
        assert lines_of(tmp_path / name, "eval_loss") == pytest.approx(held_out, abs=3e-6), name
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / name / "final")
        assert exported.config.num_hidden_layers == LAYERS
        assert exported.config.tie_word_embeddings
        worst = max((plain[key] - value).abs().max().item() for key, value in exported.state_dict().items())
        assert worst < 1e-5, name
    measured = json.loads((tmp_path / "pp" / "measured.json").read_text())
    assert {one["op"] for one in measured["collectives"]} == {"send", "all_reduce"}
    orders = {1: [], 2: [], 4: []}
    for saved, resumed in going_on:
        again = replace(
            run, output_dir=str(tmp_path / f"{saved}-then-{resumed}"), eval_dataset_name=None, save_final=False,
            resume_from_checkpoint=str(tmp_path / saved / "checkpoint-3"),
        )  # fmt: skip
        orders[RUNS[resumed].num_ranks].append((again, RUNS[resumed]))
    for size, order in orders.items():
        ranks.run(size, run_all, order)
        for again, _ in order:
            rest = lines_of(again.output_dir, "loss")
            assert sorted(rest) == [4, 5, 6]
            assert rest == pytest.approx({step: wanted[step] for step in rest}, abs=3e-6), again.output_dir


def test_adapters_are_one_file(ranks: Pool, model_folder: Path, tmp_path: Path) -> None:
    """PEFT reads what two stages have trained; merged, it is the plain model; a checkpoint goes on in one process."""
    run = RunFile(
        model_name_or_path=str(model_folder), dataset_name="random:42", max_length=16, max_steps=4, learning_rate=1e-2,
        save_steps=2, output_dir=str(tmp_path / "lora"), merge_adapters=True, bf16=False,
    )  # fmt: skip
    strategy = replace(RUNS["pp"], tuning="lora")
    ranks.run(2, run_all, [(run, strategy)])
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    adapted: Any = PeftModel.from_pretrained(base, str(tmp_path / "lora" / "final"))
    tokens = torch.arange(12)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "lora" / "merged")
    with torch.no_grad():
        assert torch.allclose(adapted(tokens).logits, merged(tokens).logits, atol=1e-4)
    again = replace(
        run, output_dir=str(tmp_path / "again"), resume_from_checkpoint=str(tmp_path / "lora" / "checkpoint-2")
    )
    ranks.run(1, run_all, [(again, replace(RUNS["one"], tuning="lora"))])
    wanted = lines_of(tmp_path / "lora", "loss")
    rest = lines_of(tmp_path / "again", "loss")
    assert rest == pytest.approx({step: wanted[step] for step in rest}, abs=3e-6)


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (replace(ZERO_BUBBLE, dp_shard=2, zero_stage=2), "use stage 0 or 1"),
        (replace(ZERO_BUBBLE, checkpointing="full"), "compute a block again"),
        (replace(ZERO_BUBBLE, loss="fused"), "use loss plain"),
        (replace(ZERO_BUBBLE, compile_blocks=True), "use 1f1b or no compile"),
        (replace(F1B, virtual_stages=2), "use interleaved_1f1b or zero_bubble"),
        (replace(INTERLEAVED, tuning="lora"), "use virtual_stages 1"),
        (replace(F1B, offload="optimizer"), "more shards or stages"),
    ],
)  # fmt: skip
def test_what_a_pipeline_cannot_do_is_refused(strategy: Strategy, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        refuse_unsupported(strategy)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=64), "has no"),
        (GraniteConfig(num_hidden_layers=4, hidden_size=32, intermediate_size=32, num_attention_heads=2,
                       num_key_value_heads=2, vocab_size=64, embedding_multiplier=12.0), "changes the hidden states"),
    ],
)  # fmt: skip
def test_models_that_are_no_plain_stack_are_refused(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_skeleton(config, F1B, LoraSettings())
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config)
    assert pipeline.layers_of(model) == {}


def verify_with_a_lost_layer(case: Case) -> str:
    skeleton, mesh = build(case)
    if mesh.stage == 1:
        layers = skeleton.model.model.layers
        del layers._modules[next(iter(layers._modules))]
    try:
        verify_wrapping(skeleton, mesh, case.strategy)
    except PlanMismatchError as error:
        return str(error)
    return ""


def test_a_layer_that_no_stage_holds_is_named(ranks: Pool) -> None:
    case = replace(case_of(replace(F1B, precision="fp32")), double=False)
    for said in ranks.run(2, verify_with_a_lost_layer, case):
        assert "model.layers.3.self_attn.q_proj.weight is on no stage of the pipeline" in said
