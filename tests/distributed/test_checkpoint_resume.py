"""Save on W ranks, resume on W': every weight and optimizer state bit-equal, whatever the layout."""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from checkpoint_models import Run, make_model
from checkpoint_pool import Pool
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardwise.errors import CheckpointError, ResourceError, ShardwiseError
from shardwise.trainer.checkpoint import (
    AppState,
    Checkpointer,
    SafetensorsReader,
    SafetensorsWriter,
    SaveOptions,
    ValueLoadPlanner,
    ValueSavePlanner,
    load,
    newest_good,
    save,
    verify_folder,
)

pytestmark = pytest.mark.distributed
LAYOUTS = {
    "plain": 1,
    "fsdp1": 1,
    "ddp": 2,
    "fsdp2": 2,
    "fsdp4": 4,
    "hsdp": 4,
    "tp+fsdp": 4,
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as started:
        yield started


def _layout(name: str) -> str:
    return name.rstrip("124")


def _train_and_save(folder: str, name: str) -> dict[str, str]:
    run = Run(_layout(name), seed=1)
    run.step()
    run.step()
    save(run.state, folder, 2, options=SaveOptions(max_file_bytes=40_000))
    return run.fingerprint()


def _load_and_look(folder: str, name: str) -> tuple[dict[str, str], Any]:
    run = Run(_layout(name), seed=2)
    restored = load(run.state, Path(folder) / "checkpoint-2")
    look = run.fingerprint()
    run.step()  # it goes on
    return look, (restored.step, dict(restored.counters), restored.rng_restored, restored.notes)


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, str]]]:
    """A checkpoint of every layout, and the fingerprint of the run that made it."""
    made: dict[str, tuple[Path, dict[str, str]]] = {}
    for name, size in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(name.replace("+", "-"))
        prints = pool.run(size, _train_and_save, str(folder), name)
        assert all(found == prints[0] for found in prints)
        made[name] = (folder, prints[0])
    return made


NUMBERS_OF_RANKS = ("fsdp1", "fsdp2", "fsdp4")
OTHERS = ("plain", "ddp", "hsdp", "tp+fsdp")
PAIRS = [
    *itertools.product(NUMBERS_OF_RANKS, NUMBERS_OF_RANKS),
    *((other, other) for other in OTHERS),
    *((other, "fsdp2") for other in OTHERS),
    *(("fsdp4", other) for other in OTHERS),
    ("hsdp", "tp+fsdp"),
    ("tp+fsdp", "plain"),
]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_any_layout_resumes_in_any_other_bit_by_bit(
    pool: Pool, saved: dict[str, tuple[Path, dict[str, str]]], source: str, target: str
) -> None:
    folder, expected = saved[source]
    for found, (step, counters, rng_restored, notes) in pool.run(LAYOUTS[target], _load_and_look, str(folder), target):
        assert {name for name in found if found[name] != expected.get(name)} == set()
        assert set(found) == set(expected)
        assert (step, counters) == (2, {"tokens": 1234})
        assert rng_restored == (source == target)
        assert any("anew" in note for note in notes) == (source != target)


def test_the_fingerprint_holds_weights_states_and_rates(saved: dict[str, tuple[Path, dict[str, str]]]) -> None:
    """A control: what was compared is not nothing, and the runs were not equal before the load."""
    expected = saved["fsdp2"][1]
    weights = [name for name in expected if name.startswith("model.")]
    assert len(weights) == 20  # 2 blocks of 9, embedding, norm; the tied head is stored once
    assert len([name for name in expected if name.endswith(".exp_avg_sq")]) == 20
    assert "'lr': 0.003" in expected["optimizer.group.model.norm.weight"]
    assert "'position': 2" in expected["extra.sampler"]
    assert Run("plain", seed=2).fingerprint()[weights[0]] != expected[weights[0]]


def _straight(name: str) -> list[float]:
    run = Run(name, dropout=0.2)
    torch.manual_seed(7 + dist.get_rank())
    return [run.step() for _ in range(6)]


def _first_half(folder: str, name: str) -> list[float]:
    run = Run(name, dropout=0.2)
    torch.manual_seed(7 + dist.get_rank())
    losses = [run.step() for _ in range(3)]
    save(run.state, folder, 3)
    return losses


def _second_half(folder: str, name: str) -> list[float]:
    run = Run(name, dropout=0.2, seed=5)
    torch.manual_seed(0)
    found = newest_good(folder)
    assert found.path is not None
    load(run.state, found.path)
    return [run.step() for _ in range(3)]


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_resumed_run_has_the_losses_of_one_that_never_stopped(pool: Pool, tmp_path: Path, name: str) -> None:
    """With dropout, so that the random streams of each rank have to go on too."""
    straight = pool.run(2, _straight, name)
    halves = zip(
        pool.run(2, _first_half, str(tmp_path), name), pool.run(2, _second_half, str(tmp_path), name), strict=True
    )
    assert [one + two for one, two in halves] == straight
    assert straight[0] != straight[1]  # the ranks' dropout differs


def _save_behind(folder: str) -> tuple[dict[str, str], list[str], bool]:
    run = Run("fsdp")
    run.step()
    expected = run.fingerprint()
    checkpointer = Checkpointer(folder, SaveOptions(save_total_limit=1))
    assert checkpointer.save(run.state, 1, blocking=False) is None
    for _ in range(3):
        run.step()  # changes every tensor while the writing may still go on
    report = checkpointer.wait()
    assert report is not None
    planned = checkpointer._planned
    checkpointer.save(run.state, 4, blocking=False)
    checkpointer.save(run.state, 5, blocking=False)  # waits for the one before
    same_plan = checkpointer._planned is planned
    checkpointer.close()
    kept = sorted(os.listdir(folder))
    other = Run("fsdp", seed=3)
    load(other.state, Path(folder) / "checkpoint-5")
    assert other.fingerprint() == run.fingerprint()
    return expected, kept, same_plan


def test_a_save_in_the_background_holds_the_state_of_its_call(pool: Pool, tmp_path: Path) -> None:
    first = tmp_path / "first"
    for expected, kept, same_plan in pool.run(2, _save_behind, str(first)):
        assert kept == ["checkpoint-5"]
        assert same_plan
        assert expected
    for expected, found in pool.run(2, _save_once_behind, str(tmp_path / "second")):
        assert expected == found


def _save_once_behind(folder: str) -> tuple[dict[str, str], dict[str, str]]:
    run = Run("fsdp")
    run.step()
    expected = run.fingerprint()
    checkpointer = Checkpointer(folder)
    checkpointer.save(run.state, 1, blocking=False)
    run.step()
    checkpointer.close()
    other = Run("fsdp", seed=3)
    load(other.state, Path(folder) / "checkpoint-1")
    return expected, other.fingerprint()


def _save_without_room(folder: str, full: str) -> tuple[list[str], str]:
    """Rank 1's disk refuses in the middle of a file, as a full one does."""
    import errno

    from shardwise.trainer.checkpoint import tensorfile

    run = Run("fsdp")
    checkpointer = Checkpointer(folder)
    run.step()
    checkpointer.save(run.state, 1)
    original = tensorfile.HashingFile.write
    if dist.get_rank() == 1 and full == "refusing":

        def refuse(self: Any, data: Any) -> None:
            original(self, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

        tensorfile.HashingFile.write = refuse  # type: ignore[method-assign]
    events: list[str] = []
    try:
        run.step()
        checkpointer.save(run.state, 2, blocking=False)
        assert checkpointer._thread is not None
        checkpointer._thread.join(60)  # however long the disk takes, the next poll must raise
        events.append("step")
        run.step()
        checkpointer.poll()
        events.append("polled without an error")
    except ResourceError as error:
        events.append(str(error))
    finally:
        tensorfile.HashingFile.write = original  # type: ignore[method-assign]
    assert checkpointer.poll() is None  # said once
    report = checkpointer.save(run.state, 3)  # with room again, saving goes on
    assert report is not None
    checkpointer.close()
    return events, report.path.name


def test_a_full_disk_is_raised_on_all_ranks_within_one_step(pool: Pool, tmp_path: Path) -> None:
    for events, after in pool.run(2, _save_without_room, str(tmp_path), "refusing"):
        assert len(events) == 2
        assert events[0] == "step"
        assert "rank 1: No space left on device" in events[1]
        assert after == "checkpoint-3"
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "checkpoint-3"]
    verify_folder(tmp_path / "checkpoint-1")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_small_file_system_that_fills_up(pool: Pool, tmp_path: Path) -> None:
    import subprocess

    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"this machine mounts no tmpfs: {mounted.stderr.decode()}")
    try:
        for problem, kept in pool.run(2, _fill_up, str(disk)):
            assert "No space left on device" in problem
            assert kept == ["checkpoint-1"]
        assert newest_good(disk).step == 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _fill_up(folder: str) -> tuple[str, list[str]]:
    from shardwise.trainer.checkpoint import folder as folders

    folders.check_disk = lambda *_: None  # type: ignore[assignment]  # it would refuse before the first byte
    run = Run("fsdp")
    checkpointer = Checkpointer(folder)
    run.step()
    checkpointer.save(run.state, 1)
    problem = ""
    for step in range(2, 6):
        run.step()
        checkpointer.save(run.state, step, blocking=False)
        assert checkpointer._thread is not None
        checkpointer._thread.join(60)
        try:
            checkpointer.poll()
        except ShardwiseError as error:
            problem = str(error)
            break
    checkpointer.close()
    dist.barrier()
    return problem, sorted(os.listdir(folder))


def _load_damaged(folder: str) -> tuple[str, bool]:
    run = Run("fsdp", seed=9)
    run.step()
    before = run.fingerprint()
    try:
        load(run.state, folder)
    except CheckpointError as error:
        return str(error), run.fingerprint() == before
    return "loaded", False


def test_every_rank_names_the_damaged_file_and_loads_nothing(
    pool: Pool, saved: dict[str, tuple[Path, dict[str, str]]], tmp_path: Path
) -> None:
    import shutil

    folder = tmp_path / "checkpoint-2"
    shutil.copytree(saved["fsdp4"][0] / "checkpoint-2", folder)
    path = folder / "rank-00003-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)
    for problem, untouched in pool.run(2, _load_damaged, str(folder)):
        assert "rank-00003-00000.safetensors is damaged" in problem
        assert untouched


def _narrow(folder: str, seed: int) -> list[float]:
    """Weights with fewer rows than ranks: the last ranks hold empty shards."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = AppState(model=model, optimizers=[optimizer])
    checkpointer = Checkpointer(folder)
    if seed == 1:
        checkpointer.prepare(state)
        checkpointer.save(state, 1, blocking=False)
        checkpointer.wait()
    else:
        load(state, Path(folder) / "checkpoint-1")
    checkpointer.close()
    return [value for p in model.parameters() for value in cast(DTensor, p).full_tensor().flatten().tolist()]


def test_ranks_with_empty_shards(pool: Pool, tmp_path: Path) -> None:
    saved = pool.run(4, _narrow, str(tmp_path), 1)
    assert pool.run(2, _narrow, str(tmp_path), 2) == saved[:2]
    assert pool.run(4, _narrow, str(tmp_path), 3) == saved


def _disagree(folder: str) -> str:
    run = Run("fsdp")
    run.sampler.position = dist.get_rank()
    try:
        save(run.state, folder, 1)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_ranks_that_disagree_about_the_data_position_are_an_error(pool: Pool, tmp_path: Path) -> None:
    for problem in pool.run(2, _disagree, str(tmp_path)):
        assert "sampler is not the same on all ranks" in problem
    assert not os.listdir(tmp_path)


def _stages(folder: str, whole: bool) -> dict[str, list[float]]:
    """A pipeline of two stages whose layers are numbered from 0 on each."""
    model = make_model(tied=False, seed=1 if not whole else 2)
    if whole:
        state = AppState(model=model)
        load(state, Path(folder) / "checkpoint-1")
        return {name: p.flatten().tolist() for name, p in model.named_parameters() if "q_proj" in name}
    stage = dist.get_rank()
    kept = {name: p.flatten().tolist() for name, p in model.named_parameters() if "q_proj" in name}
    model.model.layers = torch.nn.ModuleList([model.model.layers[stage]])
    if stage == 0:
        model.model.norm, model.lm_head = torch.nn.Identity(), torch.nn.Identity()
    else:
        model.model.embed_tokens = None
    state = AppState(model=model, rename=lambda name: name.replace("layers.0.", f"layers.{stage}."))
    save(state, folder, 1)
    return kept


def test_stages_of_a_pipeline_make_one_checkpoint_of_the_plain_model(pool: Pool, tmp_path: Path) -> None:
    [kept, _] = pool.run(2, _stages, str(tmp_path), False)
    assert pool.run(1, _stages, str(tmp_path), True) == [kept]


def _plain_dcp(folder: str) -> Any:
    """torch's own save and load around our storage, with a nested state dict."""
    state: dict[str, Any] = {"a": {"weight": torch.arange(6.0)}, "n": [1, {"x": (2, "y")}], "none": None}
    dcp_save(state, storage_writer=SafetensorsWriter(folder, step=3), planner=ValueSavePlanner())
    other: dict[str, Any] = {"a": {"weight": torch.zeros(6)}, "n": [0, {"x": None}], "none": 1}
    verify_folder(Path(folder))
    dcp_load(other, storage_reader=SafetensorsReader(folder), planner=ValueLoadPlanner())
    refused: list[str] = []
    for attempt in (
        lambda: dcp_save(state, storage_writer=SafetensorsWriter(folder + "-pickled")),
        lambda: dcp_load(dict(other), storage_reader=SafetensorsReader(folder)),
    ):
        try:
            attempt()
        except CheckpointException as error:
            refused.append(str(error))
    return other["a"]["weight"].tolist(), other["n"], other["none"], refused


def test_the_storage_serves_torchs_own_save_and_load(pool: Pool, tmp_path: Path) -> None:
    for weight, numbers, none, refused in pool.run(2, _plain_dcp, str(tmp_path / "x")):
        assert weight == [0, 1, 2, 3, 4, 5]
        assert numbers == [1, {"x": (2, "y")}]
        assert none is None
        assert "would pickle" in refused[0]
        assert "would unpickle" in refused[1]


def test_transformers_reads_the_trainer_state(tmp_path: Path) -> None:
    from transformers.trainer_callback import TrainerState

    history = [{"step": 1, "loss": 2.5}]
    model = torch.nn.Linear(2, 2)
    save(AppState(model=model), tmp_path, 7, trainer_state={"log_history": history, "epoch": 0.5})
    read = TrainerState.load_from_json(str(tmp_path / "checkpoint-7" / "trainer_state.json"))
    assert (read.global_step, read.log_history) == (7, history)
    assert json.loads((tmp_path / "checkpoint-7" / "trainer_state.json").read_text())["epoch"] == 0.5
