"""Starting ranks: what the environment says, what comes back, how failures are told."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.errors import DataError, TrainingError, UsageError
from shardwise.launch.environment import first_host, node_environment, rank_environment
from shardwise.launch.local import LaunchOptions, choose_threads, launch

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "12345", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu[07-08]",
}  # fmt: skip
TWO = LaunchOptions(num_ranks=2, device="cpu")


def test_no_launcher_no_rank() -> None:
    assert rank_environment({"HOME": "/root", "SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}) is None


def test_torchrun() -> None:
    found = rank_environment(TORCHRUN)
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 4, 1, 2)
    assert found.variables() == TORCHRUN


def test_slurm_with_one_task_a_rank() -> None:
    found = rank_environment(SLURM)
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 8, 1, 4)
    assert (found.master_addr, found.master_port) == ("gpu07", 20_000 + 2345)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu07", "gpu07"),
        ("gpu[07-09,12]", "gpu07"),
        ("a1,a2", "a1"),
        ("n[3]-ib,x", "n3-ib"),
        ("r1n[10-12],q", "r1n10"),
    ],
)
def test_first_host_of_a_node_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "x"}, "RANK is 'x'"),
        ({"RANK": "4"}, "The rank is 4, but there are 4 ranks"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE is '-1'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'; it must be a whole number from 1"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is 99999"),
        ({"LOCAL_RANK": "2"}, "The local rank is 2, but this machine has 2 ranks"),
        ({"MASTER_ADDR": None}, "not MASTER_ADDR"),
        ({"RANK": "1e3", "MASTER_PORT": ""}, "2 problems"),
    ],
)
def test_garbage_is_named(change: dict[str, Any], message: str) -> None:
    environ = {key: value for key, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(UsageError, match=message):
        rank_environment(environ)


def test_several_machines_need_a_place_to_meet() -> None:
    with pytest.raises(UsageError, match="PET_MASTER_ADDR and PET_MASTER_PORT"):
        node_environment({"PET_NNODES": "2", "PET_NODE_RANK": "1"})
    found = node_environment({"PET_NNODES": "2", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "29500"})
    assert (found.num_nodes, found.node_rank, found.master_port) == (2, 0, 29500)
    assert node_environment({}).num_nodes == 1


def test_threads_are_chosen_and_explained() -> None:
    assert choose_threads(TWO, 8, {}).count == 4
    assert choose_threads(TWO, 1, {}).count == 1
    assert choose_threads(LaunchOptions(num_ranks=2, device="cuda"), 64, {}).count == 8
    given = choose_threads(TWO, 8, {"OMP_NUM_THREADS": "3"})
    assert (given.count, given.reason) == (3, "OMP_NUM_THREADS was set")


def meet(word: str) -> tuple[str, int, str]:
    dist.init_process_group("gloo")
    answers: list[Any] = [None, None]
    dist.all_gather_object(answers, f"{word} {dist.get_rank()}")
    dist.destroy_process_group()
    return ", ".join(answers), len(answers), os.environ["OMP_NUM_THREADS"]


def fail_first(kind: str) -> None:
    """Rank 1 fails; rank 0 waits for it in a collective and fails of that."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        if kind == "ours":
            raise DataError("data.jsonl, line 7: no answer.", "data.jsonl, line 9: no question.")
        if kind == "theirs":
            raise ZeroDivisionError("the loss was divided by nothing")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.distributed
def test_ranks_meet_and_the_first_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert launch(meet, ("rank",), TWO) == ("rank 0, rank 1", 2, "1")
    assert os.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.distributed
def test_errors_come_back_as_themselves() -> None:
    with pytest.raises(DataError) as raised:
        launch(fail_first, ("ours",), TWO)
    assert raised.value.problems == ("data.jsonl, line 7: no answer.", "data.jsonl, line 9: no question.")
    with pytest.raises(
        TrainingError, match="Rank 1 failed: ZeroDivisionError: the loss was divided by nothing"
    ) as told:
        launch(fail_first, ("theirs",), TWO)
    assert "in fail_first" in "".join(told.value.__notes__)
    with pytest.raises(TrainingError, match=r"Rank 1 was killed by signal 9 \(SIGKILL\)"):
        launch(fail_first, ("killed",), TWO)


def refuse(folder: str) -> None:
    """Leaves a file for each attempt that comes so far."""
    (Path(folder) / f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
    raise DataError("data.jsonl, line 7: no answer.")


@pytest.mark.distributed
def test_what_a_restart_cannot_mend_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 7"):
        launch(refuse, (str(tmp_path),), LaunchOptions(num_ranks=1, device="cpu", max_restarts=1))
    assert [path.name for path in tmp_path.iterdir()] == ["attempt-0"]


def test_a_launcher_with_another_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="torchrun has started 4 ranks, but the plan needs 2"):
        launch(meet, ("rank",), TWO)


def test_a_run_that_may_be_restarted_takes_the_ranks_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    options = LaunchOptions(num_ranks=8, device="cpu", max_restarts=1)
    assert launch(os.environ.get, ("WORLD_SIZE",), options) == "4"
