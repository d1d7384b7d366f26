"""What makes steps fast is right on real cards: fused loss, documents in one row, and a host that never waits."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from gpu_ranks import on_cards, waits_of_steps
from harness import Case
from torch import Tensor

from shardwise.launch.local import LaunchOptions, launch
from shardwise.levers.loss import apply_fused, cost
from shardwise.levers.loss.apply_fused import LogitRule, linear_cross_entropy
from shardwise.trainer import attention
from shardwise.vocabulary.strategy import Strategy

DEVICE = torch.device("cuda", 0)
ONE = Strategy(precision="bf16", micro_batch_size=4, accumulation=2, loss="fused")
BF16_LIMIT = 1e-2
"""Of a relative error in bf16."""


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(scale=0.5, softcap=5.0)], ids=str)
@pytest.mark.parametrize("compiled", [True, False])
def test_fused_loss_in_bf16(monkeypatch: pytest.MonkeyPatch, rule: LogitRule, *, compiled: bool) -> None:
    """Several chunks, the last smaller, a vocabulary that no tile divides; the exact one is computed in fp64."""
    monkeypatch.setattr(cost, "FUSED_CHUNK_BYTES", 256 * 50_257 * (2 if compiled else 10))
    draw = torch.Generator(DEVICE).manual_seed(1)
    hidden = torch.randn(1000, 512, generator=draw, device=DEVICE).bfloat16().requires_grad_()
    weight = (0.1 * torch.randn(50_257, 512, generator=draw, device=DEVICE)).bfloat16().requires_grad_()
    targets = torch.randint(0, 50_257, (1000,), generator=draw, device=DEVICE)
    targets[::3] = -100
    found = linear_cross_entropy(hidden, weight, None, targets, rule, compiled=compiled)
    gradients = torch.autograd.grad(0.25 * found, (hidden, weight))
    exact_hidden, exact_weight = (one.detach().double().requires_grad_() for one in (hidden, weight))
    logits = rule(exact_hidden @ exact_weight.t())
    exact = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    wanted = torch.autograd.grad(0.25 * exact, (exact_hidden, exact_weight))
    assert found.item() == pytest.approx(exact.item(), rel=2e-3)
    assert all(error(one, other) < BF16_LIMIT for one, other in zip(gradients, wanted, strict=True))


def test_head_gradient_is_summed_in_fp32_by_the_product() -> None:
    """Otherwise each chunk reads and writes the whole sum once more."""
    assert apply_fused.sums_in_fp32(torch.bfloat16, DEVICE)
    left = torch.randn(300, 200, device=DEVICE).bfloat16()
    right = torch.randn(200, 100, device=DEVICE).bfloat16()
    total = torch.randn(300, 100, device=DEVICE)
    expected = total.double() + left.double() @ right.double()
    apply_fused.add_product(total, left, right, keep=True)
    assert error(total, expected) < 1e-5
    apply_fused.add_product(total, left, right, keep=False)
    assert error(total, left.double() @ right.double()) < 1e-5


@pytest.mark.parametrize("reach", [-1, 100])
@pytest.mark.parametrize("groups", [8, 2])
def test_documents_in_one_row(groups: int, reach: int) -> None:
    """The kernel against one document after the other in fp32, with empty documents at the end."""
    lengths = torch.tensor([5, 700, 1, 300, 128])
    bounds = torch.tensor([0, *lengths.cumsum(0).tolist(), 1134, 1134], dtype=torch.int32, device=DEVICE)
    draw = torch.Generator(DEVICE).manual_seed(1)
    shapes = ((1134, 8, 64), (1134, groups, 64), (1134, groups, 64))
    rows = [torch.randn(shape, generator=draw, device=DEVICE).bfloat16().requires_grad_() for shape in shapes]
    kernel = attention.variable_length_kernel()
    assert kernel is not None
    found = kernel(rows, bounds, 1024, None, reach)
    exact_rows = [row.detach().float().requires_grad_() for row in rows]
    exact = attention.attend_by_document(exact_rows, bounds, 1024, None, reach)
    assert error(found, exact) < BF16_LIMIT
    weight = torch.randn(exact.shape, generator=draw, device=DEVICE)
    gradients = torch.autograd.grad((found.float() * weight).sum(), rows)
    wanted = torch.autograd.grad((exact * weight).sum(), exact_rows)
    assert all(error(one, other) < 2 * BF16_LIMIT for one, other in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_host_never_waits_inside_a_step(*, compiled: bool, packed: bool) -> None:
    """Every wait raises an error after the first steps; with rows of several documents too."""
    splits = {
        "ddp": replace(ONE, dp_replicate=2, compile_blocks=compiled),
        "zero3": replace(ONE, dp_shard=2, zero_stage=3, compile_blocks=compiled),
        "lora": replace(ONE, dp_replicate=2, tuning="lora", compile_blocks=compiled),
    }
    cases = {
        name: Case(strategy=strategy, device="cuda", model="qwen2", hidden_size=256, layers=2, max_tokens=256)
        for name, strategy in splits.items()
    }
    found = launch(on_cards, (waits_of_steps, cases, packed), LaunchOptions(num_ranks=2, device="cuda"))
    assert found == dict.fromkeys(cases, ""), found
