"""The page of several jobs, their command lines, and what cannot run side by side."""

import dataclasses
import io
import shlex
from pathlib import Path

import pytest
from tests.unit.factories import make_plan

from shardwise.cli import one_per_card, train, train_options
from shardwise.cli.main import main
from shardwise.cli.one_per_card import JobPage, table
from shardwise.cli.options import parse, spelled
from shardwise.errors import UsageError
from shardwise.report.style import Style
from shardwise.verify.queue import JobStatus, QueuedJob
from shardwise.vocabulary import codec


def status(name: str, state: str, step: int | None = None, **changes: object) -> JobStatus:
    job = QueuedJob(name=name, words=(), folder=Path("runs") / name)
    usual = JobStatus(job=job, state="waiting", step=step, num_steps=None if step is None else 20)
    return dataclasses.replace(usual, state=state, **changes)


@pytest.mark.parametrize(
    "line",
    [
        "run.yaml --max-steps 5",
        "a b c --one-per-card --resume --data chats.jsonl",
        "m --no-bf16 --packing --lora-target-modules q_proj v_proj --column-map q=prompt a=completion",
        "m --gradient-checkpointing selective --learning-rate 1e-05 --zero-stage=null",
    ],
)
def test_options_are_spelled_as_they_were_given(line: str) -> None:
    options = parse(train_options.Options, line.split())
    assert parse(train_options.Options, spelled(options)) == options


def test_a_job_of_the_queue_is_a_train_of_its_own() -> None:
    options = parse(
        train_options.Options,
        shlex.split("a.yaml b.yaml --one-per-card --resume --gpus 4xh100 --max-steps 5 --out all"),
    )
    words = one_per_card.job_of(options, "b.yaml", Path("all/b"), Path("one-card.yaml")).words
    assert " ".join(words) == "b.yaml --out all/b --resume --cluster one-card.yaml --max-steps 5"


def test_the_table_tells_every_job() -> None:
    jobs = [
        status("a.yaml", "done", 20, loss=1.25, eval_loss=1.5, tokens_per_s=12000.0, slot="card 0", seconds=61.0),
        status("b.yaml", "failed", reason="exit code 2: no data"),
        status("c.yaml", "waiting"),
    ]
    lines = table(jobs, Style())
    assert lines[0].split() == ["job", "state", "on", "step", "loss", "held-out", "tokens/s", "time", "folder"]
    assert lines[1].split()[:7] == ["a.yaml", "done", "card", "0", "20/20", "1.2500", "1.5000"]
    assert len(lines) == 4


def test_without_a_terminal_lines_come_when_something_has_changed() -> None:
    stream = io.StringIO()
    page = JobPage(stream)
    page([status("a", "waiting")])
    for step in (1, 1, 2, 3, 4):
        page([status("a", "running", step, loss=2.0, slot="card 0")])
    page([status("a", "failed", 4, reason="exit code 1: no answer.")])
    assert stream.getvalue().splitlines() == [
        "a: running | card 0 | step 1/20 | loss 2.0000",
        "a: running | card 0 | step 2/20 | loss 2.0000",
        "a: running | card 0 | step 4/20 | loss 2.0000",
        "a: failed | step 4/20 | exit code 1: no answer.",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_page_renews_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    stream = Terminal()
    page = JobPage(stream)
    page([status("a", "running", 1)])
    page([status("a", "running", 2)])
    assert stream.getvalue().count("\033[2A") == 1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(f"{name}.yaml").write_text("model_name_or_path: m\ndataset_name: chats.jsonl\n")
    Path("two.yaml").write_text(codec.to_yaml(make_plan()))
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a.yaml b.yaml", "a.yaml and b.yaml would all write to runs/latest; give each an output_dir"),
        ("a.yaml a.yaml", "a.yaml is named 2 times"),
        ("a.yaml two.yaml --data x.jsonl --out all", "two.yaml is a plan for 2 cards"),
        ("two.yaml --out all", "two.yaml names nothing to train on"),
    ],
)
def test_what_cannot_run_side_by_side_is_said_first(line: str, words: str) -> None:
    options = parse(train_options.Options, [*line.split(), "--one-per-card"])
    with pytest.raises(UsageError) as told:
        one_per_card.run_jobs(options, _flags(options))
    assert words in str(told.value)


def _flags(options: train_options.Options) -> dict[str, object]:
    return {key: value for key, value in train.key_flags(options).items() if key != "output_dir"}


def test_several_targets_need_the_word(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert folder.is_dir()
    assert main(["train", "a.yaml", "b.yaml"]) == 2
    assert "2 targets are given; to run each on a card of its own say --one-per-card" in capsys.readouterr().err
