"""The fused loss equals the plain one; its rows are those that learn; unknown logits are refused."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from shardwise.errors import ConfigError
from shardwise.levers.loss import apply as loss
from shardwise.levers.loss import apply_fused, cost
from shardwise.levers.loss.apply_fused import LogitRule, linear_cross_entropy
from shardwise.trainer.data.batches import MicroBatch
from shardwise.trainer.data.collate import CollateOptions, collate
from shardwise.trainer.data.store import from_samples
from shardwise.trainer.model import parameters_on_meta

TOKENS, HIDDEN, VOCAB = 301, 24, 97
RULES = [LogitRule(), LogitRule(scale=0.3), LogitRule(softcap=5.0), LogitRule(scale=2.0, softcap=3.0)]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 40 tokens in fp64."""
    monkeypatch.setattr(cost, "FUSED_CHUNK_BYTES", 40 * 16 * VOCAB)
    monkeypatch.setattr(cost, "TILE", 8)


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=draw).to(dtype).requires_grad_()
    bias = torch.randn(VOCAB, generator=draw).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=draw)
    targets[::3] = -100
    return hidden, weight, bias, targets


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rule: LogitRule) -> Tensor:
    logits = F.linear(hidden, weight, bias) * rule.scale
    if rule.softcap is not None:
        logits = torch.tanh(logits / rule.softcap) * rule.softcap
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.usefixtures("small_chunks")
def test_equals_plain_in_fp64(rule: LogitRule) -> None:
    """Eight chunks, the last of another size; the incoming gradient is not 1."""
    hidden, weight, bias, targets = inputs(torch.float64)
    assert cost.fused_chunk(TOKENS, VOCAB, 8, compiled=False) == 40
    expected = plain(hidden, weight, bias, targets, rule)
    found = linear_cross_entropy(hidden, weight, bias, targets, rule, compiled=False)
    assert found.item() == pytest.approx(expected.item(), rel=1e-14)
    wanted = torch.autograd.grad(0.37 * expected, (hidden, weight, bias))
    gradients = torch.autograd.grad(0.37 * found, (hidden, weight, bias))
    for one, other in zip(gradients, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.usefixtures("small_chunks")
def test_bf16_sums_the_head_in_fp32() -> None:
    """The gradient of the head is as near to the exact one as a single product in bf16 would be."""
    hidden, weight, _, targets = inputs(torch.bfloat16)
    exact = torch.autograd.grad(plain(hidden.double(), weight.double(), None, targets, RULES[0]), weight)[0]
    total = linear_cross_entropy(hidden, weight, None, targets, RULES[0], compiled=False)
    found = torch.autograd.grad(total, weight)[0]
    assert found.dtype == torch.bfloat16
    assert total.dtype == torch.float32
    assert (found.double() - exact.double()).norm() <= 6e-3 * exact.double().norm()


def test_a_frozen_head_costs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    monkeypatch.setattr(apply_fused, "add_product", None)
    total = linear_cross_entropy(hidden, weight.detach(), None, targets, RULES[0], compiled=False)
    total.backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_without_gradients_nothing_is_kept() -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    with torch.no_grad():
        found = linear_cross_entropy(hidden, weight, bias, targets, RULES[0], compiled=False)
    assert not found.requires_grad
    assert found.item() == pytest.approx(plain(hidden, weight, bias, targets, RULES[0]).item(), rel=1e-6)


def test_nothing_to_learn_is_a_loss_of_zero() -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    total = linear_cross_entropy(hidden, weight, None, torch.full_like(targets, -100), RULES[0], compiled=False)
    total.backward()
    assert total.item() == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_second_backward_is_refused() -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    total = linear_cross_entropy(hidden, weight, None, targets, RULES[0], compiled=False)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        total.backward()


def test_compiled_kernel_serves_all_numbers_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the plain loss, and traced at most twice: once for a number of tokens, once for all."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    hidden, weight, bias, targets = inputs(torch.float32)
    rule = RULES[3]
    counters.clear()
    for number in (301, 256, 128, 200):
        part = (hidden[:number], weight, bias, targets[:number])
        expected, found = plain(*part, rule), linear_cross_entropy(*part, rule, compiled=True)
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)
        wanted = torch.autograd.grad(expected, (hidden, weight))
        for one, other in zip(torch.autograd.grad(found, (hidden, weight)), wanted, strict=True):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-4)
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("share", [0.0, 0.01, 0.4, 1.0])
def test_rows_with_logits_are_those_that_learn(share: float) -> None:
    draw = np.random.default_rng(3)
    samples = [draw.integers(1, 50, 400).tolist() for _ in range(3)]
    marks = [(draw.random(400) < share).astype(int).tolist() for _ in samples]
    data = from_samples(samples, marks)
    micro = MicroBatch(rows=tuple((index,) for index in range(len(data))))
    batch = collate(data, micro, CollateOptions(pad_token_id=0))
    targets = loss.next_tokens(batch.labels).flatten()
    if batch.loss_rows is None:
        assert share == 1.0
        return
    assert len(batch.loss_rows.unique()) == len(batch.loss_rows)
    assert len(batch.loss_rows) % 128 == 0
    assert int((targets[batch.loss_rows] != -100).sum()) == int((targets != -100).sum()) == batch.num_supervised_tokens


SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def made(model_type: str, **keys: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with parameters_on_meta():
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SMALL, **keys))


@pytest.mark.parametrize(
    ("model_type", "keys", "rule"),
    [
        ("qwen3", {}, LogitRule()),
        ("gemma2", {"head_dim": 8}, LogitRule(softcap=30.0)),
        ("cohere", {}, LogitRule(scale=0.0625)),
        ("granite", {"logits_scaling": 8.0}, LogitRule(scale=0.125)),
        ("gpt2", {}, LogitRule()),
    ],
)
def test_logits_of_families_are_known(model_type: str, keys: dict[str, Any], rule: LogitRule) -> None:
    model = made(model_type, **keys)
    assert loss.logit_rule(model) == rule
    loss.check_rule(model, rule, "fused")


def test_unknown_logits_are_refused() -> None:
    with pytest.raises(ConfigError, match="changes the hidden states"):
        loss.apply(made("minicpm3"), "fused")
    model = made("qwen2")
    with pytest.raises(ConfigError, match="changes its logits"):
        loss.check_rule(model, LogitRule(scale=0.5), "fused")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ConfigError, match="not a plain matrix"):
        loss.apply(model, "chunked")
