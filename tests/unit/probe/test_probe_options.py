import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import MissingExtraError, UsageError
from shardwise.facts.machine import Unreadable
from shardwise.probe import inventory
from shardwise.probe import launch as module
from shardwise.probe.launch import choose_ranks, measure
from shardwise.probe.options import (
    FULL_SIZES,
    NEEDED_SIZES,
    QUICK_SIZES,
    Place,
    ProbeOptions,
    ProbeTask,
    check_options,
    make_task,
)
from shardwise.vocabulary.codec import from_data, to_data


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    options = ProbeOptions(
        ranks=0, nodes=0, sizes=(0, 2**40), out=tmp_path / "no" / "cluster.yaml", budget_seconds=float("inf")
    )
    with pytest.raises(UsageError) as caught:
        check_options(options)
    text = str(caught.value)
    assert len(caught.value.problems) == 6
    for value in ("ranks is 0", "nodes is 0", "sizes holds 0", str(2**40), "does not exist", "budget_seconds is inf"):
        assert value in text


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"budget_seconds": 0.0}, "budget_seconds"),
        ({"budget_seconds": float("nan")}, "budget_seconds"),
        ({"parts": ()}, "at least one"),
        ({"parts": ("wires",)}, "wires"),
    ],
)
def test_single_problems(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        check_options(ProbeOptions(**changes))


def test_out_must_not_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        check_options(ProbeOptions(out=tmp_path))


def test_task_fills_in_what_was_left_open(tmp_path: Path) -> None:
    quick = make_task(ProbeOptions(quick=True, out=tmp_path / "c.yaml"), "cpu")
    full = make_task(ProbeOptions(), "cuda")
    assert quick.sizes == QUICK_SIZES
    assert full.sizes == FULL_SIZES
    assert (FULL_SIZES[0], FULL_SIZES[-1]) == (8, 2**30)
    assert quick.checkpoint_dir == str(tmp_path.resolve())
    assert (quick.budget.aim_seconds, quick.budget.limit_seconds) == (13.0, 20.0)
    assert (full.budget.aim_seconds, full.budget.limit_seconds) == (95.0, 120.0)
    assert make_task(ProbeOptions(sizes=(64, 8, 64)), "cpu").sizes == (8, 64)
    assert from_data(ProbeTask, to_data(full)) == full
    card = make_task(ProbeOptions(quick=True), "cuda")
    for task in (quick, full, card):
        assert task.needed_sizes == NEEDED_SIZES
        assert set(NEEDED_SIZES) <= set(task.sizes)
    assert make_task(ProbeOptions(sizes=(64, 8)), "cuda").needed_sizes == ()  # what was asked for, and no more
    assert (card.attention_lengths[0], full.attention_lengths[:2]) == (4096, (4096, 2048))
    assert (card.matmul_sizes["bf16"][0], full.matmul_sizes["bf16"][0]) == (4096, 4096)
    assert 8192 in card.matmul_sizes["bf16"]


def test_places() -> None:
    place = Place(rank=5, world_size=8, local_rank=1, local_world_size=4)
    assert (place.node, place.num_nodes) == (1, 2)


def test_several_machines_need_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(UsageError, match="torchrun --nnodes=3"):
        measure(ProbeOptions(nodes=3))


def test_what_torchrun_started_must_be_what_was_asked_for() -> None:
    place = Place(rank=0, world_size=4, local_rank=0, local_world_size=2)
    with pytest.raises(UsageError) as caught:
        module.check_place(place, ProbeOptions(nodes=3, ranks=4), {"GROUP_RANK": "0"})
    assert len(caught.value.problems) == 2
    with pytest.raises(UsageError, match="different numbers"):
        module.check_place(
            Place(rank=2, world_size=3, local_rank=0, local_world_size=1), ProbeOptions(), {"GROUP_RANK": "1"}
        )


def test_cards_are_counted_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch in the parent would take as long as the ranks' own import, and before it."""
    monkeypatch.setattr(inventory, "has_nvidia_device", lambda: True)
    monkeypatch.setattr(module, "count_cuda_cards", lambda: 2)
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it would raise
    assert choose_ranks(ProbeOptions()) == ("cuda", 2)
    monkeypatch.setattr(module, "count_cuda_cards", lambda: Unreadable(why="no libcuda"))
    with pytest.raises(MissingExtraError):
        choose_ranks(ProbeOptions())


def test_ranks_follow_cards_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_num_gpus", lambda: 4)
    monkeypatch.setattr(inventory, "num_usable_cpus", lambda: 4)
    assert choose_ranks(ProbeOptions()) == ("cuda", 4)
    assert choose_ranks(ProbeOptions(ranks=2)) == ("cuda", 2)
    assert choose_ranks(ProbeOptions(device="cpu")) == ("cpu", 2)
    assert choose_ranks(ProbeOptions(device="cpu", ranks=4)) == ("cpu", 4)
    with pytest.raises(UsageError, match="ranks is 5, but only 4 GPU"):
        choose_ranks(ProbeOptions(ranks=5))
    with pytest.raises(UsageError, match="only 4 core"):
        choose_ranks(ProbeOptions(device="cpu", ranks=5))
    monkeypatch.setattr(module, "_num_gpus", lambda: 0)
    with pytest.raises(UsageError, match="torch sees no GPU"):
        choose_ranks(ProbeOptions(device="cuda"))
