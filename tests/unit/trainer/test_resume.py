"""Going on: fewer ranks with the same batch, each step once in metrics.jsonl, room on the disk before it starts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwise.errors import PlanMismatchError, ResourceError
from shardwise.trainer.checkpoint.folder import Need, check_room
from shardwise.trainer.resume import fit_ranks
from shardwise.trainer.tracking import METRICS_FILE, REPEATED_FILE, Tracking, TrackingWish, set_aside
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy

RUN = RunFile(model_name_or_path="x", max_restarts=1)
ZERO_3 = Strategy(precision="bf16", micro_batch_size=2, accumulation=3, dp_shard=4, zero_stage=3)
HSDP = replace(ZERO_3, dp_replicate=2, keep_unsharded=True)


@pytest.mark.parametrize(
    ("before", "num_ranks", "after"),
    [
        (ZERO_3, 2, replace(ZERO_3, dp_shard=2, accumulation=6)),
        (ZERO_3, 1, replace(ZERO_3, dp_shard=1, accumulation=12, zero_stage=0)),
        (ZERO_3, 12, replace(ZERO_3, dp_replicate=3, accumulation=1)),
        (HSDP, 4, replace(HSDP, dp_replicate=1, accumulation=6)),
        (HSDP, 2, replace(HSDP, dp_replicate=1, dp_shard=2, accumulation=12)),
        (HSDP, 1, replace(HSDP, dp_replicate=1, dp_shard=1, accumulation=24, zero_stage=0, keep_unsharded=False)),
        (replace(ZERO_3, dp_shard=1, dp_replicate=4, zero_stage=0), 2,
         replace(ZERO_3, dp_shard=1, dp_replicate=2, zero_stage=0, accumulation=6)),
        (replace(ZERO_3, tp=2), 4, replace(ZERO_3, tp=2, dp_shard=2, accumulation=6)),
    ],
)  # fmt: skip
def test_fewer_ranks_take_the_same_batch(
    monkeypatch: pytest.MonkeyPatch, before: Strategy, num_ranks: int, after: Strategy
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    assert fit_ranks(RUN, before) == after
    assert after.num_ranks == num_ranks
    assert after.global_batch_size == before.global_batch_size
    assert fit_ranks(replace(RUN, max_restarts=0), before) == before


def test_a_batch_that_does_not_divide_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(PlanMismatchError, match=r"5 ranks are running, but the 12 micro-batches .* 1, 2, 3, 4, 6, 12"):
        fit_ranks(RUN, ZERO_3)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(PlanMismatchError, match="2, 4, 6, 8, 12, 24 ranks only"):
        fit_ranks(RUN, replace(ZERO_3, tp=2))


def _lines(folder: Path, name: str = METRICS_FILE) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / name).read_text().splitlines()]


def test_a_step_that_is_done_again_stands_once(tmp_path: Path) -> None:
    first = Tracking(TrackingWish(folder=tmp_path), print)
    for step in (0, 1, 2, 3, 4, 5):
        first.log({"loss": 1.0}, step)
    first.close()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"loss": 0.5, "st')  # killed in the middle of a line
    second = Tracking(TrackingWish(folder=tmp_path, first_step=3), print)
    assert not (tmp_path / REPEATED_FILE).exists()  # nothing moves before it logs
    second.log({"loss": 2.0}, 4)
    second.close()
    assert _lines(tmp_path) == [0, 1, 2, 3, 4]
    repeated = ['{"loss": 1.0, "step": 4}', '{"loss": 1.0, "step": 5}', '{"loss": 0.5, "st']
    assert (tmp_path / REPEATED_FILE).read_text().splitlines() == repeated
    third = Tracking(TrackingWish(folder=tmp_path), print)  # from the beginning
    third.log({"eval_loss": 3.0}, 0)
    third.close()
    assert _lines(tmp_path) == [0]
    assert len((tmp_path / REPEATED_FILE).read_text().splitlines()) == 8


def test_nothing_to_set_aside(tmp_path: Path) -> None:
    assert set_aside(tmp_path / METRICS_FILE, 3) == 0
    (tmp_path / METRICS_FILE).write_text('{"step": 3}\n[1]\n')
    assert set_aside(tmp_path / METRICS_FILE, 3) == 0
    assert not (tmp_path / REPEATED_FILE).exists()


GB = 10**9


def set_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    def usage(_: Path) -> SimpleNamespace:
        return SimpleNamespace(free=num_bytes)

    monkeypatch.setattr(shutil, "disk_usage", usage)


NEED = Need(checkpoint={"a": 6 * GB, "b": 2 * GB}, exported={"a": GB}, num_saves=10, save_total_limit=2)


@pytest.mark.parametrize(
    ("need", "gigabytes"),
    [
        (NEED, 24),  # three at once while the newest is written
        (replace(NEED, num_there=2), 8),  # the oldest makes way for each
        (replace(NEED, save_total_limit=None), 9),  # who keeps all is asked for the next, and for the export
        (replace(NEED, num_saves=1), 9),
        (replace(NEED, num_saves=0), 1),
        (replace(NEED, exported={"a": 20 * GB}), 36),  # beside the two that are kept
        (NEED.joined([replace(NEED, checkpoint={"b": 2 * GB, "c": GB})]), 27),  # another stage of a pipeline
        (replace(NEED, num_saves=0, exported={}), 0),
    ],
)
def test_room_for_what_a_run_will_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, need: Need, gigabytes: int
) -> None:
    assert need.num_bytes == gigabytes * GB
    set_free(monkeypatch, gigabytes * GB + 64 * 2**20)
    check_room(tmp_path / "not" / "yet", need)
    set_free(monkeypatch, gigabytes * GB)
    if gigabytes:
        with pytest.raises(ResourceError, match=rf"The run needs .* \({gigabytes * GB + 64 * 2**20} bytes\)"):
            check_room(tmp_path / "not" / "yet", need)


def test_the_numbers_of_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_free(monkeypatch, 5)
    with pytest.raises(ResourceError, match=r"3 × 8 GB for checkpoints \(save_total_limit 2, .* 1 GB for the export"):
        check_room(tmp_path, NEED)
