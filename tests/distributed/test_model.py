"""Models made on meta come out as transformers makes them, the same for every split; and sentinels see when not."""

import dataclasses
from typing import Any

import pytest
import torch
from checkpoint_pool import Pool
from harness import Case, build, make_config, make_skeleton, make_stepper, seeded, whole_weights
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from shardwise.axes.fully_shard_apply import fsdp_modules
from shardwise.errors import ConfigError, PlanMismatchError, TrainingError
from shardwise.trainer.checkpoint import model_tensors
from shardwise.trainer.mesh import build_mesh
from shardwise.trainer.model import build_skeleton, materialize
from shardwise.trainer.parallelize import parallelize, refuse_unsupported
from shardwise.trainer.sentinels import check_buffers, check_gradients, check_ties, verify_wrapping
from shardwise.vocabulary.job import LoraSettings
from shardwise.vocabulary.strategy import Strategy

pytestmark = pytest.mark.distributed

FP32 = Strategy(precision="fp32")
BF16 = Strategy(precision="bf16")


def start(strategy: Strategy, tied: bool) -> dict[str, torch.Tensor]:
    return whole_weights(build(Case(strategy=strategy, tied=tied))[0].model)


@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_do_not_depend_on_the_split(ranks: Pool, *, tied: bool) -> None:
    one = ranks.run(1, start, FP32, tied)[0]
    for size, strategy in (
        (2, dataclasses.replace(FP32, dp_replicate=2)),
        (4, dataclasses.replace(FP32, dp_shard=4, zero_stage=3)),
        (4, dataclasses.replace(FP32, dp_replicate=2, dp_shard=2, zero_stage=2)),
    ):
        for weights in ranks.run(size, start, strategy, tied):
            assert weights.keys() == one.keys()
            assert all(torch.equal(weights[name], one[name]) for name in one)


def test_random_weights_follow_the_models_own_rule() -> None:
    case = Case(strategy=FP32, model="gemma", hidden_size=64)
    skeleton = make_skeleton(case)
    seeded(skeleton, torch.device("cpu"))
    model: Any = skeleton.model
    norm = model.model.norm.weight
    theirs = AutoModelForCausalLM.from_config(make_config(case)).model.norm.weight
    assert torch.equal(norm, theirs)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(model.config.initializer_range, rel=0.05)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}])
def test_rotary_buffers_after_meta(scaling: dict[str, Any] | None) -> None:
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    if scaling is not None:
        config.rope_parameters = scaling
    skeleton = build_skeleton(config, FP32, LoraSettings())
    materialize(skeleton, torch.device("cpu"))
    theirs = dict(AutoModelForCausalLM.from_config(config).named_buffers())
    ours = dict(skeleton.model.named_buffers())
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    check_buffers(skeleton.model, skeleton.buffers)
    next(iter(ours.values())).zero_()
    with pytest.raises(PlanMismatchError, match="inv_freq does not hold what the CPU computed"):
        check_buffers(skeleton.model, skeleton.buffers)


def test_nothing_is_allocated_before_materialize() -> None:
    skeleton = make_skeleton(Case(strategy=FP32))
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    assert not any(buffer.is_meta for buffer in skeleton.model.buffers())


def test_ties_come_apart_loudly() -> None:
    skeleton = make_skeleton(Case(strategy=FP32, tied=True))
    seeded(skeleton, torch.device("cpu"))
    check_ties(skeleton.model, skeleton.aliases)
    skeleton.model.lm_head.weight = nn.Parameter(skeleton.model.lm_head.weight.detach().clone())
    with pytest.raises(PlanMismatchError, match=r"embed_tokens.weight and lm_head.weight were tied"):
        check_ties(skeleton.model, skeleton.aliases)


def wrapping_problem(strategy: Strategy, planned: Strategy, forget: str) -> str:
    """Wraps as one strategy, asks whether it is another; `forget` leaves something undone on purpose."""
    mesh = build_mesh(strategy, torch.device("cpu"))
    skeleton = make_skeleton(Case(strategy=strategy))
    if forget == "dtype":
        for parameter in skeleton.model.model.norm.parameters():
            parameter.data = parameter.data.to(torch.float64)
    parallelize(skeleton, mesh, strategy)
    try:
        verify_wrapping(skeleton, build_mesh(planned, torch.device("cpu")), planned)
    except PlanMismatchError as error:
        return str(error)
    return ""


def test_wrapping_is_verified(ranks: Pool) -> None:
    zero_3 = dataclasses.replace(FP32, dp_shard=2, zero_stage=3)
    assert ranks.run(2, wrapping_problem, zero_3, zero_3, "") == ["", ""]
    replicated = dataclasses.replace(FP32, dp_replicate=2)
    problem = ranks.run(2, wrapping_problem, zero_3, replicated, "")[0]
    assert "model.embed_tokens.weight should be replicated over dp_replicate 2" in problem
    lora = dataclasses.replace(FP32, dp_shard=2, zero_stage=2, tuning="lora")
    problem = ranks.run(2, wrapping_problem, lora, dataclasses.replace(lora, zero_stage=3), "")[0]
    assert "model.embed_tokens should be a group of its own (embedding)" in problem
    problem = ranks.run(2, wrapping_problem, zero_3, zero_3, "dtype")[0]
    assert problem == "model.norm.weight is stored in torch.float64, planned in torch.float32."


def classes_and_dtypes(strategy: Strategy) -> tuple[int, set[str], set[str]]:
    model = build(Case(strategy=strategy))[0].model
    trained = {str(parameter.dtype) for parameter in model.parameters() if parameter.requires_grad}
    frozen = {str(parameter.dtype) for parameter in model.parameters() if not parameter.requires_grad}
    return len(fsdp_modules(model)), trained, frozen


def test_master_dtypes(ranks: Pool) -> None:
    zero_3 = dataclasses.replace(BF16, dp_shard=2, zero_stage=3)
    assert ranks.run(2, classes_and_dtypes, zero_3)[0] == (5, {"torch.float32"}, set())
    pure = dataclasses.replace(zero_3, precision="bf16_pure")
    assert ranks.run(2, classes_and_dtypes, pure)[0] == (5, {"torch.bfloat16"}, set())
    lora = dataclasses.replace(zero_3, tuning="lora", zero_stage=2)
    assert ranks.run(2, classes_and_dtypes, lora)[0] == (4, {"torch.float32"}, {"torch.bfloat16"})


def saved_names(strategy: Strategy) -> list[str]:
    return sorted(model_tensors(build(Case(strategy=strategy, tied=True))[0].model))


def test_saved_names_know_nothing_of_wrappers(ranks: Pool) -> None:
    plain = AutoModelForCausalLM.from_config(make_config(Case(strategy=FP32, tied=True)))
    names = sorted(set(plain.state_dict()) - {"lm_head.weight"})
    wrapped = dataclasses.replace(FP32, dp_shard=2, zero_stage=3, checkpointing="full", compile_blocks=True)
    assert ranks.run(2, saved_names, wrapped)[0] == names


def first_gradients(strategy: Strategy, freeze: str) -> str:
    """What the sentinel says after the first backward, with a parameter's gradient taken away."""
    case = Case(strategy=strategy)
    skeleton, mesh = build(case)
    stepper = make_stepper(case, skeleton, mesh)
    batch = torch.arange(8).reshape(1, 8)
    loss = skeleton.model(input_ids=batch, loss_labels=batch)
    loss.backward()
    for name, parameter in skeleton.model.named_parameters():
        if freeze and name.endswith(freeze):
            parameter.grad = None
    del stepper
    try:
        check_gradients(skeleton.model)
    except TrainingError as error:
        return str(error)
    return ""


def test_dead_parameters_are_named(ranks: Pool) -> None:
    zero_2 = dataclasses.replace(FP32, dp_shard=2, zero_stage=2)
    assert ranks.run(2, first_gradients, zero_2, "") == ["", ""]
    problem = ranks.run(2, first_gradients, zero_2, "0.self_attn.q_proj.weight")[0]
    assert "1 trained parameters got no gradient" in problem
    assert "model.layers.0.self_attn.q_proj.weight" in problem


def test_targets_that_fit_nothing_name_what_would() -> None:
    config = Qwen2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(ConfigError, match=r"\['qkv'\] fits no module .* down_proj, gate_proj"):
        build_skeleton(config, dataclasses.replace(FP32, tuning="lora"), LoraSettings(target_modules=("qkv",)))


def test_an_adapter_on_a_tied_head_is_refused() -> None:
    config = Qwen2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        tie_word_embeddings=True,
    )  # fmt: skip
    lora, targets = dataclasses.replace(FP32, tuning="lora"), LoraSettings(target_modules=("lm_head", "q_proj"))
    with pytest.raises(ConfigError, match="names the embedding or the head, which are one tied weight"):
        build_skeleton(config, lora, targets)
    config.tie_word_embeddings = False
    assert build_skeleton(config, lora, targets)


def test_what_the_engine_does_not_run_is_said_at_once() -> None:
    wishes = dataclasses.replace(FP32, offload="optimizer", zero_stage=3)
    with pytest.raises(ConfigError, match="2 problems"):
        refuse_unsupported(wishes)
