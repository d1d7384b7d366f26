"""A slow average survives in bf16 ([Note: a slow average in bf16])."""

import pytest
import torch

from shardwise.levers.optimizer.apply_bf16 import AdamWBf16States, rounded


def second_moment(num_steps: int) -> float:
    """Of a weight that saw one large gradient, then small ones."""
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    optimizer = AdamWBf16States([{"params": [weight], "weight_decay": 0.0}], 1e-3, (0.9, 0.999), 1e-8)
    for step in range(num_steps):
        weight.grad = torch.full_like(weight, 1.0 if step == 0 else 1e-3)
        optimizer.step()
    return optimizer.state[weight]["exp_avg_sq"].float().mean().item()


def test_the_second_moment_falls_as_in_fp32() -> None:
    exact = 0.001 * 0.999**1499 + (1 - 0.999**1499) * 1e-6
    assert second_moment(1500) == pytest.approx(exact, rel=0.02)


def test_rounding_to_nearest_would_keep_it_for_good() -> None:
    """A control: the trouble is real."""
    value = torch.tensor(0.001).bfloat16()
    assert (value.float() * 0.999).bfloat16() == value


def test_rounding_is_to_a_neighbor_and_right_on_average() -> None:
    values = torch.rand(1000, generator=torch.Generator().manual_seed(1)) * 3
    many = torch.stack([rounded([values], step)[0] for step in range(256)])
    assert torch.equal(many.bfloat16().float(), many)  # bf16 holds them
    spacing = 2.0 ** (torch.frexp(values).exponent - 8)
    assert ((many - values).abs() < spacing).all()
    assert ((many.mean(0) - values).abs() <= spacing / 200).all()


def test_zero_infinity_and_nan_stay_what_they_are() -> None:
    for step in (1, 2**15, 2**16 - 1):
        [found] = rounded([torch.tensor([0.0, float("inf"), float("nan"), 2.0])], step)
        assert found[0] == 0
        assert found[1] == float("inf")
        assert found[2].isnan()
        assert found[3] == 2
