import os
import shutil
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from checkpoint_damage import damage

from shardwise.errors import CheckpointError, ResourceError
from shardwise.trainer.checkpoint import AppState, SaveOptions, load, newest_good, read_manifest, save


def names(run_folder: Path) -> set[str]:
    return {path.name for path in run_folder.iterdir()}


def save_steps(run_folder: Path, steps: range, limit: int | None = None) -> None:
    state = damage.make_state(0)
    for step in steps:
        save(state, run_folder, step, options=SaveOptions(save_total_limit=limit))


def test_the_newest_is_found_and_loaded(tmp_path: Path) -> None:
    save_steps(tmp_path, range(9, 12))
    found = newest_good(tmp_path)
    assert found.step == 11  # by number: by name checkpoint-9 would be last
    assert found.path is not None
    restored = load(damage.make_state(5), found.path)
    assert restored.step == 11
    assert restored.counters == {"tokens": 0}
    assert restored.rng_restored


def test_nothing_is_found_in_a_run_that_has_not_begun(tmp_path: Path) -> None:
    assert newest_good(tmp_path / "none").path is None


@pytest.mark.parametrize(("limit", "left"), [(None, 4), (3, 3), (1, 1), (0, 1)])
def test_the_limit_is_kept_and_the_newest_never_goes(tmp_path: Path, limit: int | None, left: int) -> None:
    save_steps(tmp_path, range(1, 5), limit)
    assert names(tmp_path) == {f"checkpoint-{step}" for step in range(5 - left, 5)}


def test_what_was_just_saved_stays_although_a_later_step_lies_there(tmp_path: Path) -> None:
    save_steps(tmp_path, range(8, 10))
    save_steps(tmp_path, range(3, 4), limit=1)
    assert "checkpoint-3" in names(tmp_path)


def test_what_is_not_ours_is_never_removed(tmp_path: Path) -> None:
    save_steps(tmp_path, range(1, 4))
    (tmp_path / "checkpoint-1" / "my notes.txt").write_text("dear diary")
    (tmp_path / "checkpoint-0").mkdir()
    (tmp_path / "checkpoint-0" / "pytorch_model.bin").write_text("another tool's")
    (tmp_path / "checkpoint-2-copy").mkdir()
    (tmp_path / "notes").mkdir()
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    shutil.copytree(tmp_path / "checkpoint-2", elsewhere)
    (tmp_path / "checkpoint-00").symlink_to(elsewhere)
    report = save(damage.make_state(0), tmp_path, 4, options=SaveOptions(save_total_limit=1))
    expected = {"checkpoint-0", "checkpoint-00", "checkpoint-1", "checkpoint-2-copy", "checkpoint-4", "notes"}
    assert names(tmp_path) == expected
    assert (tmp_path / "checkpoint-1" / "my notes.txt").read_text() == "dear diary"
    assert len(list(elsewhere.iterdir())) > 1
    assert len(report.notes) == 2
    assert any("my notes.txt" in note for note in report.notes)


def test_a_partial_folder_of_somebody_else_stops_the_save(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1.partial").mkdir()
    (tmp_path / "checkpoint-1.partial" / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match="in the way"):
        save_steps(tmp_path, range(1, 2))
    assert (tmp_path / "checkpoint-1.partial" / "thesis.tex").exists()


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(damage.make_state(1), tmp_path, 5, options=SaveOptions(save_total_limit=1))
    save(damage.make_state(2), tmp_path, 5, options=SaveOptions(save_total_limit=1))
    assert names(tmp_path) == {"checkpoint-5"}
    state = damage.make_state(3)
    load(state, tmp_path / "checkpoint-5")
    assert torch.equal(next(state.model.parameters()), next(damage.make_state(2).model.parameters()))


def test_no_room_on_the_disk_is_said_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, range(1, 2))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", MagicMock(return_value=usage._replace(free=1000)))
    with pytest.raises(ResourceError, match=r"needs .* bytes\) in .*1000 bytes\) are free"):
        save_steps(tmp_path, range(2, 3))
    assert names(tmp_path) == {"checkpoint-1"}


@pytest.mark.parametrize("name", ["../x", "a/b", "manifest.json", ".hidden", "UNFINISHED", "rank-00000.json", ""])
def test_extra_files_cannot_leave_the_folder_or_replace_ours(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="plain file name"):
        save(damage.make_state(0), tmp_path, 1, extra_files={name: b"x"})
    assert not newest_good(tmp_path).path


def test_extra_files_belong_to_the_checkpoint(tmp_path: Path) -> None:
    save(damage.make_state(0), tmp_path, 1, extra_files={"config.json": b"{}"}, trainer_state={"log_history": []})
    assert {"config.json", "trainer_state.json"} < set(read_manifest(tmp_path / "checkpoint-1").files)
    (tmp_path / "checkpoint-1" / "config.json").write_bytes(b"[]")
    assert "config.json" in newest_good(tmp_path).damaged[0]


def test_another_model_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    save(damage.make_state(1), tmp_path, 1)
    embedding = torch.nn.Embedding(50, 24)
    model = torch.nn.Sequential(embedding, torch.nn.Linear(24, 41))
    before = embedding.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"\(40, 24\) in the checkpoint and \(41, 24\) in this run"):
        load(AppState(model=model), tmp_path / "checkpoint-1")
    with pytest.raises(CheckpointError, match="in the checkpoint but not in this run"):
        load(AppState(model=torch.nn.Sequential(torch.nn.Embedding(50, 24))), tmp_path / "checkpoint-1")
    assert torch.equal(embedding.weight, before)


def test_adapters_are_not_put_onto_another_base(tmp_path: Path) -> None:
    state = damage.make_state(1)
    state.model[0].requires_grad_(False)  # pyright: ignore[reportIndexIssue]
    optimizer = torch.optim.SGD([p for p in state.model.parameters() if p.requires_grad])
    small = AppState(model=state.model, optimizers=[optimizer], trainable_only=True)
    save(small, tmp_path, 1)
    stored = read_manifest(tmp_path / "checkpoint-1").tensors
    assert "model.0.weight" not in stored
    assert "model.1.weight" in stored
    assert load(small, tmp_path / "checkpoint-1").step == 1
    with pytest.raises(CheckpointError, match="only trainable parameters"):
        load(state, tmp_path / "checkpoint-1")
    state.model[1].requires_grad_(False)  # pyright: ignore[reportIndexIssue]
    with pytest.raises(CheckpointError, match="belongs to the base model"):
        load(small, tmp_path / "checkpoint-1")


def test_an_optimizer_that_has_not_stepped_is_left_as_it_is(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    save(AppState(model=model, optimizers=[optimizer]), tmp_path, 0)
    assert not optimizer.state
    again = torch.optim.AdamW(model.parameters())
    load(AppState(model=model, optimizers=[again]), tmp_path / "checkpoint-0")
    assert not again.state


def test_states_keep_their_type_when_it_is_not_the_weights(tmp_path: Path) -> None:
    """`Optimizer.load_state_dict` would make fp32 of these bf16 states."""
    state = damage.make_state(1)
    [optimizer] = state.optimizers
    for held in optimizer.state.values():
        held["exp_avg"] = held["exp_avg"].bfloat16()
    save(state, tmp_path, 1)
    other = damage.make_state(2)
    for held in other.optimizers[0].state.values():
        held["exp_avg"] = held["exp_avg"].bfloat16()
    load(other, tmp_path / "checkpoint-1")
    for one, two in zip(optimizer.state.values(), other.optimizers[0].state.values(), strict=True):
        assert two["exp_avg"].dtype == torch.bfloat16
        assert torch.equal(one["exp_avg"], two["exp_avg"])
    with pytest.raises(CheckpointError, match="Resume with the same precision and optimizer"):
        load(damage.make_state(3), tmp_path / "checkpoint-1")


def test_a_scheduler_of_torch_goes_on(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    made = [_scheduled(model) for _ in range(2)]
    for _ in range(3):
        made[0][0].step()
        made[0][1].step()
    save(AppState(model=model, optimizers=[made[0][0]], extra={"scheduler": made[0][1]}), tmp_path, 3)
    load(AppState(model=model, optimizers=[made[1][0]], extra={"scheduler": made[1][1]}), tmp_path / "checkpoint-3")
    assert made[1][1].get_last_lr() == made[0][1].get_last_lr() == [0.25]


def _scheduled(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def test_groups_that_mix_what_was_apart_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    apart = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(apart, lr=0.5)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    save(AppState(model=model, optimizers=[optimizer]), tmp_path, 1)
    other = torch.nn.Linear(3, 3)
    before = other.weight.detach().clone()
    mixed = AppState(model=other, optimizers=[torch.optim.AdamW(other.parameters(), lr=0.5)])
    with pytest.raises(CheckpointError, match=r"weight_decay 0\.1 and 0\.0"):
        load(mixed, tmp_path / "checkpoint-1")
    assert torch.equal(other.weight, before)


def test_files_are_readable_by_sha256sum_and_json(tmp_path: Path) -> None:
    import hashlib
    import json

    save(damage.make_state(1), tmp_path, 1)
    body = json.loads((tmp_path / "checkpoint-1" / "manifest.json").read_text())["body"]
    for name, entry in body["files"].items():
        data = (tmp_path / "checkpoint-1" / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["bytes"], entry["sha256"])
    assert os.path.basename(tmp_path / "checkpoint-1") == "checkpoint-1"
