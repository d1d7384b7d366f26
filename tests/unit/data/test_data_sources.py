from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from data_helpers import Write

from shardwise.errors import DataError
from shardwise.trainer.data import sources
from shardwise.trainer.data.options import DataOptions
from shardwise.trainer.data.sources import Problems, open_source, refuse_split

ROWS = [{"text": "one", "n": 1}, {"text": "two", "n": 2}, {"text": "three", "n": 3}]


def read(path: str) -> tuple[list[tuple[int, dict[str, Any]]], tuple[str, ...]]:
    source = open_source(DataOptions(source=path))
    problems = Problems(source.name, source.unit)
    return [(row.number, dict(row.columns)) for row in source.rows(problems)], problems.lines()


def test_jsonl_with_mark_blank_lines_and_windows_ends(write: Write) -> None:
    rows, problems = read(write(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "t\xc3\xbc"}'))
    assert rows == [(1, {"text": "one"}), (3, {"text": "tü"})]
    assert problems == ()


def test_every_bad_line_is_named_and_the_others_are_read(write: Write) -> None:
    rows, problems = read(
        write(
            b'{"text": 1}\n{"text": \n[1]\n{"text": "\xff"}\nnull\n'
            + b"[" * 100_000
            + b'\n{"n": '
            + b"9" * 5000
            + b'}\n{"text": "last"}\n'
        )
    )
    assert rows == [(1, {"text": 1}), (8, {"text": "last"})]
    assert [line.split(": ")[0] for line in problems] == [f"line {number}" for number in range(2, 8)]
    assert "not valid JSON" in problems[0]
    assert "is a JSON list, not an object" in problems[1]
    assert "not UTF-8: byte 0xff at position 11" in problems[2]
    assert "is a JSON null" in problems[3]
    assert "nested too deeply" in problems[4]
    assert "not usable JSON" in problems[5]


def test_an_endless_line_is_skipped_and_not_held(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1000)
    rows, problems = read(write(b'{"text": "' + b"x" * 5_000_000 + b'"}\n{"text": "two"}\n'))
    assert rows == [(2, {"text": "two"})]
    assert problems == ("line 1: is 5 MB long, more than the limit of 1 KB a line",)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ROWS),
        json.dumps({"data": ROWS}, indent=2),
        "".join(json.dumps(row) + "\n" for row in ROWS),
    ],
)
def test_json_in_its_three_shapes(write: Write, text: str) -> None:
    rows, _ = read(write(text, "data.json"))
    assert [columns for _, columns in rows] == ROWS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"a": 1},\n {"a" 2}]', "line 2, column 7: not valid JSON"),
        (b'[\n"\xfe"]', "line 2: is not UTF-8"),
        (b"3", "holds a JSON number; expected a list of objects"),
    ],
)
def test_broken_json_names_the_line(write: Write, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(write(content, "data.json"))


def test_csv_with_line_breaks_and_bad_records(write: Write) -> None:
    rows, problems = read(
        write(b'prompt,completion\n"a\nb",c\nonly\n\xff,x\nd,"e ""f"""\n' + b"x" * 200_000 + b",y\n", "data.csv")
    )
    assert rows[:2] == [(2, {"prompt": "a\nb", "completion": "c"}), (6, {"prompt": "d", "completion": 'e "f"'})]
    assert len(rows[2][1]["prompt"]) == 200_000
    assert problems == (
        "line 4: has 1 columns, the header has 2 (prompt, completion)",
        "line 5: is not UTF-8: byte 0xff at position 1",
    )


def test_compressed_tsv_and_a_damaged_archive(tmp_path: Path) -> None:
    path = tmp_path / "data.tsv.gz"
    path.write_bytes(gzip.compress(b"a\tb\n1\t2\n"))
    assert read(str(path))[0] == [(2, {"a": "1", "b": "2"})]
    content = gzip.compress(b'{"text": "x"}\n' * 5000, 0)
    (tmp_path / "cut.jsonl.gz").write_bytes(content[: len(content) // 2])
    assert "cannot be read: Compressed file ended" in read(str(tmp_path / "cut.jsonl.gz"))[1][0]


def test_parquet_arrow_and_saved_folders(tmp_path: Path) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.feather as feather
    import pyarrow.parquet as parquet

    table = pa.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "a.parquet")
    feather.write_feather(table, tmp_path / "file.arrow", compression="uncompressed")
    with pa.OSFile(str(tmp_path / "stream.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "folder")
    for name in ("a.parquet", "file.arrow", "stream.arrow", "folder"):
        assert read(str(tmp_path / name))[0] == list(enumerate(ROWS, 1)), name
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match=r"bad\.parquet cannot be read"):
        read(str(tmp_path / "bad.parquet"))


@pytest.mark.parametrize("suffix", ["#2", "[:2]"])
def test_the_first_rows(write: Write, suffix: str) -> None:
    assert len(read(write(ROWS) + suffix)[0]) == 2


def test_content_hash_follows_the_content_and_the_limit(write: Write) -> None:
    def content_hash(path: str) -> str:
        return open_source(DataOptions(source=path)).content_hash()

    first = write(ROWS)
    assert content_hash(first) == content_hash(write(ROWS, "other.jsonl"))
    assert content_hash(first) != content_hash(first + "#2")
    assert content_hash(first) != content_hash(write(ROWS[:2], "third.jsonl"))


def test_places_that_are_no_source(tmp_path: Path, write: Write) -> None:
    write(ROWS, "chats.jsonl")
    with pytest.raises(DataError, match=r"No such data file: .*chat\.jsonl\. Did you mean chats\.jsonl"):
        read(str(tmp_path / "chat.jsonl"))
    with pytest.raises(DataError, match=r"ends in \.txt; known are \.arrow, \.csv"):
        read(write("x", "a.txt"))
    with pytest.raises(DataError, match="is empty: no row"):
        read(write(b"", "empty.jsonl"))


def test_a_hub_id_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the Hub\nlong story")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(
        DataError, match=r"'someone/set' \(split 'train'\) cannot be loaded: Couldn't reach the Hub\. It"
    ):
        read("someone/set")


def test_a_hub_id_with_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: dict[str, object] = {}

    def load(path: str, **more: object) -> Any:
        asked.update(path=path, **more)
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(read("someone/set#3")[0]) == 3
    assert asked == {"path": "someone/set", "name": None, "split": "train[:3]", "streaming": False}


def test_problems_are_capped_and_counted() -> None:
    problems = Problems("chats.jsonl", "line")
    for number in range(1, 48):
        problems.add(number, "is wrong")
        problems.add(number, "twice")
    text = str(problems.error())
    assert text.startswith(
        "chats.jsonl: 47 lines cannot be used (the first 10 are shown):\n  line 1: is wrong; twice\n"
    )
    assert text.count("is wrong") == 10
    assert "skip_bad_rows: true" in text


def test_a_split_without_effect_is_refused(write: Write, tmp_path: Path) -> None:
    path = write([{"text": "a"}])
    with pytest.raises(DataError, match="is a file and has no split 'test': all of it would be read"):
        refuse_split(path, "test")
    with pytest.raises(DataError, match="is a file"):
        refuse_split(f"{path}#3", "test")
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match="is a folder with one set and has no split"):
        refuse_split(str(tmp_path), "test")
    refuse_split("somebody/some-set", "test")
