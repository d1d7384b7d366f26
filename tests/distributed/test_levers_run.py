"""Whole runs with what the levers add: from a run file's keys to the exported folders."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_pool import Pool
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from shardwise.trainer.run import RunWishes, run_training
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy

pytestmark = pytest.mark.distributed

DDP = Strategy(precision="fp32", micro_batch_size=1, accumulation=2, dp_replicate=2)
ZERO_3 = dataclasses.replace(DDP, dp_replicate=1, dp_shard=2, zero_stage=3)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97, hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return RunFile(
        model_name_or_path=str(folder),
        dataset_name="random:16",
        max_length=12,
        max_steps=4,
        learning_rate=1e-3,
        save_steps=2,
        output_dir=str(folder.parent / "run"),
    )


def train(run: RunFile, strategy: Strategy) -> None:
    run_training(run, strategy, RunWishes(measure=False))


def logged(run: RunFile, key: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (Path(run.output_dir) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def test_qlora_trains_resumes_and_exports_adapters_and_the_merged_model(ranks: Pool, run_file: RunFile) -> None:
    pytest.importorskip("bitsandbytes", reason="QLoRA needs bitsandbytes")
    from peft import PeftModel

    strategy = dataclasses.replace(ZERO_3, tuning="qlora", optimizer="adamw_bf16_states")
    run = dataclasses.replace(
        run_file, output_dir=run_file.output_dir + "-qlora", optim="adamw_bf16_states", use_dora=True, lora_r=4,
        lora_dropout=0.1, merge_adapters=True,
    )  # fmt: skip
    ranks.run(2, train, run, strategy)
    whole = logged(run, "loss")
    again = dataclasses.replace(
        run, output_dir=run.output_dir + "-again",
        resume_from_checkpoint=str(Path(run.output_dir) / "checkpoint-2"),
    )  # fmt: skip
    ranks.run(2, train, again, strategy)
    assert logged(again, "loss") == {step: whole[step] for step in (3, 4)}  # dropout goes on too
    merged: Any = AutoModelForCausalLM.from_pretrained(Path(run.output_dir) / "merged")
    assert merged.config.num_hidden_layers == 1
    base: Any = AutoModelForCausalLM.from_pretrained(run.model_name_or_path)
    beside: Any = PeftModel.from_pretrained(base, str(Path(run.output_dir) / "final"))
    names = [name for name, _ in beside.named_parameters()]
    assert any("lora_magnitude_vector" in name for name in names)


@pytest.mark.parametrize("strategy", [DDP, ZERO_3], ids=["ddp", "zero3"])
def test_8_bit_moments_survive_in_plain_files(ranks: Pool, run_file: RunFile, strategy: Strategy) -> None:
    pytest.importorskip("bitsandbytes", reason="8-bit optimizers need bitsandbytes")
    run = dataclasses.replace(
        run_file, output_dir=f"{run_file.output_dir}-8bit-{strategy.name}", optim="adamw_8bit", save_final=False
    )
    strategy = dataclasses.replace(strategy, optimizer="adamw_8bit")
    ranks.run(2, train, run, strategy)
    dtypes: set[str] = set()
    for file in (Path(run.output_dir) / "checkpoint-2").glob("*.safetensors"):
        with safe_open(str(file), "pt") as opened:
            dtypes |= {opened.get_slice(key).get_dtype() for key in opened.keys() if "exp_avg@" in key}  # noqa: SIM118
    assert dtypes == {"U8", "F32"}
    again = dataclasses.replace(
        run, output_dir=run.output_dir + "-again", resume_from_checkpoint=str(Path(run.output_dir) / "checkpoint-2")
    )
    ranks.run(2, train, again, strategy)
    whole = logged(run, "loss")
    assert logged(again, "loss") == {step: whole[step] for step in (3, 4)}  # to the last bit


def test_the_rate_follows_the_batch_and_offload_changes_no_loss(ranks: Pool, run_file: RunFile) -> None:
    run = dataclasses.replace(
        run_file, output_dir=run_file.output_dir + "-scaled", optim="lamb", learning_rate_base_batch=2,
        lr_scheduler_type="constant", save_final=False,
    )  # fmt: skip
    strategy = dataclasses.replace(ZERO_3, optimizer="lamb")
    ranks.run(2, train, run, strategy)
    assert logged(run, "learning_rate") == {1: 0.0, 2: 2e-3, 3: 2e-3, 4: 2e-3}  # batch 4 instead of 2
    offloaded = dataclasses.replace(run, output_dir=run.output_dir + "-offloaded", offload="parameters")
    ranks.run(2, train, offloaded, dataclasses.replace(strategy, offload="parameters"))
    assert logged(offloaded, "loss") == logged(run, "loss")


def test_what_is_not_installed_or_not_there_stops_a_run_before_it_starts(ranks: Pool, run_file: RunFile) -> None:
    run = dataclasses.replace(run_file, output_dir=run_file.output_dir + "-fp8", fp8=True)
    with pytest.raises(AssertionError, match=r"fp8 needs a card of compute capability 8\.9"):
        ranks.run(2, train, run, dataclasses.replace(DDP, precision="fp8"))
    assert not Path(run.output_dir).exists()
