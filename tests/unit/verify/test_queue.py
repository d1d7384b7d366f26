"""A queue of jobs, with a stand-in for the trainer that starts at once."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardwise.verify.queue import JobQueue, JobStatus, QueuedJob, Slot, card_slots, core_slots, is_finished

TRAINER = """
import json, os, pathlib, signal, sys, time
folder, fate = pathlib.Path(sys.argv[2]), sys.argv[3]
(folder / "env.json").write_text(json.dumps({"card": os.environ.get("CUDA_VISIBLE_DEVICES"), "began": time.time()}))
with (folder / "metrics.jsonl").open("w") as file:
    for step in (1, 2):
        file.write(json.dumps({"loss": 4.0 - step, "tokens_per_second": 100.0, "step": step}) + "\\n")
    file.write(json.dumps({"eval_loss": 1.5, "step": 2}) + "\\n")
print("step 1/2 | loss 3\\nstep 2/2 | loss 2", flush=True)
if fate == "fails":
    sys.exit("shardwise: data.jsonl, line 7: no answer.")
if fate == "waits":
    def save(*_):
        (folder / "saved").touch()
        sys.exit(143)
    signal.signal(signal.SIGTERM, save)
    (folder / "ready").touch()
    time.sleep(30)
(folder / "ledger.json").write_text("{}")
"""


@pytest.fixture
def trainer(tmp_path: Path) -> dict[str, str]:
    """The environment in which `python -m shardwise train FOLDER FATE` is the stand-in."""
    package = tmp_path / "stand-in" / "shardwise"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(TRAINER)
    return {"PYTHONPATH": str(package.parent)}


def job(tmp_path: Path, name: str, fate: str, *, skipped: bool = False) -> QueuedJob:
    folder = tmp_path / name
    return QueuedJob(name=name, words=(str(folder), fate), folder=folder, skipped=skipped)


def ignore(_: Sequence[JobStatus]) -> None:
    pass


def test_a_job_that_fails_stops_no_other(tmp_path: Path, trainer: dict[str, str]) -> None:
    jobs = [job(tmp_path, "a", "ends"), job(tmp_path, "b", "fails"), job(tmp_path, "c", "ends")]
    slots = [Slot(name=f"card {card}", environ={**trainer, "CUDA_VISIBLE_DEVICES": card}) for card in ("4", "6")]
    looks: list[list[str]] = []
    ended = JobQueue(jobs, slots, lambda now: looks.append([one.state for one in now])).run()
    assert [one.state for one in ended] == ["done", "failed", "done"]
    assert ended[1].reason == "exit code 1: data.jsonl, line 7: no answer."
    assert (ended[0].step, ended[0].num_steps, ended[0].loss, ended[0].eval_loss) == (2, 2, 2.0, 1.5)
    assert ended[0].tokens_per_s == 100.0
    seen = [json.loads((one.folder / "env.json").read_text()) for one in jobs]
    assert [one["card"] for one in seen[:2]] == ["4", "6"]
    assert seen[2]["card"] in ("4", "6")
    assert seen[2]["began"] > max(seen[0]["began"], seen[1]["began"])  # it waited for a card
    assert looks[0] == ["running", "running", "waiting"]
    assert all(is_finished(one.folder) is (one.name != "b") for one in jobs)


def test_what_is_finished_is_shown_and_not_run(tmp_path: Path, trainer: dict[str, str]) -> None:
    jobs = [job(tmp_path, "a", "fails", skipped=True), job(tmp_path, "b", "ends")]
    ended = JobQueue(jobs, [Slot(name="card 0", environ=trainer)], ignore).run()
    assert [(one.state, one.reason) for one in ended] == [("skipped", "finished earlier"), ("done", "")]
    assert not (tmp_path / "a").exists()


def test_an_interrupted_queue_lets_its_jobs_save(tmp_path: Path, trainer: dict[str, str]) -> None:
    def interrupt(_: Sequence[JobStatus]) -> None:
        if (tmp_path / "a" / "ready").exists():
            raise KeyboardInterrupt

    queue = JobQueue(
        [job(tmp_path, "a", "waits"), job(tmp_path, "b", "ends")], [Slot(name="card 0", environ=trainer)], interrupt
    )
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        queue.run()
    assert time.monotonic() - started < 25
    assert (tmp_path / "a" / "saved").exists()
    assert [(one.state, one.step) for one in queue.status()] == [("stopped", 2), ("waiting", None)]


def test_slots_of_cards_follow_the_visible_ones() -> None:
    assert [slot.environ for slot in card_slots("5,7", 2)] == [
        {"CUDA_VISIBLE_DEVICES": "5"},
        {"CUDA_VISIBLE_DEVICES": "7"},
    ]
    assert [slot.name for slot in card_slots(None, 3)] == ["card 0", "card 1", "card 2"]


def test_slots_of_cores_share_them() -> None:
    assert [slot.environ for slot in core_slots(3, 8)] == [{"OMP_NUM_THREADS": "2"}] * 3
    assert len(core_slots(9, 2)) == 2
