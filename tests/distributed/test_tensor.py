"""Tensor parallel: losses, norms and weights of one process; messages and bytes of the plan; files and refusals."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import Run
from checkpoint_pool import Pool
from harness import CONFIGS, Case, StepCost, Trace, build, cost_of_step, make_config, train, train_plain
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from shardwise.errors import ConfigError, PlanMismatchError, TrainingError
from shardwise.facts.config import model_from_config
from shardwise.planner.timeline import sends
from shardwise.trainer.checkpoint import load, save
from shardwise.trainer.run import RunWishes, run_training
from shardwise.trainer.sentinels import verify_wrapping
from shardwise.trainer.sentinels.drift import check_drift
from shardwise.vocabulary.job import Job, LoraSettings
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy

pytestmark = pytest.mark.distributed

ONE = Strategy(precision="fp32", micro_batch_size=1, accumulation=4)
TP = replace(ONE, tp=2)
SP = replace(TP, sequence_parallel=True)
FOUR = replace(TP, accumulation=2)
SP_FOUR = replace(FOUR, sequence_parallel=True)
LIMITS = {"loss": 1e-8, "norm": 1e-7, "weight": 1e-7}
"""In fp64; Gemma's norms compute in fp32 even there."""
EXACT = {"loss": 1e-13, "norm": 1e-13, "weight": 2e-12}


def check(ranks: Pool, case: Case, limits: dict[str, float]) -> None:
    case = replace(case, vocab_size=96, layers=2, steps=3, double=True)
    one = replace(ONE, tuning=case.strategy.tuning, accumulation=case.strategy.global_batch_size)
    wanted: Trace = train_plain(replace(case, strategy=one))
    for trace in ranks.run(case.strategy.num_ranks, train, case):
        found = trace.difference(wanted)
        assert all(found[what] <= limit for what, limit in limits.items()), found


@pytest.mark.parametrize("split", [TP, SP], ids=["whole rows", "split rows"])
@pytest.mark.parametrize("model", CONFIGS)
def test_every_family_equals_one_process(ranks: Pool, model: str, split: Strategy) -> None:
    """Each once with sequence parallel, where loss and checkpointing are the dearer kinds too."""
    strategy = replace(split, loss="chunked", checkpointing="full") if split.sequence_parallel else split
    tied = model.startswith("gemma") or model == "qwen2"
    case = Case(strategy=strategy, model=model, tied=tied, attention="eager" if model == "gemma2" else "sdpa")
    check(ranks, case, LIMITS if model.startswith("gemma") else EXACT)


@pytest.mark.parametrize(
    "strategy",
    [replace(SP_FOUR, dp_shard=2, zero_stage=1), replace(FOUR, dp_shard=2, zero_stage=2),
     replace(SP_FOUR, dp_shard=2, zero_stage=3), replace(SP_FOUR, dp_replicate=2, checkpointing="selective"),
     replace(SP, tuning="lora", loss="chunked"), replace(FOUR, tuning="lora", dp_shard=2, zero_stage=2),
     replace(SP_FOUR, tuning="lora", dp_shard=2, zero_stage=3)],
    ids=["zero1", "zero2", "zero3", "ddp", "lora", "lora-zero2", "lora-zero3"],
)  # fmt: skip
def test_with_data_parallel_and_adapters(ranks: Pool, strategy: Strategy) -> None:
    """Norms of heads, tied ends, uneven rows, and a rank without samples in the last step."""
    check(ranks, Case(strategy=strategy, model="qwen3", tied=strategy.zero_stage != 2), EXACT)


# ---------------------------------------------------------------------------------------------------------- messages


def predicted(case: Case) -> Counter[tuple[Any, int, int]]:
    strategy = case.strategy
    job = Job(
        model=model_from_config(make_config(case).to_dict(), "tiny"),
        tuning=strategy.tuning,
        sequence_length=case.max_tokens,
        precision=strategy.precision,
        lora=LoraSettings(r=4),
    )
    counts: Counter[tuple[Any, int, int]] = Counter()
    for message in sends(Placement(job=job, strategy=strategy)):
        counts[message.op, message.ranks, message.bytes] += message.count
    return counts


@pytest.mark.parametrize(
    ("strategy", "model"),
    [(TP, "qwen3"), (replace(TP, checkpointing="selective"), "gemma2"), (SP, "llama"),
     (replace(SP, checkpointing="full", loss="chunked"), "gemma3"), (replace(SP, checkpointing="full"), "mistral"),
     (replace(TP, dp_replicate=2), "qwen2"), (replace(SP, dp_shard=2, zero_stage=1), "qwen3"),
     (replace(SP, dp_shard=2, zero_stage=3), "llama"), (replace(SP, tuning="lora", checkpointing="full"), "qwen3"),
     (replace(TP, tuning="lora", dp_shard=2, zero_stage=2), "llama")],
    ids=["heads", "selective", "split", "gemma", "full", "ddp", "zero1", "zero3", "lora", "lora-zero2"],
)  # fmt: skip
def test_messages_and_stored_bytes_are_the_plans(ranks: Pool, strategy: Strategy, model: str) -> None:
    """Counted on a real step: two sums a block and direction, no more than Megatron's; one message for all norms."""
    strategy = replace(strategy, precision="bf16", accumulation=2)
    attention = "eager" if model == "gemma2" else "sdpa"
    tied = model.startswith("gemma")
    case = Case(strategy=strategy, model=model, tied=tied, attention=attention, vocab_size=96, max_tokens=8, layers=2)
    costs: list[StepCost] = ranks.run(strategy.num_ranks, cost_of_step, case)
    for cost in costs:
        assert Counter({(one.op, one.ranks, one.bytes): one.count for one in cost.collectives}) == predicted(case)
    place = Placement(
        job=Job(
            model=model_from_config(make_config(case).to_dict(), "tiny"), lora=LoraSettings(r=4), tuning=strategy.tuning
        ),
        strategy=strategy,
    )
    assert costs[0].stored.parameters == 4 * place.trainable // strategy.dp_shard
    assert costs[0].stored.gradients == costs[0].stored.parameters
    assert 0 <= costs[0].stored.optimizer - 2 * costs[0].stored.parameters <= 4 * 200


# -------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():  # far from fresh weights, whose loss is ln(vocabulary) whatever they compute
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    model.save_pretrained(folder)
    return folder


def run(file: RunFile, strategy: Strategy) -> None:
    run_training(file, strategy, RunWishes(measure=False))


def losses(folder: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines for key in ("loss", "eval_loss") if key in line}


def test_a_run_goes_on_under_every_split_and_exports(ranks: Pool, model_folder: Path, tmp_path: Path) -> None:
    """From split shards to one card, to data parallel, and to both; weights by the files' own names and values."""
    four = replace(SP, accumulation=2, micro_batch_size=1, dp_shard=2, zero_stage=3)
    splits = {
        "tp": replace(SP, accumulation=4),
        "one": replace(ONE, accumulation=4),
        "zero": replace(ONE, accumulation=2, dp_shard=2, zero_stage=2),
        "both": replace(four, accumulation=2),
    }
    base = RunFile(
        model_name_or_path=str(model_folder), dataset_name="random:24", eval_dataset_name="random:5", max_length=12,
        max_steps=4, learning_rate=1e-3, save_steps=2, output_dir="",
    )  # fmt: skip
    for name, strategy in splits.items():
        start = str(tmp_path / "tp" / "checkpoint-2") if name != "tp" else None
        file = replace(base, output_dir=str(tmp_path / name), resume_from_checkpoint=start)
        ranks.run(strategy.num_ranks, run, file, strategy)
    whole = losses(str(tmp_path / "tp"))
    for name in ("one", "zero", "both"):
        rest = losses(str(tmp_path / name))
        assert rest == pytest.approx({step: whole[step] for step in rest}, abs=2e-5), name
        assert 4 in rest
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "tp" / "final").state_dict()
    for name, weight in AutoModelForCausalLM.from_pretrained(tmp_path / "both" / "final").state_dict().items():
        torch.testing.assert_close(weight, trained[name], atol=1e-4, rtol=0)


def draw_after_load(folder: str) -> float:
    state = replace(Run("fsdp", seed=2).state, data_rank=0)
    load(state, Path(folder) / "checkpoint-1")
    return torch.rand(()).item()


def save_one(folder: str) -> None:
    run = Run("plain", seed=1)
    run.step()
    save(run.state, folder, 1)


def test_ranks_that_share_a_model_draw_alike_after_a_resume(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(1, save_one, str(tmp_path))
    first, second = ranks.run(2, draw_after_load, str(tmp_path))
    assert first == second


# ---------------------------------------------------------------------------------------------------------- sentinels


def faults(case: Case) -> tuple[str, str, str]:
    """What is said of a norm that has drifted, of a matrix split otherwise than planned, and of an odd row."""
    skeleton, mesh = build(case)
    with torch.no_grad():
        skeleton.model.model.norm.weight.to_local().add_(mesh.tensor_rank)
    with pytest.raises(TrainingError) as drifted:
        check_drift(skeleton.model, mesh.control, 1)
    attention = skeleton.model.model.layers[1].self_attn
    own, attention.q_proj.weight = attention.q_proj.weight, attention.o_proj.weight
    with pytest.raises(PlanMismatchError) as misplaced:
        verify_wrapping(skeleton, mesh, case.strategy)
    attention.q_proj.weight = own
    ids = torch.zeros(1, 7, dtype=torch.long)
    with pytest.raises(ConfigError) as odd:
        skeleton.model(input_ids=ids, loss_labels=ids)
    return str(drifted.value), str(misplaced.value), str(odd.value)


def test_what_is_wrong_is_named(ranks: Pool) -> None:
    for drifted, misplaced, odd in ranks.run(2, faults, Case(strategy=SP, vocab_size=96, layers=2)):
        assert "model.norm.weight" in drifted
        assert "layers.1.self_attn.q_proj.weight should be" in misplaced
        assert "split along dim 0 over tp 2" in misplaced
        assert "7 tokens" in odd


def refused(case: Case, dora: bool) -> str:
    import harness

    def with_dora(r: int) -> LoraSettings:
        return LoraSettings(r=r, use_dora=True)

    settings: Any = with_dora
    if dora:
        harness.LoraSettings = settings
    try:
        build(case)
    except ConfigError as error:
        return str(error)
    finally:
        harness.LoraSettings = LoraSettings
    return ""


def test_what_cannot_be_split_is_refused(ranks: Pool) -> None:
    lora = Case(strategy=replace(TP, tuning="lora"), vocab_size=96, layers=2)
    assert "DoRA" in ranks.run(2, refused, lora, True)[0]
    assert "97 rows" in ranks.run(2, refused, Case(strategy=TP, layers=2), False)[0]
    fused = ranks.run(2, refused, Case(strategy=replace(TP, loss="fused", offload="optimizer"), layers=2), False)[0]
    assert "use chunked" in fused
    assert "offloading" in fused
