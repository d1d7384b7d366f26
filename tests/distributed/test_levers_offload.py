"""What waits on the host trains as what does not; what a machine cannot do is refused before anything is loaded.

On processors the host is the device, so these show that nothing is lost on the way; copies are shown on cards.
"""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoint_pool import Pool
from harness import Case, train, train_plain
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from shardwise.errors import ConfigError, MissingExtraError
from shardwise.levers.offload import apply as offload
from shardwise.levers.precision import apply_fp8 as fp8
from shardwise.trainer.parallelize import refuse_machine, refuse_unsupported
from shardwise.vocabulary.strategy import Strategy

pytestmark = pytest.mark.distributed

ONE = Strategy(precision="fp32", micro_batch_size=1, accumulation=8)
DDP = replace(ONE, accumulation=4, dp_replicate=2, offload="optimizer")
ZERO_1 = replace(ONE, accumulation=4, dp_shard=2, zero_stage=1, offload="optimizer")
ZERO_3 = replace(ZERO_1, zero_stage=3, offload="parameters")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "strategy",
    [
        DDP,
        ZERO_1,
        replace(ZERO_1, zero_stage=2),
        ZERO_3,
        replace(ZERO_3, tuning="lora"),
        replace(ZERO_1, tuning="lora"),
        replace(ONE, offload="parameters"),
        replace(ONE, offload="optimizer"),
    ],
    ids=["ddp", "zero1", "zero2", "zero3", "zero3-lora", "zero1-lora", "one-card", "one-card-optimizer"],
)
def test_offloaded_training_equals_one_process(ranks: Pool, strategy: Strategy) -> None:
    case = Case(strategy=strategy, double=True, steps=3)
    expected = train_plain(replace(case, strategy=replace(ONE, tuning=strategy.tuning)))
    for trace in ranks.run(strategy.num_ranks, train, case):
        found = trace.difference(expected)
        assert found["loss"] <= 1e-13, found
        assert found["norm"] <= 1e-13, found
        assert found["weight"] <= 2e-12, found


def test_policy_pins_memory_for_cards_only() -> None:
    on_card = offload.policy(ZERO_3, torch.device("cuda", 0))
    assert isinstance(on_card, CPUOffloadPolicy)
    assert on_card.pin_memory
    on_host = offload.policy(ZERO_3, CPU)
    assert isinstance(on_host, CPUOffloadPolicy)
    assert not on_host.pin_memory
    assert not isinstance(offload.policy(replace(ZERO_3, offload="none"), CPU), CPUOffloadPolicy)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (replace(DDP, offload="parameters"), "stage 0 on 2 ranks keeps weights whole"),
        (replace(ZERO_3, offload="optimizer"), "Use offload: parameters"),
        (replace(ONE, zero_stage=2), "over one shard splits nothing"),
    ],
)
def test_what_cannot_run_is_refused_with_a_way_out(strategy: Strategy, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        refuse_unsupported(strategy)


def test_fp8_is_refused_without_a_card_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = replace(ONE, precision="fp8")
    with pytest.raises(ConfigError, match=r"compute capability 8\.9 or later; this run is on cpu"):
        refuse_machine(strategy, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", mock.Mock(return_value=(8, 0)))
    monkeypatch.setattr(torch.cuda, "get_device_name", mock.Mock(return_value="A100"))
    with pytest.raises(ConfigError, match=r"A100 has 8\.0"):
        refuse_machine(strategy, torch.device("cuda", 0))


class _Float8:
    """In place of torchao's module: notes which layers are swapped."""

    def __init__(self) -> None:
        self.swapped: list[str] = []

    def Float8LinearConfig(self, **options: bool) -> dict[str, bool]:
        return options

    def convert_to_float8_training(self, blocks: nn.Module, *, module_filter_fn: Any, config: Any) -> None:
        assert config == {"pad_inner_dim": True}
        self.swapped = [name for name, module in blocks.named_modules() if module_filter_fn(module, name)]


def test_fp8_takes_the_matrices_of_blocks_but_not_adapters_and_refuses_odd_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = _Float8()
    monkeypatch.setattr(fp8, "load_float8", lambda: library)
    block = nn.ModuleDict({"up": nn.Linear(32, 48), "norm": nn.LayerNorm(48)})
    block["lora_A"] = nn.ModuleDict({"default": nn.Linear(32, 4)})
    fp8.apply(nn.ModuleList([block]))
    assert library.swapped == ["0.up"]
    block["odd"] = nn.Linear(32, 40)
    with pytest.raises(ConfigError, match=r"1 of 2 do not: 0\.odd \(40 x 32\)"):
        fp8.apply(nn.ModuleList([block]))


@pytest.mark.parametrize(
    ("strategy", "module", "extra"),
    [
        (replace(ONE, tuning="qlora"), "bitsandbytes", "qlora"),
        (replace(ONE, optimizer="paged_adamw_8bit"), "bitsandbytes", "qlora"),
        (replace(ONE, precision="fp8"), "torchao", "fp8"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, strategy: Strategy, module: str, extra: str
) -> None:
    for name in ("bitsandbytes", "bitsandbytes.functional", "torchao", "torchao.float8"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    monkeypatch.setattr(fp8, "problems", mock.Mock(return_value=[]))
    with pytest.raises(MissingExtraError, match=rf"{module}.*shardwise\[{extra}\]"):
        refuse_machine(strategy, CPU)
