"""Every sentinel with the fault that it is there for, planted."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_pool import Pool
from harness import Case, batches_of, build, local_gradient, make_data, make_plan, make_stepper
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from shardwise.errors import PlanMismatchError, ShardwiseError, TrainingError
from shardwise.trainer.data.batches import BatchPlan, MicroBatch
from shardwise.trainer.mesh import build_mesh
from shardwise.trainer.meter.wire import Tally, WireCount
from shardwise.trainer.run import RunWishes, run_training
from shardwise.trainer.sentinels.adapters import check_adapters
from shardwise.trainer.sentinels.drift import check_drift
from shardwise.trainer.sentinels.finite import MAX_IN_A_ROW, FiniteWatch
from shardwise.trainer.sentinels.gradients import GradientWatch
from shardwise.trainer.sentinels.movement import MovementWatch, judge_movement
from shardwise.trainer.sentinels.samples import StepData, check_data, check_effective_batch, data_of, planned_data
from shardwise.trainer.sentinels.words import name_ranks
from shardwise.trainer.sentinels.world import RankFacts, check_world, judge_world
from shardwise.trainer.step import Stepper
from shardwise.vocabulary import codec
from shardwise.vocabulary.cluster import Cluster, Gpu, Link
from shardwise.vocabulary.measured import Measured
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy

pytestmark = pytest.mark.distributed

FP32 = Strategy(precision="fp32", micro_batch_size=2)
DDP = dataclasses.replace(FP32, dp_replicate=2)
ZERO_3 = dataclasses.replace(FP32, dp_shard=2, zero_stage=3)
LORA = dataclasses.replace(FP32, dp_shard=2, zero_stage=2, tuning="lora")


def said_by(act: Callable[[], object]) -> str:
    """What a sentinel raises; nothing if it is content."""
    try:
        act()
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# Gradients -----------------------------------------------------------------------------------------------------------


def gradient_words(strategy: Strategy, lost: str, num_steps: int) -> list[str]:
    """What is said at each of the first steps, with the gradients of some parameters set to zero."""
    case = Case(strategy=strategy)
    skeleton, mesh = build(case)
    for name, parameter in skeleton.model.named_parameters():  # the harness moves B away from 0, a real run does not
        if ".lora_B." in name:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.data.zero_()
    stepper = make_stepper(case, skeleton, mesh)
    data = make_data(case)
    plan = make_plan(case, data, 2)
    watch = GradientWatch(skeleton.model, mesh.control)
    words: list[str] = []
    tally = Tally()
    for step in range(num_steps):

        def look(step: int = step) -> None:
            for name, parameter in skeleton.model.named_parameters():
                if lost and lost in name and parameter.requires_grad:
                    local_gradient(parameter).zero_()
            with WireCount(tally):
                words.append(said_by(lambda: watch.look(moved=step > 0)))

        batches = batches_of(data, plan, step, mesh.data_rank, mesh.device)
        stepper.run(batches, len(batches), plan.num_supervised_tokens(step), after_backward=look)
    assert not tally.counts(), "the sentinel's own messages are counted as the training's"
    return [*words, str(watch.is_done)]


def test_gradients_that_are_zero(ranks: Pool) -> None:
    assert ranks.run(2, gradient_words, ZERO_3, "", 1) == [["", "True"]] * 2
    [everything, _] = ranks.run(2, gradient_words, DDP, "weight", 1)[0]
    assert "TrainingError: The gradients of all 30 trained parameters are exactly zero" in everything
    words = ranks.run(2, gradient_words, ZERO_3, "1.self_attn.q_proj", 3)
    assert words[0] == words[1]
    assert words[0][:2] == ["", ""]
    assert (
        "1 trained parameters had a gradient of exactly zero in 3 steps: model.layers.1.self_attn.q_proj" in words[0][2]
    )


def test_adapters_may_wait_for_b(ranks: Pool) -> None:
    assert ranks.run(2, gradient_words, LORA, "", 2) == [["", "", "True"]] * 2
    words = ranks.run(2, gradient_words, LORA, "2.mlp.up_proj.lora_A", 4)[0]
    assert words[:3] == ["", "", ""]
    assert "model.layers.2.mlp.up_proj.lora_A" in words[3]


def dead_adapters(num_steps: int) -> str:
    case = Case(strategy=LORA)
    skeleton, mesh = build(case)
    for name, parameter in skeleton.model.named_parameters():
        if ".lora_B." in name and (num_steps == 0 or "0.mlp" not in name):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.data.fill_(float(num_steps))
    return said_by(lambda: check_adapters(skeleton.model, mesh.control))


def test_dead_adapters_are_named(ranks: Pool) -> None:
    assert ranks.run(2, dead_adapters, 1) == ["", ""]
    assert (
        "TrainingError: 21 adapters are still zero after training: model.layers.0" in ranks.run(2, dead_adapters, 0)[0]
    )


# Data ----------------------------------------------------------------------------------------------------------------


def data_words(fault: str) -> str:
    """What is said of a step in which rank 1 computes rank 0's samples again, or learns other tokens."""
    mesh = build_mesh(DDP, torch.device("cpu"))
    case = Case(strategy=DDP)
    data = make_data(case)
    plan = make_plan(case, data, 2)
    rank = 0 if fault == "duplicate" else mesh.data_rank
    batches = batches_of(data, plan, 1, rank, mesh.device)
    if fault == "tokens" and mesh.rank == 1:
        batches = [dataclasses.replace(batch, num_supervised_tokens=1) for batch in batches]
    mine = data_of(batches)
    numbers = torch.tensor([mine.num_samples, mine.num_supervised, mine.hash_sum], dtype=torch.float64)
    dist.all_reduce(numbers)
    samples, supervised, hashes = (round(number) for number in numbers.tolist())
    found = StepData(num_samples=samples, num_supervised=supervised, hash_sum=hashes)
    own = [sample for batch in batches for sample in batch.sample_ids]
    return said_by(lambda: check_data(1, found, planned_data(plan, 1), own, mesh))


def test_samples_on_two_ranks_are_named(ranks: Pool) -> None:
    assert ranks.run(2, data_words, "") == ["", ""]
    words = ranks.run(2, data_words, "duplicate")
    assert words[0] == words[1]
    assert "TrainingError: Step 2 was planned with 4 samples" in words[0]
    assert "on ranks 0, 1; twice on one rank: none" in words[0].replace(", ...", "")
    assert "Samples on several ranks: none" in ranks.run(2, data_words, "tokens")[0]


def test_the_effective_batch_is_the_stated_one() -> None:
    case = Case(strategy=DDP)
    plan = make_plan(case, make_data(case), 2)
    check_effective_batch(plan, DDP)
    with pytest.raises(PlanMismatchError, match="The global batch is 4, but the strategy says 8"):
        check_effective_batch(plan, dataclasses.replace(DDP, accumulation=2))
    with pytest.raises(PlanMismatchError, match="The number of data-parallel ranks is 2, but the strategy says 1"):
        check_effective_batch(plan, FP32)


# Numbers -------------------------------------------------------------------------------------------------------------


def test_not_finite_is_counted_and_ends() -> None:
    watch = FiniteWatch(peak=1e-3)
    assert watch.count(0, 2.0, 1.0) is None
    for step in range(MAX_IN_A_ROW - 1):
        assert (
            watch.count(step, 2.0, float("nan")) == f"Step {step + 1}: the gradient's norm is nan; nothing was updated."
        )
    assert watch.count(4, 2.0, 1.0) is None  # one good step starts the count anew
    assert "the loss is inf although the gradient is finite" in str(watch.count(5, float("inf"), 1.0))
    for step in range(6, 9):
        watch.count(step, 2.0, float("inf"))
    with pytest.raises(TrainingError, match=r"not finite in 5 steps in a row, up to step 10 .* Lower learning_rate"):
        watch.count(9, 2.0, float("inf"))


def test_steps_without_a_token_to_learn_are_told_and_end() -> None:
    watch = FiniteWatch(peak=1e-3)
    assert watch.count_tokens(0, 5) is None
    assert watch.count_tokens(1, 0) == "Step 2: no token of it is learned; its loss of 0 means nothing."
    for step in range(2, 5):
        watch.count_tokens(step, 0)
    with pytest.raises(TrainingError, match="5 steps in a row, up to step 6, had no token to learn from"):
        watch.count_tokens(5, 0)


def movement(precision: str, learning_rate: float) -> tuple[float, float]:
    strategy = dataclasses.replace(ZERO_3, precision=precision)
    case = Case(strategy=strategy)
    skeleton, mesh = build(case)
    stepper = make_stepper(case, skeleton, mesh)
    for group in stepper.optimizer.param_groups:
        group["lr"] = learning_rate
    data = make_data(case)
    plan = make_plan(case, data, 2)
    watch = MovementWatch(stepper.optimizer)
    watch.arm()
    batches = batches_of(data, plan, 0, mesh.data_rank, mesh.device)
    stepper.run(batches, len(batches), plan.num_supervised_tokens(0))
    found = watch.take()
    assert found is not None
    watch.close()
    unchanged, compared = found.tolist()
    return unchanged, compared


def test_weights_that_do_not_move(ranks: Pool) -> None:
    unchanged, compared = ranks.run(2, movement, "fp32", 1e-5)[0]
    assert unchanged < 0.01 * compared
    unchanged, compared = ranks.run(2, movement, "bf16_pure", 1e-5)[0]
    assert 0.5 * compared < unchanged < compared  # the usual learning rate of a full fine-tune, without masters
    assert "did not change at learning_rate 1e-05" in str(judge_movement(0, (unchanged, compared), 1e-5, pure=True))
    still = ranks.run(2, movement, "bf16_pure", 1e-12)[0]
    with pytest.raises(TrainingError, match=r"left all \d+ weights .* train with fp32 masters"):
        judge_movement(0, still, 1e-12, pure=True)
    assert judge_movement(0, still, 0.0, pure=True) is None  # the first step of a warm-up stands still on purpose
    assert judge_movement(0, (0.0, 0.0), 1e-5, pure=False) is None


# Replicas ------------------------------------------------------------------------------------------------------------


def drift(strategy: Strategy, changed: str) -> str:
    case = Case(strategy=strategy)
    skeleton, mesh = build(case)
    if mesh.rank == mesh.data.size() - 1:
        for name, tensor in (*skeleton.model.named_parameters(), *skeleton.model.named_buffers()):
            if changed and changed in name:
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                with torch.no_grad():
                    local.view(-1)[-1] += 1e-6
    return said_by(lambda: check_drift(skeleton.model, mesh.control, 200))


@pytest.mark.parametrize(
    ("size", "strategy", "changed", "words"),
    [
        (2, DDP, "", ""),
        (2, DDP, "1.mlp.up_proj.weight", "1 tensors of rank 1 differ from those of the first rank"),
        (2, ZERO_3, "1.mlp.up_proj.weight", ""),  # nobody else has that part
        (2, ZERO_3, "inv_freq", "model.rotary_emb.inv_freq"),
        (4, dataclasses.replace(FP32, dp_replicate=2, dp_shard=2, zero_stage=2), "embed_tokens", "rank 3"),
        (2, LORA, "0.self_attn.q_proj.base_layer", "model.layers.0.self_attn.q_proj.base_layer.weight"),
    ],
)  # fmt: skip
def test_replicas_that_drift(ranks: Pool, size: int, strategy: Strategy, changed: str, words: str) -> None:
    said = ranks.run(size, drift, strategy, changed)
    assert len(set(said)) == 1
    assert words in said[0] if words else said[0] == ""


# The world -----------------------------------------------------------------------------------------------------------

NODE = {"torch": "2.11.0", "shardwise": "0.1.0"}
CLUSTER = Cluster(
    name="two machines",
    gpu=Gpu(
        name="h100-sxm",
        memory_bytes=80 * 2**30,
        peak_flops={"bf16": 989e12},
        memory_bandwidth_bytes_per_s=3.35e12,
        architecture="hopper",
    ),
    gpus_per_node=1,
    num_nodes=2,
    intra_node=Link(name="nvlink4", kind="nvlink", bandwidth_bytes_per_s=450e9),
    inter_node=Link(name="ib", kind="network", bandwidth_bytes_per_s=50e9),
)


def facts(host: str, clock: float = 0.0, **changes: Any) -> RankFacts:
    usual = RankFacts(host=host, clock=clock, card="NVIDIA H100", card_bytes=79 * 2**30, versions=NODE)
    return dataclasses.replace(usual, **changes)


def test_a_world_as_planned_is_described() -> None:
    text = judge_world([facts("a"), facts("b", 0.25)], DDP, CLUSTER)
    assert text == "World: 2 ranks on 2 machines, 2 × NVIDIA H100, clocks within 250 ms."
    text = judge_world([facts("a"), facts("b", 4.0)], DDP, CLUSTER)
    assert "Warning: the clock of rank 0 (a) is 4 s behind; above 15 s torch's launcher loses machines" in text


@pytest.mark.parametrize(
    ("ranks_", "strategy", "words"),
    [
        ([facts("a")], DDP, "1 ranks are running, but DDP was planned for 2"),
        ([facts("a"), facts("a")], DDP, "for 2 machines with 1 cards each, but the ranks are 2 on a"),
        ([facts("a", 20.0), facts("b")], DDP, "the clock of rank 1 (b) is 20 s behind, more than 10 s"),
        ([facts("a"), facts("b", versions={**NODE, "torch": "2.13.0"})], DDP,
         "different versions of torch: 2.11.0 on rank 0, 2.13.0 on rank 1"),
        ([facts("a"), facts("b", card="NVIDIA A100", card_bytes=40 * 2**30)], DDP,
         "but rank 1 has 42.95 GB (NVIDIA A100)"),
    ],
)  # fmt: skip
def test_another_world_is_refused(ranks_: list[RankFacts], strategy: Strategy, words: str) -> None:
    with pytest.raises(PlanMismatchError) as told:
        judge_world(ranks_, strategy, CLUSTER)
    assert words in str(told.value)


def world() -> str:
    return check_world(build_mesh(DDP, torch.device("cpu")), DDP, None)


def test_the_real_world(ranks: Pool) -> None:
    assert ranks.run(2, world) == ["World: 2 ranks on 1 machine, 2 × cpu."] * 2


def test_ranks_are_named_briefly() -> None:
    assert [name_ranks([3]), name_ranks([2, 0]), name_ranks(range(4))] == ["rank 3", "ranks 0, 2", "ranks 0 to 3"]


# Whole runs ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return RunFile(
        model_name_or_path=str(folder), dataset_name="random:40", max_length=16, max_steps=6, learning_rate=1e-3,
        save_steps=6, save_final=False,
    )  # fmt: skip


def run_with_fault(run: RunFile, strategy: Strategy, fault: str) -> str:
    """A whole run with a fault planted in it; what it says at the end."""
    kept = BatchPlan.for_rank, Stepper.clip
    if fault == "duplicate":

        def for_rank(self: BatchPlan, step: int, rank: int) -> tuple[MicroBatch, ...]:
            return kept[0](self, step, 0 if step == 3 else rank)

        BatchPlan.for_rank = for_rank
    if fault in ("nan", "drift", "frozen"):

        def clip(self: Stepper) -> torch.Tensor:
            named = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            for parameter in named:
                if fault == "frozen":
                    local_gradient(parameter).zero_()
                elif fault == "drift" and self.mesh.rank == 1:
                    parameter.to_local().data.mul_(1.001)
            return kept[1](self) * (float("nan") if fault == "nan" else 1.0)

        Stepper.clip = clip
    try:
        return said_by(lambda: run_training(run, strategy, RunWishes(measure=True)))
    finally:
        BatchPlan.for_rank, Stepper.clip = kept


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("", ""),
        ("duplicate", "Step 4 was planned with 4 samples"),
        ("nan", "not finite in 5 steps in a row, up to step 5"),
        ("drift", "After step 1 the replicas are not equal"),
    ],
)
def test_a_run_ends_at_the_fault(ranks: Pool, run_file: RunFile, tmp_path: Path, fault: str, words: str) -> None:
    run = dataclasses.replace(run_file, output_dir=str(tmp_path / "run"))
    said = ranks.run(2, run_with_fault, run, DDP, fault)
    assert words in said[0] if words else said == ["", ""]
    if fault == "nan":
        assert not list(Path(run.output_dir).glob("checkpoint-*"))


def test_resuming_a_finished_run_keeps_what_was_measured(ranks: Pool, run_file: RunFile, tmp_path: Path) -> None:
    run = dataclasses.replace(run_file, output_dir=str(tmp_path / "run"), max_steps=6)
    assert ranks.run(2, run_with_fault, run, DDP, "") == ["", ""]
    path = Path(run.output_dir) / "measured.json"
    before = codec.read_noun(Measured, path)
    assert before.step is not None
    again = dataclasses.replace(run, resume_from_checkpoint=True)
    assert ranks.run(2, run_with_fault, again, DDP, "") == ["", ""]
    assert codec.read_noun(Measured, path) == before
    assert json.loads((path.parent / "trainer_state.json").read_text())["global_step"] == 6
