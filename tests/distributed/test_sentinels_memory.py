"""Out of memory ends in a page: the category that grew, the instant, the prediction, the plan that fits."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_pool import Pool
from tests.unit.factories import make_candidate, make_plan

from shardwise.errors import TrainingError
from shardwise.levers.loss import apply as loss
from shardwise.trainer import evaluate
from shardwise.trainer.run import RunWishes, run_training
from shardwise.trainer.sentinels.out_of_memory import MemoryFound, explain, flags_of, is_out_of_memory
from shardwise.vocabulary import codec
from shardwise.vocabulary.memory import Category
from shardwise.vocabulary.plan import Plan
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy
from shardwise.vocabulary.units import GB, MIB

pytestmark = pytest.mark.distributed

RAN = Strategy(dp_shard=2, zero_stage=2, micro_batch_size=2, accumulation=8)
SMALLER = dataclasses.replace(RAN, zero_stage=3, micro_batch_size=1, accumulation=16, checkpointing="full")
FULL_CARD = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity ..."


def plan_of_two() -> Plan:
    ran, smaller = make_candidate(RAN), make_candidate(SMALLER, seconds=2.3)
    return dataclasses.replace(make_plan(), candidates=(ran, smaller), recommended=ran)


def found(plan: Plan, activation_factor: float) -> MemoryFound:
    """States as predicted, the rest some factor above."""
    memory = plan.candidates[0].memory
    states = {one: memory.by_category()[one] for one in (Category.PARAMETER, Category.OPTIMIZER, Category.GRADIENT)}
    moving = memory.by_category()[Category.ACTIVATION] + memory.by_category()[Category.TEMPORARY]
    allocated = sum(states.values()) + round(activation_factor * moving) - 1536 * MIB
    return MemoryFound(
        stored=states, allocated=allocated, reserved=allocated + GB, device=allocated + 2 * GB,
        total=plan.cluster.gpu.memory_bytes, requested=1536 * MIB,
    )  # fmt: skip


def test_the_category_that_grew_is_named_with_the_next_plan() -> None:
    plan = plan_of_two()
    page = explain(plan.candidates[0].memory.peak_instant, found(plan, 1.4), plan, RAN, rank=1)
    assert page[0].startswith("Rank 1 ran out of memory ")
    assert page[0].endswith("asking for 1.611 GB more.")
    assert "What grew is activation and temporary, by " in page[2]
    assert "parameter 6.175 GB (predicted 6.175 GB)" in page[2]
    assert "The next plan that fits: ZeRO-3, predicted " in page[3]
    assert "20% more time" in page[3].replace("20 %", "20%")
    assert page[3].endswith(f"shardwise train ... {flags_of(SMALLER)}")


def test_another_program_on_the_card_is_told_apart() -> None:
    plan = plan_of_two()
    seen = found(plan, 0.9)
    instant = plan.candidates[0].memory.peak_instant
    page = explain(instant, dataclasses.replace(seen, device=(seen.device or 0) + 6 * GB), plan, RAN, rank=0)
    assert "What grew is runtime, by 6.7 GB over the plan" in page[2]
    page = explain(instant, dataclasses.replace(seen, device=seen.allocated), plan, RAN, rank=0)
    assert "No category is above its prediction" in page[2]


def test_without_a_plan_the_counts_are_told() -> None:
    page = explain(None, MemoryFound(stored={Category.PARAMETER: GB}), None, RAN, rank=0)
    assert page == (
        "Rank 0 ran out of memory outside a step.",
        "Counted: parameter 1 GB.",
        "No plan of this run is known; `shardwise plan` says what fits.",
    )


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError(FULL_CARD))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."))
    assert not is_out_of_memory(RuntimeError("Connection closed by peer"))


def run_out(run: RunFile, strategy: Strategy, place: str) -> str:
    """A whole run in which a rank's memory runs out somewhere; what it says."""
    plain_cross_entropy = loss.summed_cross_entropy

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError(FULL_CARD)

    class FullBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError(FULL_CARD)

    def broken_cross_entropy(*args: Any) -> torch.Tensor:
        return FullBackward.apply(plain_cross_entropy(*args))  # type: ignore[return-value]  # torch types apply as Any

    planted = {
        "optimizer": (torch.optim.AdamW, "step", full),
        "loss": (loss, "summed_cross_entropy", full),
        "backward": (loss, "summed_cross_entropy", broken_cross_entropy),
        "evaluation": (evaluate, "summed_loss", full),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*planted[place])
        try:
            run_training(run, strategy, RunWishes(measure=False))
        except TrainingError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("optimizer", "in the optimizer's step"),
        ("loss", "in the loss"),
        ("backward", "in backward"),
        ("evaluation", "in evaluation"),
    ],
)
def test_a_run_says_when_it_was(ranks: Pool, tmp_path: Path, place: str, words: str) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "vocab_size": 97, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,'
        ' "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}'
    )
    run = RunFile(
        model_name_or_path=str(tmp_path), random_init=True, dataset_name="random:8", max_length=8, max_steps=2,
        eval_dataset_name="random:2" if place == "evaluation" else None, save_strategy="no", save_final=False,
        output_dir=str(tmp_path / "run"),
    )  # fmt: skip
    strategy = Strategy(precision="fp32", micro_batch_size=2)
    plan = dataclasses.replace(make_plan(), candidates=(make_candidate(strategy), make_candidate(SMALLER)))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.yaml").write_text(codec.to_yaml(plan))
    [said] = ranks.run(1, run_out, run, strategy, place)
    assert f"Rank 0 ran out of memory {words}, asking for 1.611 GB more." in said
    assert "parameter" in said
    assert "The next plan that fits: ZeRO-3" in said
