"""A rank that is stopped, or stuck, is named with what the others wait in; the run ends long before any timeout."""

import dataclasses
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_pool import Pool

from shardwise.errors import TrainingError
from shardwise.launch.local import LaunchOptions, launch
from shardwise.trainer.feeder import Feeder
from shardwise.trainer.run import RunWishes, run_training
from shardwise.trainer.sentinels.hang import Beat, HangLimits, HangWatch, Seen, judge
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy

LIMITS = HangLimits(silent_s=60, stuck_s=600)
RUN = RunFile(
    model_name_or_path="tiny",
    random_init=True,
    dataset_name="random:8",
    max_length=8,
    max_steps=50,
    save_strategy="no",
    save_final=False,
    hang_timeout=4,
)
DDP = Strategy(precision="fp32", dp_replicate=2)


def seen(tick: int, waits_in: str = "", *, silent: float = 1, stuck: float = 700, patient: bool = False) -> Seen:
    beat = Beat(
        beat=9, tick=tick, what=f"step {tick}: forward and backward", waits_in=waits_in, patient=patient,
        host="node07", pid=4711,
    )  # fmt: skip
    return Seen(beat=beat, silent_s=silent, stuck_s=stuck)


def test_a_silent_rank_is_named_with_what_the_others_wait_in() -> None:
    verdict = judge({0: seen(3, "all_reduce"), 1: seen(3, silent=75), 2: seen(3, "all_reduce")}, LIMITS)
    assert str(verdict).startswith(
        "No sign of life for 75 s from rank 1 (process 4711 on node07, last heard of in step 3: forward and "
        "backward). "
        "Waiting: ranks 0, 2 in all_reduce (step 3: forward and backward)."
    )


def test_the_rank_that_is_behind_is_named() -> None:
    verdict = judge({0: seen(8, "all_gather"), 1: seen(7), 2: seen(8, "all_gather")}, LIMITS)
    assert "Rank 1 is in step 7: forward and backward. Waiting: ranks 0, 2 in all_gather" in str(verdict)


def test_among_equals_the_one_in_no_collective_or_another_is_named() -> None:
    idle = judge({0: seen(8, "all_gather"), 1: seen(8), 2: seen(8, "all_gather")}, LIMITS)
    assert "Rank 1 is in step 8: forward" in str(idle)
    other = judge({0: seen(8, "all_gather"), 1: seen(8, "all_reduce"), 2: seen(8, "all_gather")}, LIMITS)
    assert "Rank 1 is in all_reduce (step 8: forward and backward). Waiting: ranks 0, 2 in all_gather" in str(other)


def test_who_may_take_long_is_left_alone() -> None:
    assert judge({0: seen(8), 1: seen(8, patient=True)}, LIMITS) is None
    assert judge({0: seen(8, stuck=700), 1: seen(9, stuck=10)}, LIMITS) is None
    assert judge({}, LIMITS) is None
    assert judge({0: seen(8), 1: seen(8, silent=61, patient=True)}, LIMITS) is not None


def wait_for_each_other(rank: int, how: str) -> str:
    """One rank does not come to the barrier; what the watch of the other says. The first goes on afterwards."""
    pids: list[Any] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    said: list[str] = []
    told = threading.Event()

    def note(verdict: TrainingError) -> None:
        said.append(str(verdict))
        told.set()
        if how == "stopped":
            os.kill(pids[rank], signal.SIGCONT)

    with HangWatch(HangLimits(silent_s=1.2, stuck_s=600 if how == "stopped" else 1.2), on_hang=note).running() as watch:
        watch.at("step 3: forward and backward")
        if dist.get_rank() == rank and how == "stopped":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif dist.get_rank() == rank:
            told.wait(4)
        else:
            watch.at("step 3: exchange of its numbers")
        dist.all_reduce(torch.ones(1))
    return "".join(said)


@pytest.mark.distributed
@pytest.mark.parametrize("rank", [0, 1])
def test_whoever_is_stopped_the_other_names_it(ranks: Pool, rank: int) -> None:
    words = ranks.run(2, wait_for_each_other, rank, "stopped")
    assert words[rank] == ""
    assert f"from rank {rank} (process " in words[1 - rank]
    assert f"Waiting: rank {1 - rank} in all_reduce (step 3: exchange of its numbers)" in words[1 - rank]


@pytest.mark.distributed
def test_a_rank_that_never_comes_is_named(ranks: Pool) -> None:
    words = ranks.run(2, wait_for_each_other, 1, "asleep")
    assert words[0].startswith("No rank has come further for 1.")
    assert "Rank 1 is in step 3: forward and backward. Waiting: rank 0 in all_reduce" in words[0]
    assert "raise hang_timeout" in words[0]


def train_and_stop(run: RunFile, strategy: Strategy) -> str:
    """Rank 1 stops itself before its third step."""
    take = Feeder.take

    def taking(self: Any, step: int) -> Any:
        if step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return take(self, step)

    Feeder.take = taking
    torch.set_num_threads(1)
    return run_training(run, strategy, RunWishes(measure=False))


@pytest.fixture
def run_file(tmp_path: Path) -> RunFile:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(
        '{"model_type": "llama", "vocab_size": 97, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,'
        ' "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}'
    )
    return dataclasses.replace(RUN, model_name_or_path=str(tmp_path / "tiny"), output_dir=str(tmp_path / "run"))


@pytest.mark.distributed
def test_sigstop_of_a_rank_ends_the_run_with_its_name(run_file: RunFile) -> None:
    with pytest.raises(TrainingError) as told:
        launch(train_and_stop, (run_file, DDP), LaunchOptions(num_ranks=2, device="cpu"))
    assert "from rank 1 (process " in str(told.value)
    assert "Waiting: rank 0 in all_" in str(told.value)


def test_alone_nothing_is_watched(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    with HangWatch(LIMITS).running() as watch:
        watch.at("step 1")
        assert not [thread for thread in threading.enumerate() if thread.name == "shardwise-watch"]
    dist.destroy_process_group()
