"""Streams: windows that do not depend on ranks, every sample once, and going on at the very next sample."""

from __future__ import annotations

import gzip
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from data_helpers import MakeTokenizer, Write

from shardwise.errors import ConfigError, DataError, PlanMismatchError
from shardwise.trainer.data import stream
from shardwise.trainer.data.batches import BatchOptions
from shardwise.trainer.data.encode import Encoder
from shardwise.trainer.data.options import DataOptions
from shardwise.trainer.data.sources import Place, Problems, open_source
from shardwise.trainer.data.stream import StreamPlan, plan_stream

ROWS = [{"prompt": f"q{index}", "completion": " hello" * (1 + index * 7 % 5)} for index in range(50)]
MakePlan = Callable[..., StreamPlan]


@pytest.fixture
def make_plan(make_tokenizer: MakeTokenizer, monkeypatch: pytest.MonkeyPatch) -> MakePlan:
    monkeypatch.setattr(stream, "WINDOW_STEPS", 3)
    monkeypatch.setattr(stream, "CHUNK_ROWS", 7)
    tokenizer = make_tokenizer()

    def make(source: str, num_ranks: int = 1, **more: Any) -> StreamPlan:
        options: dict[str, Any] = {"global_batch": 4, "micro_batch": 1, "max_steps": 12, "max_length": 32, **more}
        skips = options.pop("skip_bad_rows", False)
        data = DataOptions(source=source, streaming=True, max_length=32, skip_bad_rows=skips)
        return plan_stream(data, tokenizer, BatchOptions(num_ranks=num_ranks, **options), lambda _: None)

    return make


def rows_of_rank(plan: StreamPlan, step: int, rank: int) -> list[int]:
    """Numbers in the source of what a rank computes in a step."""
    numbers = plan.set_at(step).rows
    return [int(numbers[sample]) for micro in plan.for_rank(step, rank) for sample in micro.sample_ids]


def rows_of_step(plan: StreamPlan, step: int) -> list[int]:
    return [row for rank in range(plan.options.num_ranks) for row in rows_of_rank(plan, step, rank)]


@pytest.mark.parametrize("packing", [False, True])
def test_every_sample_once_on_any_number_of_ranks(make_plan: MakePlan, write: Write, *, packing: bool) -> None:
    path = write(ROWS)
    plans = [make_plan(path, ranks, packing=packing) for ranks in (1, 2, 3)]
    assert len({plan.fingerprint for plan in plans}) == 1
    assert len({plan.layout_fingerprint for plan in plans}) == 3
    seen: list[int] = []
    for step in range(12):
        steps = [rows_of_step(plan, step) for plan in plans]
        assert sorted(steps[0]) == sorted(steps[1]) == sorted(steps[2])
        assert plans[0].num_supervised_tokens(step) == plans[2].num_supervised_tokens(step) > 0
        counts = {len(plans[2].for_rank(step, rank)) for rank in range(3)}
        assert counts == {plans[2].num_micro_steps(step)}
        if plans[0].epoch(step) == 0:
            seen += steps[0]
    assert len(seen) == len(set(seen))
    assert set(seen) <= set(range(1, 51))
    assert packing or seen[:4] != [1, 2, 3, 4]  # shuffled within the window


def test_a_stream_that_ends_starts_again(make_plan: MakePlan, write: Write) -> None:
    plan = make_plan(write(ROWS[:10]), max_steps=6)
    steps = [rows_of_step(plan, step) for step in range(6)]
    passes = [sorted(itertools.chain.from_iterable(part)) for part in (steps[:3], steps[3:])]
    assert passes == [list(range(1, 11))] * 2
    assert [plan.epoch(step) for step in range(6)] == [0, 0, 0, 1, 1, 1]
    assert steps[:3] != steps[3:]


NOTHING: dict[str, Any] = {"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}
ONE: dict[str, Any] = {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}


@pytest.mark.parametrize("tail", [[], [NOTHING], [{"input_ids": "no"}]], ids=["none", "nothing to learn", "bad"])
def test_a_window_may_end_with_the_last_row(make_plan: MakePlan, write: Write, tail: list[dict[str, Any]]) -> None:
    """12 rows are one window; behind it the stream starts again, also for a run that goes on there."""
    path = write([ONE] * 12 + tail)
    plan = make_plan(path, skip_bad_rows=True)
    steps, epochs = list[list[int]](), list[int]()
    for step in range(12):
        steps.append(rows_of_step(plan, step))
        epochs.append(plan.epoch(step))
    for first in range(0, 12, 3):
        assert sorted(itertools.chain.from_iterable(steps[first : first + 3])) == list(range(1, 13))
    assert epochs == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    for step in (9, 11):
        other = make_plan(path, 2, skip_bad_rows=True)
        other.resume(plan.state(step))
        assert sorted(rows_of_step(other, step)) == sorted(steps[step])
        assert other.epoch(step) == 3


@pytest.mark.parametrize("zipped", [False, True])
def test_a_file_that_was_cut_off_is_not_gone_on_with(make_plan: MakePlan, tmp_path: Path, *, zipped: bool) -> None:
    """Not even at its first row, as a stream does that has come to its end."""
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    path = tmp_path / ("data.jsonl.gz" if zipped else "data.jsonl")
    path.write_bytes(gzip.compress(lines) if zipped else lines)
    plan = make_plan(str(path))
    rows_of_step(plan, 8)
    state, short = plan.state(8), b"".join(lines.splitlines(keepends=True)[:20])
    path.write_bytes(gzip.compress(short) if zipped else short)
    with pytest.raises(DataError, match="ends at line 20, but had been read up to 24"):
        make_plan(str(path)).resume(state)


def as_lines(write: Write, tmp_path: Path) -> str:
    del tmp_path
    return write(ROWS)


def as_gzip(write: Write, tmp_path: Path) -> str:
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress(Path(write(ROWS)).read_bytes()))
    return str(path)


def as_csv(write: Write, tmp_path: Path) -> str:
    del tmp_path
    lines = "".join(f'{row["prompt"]},"{row["completion"]}\n"\n' for row in ROWS)  # records of two lines
    return write("prompt,completion\n" + lines, "data.csv")


def as_parquet(write: Write, tmp_path: Path) -> str:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    library: Any = parquet
    table: Any = pa.Table.from_pylist(ROWS)
    library.write_table(table, tmp_path / "data.parquet", row_group_size=8)
    return str(tmp_path / "data.parquet")


def as_list(write: Write, tmp_path: Path) -> str:
    del tmp_path
    return write(json.dumps(ROWS), "data.json")


@pytest.mark.parametrize("make_source", [as_lines, as_gzip, as_csv, as_parquet, as_list])
def test_going_on_elsewhere_draws_the_same_samples(
    make_plan: MakePlan, write: Write, tmp_path: Path, make_source: Callable[[Write, Path], str]
) -> None:
    path = make_source(write, tmp_path)
    whole = make_plan(path)
    steps, saved = [rows_of_step(whole, step) for step in range(12)], dict[int, Any]()
    again = make_plan(path)
    for step in range(12):
        rows_of_step(again, step)
        saved[step] = again.state(step)
    for step in (0, 2, 3, 7, 11):
        other = make_plan(path, 3, micro_batch=2)
        assert other.resume(saved[step]) == step
        assert [sorted(rows_of_step(other, later)) for later in range(step, 12)] == [
            sorted(rows) for rows in steps[step:]
        ]


def test_a_file_of_lines_is_entered_in_the_middle(
    make_plan: MakePlan, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(ROWS)
    plan = make_plan(path)
    for step in range(8):
        plan.for_rank(step, 0)
    state = plan.state(8)
    place = json.loads(state.cursor)["place"]
    assert Path(path).read_bytes()[: place["byte"]].count(b"\n") == place["number"] == 24
    other, read = make_plan(path), list[int]()
    source = open_source(DataOptions(source=path))
    assert next(source.read(Problems("x", "line"), Place(**place))).number == 25
    tokenize = Encoder.encode

    def encode(self: Any, examples: Any) -> Any:
        read.extend(one.number for one in examples)
        return tokenize(self, examples)

    monkeypatch.setattr(Encoder, "encode", encode)
    other.resume(state)
    assert min(read) == 25  # nothing before it was parsed or tokenized


def test_resuming_waits_for_what_is_being_read_ahead(
    make_plan: MakePlan, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two readers of one source at once would draw each other's rows."""
    path, busy, most = write(ROWS), list[int](), list[int]()
    read = stream.WindowReader.read

    def slow(self: Any, start: stream.Cursor) -> stream.Window:
        busy.append(start.number)
        most.append(len(busy))
        time.sleep(0.05)
        try:
            return read(self, start)
        finally:
            busy.pop()

    whole = make_plan(path)
    steps = [rows_of_step(whole, step) for step in range(12)]
    state = whole.state(8)
    monkeypatch.setattr(stream.WindowReader, "read", slow)
    other = make_plan(path)
    assert other.set_at(0)  # the next window is being read from here on
    other.resume(state)
    assert [rows_of_step(other, step) for step in range(8, 12)] == steps[8:]
    assert max(most) == 1


def test_a_hub_stream_goes_on(make_plan: MakePlan, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    library: Any = datasets
    asked: list[dict[str, Any]] = []

    def load(path: str, **options: Any) -> Any:
        asked.append({"path": path, **options})
        return library.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=3)

    monkeypatch.setattr(library, "load_dataset", load)
    plan = make_plan("somebody/some-set")
    steps = [rows_of_step(plan, step) for step in range(12)]
    assert asked[0] == {"path": "somebody/some-set", "name": None, "split": "train", "streaming": True}
    assert len(asked) == 1
    other = make_plan("somebody/some-set", 2)
    assert other.resume(plan.state(10)) == 10
    assert [sorted(rows_of_step(other, step)) for step in (10, 11)] == [sorted(rows) for rows in steps[10:]]


def test_max_steps_is_needed(make_plan: MakePlan, write: Write) -> None:
    with pytest.raises(ConfigError, match="streaming: true needs max_steps: nobody knows where a stream ends"):
        make_plan(write(ROWS), max_steps=None)


def test_another_stream_or_batch_is_refused(make_plan: MakePlan, write: Write) -> None:
    path = write(ROWS)
    state = make_plan(path).state(1)
    with pytest.raises(PlanMismatchError, match="global batch has changed"):
        make_plan(path, global_batch=5).resume(state)
    with pytest.raises(PlanMismatchError, match="the data file"):
        make_plan(write(ROWS[1:])).resume(state)


def test_a_bad_row_far_behind_ends_the_run_when_it_comes(make_plan: MakePlan, write: Write) -> None:
    rows: list[Any] = [*ROWS[:20], {"prompt": 3, "completion": "x"}, *ROWS[20:]]
    plan = make_plan(write(rows))
    assert rows_of_step(plan, 0)
    with pytest.raises(DataError, match="line 21: prompt is a number, not text"):
        plan.for_rank(8, 0)
    skipping = make_plan(write(rows), skip_bad_rows=True)
    seen = [row for step in range(12) for row in rows_of_step(skipping, step)]
    assert 21 not in seen
    assert "4 windows read, 49 rows, 48 samples; 0 rows cut" in skipping.account()
    assert "1 bad rows left out" in skipping.account()
    assert len(set(seen)) == 48


def test_few_windows_are_kept_and_nothing_is_read_far_ahead(
    make_plan: MakePlan, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = open_source

    def opened(options: DataOptions) -> Any:
        source = original(options)

        def rows(problems: Any, after: Any) -> Iterator[Any]:
            for row in source.read(problems, after):
                read.append(row.number)
                yield row

        return type(source)(
            name=source.name, unit=source.unit, read=rows, content_hash=source.content_hash, limit=source.limit
        )

    monkeypatch.setattr(stream, "open_source", opened)
    plan = make_plan(write(ROWS), max_steps=3)
    assert max(read) == 14  # the window's 12 rows, in chunks of 7
    plan.for_rank(2, 0)
    with pytest.raises(IndexError, match="outside the plan of 3 steps"):
        plan.for_rank(3, 0)


def test_the_start_of_a_run_in_words(make_plan: MakePlan, write: Write) -> None:
    assert make_plan(write(ROWS), 2).describe() == (
        "1 x 2 x 2 ranks for 4 sequences a step, about 24 tokens; 12 steps of a stream, read in windows of 3 steps"
    )
