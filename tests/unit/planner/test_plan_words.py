"""What a plan says in words: why, why not, what a name stands for, and every fault of a question at once."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from shardwise.axes import engine
from shardwise.cli.main import main
from shardwise.facts import catalog
from shardwise.planner import duration, learning_rate, reasons
from shardwise.planner.answer import make_plan
from shardwise.planner.pricing import price
from shardwise.planner.rules import LOWEST_STAGE, ONE_CARD, simplicity
from shardwise.planner.search import Wishes
from shardwise.vocabulary.job import Job, SequenceLengths
from shardwise.vocabulary.plan import Candidate, Plan
from shardwise.vocabulary.strategy import Axis, Strategy

SMALL = Job(model=catalog.model("qwen2.5-0.5b"), tuning="any")
TWO = catalog.parse_gpus("2xrtx-3090")


def printed(capsys: pytest.CaptureFixture[str], line: str, code: int = 0) -> str:
    assert main(shlex.split(line)) == code
    out, err = capsys.readouterr()
    return " ".join((err if code == 2 else out).split())


# ----------------------------------------------------------------------------------------------------------------- why


def timed(strategy: Strategy, seconds: float, like: Candidate) -> Candidate:
    step = dataclasses.replace(like.step, seconds=seconds, exposed_wire_seconds=0.0)
    return dataclasses.replace(like, strategy=strategy, step=step)


def test_the_reason_names_the_next_the_simpler_and_the_equal() -> None:
    like = price(SMALL, TWO, Strategy(dp_replicate=2, micro_batch_size=16))
    ddp = Strategy(dp_replicate=2, micro_batch_size=16)
    zero1 = Strategy(dp_shard=2, zero_stage=1, micro_batch_size=16)

    def why(first: float, second: float) -> str:
        both = [timed(ddp, first, like), timed(zero1, second, like)]
        return reasons.why(both[0], both, [simplicity(each.strategy) for each in both])

    assert why(1.0, 1.1).endswith("It is the fastest of the 2 splits that fit; the next, ZeRO-1, takes 10.0 % longer.")
    assert why(1.0, 2.5).endswith("the next, ZeRO-1, takes 2.5 times as long.")
    assert why(1.02, 1.0).endswith(
        "ZeRO-1 is 2.0 % faster, but of what lies within 3 % the simplest is taken (a lower ZeRO stage)."
    )
    assert "ZeRO-1 is as fast; of what lies within 3 % the simplest" in why(1.0, 1.0001)
    one = [timed(ddp, 1.0, like)]
    assert reasons.why(one[0], one, [(0,)]).endswith("No other split fits.")
    assert reasons.why(one[0], one, [(0,)], alone=True).endswith(" a card.")


def test_faster_rows_that_a_rule_keeps_out_are_named() -> None:
    plan = make_plan(SMALL, TWO)
    taken = plan.recommended
    assert taken is not None
    assert taken.strategy.tuning == "full"
    faster = [each for each in plan.candidates if each.fits and each.step.seconds < taken.step.seconds * 0.9995]
    adapters = [each for each in faster if each.strategy.tuning != "full"]
    assert adapters
    named = re.search(
        r"(\S+ under \S+) and (\d+) others? are faster, by up to (\d+) %, but a full fine-tune", plan.reason
    )
    assert named
    assert int(named[2]) == len(adapters) - 1
    best = min(adapters, key=lambda each: each.step.seconds)
    assert named[1] == reasons.called(best.strategy)
    assert int(named[3]) == round(100 * (1 - best.step.seconds / taken.step.seconds))
    assert "--tuning lora" in plan.reason


def test_rules_are_spoken_only_where_they_hold() -> None:
    alone = make_plan(dataclasses.replace(SMALL, tuning="full"), catalog.parse_gpus("h100"))
    assert alone.rules == ()
    assert ONE_CARD in make_plan(SMALL, TWO).rules
    asked = make_plan(Job(model=catalog.model("qwen2.5-7b")), catalog.parse_gpus("8xh100"), Wishes(tp=4))
    assert LOWEST_STAGE not in asked.rules
    assert not any(rule.startswith("no data-parallel") for rule in asked.rules)


def test_what_the_engine_does_not_run_is_said_with_what_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_tensor(axis: Axis) -> bool:
        return axis in (Axis.DP_REPLICATE, Axis.DP_SHARD)

    monkeypatch.setattr(engine, "runs_axis", no_tensor)
    job = Job(model=catalog.model("llama-3.1-8b"), sequence_length=131_072)
    plan = make_plan(job, catalog.parse_gpus("8xh100"))
    assert plan.recommended is not None
    assert plan.recommended.strategy.tp > 1
    assert any("not run by this version's engine" in rule for rule in plan.rules)
    instead = [advice for advice in plan.advice if advice.rule == "make_it_run"]
    assert instead
    assert all(advice.message.startswith("To run it with this version's engine: ") for advice in instead)


def test_refusals_have_their_numbers() -> None:
    plan = make_plan(Job(model=catalog.model("llama-3.1-70b")), catalog.parse_gpus("4xrtx-4090"), Wishes(tp=4))
    assert plan.refusals
    for refusal in plan.refusals:
        assert re.search(r"\d", refusal.message), refusal
    small = make_plan(Job(model=catalog.model("llama-3.1-8b"), tuning="full"), TWO)
    for refusal in small.refusals:
        found = re.search(
            r"needs ([\d,.]+) GB a card, and 23.3 GB of rtx-3090 are usable; the largest", refusal.message
        )
        assert found, refusal
        assert float(found[1].replace(",", "")) > 23.3


# --------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "FULL_SHARD",
            "FULL_SHARD is FSDP1's name for ZeRO-3: weights, gradients and the optimizer's states are sharded",
        ),
        ("shard_grad_op", "shard_grad_op is FSDP1's name for ZeRO-2"),
        ("NO_SHARD", "NO_SHARD is FSDP1's name for DDP"),
        ("zero1", "zero1 is another name for ZeRO-1"),
        ("'full_shard auto_wrap'", "full_shard auto_wrap is"),
    ],
)
def test_a_split_s_name_is_explained(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in printed(capsys, f"plan qwen2.5-0.5b --gpus 2xh100 --tuning full --split {name}")


def test_hybrid_names_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for name, stage in (("HYBRID_SHARD", 3), ("_HYBRID_SHARD_ZERO2", 2)):
        page = printed(capsys, f"plan qwen2.5-0.5b --gpus 2x4xh100 --tuning full --split {name}")
        assert f"{name} is FSDP1's name for ZeRO-{stage}" in page
        assert "over the cards of a machine" in page
        assert "replicas across machines (HSDP)" in page


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("--tp 2 --dp-shard 2 --dp-replicate 2", {"pp": 1}), ("--pp 2 --tp 2 --dp-shard 2", {"dp_replicate": 1}),
        ("--pp 1 --dp-replicate 2 --dp-shard 1", {"tp": 4}), ("--pp 2 --tp 2 --dp-replicate 1", {"dp_shard": 2}),
    ],
)  # fmt: skip
def test_the_last_degree_is_solved(given: str, left: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "llama-3.1-8b", "--gpus", "8xh100", "--tuning", "full", "--json", *given.split()])
    data = json.loads(capsys.readouterr().out)
    strategies = [candidate["strategy"] for candidate in data["candidates"]]
    assert strategies
    for strategy in strategies:
        assert {name: strategy[name] for name in left} == left


# -------------------------------------------------------------------------------------------------------------- faults


def test_every_fault_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Degrees, heads, layers, batch, length, a contradiction and a flag without effect in one question."""
    told = printed(
        capsys,
        "plan qwen2.5-7b --gpus 8xh100 --tuning full --tp 3 --pp 40 --dp-shard 5 --global-batch 33 --seq 999999 "
        "--split HYBRID_SHARD --zero 1 --lora-r 8",
        2,
    )
    for piece in (
        "--lora-r 8 belongs to adapters",
        "HYBRID_SHARD is ZeRO stage 3, but stage 1 was asked for; leave one out",
        "pp 40, dp_shard 5, tp 3 multiply to 600, which does not divide the 8 cards; 1, 2, 4, 8 do",
        "was made for 131,072 tokens; a sequence of 999,999 is longer: cut it to 131,072 or fewer",
        "28 attention heads, which tp 3 does not divide; 2, 4, 7 do",
        "28 layers, fewer than 40 pipeline stages; use at most 28",
        "a global batch of 33 does not divide by 5",
    ):
        assert piece in told, piece


def test_faults_of_files_names_and_flags_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    told = printed(capsys, f"plan {tmp_path} --gpus 2xh1000 --split FULL_SHRD --virtual-stages 2", 2)
    for piece in ("has no 'vocab_size'", "has no 'num_hidden_layers'", "Unknown card", "Did you mean 'FULL_SHARD'?",
                  "--virtual-stages divides stages; give --pp too"):  # fmt: skip
        assert piece in told, piece
    told = printed(capsys, "plan qwen2.5-7x --cluster nowhere.yaml --zero 0 --keep-unsharded --data nowhere.jsonl", 2)
    for piece in (
        "nowhere.jsonl: there is no such file",
        "Unknown model 'qwen2.5-7x'",
        "nowhere.yaml cannot be read",
        "--keep-unsharded is for ZeRO 2 and 3",
    ):
        assert piece in told, piece


def test_the_way_out_of_a_batch_is_a_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    told = printed(capsys, "plan qwen2.5-7b --gpus 8xh100 --micro-batch 3 --global-batch 32", 2)
    ways = re.search(r"(\d+) and (\d+) divide by 24", told)
    assert ways
    for batch in ways.groups():
        main(["plan", "qwen2.5-7b", "--gpus", "8xh100", "--micro-batch", "3", "--global-batch", batch])
        capsys.readouterr()


def test_a_machine_without_cards_is_told_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert "shardwise probe --out cluster.yaml" in printed(capsys, "plan qwen2.5-0.5b --gpus 2xcpu", 2)


# ------------------------------------------------------------------------------------------------- time, money, rate


def lengths(mean: float = 126.0, longest: int = 273) -> SequenceLengths:
    return SequenceLengths(
        num_sequences=283, total_tokens=round(283 * mean), supervised_tokens=20_000, longest=longest, mean=mean,
        p50=110, p95=210, quantiles=(40, 110, longest),
    )  # fmt: skip


def told(plan: Plan, rule: str) -> str:
    return next((advice.message for advice in plan.advice if advice.rule == rule), "")


def test_short_jobs_have_a_price_too() -> None:
    job = dataclasses.replace(SMALL, sequence_length=273, lengths=lengths(), price_per_gpu_hour=0.3)
    message = told(make_plan(job, TWO), "how_long")
    assert re.search(r"9 steps of [\d.]+ ms take [\d.]+ (?:ms|s) \([\d.]+ (?:ms|s) of card time\)", message)
    assert message.endswith("less than 0.01 at 0.3 a card hour.")


def test_rates_and_hours_are_never_zero() -> None:
    job = dataclasses.replace(SMALL, max_steps=1000, price_per_gpu_hour=2.0)
    plan = make_plan(job, TWO)
    assert plan.recommended is not None
    whole = duration.duration(job, TWO, plan.recommended)
    assert whole is not None
    assert f"({whole.gpu_hours:,.2f} card hours)" in told(plan, "how_long")
    assert f": {whole.price:,.2f} at 2 a card hour" in told(plan, "how_long")


def test_the_learning_rate_follows_the_batch_and_what_is_trained() -> None:
    large = dataclasses.replace(SMALL, global_batch_size=512)
    full, lora = learning_rate.advice(large, "full"), learning_rate.advice(large, "lora")
    assert full is not None
    assert lora is not None
    assert "are 4 times the 128" in full.message
    assert "If 2e-05 is such a rate, linear scaling gives 8e-05 and the square root" in full.message
    assert "4e-05; with warm-up" in full.message
    assert "If 0.0002 is such a rate, linear scaling gives 0.0008" in lora.message
    assert learning_rate.advice(dataclasses.replace(SMALL, global_batch_size=128), "full") is None
    huge = learning_rate.advice(dataclasses.replace(SMALL, global_batch_size=4096), "full")
    assert huge is not None
    assert "Above about 8 times linear scaling stops holding" in huge.message
    assert "--optimizer lamb" in huge.message
    own = learning_rate.advice(dataclasses.replace(large, learning_rate=1e-4), "lora")
    assert own is not None
    assert "If 0.0001 is such a rate" in own.message


def test_more_cards_that_change_the_batch_say_what_it_means() -> None:
    job = Job(model=catalog.model("llama-3.1-70b"), global_batch_size=8)
    plan = make_plan(job, catalog.parse_gpus("8xh100"))
    more = next(advice for advice in plan.advice if advice.message.startswith("Take ") and "cards" in advice.message)
    steps = re.search(r"Take (\d+) cards \(steps of (\d+) sequences instead of 8: a learning rate (\S+) to (\S+) times",
                      more.message)  # fmt: skip
    assert steps
    factor = int(steps[2]) / 8
    assert int(steps[2]) % int(steps[1]) == 0
    assert float(steps[4]) == pytest.approx(factor, rel=0.01)
    assert float(steps[3]) == pytest.approx(factor**0.5, rel=0.01)
