"""A save that is killed with SIGKILL, at any point of it, leaves a good checkpoint behind."""

import importlib.util
import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_models import Run
from checkpoint_pool import Pool

from shardwise.trainer.checkpoint import Checkpointer, SaveOptions, load, newest_good, save

pytestmark = pytest.mark.distributed
NUM_EVENTS = 63
"""Writes, fsyncs, renames, unlinks, mkdirs and rmdirs of the save below; the last test keeps the number true."""
POINTS = sorted(random.Random(4).sample(range(1, 40), 7)) + list(range(40, NUM_EVENTS + 1, 2))
"""Seeded points while tensors are written, and every second one from the manifest to the last removal."""


def _damage() -> Any:
    path = Path(__file__).parents[1] / "unit" / "checkpoint" / "checkpoint_damage.py"
    spec = importlib.util.spec_from_file_location("checkpoint_damage", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["checkpoint_damage"] = module
    spec.loader.exec_module(module)
    return module.damage


damage = _damage()
OPTIONS = SaveOptions(save_total_limit=1, max_file_bytes=12_000)


def weight(seed: int) -> torch.Tensor:
    return next(iter(damage.make_state(seed).model.parameters()))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    save(damage.make_state(1), folder, 5, options=OPTIONS)
    return folder


def kill_save(folder: Path, step: int, at: int) -> bool:
    state = damage.make_state(2)
    return damage.killed_at(at, lambda: save(state, folder, step, options=OPTIONS, trainer_state={}))


@pytest.mark.parametrize("step", [5, 6], ids=["same step again", "next step"])
@pytest.mark.parametrize("at", POINTS)
def test_a_killed_save_leaves_a_good_checkpoint(good: Path, tmp_path: Path, step: int, at: int) -> None:
    run_folder = tmp_path / "run"
    shutil.copytree(good, run_folder)
    assert kill_save(run_folder, step, at)
    found = newest_good(run_folder)
    assert found.path is not None
    assert not found.damaged
    state = damage.make_state(3)
    load(
        state,
        found.path,
    )
    loaded = next(iter(state.model.parameters()))
    assert torch.equal(loaded, weight(1)) or torch.equal(loaded, weight(2))
    save(damage.make_state(4), run_folder, 7, options=OPTIONS)  # cleans up what was cut off
    assert sorted(os.listdir(run_folder)) == ["checkpoint-7"]


@pytest.mark.parametrize("step", [5, 6])
def test_the_points_reach_to_the_very_end_of_a_save(good: Path, tmp_path: Path, step: int) -> None:
    outcomes: list[bool] = []
    for at in (NUM_EVENTS, NUM_EVENTS + 1):
        run_folder = tmp_path / str(at)
        shutil.copytree(good, run_folder)
        outcomes.append(kill_save(run_folder, step, at))
    assert outcomes == [True, False]


def _save_and_die(folder: str, at: int) -> None:
    """Rank 1 is killed in the middle of its files; rank 0 must not make a checkpoint of what there is."""
    from shardwise.trainer.checkpoint import tensorfile

    run = Run("fsdp")
    checkpointer = Checkpointer(folder)
    run.step()
    checkpointer.save(run.state, 1)
    run.step()
    if dist.get_rank() == 1:
        original, count = tensorfile.HashingFile.write, [0]

        def die(self: Any, data: Any) -> None:
            count[0] += 1
            if count[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
            original(self, data)

        tensorfile.HashingFile.write = die  # type: ignore[method-assign]
    checkpointer.save(run.state, 2, blocking=False)
    checkpointer.wait()


def test_a_rank_that_is_killed_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with Pool(2) as pool:
        pool.start(2, _save_and_die, str(tmp_path), 5)
        pool.processes[1].join(60)
        assert pool.processes[1].exitcode == -signal.SIGKILL
        rank, trace, _ = pool.answer()
        assert rank == 0
        assert trace is not None
        assert "The save of step 2 was cut off" in trace  # a CheckpointError, not a hang
        pool.processes[0].kill()
    found = newest_good(tmp_path)
    assert found.step == 1
    assert found.unfinished == (str(tmp_path / "checkpoint-2.partial"),)
