"""Every command that a plan prints is run, and must do what stands beside it."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest

from shardwise.cli.main import main
from shardwise.cli.plan import Options, whole_command
from shardwise.vocabulary.units import format_gb, format_rate

NOTHING_FITS = (
    "llama-3.1-70b --gpus 2xrtx-4090 --micro-batch 3 --accumulation 2",
    "qwen2.5-7b --gpus 2xrtx-5090 --tuning full --micro-batch 16 --split FULL_SHARD --checkpointing none",
    "qwen2.5-7b --gpus 2xrtx-3090 --nodes 2 --network 25gbe --tuning full --zero 1 --global-batch 40",
    "qwen2.5-7b --gpus 2xh100 --tuning full --keep-unsharded --zero 3 --micro-batch 2",
    "qwen3-30b-a3b --gpus 8xh100 --tuning qlora",
    "llama-3.1-8b --gpus 2xrtx-3090 --tuning lora --seq 65536 --link nvlink-bridge --tp 1",
    "llama-3.1-405b --gpus rtx-4090 --tuning full",
    "qwen2.5-7b --gpus t4",
)


def answer(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, Any]:
    main(["plan", *shlex.split(line), "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("line", NOTHING_FITS)
def test_every_change_that_is_offered_makes_it_fit(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    offered = answer(capsys, line)
    assert offered["recommended"] is None
    assert offered["advice"]
    for advice in offered["advice"]:
        assert advice["rule"] == "make_it_fit"
        program, command, *words = shlex.split(advice["command"])
        assert (program, command) == ("shardwise", "plan")
        there = answer(capsys, shlex.join(words))
        taken = there["recommended"]
        assert taken is not None, advice
        assert taken["fits"], advice
        assert f"{format_rate(taken['tokens_per_s'])} tokens/s" in advice["price"], advice
        assert f"{format_gb(taken['memory']['needed_bytes'])} a card" in advice["price"], advice
        steps = re.search(r"steps of ([\d,]+) sequences", advice["message"])
        batch = int(steps[1].replace(",", "")) if steps else offered["job"]["global_batch_size"]
        assert there["job"]["global_batch_size"] == batch, advice


def test_changes_are_ranked_from_small_to_large(capsys: pytest.CaptureFixture[str]) -> None:
    offered = answer(capsys, NOTHING_FITS[1])
    starts = [advice["message"].split()[0] for advice in offered["advice"]]
    order = ["Leave", "Compute", "Train", "Keep", "Cut", "Let", "Take"]
    assert len(starts) >= 3
    assert [order.index(word) for word in starts] == sorted(order.index(word) for word in starts)


def test_the_cards_that_are_missing_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """The number of cards is the smallest of the sizes in which machines come."""
    offered = answer(capsys, "llama-3.1-8b --gpus h100 --tuning full")
    found = [re.match(r"Take (\d+) cards", advice["message"]) for advice in offered["advice"]]
    cards = next(int(match[1]) for match in found if match)
    assert cards in (2, 4, 8)
    assert answer(capsys, f"llama-3.1-8b --gpus {cards // 2}xh100 --tuning full")["recommended"] is None


@pytest.mark.parametrize(
    "line",
    [
        "qwen2.5-0.5b --gpus 2xrtx-3090", "llama-3.1-8b --gpus 4xrtx-a6000 --lora-r 64",
        "llama-3.1-8b --gpus 8xh100 --tuning full --split full_shard --price 2.5 --max-steps 10",
    ],
)  # fmt: skip
def test_what_is_worth_knowing_is_true(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    offered = answer(capsys, line)
    rules = {advice["rule"]: advice for advice in offered["advice"]}
    plan, _, train = rules["run_it"]["command"].partition(" && ")
    assert train.startswith("shardwise train plan.yaml --data ")
    again = answer(capsys, shlex.join(shlex.split(plan)[2:-2]))
    assert again["recommended"]["strategy"] == offered["recommended"]["strategy"]
    full = rules.get("full_fine_tune_possible")
    if full is not None:
        there = answer(capsys, shlex.join(shlex.split(full["command"])[2:]))
        assert there["recommended"]["strategy"]["tuning"] == "full"
        assert format_rate(there["recommended"]["tokens_per_s"]) in full["price"]
    if "how_long" in rules:
        hours = 10 * offered["recommended"]["step"]["seconds"] * 8 / 3600
        assert f"{hours * 2.5:,.2f} at 2.5" in rules["how_long"]["message"]


def test_flags_that_are_taken_back_leave_no_trace() -> None:
    options = Options(model="qwen2.5-7b", gpus="2xh100", split="zero3", micro_batch=4, lora_r=8)
    line = whole_command(options, "--split=null --micro-batch=null --zero 2 --tuning full")
    assert line == "shardwise plan qwen2.5-7b --gpus 2xh100 --tuning full --zero 2"
    assert whole_command(options, "") == ""
    assert whole_command(options, "llama-3.1-8b --seq 512").startswith(
        "shardwise plan llama-3.1-8b --gpus 2xh100 --seq"
    )
