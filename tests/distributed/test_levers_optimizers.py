"""Every optimizer: as plain code in one process has it, however the weights are cut; and its states come back."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from checkpoint_pool import Pool
from harness import (
    MAX_GRAD_NORM,
    SETTINGS,
    Case,
    Trace,
    batches_of,
    build,
    make_data,
    make_plan,
    make_skeleton,
    make_stepper,
    seeded,
    whole_weights,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.levers.optimizer import apply as optimizers
from shardwise.trainer.checkpoint.checkpointer import load, save
from shardwise.trainer.meter.wire import Tally, WireCount
from shardwise.trainer.state import app_state
from shardwise.vocabulary.job import OptimizerName
from shardwise.vocabulary.strategy import Strategy

pytestmark = pytest.mark.distributed

ONE = Strategy(precision="fp32", micro_batch_size=1, accumulation=8)
DDP = replace(ONE, accumulation=4, dp_replicate=2)
ZERO_3 = replace(ONE, accumulation=4, dp_shard=2, zero_stage=3)
HSDP = replace(ONE, accumulation=2, dp_replicate=2, dp_shard=2, zero_stage=2)
CHUNKS = replace(ONE, pp=2, pipeline_schedule="interleaved_1f1b", virtual_stages=2)
NAMES: tuple[OptimizerName, ...] = ("lamb", "adamw_bf16_states", "adamw_8bit", "sgd")
RATE = {"lamb": 0.05, "sgd": 0.5}
LIMITS = {
    "lamb": {"loss": 5e-6, "norm": 5e-6, "weight": 1e-4},
    "sgd": {"loss": 2e-6, "norm": 5e-6, "weight": 5e-6},
    # A gradient that differs in its last bit may move a moment by one of bf16's or of 256 steps.
    "adamw_bf16_states": {"loss": 5e-6, "norm": 5e-6, "weight": 1e-4},
    "adamw_8bit": {"loss": 2e-5, "norm": 2e-5, "weight": 5e-4},
}


def needs_bitsandbytes(name: str) -> None:
    if "8bit" in name:
        pytest.importorskip("bitsandbytes", reason="8-bit optimizers need bitsandbytes")


def case_of(name: OptimizerName, strategy: Strategy) -> Case:
    wide = name == "adamw_8bit"  # rows of 256 are in 8 bits, rows of 384 are not
    return Case(strategy=replace(strategy, optimizer=name), hidden_size=256 if wide else 32, layers=2, steps=5)


def settings_of(name: str) -> optimizers.OptimizerSettings:
    return replace(SETTINGS, learning_rate=RATE.get(name, SETTINGS.learning_rate))


@dataclasses.dataclass
class Run:
    """A training by the engine, step by step."""

    case: Case

    def __post_init__(self) -> None:
        case = self.case
        self.skeleton, self.mesh = build(case)
        self.stepper = make_stepper(case, self.skeleton, self.mesh)
        for group in self.stepper.optimizer.param_groups:
            group["lr"] = settings_of(case.strategy.optimizer).learning_rate
        self.data = make_data(case)
        self.plan = make_plan(case, self.data, case.strategy.data_parallel)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def step(self, number: int) -> None:
        batches = batches_of(self.data, self.plan, number, self.mesh.data_rank, "cpu")
        outcome = self.stepper.run(batches, len(batches), self.plan.num_supervised_tokens(number))
        loss = outcome.loss.double()
        dist.all_reduce(loss)
        self.losses.append(loss.item())
        self.norms.append(outcome.grad_norm.item())

    def trace(self) -> Trace:
        return Trace(
            losses=tuple(self.losses), norms=tuple(self.norms), weights=whole_weights(self.skeleton.model)
        )  # fmt: skip

    def app(self) -> Any:
        return app_state(
            self.skeleton, self.stepper.optimizer, self.case.strategy, {}, seed=0, data_rank=self.mesh.data_rank
        )


def train(case: Case) -> Trace:
    run = Run(case)
    for number in range(case.steps):
        run.step(number)
    return run.trace()


@cache
def reference(name: OptimizerName) -> Trace:
    """One process without engine, DTensor or optimizer of ours."""
    case = case_of(name, ONE)
    skeleton = make_skeleton(case)
    seeded(skeleton, torch.device("cpu"))
    model: Any = skeleton.model
    step_of = PLAIN[name](model)
    data = make_data(case)
    plan = make_plan(case, data, 1)
    losses: list[float] = []
    norms: list[float] = []
    for number in range(case.steps):
        total = 0.0
        for batch in batches_of(data, plan, number, 0, "cpu"):
            logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
            summed = nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="sum"
            )
            (summed / plan.num_supervised_tokens(number)).backward()
            total += summed.item() / plan.num_supervised_tokens(number)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item())
        step_of(number + 1)
        model.zero_grad()
        losses.append(total)
    return Trace(losses=tuple(losses), norms=tuple(norms), weights=whole_weights(model))


def decay_of(parameter: Tensor) -> float:
    return SETTINGS.weight_decay if parameter.ndim > 1 else 0.0


def plain_lamb(model: nn.Module) -> Callable[[int], None]:
    """The paper's algorithm, a parameter at a time."""
    moments = {
        parameter: (torch.zeros_like(parameter), torch.zeros_like(parameter)) for parameter in model.parameters()
    }

    @torch.no_grad()
    def step(number: int) -> None:
        for parameter, (first, second) in moments.items():
            assert parameter.grad is not None
            first.copy_(0.9 * first + 0.1 * parameter.grad)
            second.copy_(0.999 * second + 0.001 * parameter.grad**2)
            move = (first / (1 - 0.9**number)) / ((second / (1 - 0.999**number)).sqrt() + 1e-8)
            move += decay_of(parameter) * parameter
            ratio = parameter.norm() / move.norm() if parameter.ndim > 1 and parameter.norm() > 0 else 1.0
            parameter -= RATE["lamb"] * ratio * move

    return step


def plain_bf16_states(model: nn.Module) -> Callable[[int], None]:
    """AdamW whose moments pass through bf16 after each step, a parameter at a time."""
    moments = {
        parameter: (torch.zeros_like(parameter), torch.zeros_like(parameter)) for parameter in model.parameters()
    }
    rate = SETTINGS.learning_rate

    @torch.no_grad()
    def step(number: int) -> None:
        threshold = sum(((number >> bit) & 1) << (15 - bit) for bit in range(16)) / 2**16
        for parameter, (first, second) in moments.items():
            assert parameter.grad is not None
            first.lerp_(parameter.grad, 0.1)
            second.mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
            parameter *= 1 - rate * decay_of(parameter)
            parameter -= rate * (first / (1 - 0.9**number)) / ((second / (1 - 0.999**number)).sqrt() + 1e-8)
            first.copy_(first.bfloat16().float())
            mantissa, exponent = torch.frexp(second.double())  # 8 bits of the mantissa are kept
            kept = torch.floor(mantissa * 2**8 + threshold)
            second.copy_(torch.ldexp(kept / 2**8, exponent))

    return step


def plain_8bit(model: nn.Module) -> Callable[[int], None]:
    """bitsandbytes' own optimizer; torch's for what stays in 32 bits."""
    import bitsandbytes as bnb

    untyped: Any = model
    tables = {untyped.get_input_embeddings().weight, untyped.get_output_embeddings().weight}
    quantized = [p for p in model.parameters() if p.ndim == 2 and p.shape[1] == 256 and p not in tables]
    assert len(quantized) == 12
    rest = [p for p in model.parameters() if not any(p is other for other in quantized)]
    eight: Any = cast(Any, bnb.optim).AdamW8bit(
        quantized, lr=SETTINGS.learning_rate, weight_decay=SETTINGS.weight_decay
    )
    groups = [
        {"params": [p for p in rest if (p.ndim > 1) == wide], "weight_decay": 0.1 * wide} for wide in (True, False)
    ]
    exact = torch.optim.AdamW(groups, lr=SETTINGS.learning_rate)

    def step(number: int) -> None:
        del number
        eight.step()
        exact.step()

    return step


def plain_sgd(model: nn.Module) -> Callable[[int], None]:
    @torch.no_grad()
    def step(number: int) -> None:
        del number
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= RATE["sgd"] * (parameter.grad + decay_of(parameter) * parameter)

    return step


PLAIN: dict[str, Callable[[nn.Module], Callable[[int], None]]] = {
    "lamb": plain_lamb,
    "adamw_bf16_states": plain_bf16_states,
    "adamw_8bit": plain_8bit,
    "sgd": plain_sgd,
}


@pytest.mark.parametrize("strategy", [ONE, DDP, ZERO_3, HSDP], ids=["one", "ddp", "zero3", "hsdp"])
@pytest.mark.parametrize("name", NAMES)
def test_equals_plain_code_in_one_process(ranks: Pool, name: OptimizerName, strategy: Strategy) -> None:
    needs_bitsandbytes(name)
    expected = reference(name)
    for trace in ranks.run(strategy.num_ranks, train, case_of(name, strategy)):
        found = trace.difference(expected)
        assert all(found[what] <= limit for what, limit in LIMITS[name].items()), found


def test_embedding_and_head_stay_out_of_8_bits_in_every_chunk_of_a_stage(ranks: Pool) -> None:
    needs_bitsandbytes("8bit")
    case = replace(case_of("adamw_8bit", CHUNKS), layers=4, steps=3)
    [expected] = ranks.run(1, train, replace(case, strategy=replace(ONE, optimizer="adamw_8bit")))
    for trace in ranks.run(2, train, case):
        found = trace.difference(expected)
        assert all(found[what] <= limit for what, limit in LIMITS["adamw_8bit"].items()), found


def test_paged_moments_equal_unpaged_ones_where_nothing_is_paged(ranks: Pool) -> None:
    needs_bitsandbytes("8bit")
    case = case_of("adamw_8bit", DDP)
    paged = replace(case, strategy=replace(DDP, optimizer="paged_adamw_8bit"))
    [one, *_], [other, *_] = ranks.run(2, train, case), ranks.run(2, train, paged)
    assert one.losses == other.losses


def first_half(case: Case, folder: str) -> None:
    run = Run(case)
    for number in range(2):
        run.step(number)
    save(run.app(), folder, 2)


def second_half(case: Case, folder: str) -> tuple[Trace, int]:
    run = Run(case)
    load(run.app(), Path(folder) / "checkpoint-2")
    for number in range(2, case.steps):
        run.step(number)
    states = [value for state in run.stepper.optimizer.state.values() for value in state.values()]
    return run.trace(), sum(isinstance(value, DTensor) for value in states)


@pytest.mark.parametrize("name", ["lamb", "adamw_bf16_states", "adamw_8bit", "sgd"])
def test_a_run_goes_on_from_a_checkpoint_on_other_ranks(ranks: Pool, tmp_path: Path, name: OptimizerName) -> None:
    needs_bitsandbytes(name)
    [straight, *_] = ranks.run(2, train, case_of(name, ZERO_3))
    ranks.run(2, first_half, case_of(name, ZERO_3), str(tmp_path))
    for strategy in (ZERO_3, HSDP, ONE):
        [(resumed, num_sharded), *_] = ranks.run(
            strategy.num_ranks, second_half, case_of(name, strategy), str(tmp_path)
        )  # fmt: skip
        rest = replace(straight, losses=straight.losses[2:], norms=straight.norms[2:])
        found = resumed.difference(rest)
        limits = dict.fromkeys(found, 0.0) if strategy is ZERO_3 else LIMITS[name]
        assert all(found[what] <= limit for what, limit in limits.items()), (strategy.name, found)
        assert num_sharded or name == "sgd"


def collectives_of_update(case: Case) -> list[tuple[str, int, int]]:
    run = Run(case)
    run.step(0)
    for parameter in run.skeleton.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    tally = Tally()
    with WireCount(tally):
        run.stepper.optimizer.step()
    return [(one.op, one.ranks, one.count) for one in tally.counts()]


def test_lamb_sends_one_message_a_step_and_the_others_none(ranks: Pool) -> None:
    assert ranks.run(2, collectives_of_update, case_of("lamb", ZERO_3)) == [[("all_reduce", 2, 1)]] * 2
    assert ranks.run(2, collectives_of_update, case_of("lamb", DDP)) == [[], []]
    assert ranks.run(2, collectives_of_update, case_of("adamw_bf16_states", ZERO_3)) == [[], []]


def bytes_of_states(case: Case) -> dict[str, int]:
    run = Run(case)
    run.step(0)
    found: dict[str, int] = {}
    names = {id(parameter): name for name, parameter in run.skeleton.model.named_parameters()}
    for parameter, state in run.stepper.optimizer.state.items():
        tensors = [value for value in state.values() if value.ndim]
        found[names[id(parameter)]] = sum(value.numel() * value.element_size() for value in tensors)
    return found


def test_moments_take_the_bytes_that_are_promised(ranks: Pool) -> None:
    half = ranks.run(2, bytes_of_states, case_of("adamw_bf16_states", ZERO_3))[0]
    assert half["model.layers.0.self_attn.q_proj.weight"] == 4 * 32 * 32
    needs_bitsandbytes("8bit")
    small = ranks.run(2, bytes_of_states, case_of("adamw_8bit", ZERO_3))[0]
    assert small["model.layers.0.self_attn.q_proj.weight"] == 2 * (256 * 256 + 4 * 256)
    assert small["model.layers.0.mlp.down_proj.weight"] == 8 * 384 * 256  # rows of 384 hold no whole blocks
    assert small["model.embed_tokens.weight"] == 8 * 97 * 256
    assert small["lm_head.weight"] == 8 * 97 * 256
