"""Tiny models trained by the engine on gloo ranks, and by plain torch in one process, to lay side by side.

Every function here that takes a Case runs on a rank of the pool (`conftest.py`), in a world of the case's size.
"""

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from shardwise.levers.optimizer import apply as optimizers
from shardwise.trainer.data.batches import BatchOptions, BatchPlan, plan_batches
from shardwise.trainer.data.collate import Batch, CollateOptions, collate
from shardwise.trainer.data.store import TokenizedSet, from_samples
from shardwise.trainer.mesh import RankMesh, build_mesh
from shardwise.trainer.meter.memory import MemoryWatch, StepMemory, StoredBytes, stored_bytes
from shardwise.trainer.meter.wire import Tally, WireCount
from shardwise.trainer.model import Skeleton, build_skeleton, initialize, materialize, plain_parameters
from shardwise.trainer.parallelize import parallelize
from shardwise.trainer.sentinels import check_buffers, check_gradients, check_ties, verify_wrapping
from shardwise.trainer.step import Stepper, pipeline_of
from shardwise.vocabulary.job import LoraSettings
from shardwise.vocabulary.measured import CountedCollective
from shardwise.vocabulary.strategy import Strategy

VOCAB = 97  # odd, so that shards are uneven
NUM_SAMPLES = 45  # with a global batch of 8 the last step of an epoch has 5 rows: one rank gets an empty micro-batch
SETTINGS = optimizers.OptimizerSettings(learning_rate=1e-3, weight_decay=0.1)
MAX_GRAD_NORM = 0.5
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma": GemmaConfig,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how it is split."""

    strategy: Strategy
    model: str = "llama"
    tied: bool = False
    steps: int = 6
    double: bool = False
    """fp64 throughout, where rounding would hide what is looked for."""
    hidden_size: int = 32
    layers: int = 3
    max_tokens: int = 20
    vocab_size: int = VOCAB
    device: str = "cpu"
    attention: str = "sdpa"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a training leaves behind."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    weights: dict[str, torch.Tensor]
    """Whole, by plain name, in fp64."""

    def difference(self, other: "Trace") -> dict[str, float]:
        """Largest difference of losses, norms and weights."""
        return {
            "loss": max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)),
            "norm": max(abs(a - b) for a, b in zip(self.norms, other.norms, strict=True)),
            "weight": max((self.weights[name] - other.weights[name]).abs().max().item() for name in self.weights),
        }


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What one step costs on one rank."""

    collectives: tuple[CountedCollective, ...]
    stored: StoredBytes
    """At the optimizer's step, gradients included."""
    memory: StepMemory


def make_config(case: Case) -> Any:
    return CONFIGS[case.model](
        vocab_size=case.vocab_size,
        hidden_size=case.hidden_size,
        intermediate_size=case.hidden_size * 3 // 2,
        num_hidden_layers=case.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=case.hidden_size // 4,
        tie_word_embeddings=case.tied,
        max_position_embeddings=256,
        pad_token_id=0,
    )


def make_data(case: Case) -> TokenizedSet:
    """Rows of uneven length, of which a random part is supervised."""
    draw = random.Random(7)
    lengths = [draw.randint(5, case.max_tokens) for _ in range(NUM_SAMPLES)]
    samples = [[draw.randrange(case.vocab_size) for _ in range(length)] for length in lengths]
    marks = [[int(draw.random() < 0.6) for _ in sample[:-1]] + [1] for sample in samples]
    return from_samples(samples, marks)


def make_plan(case: Case, data: TokenizedSet, num_ranks: int) -> BatchPlan:
    options = BatchOptions(
        global_batch=case.strategy.global_batch_size,
        micro_batch=case.strategy.micro_batch_size,
        num_ranks=num_ranks,
        max_steps=case.steps,
    )
    return plan_batches(data, options)


def make_skeleton(case: Case, stage: int = 0) -> Skeleton:
    skeleton = build_skeleton(make_config(case), case.strategy, LoraSettings(r=4), case.attention, stage=stage)
    if case.double:
        for parameter in skeleton.model.parameters():
            parameter.data = parameter.data.double()
    return skeleton


def seeded(skeleton: Skeleton, device: torch.device, strategy: Strategy | None = None) -> None:
    """Values of the same stream for every split; adapters start with B away from 0, so that all gradients are alive."""
    materialize(skeleton, device, strategy)
    initialize(skeleton, 3, torch.device("cpu"))  # a card's generator draws other numbers from the same seed
    for name, parameter in plain_parameters(skeleton.model).items():
        if ".lora_B." in name:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            with torch.no_grad():
                local.fill_(0.01)


def build(case: Case) -> tuple[Skeleton, RankMesh]:
    """The engine's model for a case, wrapped, with values, checked."""
    device = torch.device(case.device, torch.cuda.current_device()) if case.device == "cuda" else torch.device("cpu")
    mesh = build_mesh(case.strategy, device)
    skeleton = make_skeleton(case, mesh.stage)
    parallelize(skeleton, mesh, case.strategy)
    seeded(skeleton, device, case.strategy)
    if not case.double:
        verify_wrapping(skeleton, mesh, case.strategy)
    check_buffers(skeleton.model, skeleton.buffers)
    check_ties(skeleton.model, skeleton.aliases)
    return skeleton, mesh


def make_stepper(case: Case, skeleton: Skeleton, mesh: RankMesh) -> Stepper:
    optimizer = optimizers.apply(skeleton.model, dataclasses.replace(SETTINGS, name=case.strategy.optimizer))
    return Stepper(
        model=skeleton.model,
        optimizer=optimizer,
        strategy=case.strategy,
        mesh=mesh,
        max_grad_norm=MAX_GRAD_NORM,
        attention=case.attention,
        pipeline=pipeline_of(skeleton, mesh, case.strategy, case.attention),
    )


def batches_of(data: TokenizedSet, plan: BatchPlan, step: int, rank: int, device: Any) -> list[Batch]:
    micros = plan.for_rank(step, rank)
    return [collate(data, micro, CollateOptions(pad_token_id=0)).to(device) for micro in micros]


def train(case: Case) -> Trace:
    """Trains by the engine; runs on every rank."""
    skeleton, mesh = build(case)
    stepper = make_stepper(case, skeleton, mesh)
    data = make_data(case)
    plan = make_plan(case, data, case.strategy.data_parallel)
    losses: list[float] = []
    norms: list[float] = []
    for step in range(case.steps):
        batches = batches_of(data, plan, step, mesh.data_rank, mesh.device)
        check = (lambda: check_gradients(skeleton.model)) if step == 0 else None
        outcome = stepper.run(batches, len(batches), plan.num_supervised_tokens(step), after_backward=check)
        loss = outcome.loss.double().cpu()
        dist.all_reduce(loss, group=mesh.control)
        losses.append(loss.item() / mesh.loss_copies)
        norms.append(outcome.grad_norm.item())
        assert outcome.skipped.item() == 0
    check_ties(skeleton.model, skeleton.aliases)
    check_buffers(skeleton.model, skeleton.buffers)
    return Trace(losses=tuple(losses), norms=tuple(norms), weights=whole_weights(skeleton.model))


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in plain_parameters(model).items():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        weights[name] = full.detach().double().cpu()
    return weights


def train_plain(case: Case) -> Trace:
    """The same training without the engine: one process, transformers' own loss, torch's own clipping."""
    skeleton = make_skeleton(case)
    seeded(skeleton, torch.device("cpu"))
    model: Any = skeleton.model
    optimizer = torch.optim.AdamW(
        optimizers.parameter_groups(model, SETTINGS.weight_decay), lr=SETTINGS.learning_rate, foreach=False
    )
    data = make_data(case)
    plan = make_plan(case, data, 1)
    losses: list[float] = []
    norms: list[float] = []
    for step in range(case.steps):
        total = 0.0
        for batch in batches_of(data, plan, step, 0, "cpu"):
            logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
            logits = logits if case.double else logits.float()
            loss = nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="sum"
            ) / plan.num_supervised_tokens(step)
            loss.backward()
            total += loss.item()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        norms.append(nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return Trace(losses=tuple(losses), norms=tuple(norms), weights=whole_weights(model))


def train_ddp(case: Case) -> Trace:
    """The same by torch's DistributedDataParallel with no_sync; runs on every rank."""
    skeleton = make_skeleton(case)
    seeded(skeleton, torch.device("cpu"))
    model = nn.parallel.DistributedDataParallel(skeleton.model)
    optimizer = torch.optim.AdamW(
        optimizers.parameter_groups(skeleton.model, SETTINGS.weight_decay), lr=SETTINGS.learning_rate, fused=True
    )
    data = make_data(case)
    plan = make_plan(case, data, dist.get_world_size())
    losses: list[float] = []
    norms: list[float] = []
    for step in range(case.steps):
        total = torch.zeros((), dtype=torch.float64)
        batches = batches_of(data, plan, step, dist.get_rank(), "cpu")
        for index, batch in enumerate(batches):
            model.require_backward_grad_sync = index == len(batches) - 1
            logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
            summed = nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="sum"
            )
            (summed * dist.get_world_size() / plan.num_supervised_tokens(step)).backward()
            total += summed.detach().double() / plan.num_supervised_tokens(step)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item())
    return Trace(losses=tuple(losses), norms=tuple(norms), weights=whole_weights(skeleton.model))


def cost_of_step(case: Case) -> StepCost:
    """Collectives, stored bytes and peak memory of the second step; runs on every rank."""
    skeleton, mesh = build(case)
    stepper = make_stepper(case, skeleton, mesh)
    data = make_data(case)
    plan = make_plan(case, data, case.strategy.data_parallel)
    at_update: list[StoredBytes] = []
    for step in range(2):
        batches = batches_of(data, plan, step, mesh.data_rank, mesh.device)
        num_tokens = plan.num_supervised_tokens(step)
        if step == 0:
            stepper.run(batches, len(batches), num_tokens)
            continue
        watch, tally = MemoryWatch(skeleton.model, stepper.optimizer, mesh.device), Tally()

        def note(*_: object) -> None:
            at_update.append(stored_bytes(skeleton.model, stepper.optimizer))

        stepper.optimizer.register_step_pre_hook(note)
        with watch.watching(), WireCount(tally):
            stepper.run(batches, len(batches), num_tokens)
        return StepCost(collectives=tally.counts(), stored=at_update[0], memory=watch.result())
    raise AssertionError("no second step")


def count_collectives(case: Case) -> list[tuple[str, int, int, int]]:
    """(op, ranks, bytes, count) of one step; runs on every rank."""
    return [(one.op, one.ranks, one.bytes, one.count) for one in cost_of_step(case).collectives]


def local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of a parameter's gradient."""
    gradient = parameter.grad
    assert gradient is not None, "no gradient"
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
