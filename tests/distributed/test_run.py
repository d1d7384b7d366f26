"""Whole runs on tiny models: the run folder, going on in the middle, stopping by signal, what is refused."""

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoint_pool import Pool
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from shardwise.trainer import run as entry
from shardwise.trainer.feeder import Feeder
from shardwise.trainer.model import build_skeleton
from shardwise.trainer.run import RunWishes, run_training
from shardwise.vocabulary import codec
from shardwise.vocabulary.measured import Measured
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy

pytestmark = pytest.mark.distributed

ZERO_3 = Strategy(precision="fp32", micro_batch_size=1, accumulation=2, dp_shard=2, zero_stage=3)
DDP = dataclasses.replace(ZERO_3, dp_shard=1, dp_replicate=2, zero_stage=0)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():  # far from fresh weights, whose loss is ln(vocabulary) whatever they compute
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def run_file(model_folder: Path, tmp_path: Path) -> RunFile:
    return RunFile(
        model_name_or_path=str(model_folder),
        dataset_name="random:40",
        eval_dataset_name="random:6",
        max_length=16,
        max_steps=8,
        learning_rate=1e-3,
        warmup_steps=2,
        save_steps=4,
        output_dir=str(tmp_path / "run"),
    )


def train(run: RunFile, strategy: Strategy) -> str:
    return run_training(run, strategy, RunWishes(measure=run.output_dir.endswith("measured")))


def train_with_signal(run: RunFile, strategy: Strategy, number: int, at_step: int) -> int:
    """Rank 1 alone receives a signal while it makes the batches of a step; returns what it would exit with."""
    take = Feeder.take

    def taking(self: Any, step: int) -> Any:
        if step == at_step and torch.distributed.get_rank() == 1:
            signal.raise_signal(number)
        return take(self, step)

    Feeder.take = taking
    try:
        train(run, strategy)
    except SystemExit as stopped:
        return int(stopped.code or 0)
    finally:
        Feeder.take = take
    return 0


def losses(folder: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_a_run_leaves_a_folder_that_others_can_read(ranks: Pool, run_file: RunFile) -> None:
    run = dataclasses.replace(run_file, output_dir=run_file.output_dir + "-measured", report_to=("tensorboard",))
    ranks.run(2, train, run, ZERO_3)
    folder = Path(run.output_dir)
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state["global_step"] == 8
    logged = [line for line in state["log_history"] if "loss" in line]
    assert {"loss", "grad_norm", "learning_rate", "epoch", "step", "num_tokens", "tokens_per_second"} <= set(logged[0])
    assert [line["step"] for line in state["log_history"] if "eval_loss" in line] == [0, 8]
    assert logged[-1]["num_tokens"] == 8 * 4 * 16
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-8"]
    assert list((folder / "tensorboard").rglob("events.*"))
    loaded = AutoModelForCausalLM.from_pretrained(folder / "final")
    assert loaded.config.tie_word_embeddings


def test_what_was_measured_is_a_noun(ranks: Pool, run_file: RunFile) -> None:
    run = dataclasses.replace(run_file, output_dir=run_file.output_dir + "-measured")
    ranks.run(2, train, run, ZERO_3)
    measured = codec.read_noun(Measured, Path(run.output_dir) / "measured.json")
    assert measured.strategy == ZERO_3
    assert measured.step is not None
    parts = measured.step.compute_seconds + measured.step.exposed_wire_seconds + measured.step.host_seconds
    assert parts == pytest.approx(measured.step.seconds)
    assert measured.step.exposed_wire_seconds > 0
    assert {one.op for one in measured.collectives} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert measured.stored_by_category is not None
    assert measured.allocated_bytes is not None
    assert measured.allocated_bytes > sum(measured.stored_by_category.values()) / 2
    assert measured.tokens_per_s == pytest.approx(measured.real_tokens_per_s)  # random rows have no padding
    assert measured.held_out_loss_before is not None
    assert measured.held_out_loss_after is not None


@pytest.mark.parametrize("strategy", [ZERO_3, DDP], ids=["zero3", "ddp"])
def test_going_on_in_the_middle_equals_never_stopping(ranks: Pool, run_file: RunFile, strategy: Strategy) -> None:
    ranks.run(2, train, run_file, strategy)
    whole = losses(run_file.output_dir)
    again = dataclasses.replace(
        run_file, output_dir=run_file.output_dir + "-again",
        resume_from_checkpoint=str(Path(run_file.output_dir) / "checkpoint-4"),
    )  # fmt: skip
    ranks.run(2, train, again, strategy)
    rest = losses(again.output_dir)
    assert sorted(rest) == [5, 6, 7, 8]
    assert rest == {step: whole[step] for step in rest}  # to the last bit


def test_going_on_under_another_strategy(ranks: Pool, run_file: RunFile) -> None:
    ranks.run(2, train, run_file, ZERO_3)
    whole = losses(run_file.output_dir)
    one = dataclasses.replace(ZERO_3, dp_shard=1, zero_stage=0, accumulation=4)
    again = dataclasses.replace(
        run_file, output_dir=run_file.output_dir + "-again",
        resume_from_checkpoint=str(Path(run_file.output_dir) / "checkpoint-4"),
    )  # fmt: skip
    ranks.run(1, train, again, one)
    rest = losses(again.output_dir)
    assert sorted(rest) == [5, 6, 7, 8]
    assert all(rest[step] == pytest.approx(whole[step], abs=2e-6) for step in rest)


def test_a_signal_to_one_rank_saves_and_stops_all(ranks: Pool, run_file: RunFile) -> None:
    codes = ranks.run(2, train_with_signal, run_file, ZERO_3, int(signal.SIGTERM), 2)
    assert codes == [128 + signal.SIGTERM] * 2
    [stopped] = Path(run_file.output_dir).glob("checkpoint-*")
    done = int(stopped.name.removeprefix("checkpoint-"))
    assert 3 <= done <= 4
    again = dataclasses.replace(run_file, resume_from_checkpoint=True)
    ranks.run(2, train, again, ZERO_3)
    assert sorted(losses(run_file.output_dir)) == list(range(1, 9))


def test_sigusr1_saves_and_goes_on(ranks: Pool, run_file: RunFile) -> None:
    run = dataclasses.replace(run_file, save_steps=100, save_total_limit=None)
    codes = ranks.run(2, train_with_signal, run, ZERO_3, int(signal.SIGUSR1), 2)
    assert codes == [0, 0]
    steps = sorted(int(path.name.removeprefix("checkpoint-")) for path in Path(run.output_dir).glob("checkpoint-*"))
    assert steps[-1] == 8
    assert 3 <= steps[0] <= 4


def test_a_folder_with_a_run_is_not_overwritten(ranks: Pool, run_file: RunFile) -> None:
    ranks.run(2, train, run_file, ZERO_3)
    with pytest.raises(AssertionError, match="holds checkpoint-8 of an earlier run"):
        ranks.run(2, train, run_file, ZERO_3)


def train_with_wrong_buffers(run: RunFile, strategy: Strategy) -> None:
    """Rotary frequencies are scaled where no sentinel compares them: in the model and in its reference."""

    def building(*arguments: Any, **settings: Any) -> Any:
        skeleton = build_skeleton(*arguments, **settings)
        for buffer in skeleton.buffers.values():
            buffer.mul_(3.0)
        return skeleton

    with mock.patch.object(entry, "build_skeleton", building):
        train(run, strategy)


def test_a_model_that_computes_something_else_is_stopped(ranks: Pool, run_file: RunFile) -> None:
    with pytest.raises(AssertionError, match="The split model's loss on the first row is"):
        ranks.run(2, train_with_wrong_buffers, run_file, ZERO_3)


def test_adapters_are_saved_for_peft(ranks: Pool, run_file: RunFile, model_folder: Path) -> None:
    from peft import PeftModel

    ranks.run(2, train, run_file, dataclasses.replace(DDP, tuning="lora"))
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    loaded = PeftModel.from_pretrained(base, str(Path(run_file.output_dir) / "final"))
    moved = [value for name, value in loaded.named_parameters() if "lora_B" in name]
    assert moved
    assert all(value.abs().max() > 0 for value in moved)


def test_a_tracker_that_fails_stops_nothing(ranks: Pool, run_file: RunFile) -> None:
    """wandb and trackio are not installed here."""
    run = dataclasses.replace(run_file, report_to=("wandb", "trackio"), max_steps=2)
    ranks.run(2, train, run, DDP)
    assert sorted(losses(run.output_dir)) == [1, 2]
