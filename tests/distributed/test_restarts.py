"""Ranks that are lost are started again and go on by themselves; a launcher that is told to stop waits for a save."""

import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from shardwise.launch.local import LaunchOptions, launch
from shardwise.trainer.checkpoint import newest_good
from shardwise.trainer.checkpoint.tensorfile import HashingFile
from shardwise.trainer.feeder import Feeder
from shardwise.trainer.run import RunWishes, run_training
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy

pytestmark = pytest.mark.distributed

ZERO_3 = Strategy(precision="fp32", micro_batch_size=1, accumulation=2, dp_shard=2, zero_stage=3)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    return RunFile(
        model_name_or_path=str(folder / "model"),
        dataset_name="random:40",
        max_length=16,
        max_steps=8,
        learning_rate=1e-3,
        save_steps=3,
        save_final=False,
        output_dir=str(folder / "run"),
        max_restarts=1,
    )


def train_through_trouble(run: RunFile, strategy: Strategy) -> None:
    """Rank 1 is killed in step 6 of the first attempt; in step 7 of the second, the launcher is told to stop.

    The save that follows takes longer than the elastic launcher would poll, which is what must not cut it off.
    """
    take, write = Feeder.take, HashingFile.write
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])

    def taking(self: Any, step: int) -> Any:
        if step == 5 and attempt == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 6 and attempt == 1 and rank == 0:
            HashingFile.write = writing
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(0.5)
        return take(self, step)

    def writing(self: Any, data: Any) -> None:
        time.sleep(0.2)
        write(self, data)

    Feeder.take = taking
    run_training(run, strategy, RunWishes(measure=False))


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines() if '"loss"' in line]


def test_a_lost_rank_is_started_again_and_a_stop_waits_for_the_save(
    run_file: RunFile, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM does not count as a loss: what has saved and ended is not started a third time."""
    run = dataclasses.replace(run_file, max_restarts=2)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    with pytest.raises(SystemExit) as stopped:
        launch(train_through_trouble, (run, ZERO_3), LaunchOptions.of_run(run, 2, cuda=False))
    assert stopped.value.code == 128 + signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == handlers
    said = capfd.readouterr().err
    assert "Started again after a rank was lost (1 of 2)." in said
    assert "Goes on after step 3." in said
    assert "Stopped by signal 15 after step 7; saved." in said or "Stopped by signal 15 after step 8; saved." in said
    folder = Path(run.output_dir)
    done = newest_good(folder).step
    assert done in (7, 8)
    assert steps_of(folder / "metrics.jsonl") == list(range(1, done + 1))
    assert steps_of(folder / "metrics.repeated.jsonl") in ([4], [4, 5])
