"""A save in the background without memory for copies: the training waits, and is told so."""

from pathlib import Path

import pytest
from checkpoint_damage import damage

from shardwise.errors import ResourceError
from shardwise.trainer.checkpoint import Checkpointer, staging, verify_folder


def test_without_memory_for_copies_the_training_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_bytes: int) -> None:
        raise ResourceError(f"Saving in the background needs {num_bytes} bytes.")

    monkeypatch.setattr(staging, "check_memory", refuse)
    checkpointer = Checkpointer(tmp_path)
    state = damage.make_state(1)
    checkpointer.prepare(state)  # says nothing: the save itself will
    assert checkpointer.save(state, 1, blocking=False) is None
    assert (tmp_path / "checkpoint-1").is_dir()  # durable before the training goes on
    report = checkpointer.poll()
    assert report is not None
    assert report.blocked_s == report.total_s
    [note] = report.notes
    assert note.startswith("checkpoint-1 was written while the training waited. Saving in the background needs")
    verify_folder(tmp_path / "checkpoint-1")
    monkeypatch.undo()
    checkpointer.save(state, 2, blocking=False)
    report = checkpointer.wait()
    assert report is not None
    assert report.notes == ()
    assert report.blocked_s < report.total_s
    checkpointer.close()
