from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.unit.factories import make_cluster, make_job, make_model, make_plan, make_run_folder

from shardwise.errors import UsageError
from shardwise.report.folder import PARTS, RunFolder, read_folder
from shardwise.report.html import report_page
from shardwise.vocabulary import codec
from shardwise.vocabulary.ledger import Ledger, LedgerRow
from shardwise.vocabulary.measured import Measured, Sample
from shardwise.vocabulary.plan import Advice, Fact, Refusal

HOSTILE = "</title></style></textarea>\"'><img src=x onerror=alert(1)><script>alert(2)</script>&\x00\u202e"
VOID = {"meta", "br", "img", "link", "hr", "col", "input"}


class Outline(HTMLParser):
    """Tags, attributes and text of a page; fails on tags that do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _value in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(page)
    parser.close()
    assert not parser.open
    return parser


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run_folder(tmp_path / "run")


def test_a_whole_folder_makes_every_section(folder: Path) -> None:
    found = read_folder(folder)
    assert found.notes == ()
    page = report_page(found)
    text = " ".join(outline(page).text)
    titles = re.findall(r"<h2>([^<]+)</h2>", page)
    assert titles == [
        "Memory of one card", "One optimizer step", "Loss", "A sample answer", "Predicted and measured",
        "Ways to split it", "What it rests on", "Run it again",
    ]  # fmt: skip
    for part in (
        "qwen2.5-1.5b on 2 × rtx-5090", "ZeRO-2", "2.04 s", "predicted 1.92 s (-5.9 %)", "+31.2 %",
        "Sharding is a way to", "tensor_parallel_needs_a_fast_link", "LoRA needs 5.1 GB", "nvidia-smi, driver 580",
        "torch 2.13.0",
        "shardwise train plan.yaml --data chats.jsonl", "Held-out loss fell",
    ):  # fmt: skip
        assert part in text, part


def test_the_page_loads_nothing_and_runs_nothing(folder: Path) -> None:
    page = report_page(read_folder(folder))
    seen = outline(page)
    assert not {"script", "link", "img", "iframe", "object", "embed", "form", "base"} & set(seen.tags)
    assert not {name for name in seen.attributes if name.startswith("on") or name in ("src", "href", "action", "style")}
    assert not re.search(r"url\(|@import|https?://", re.sub(r"<t[dh][^>]*>[^<]*|xmlns=\S+", "", page))
    assert "default-src &#x27;none&#x27;" in page
    assert len(page) < 200_000


def test_hostile_text_stays_text_everywhere() -> None:
    plan = make_plan(
        job=make_job(model=make_model(name=HOSTILE)),
        cluster=make_cluster(assumptions=(HOSTILE,), versions={HOSTILE: HOSTILE}),
        reason=HOSTILE,
        rules=(HOSTILE,),
        refusals=(Refusal(strategy=None, rule=HOSTILE, message=HOSTILE),),
        advice=(Advice(rule=HOSTILE, message=HOSTILE, command=HOSTILE, price=HOSTILE),),
        facts=(Fact(name=HOSTILE, value=HOSTILE, source=HOSTILE),),
        headline=tuple(dataclasses.replace(h, name=HOSTILE, formula=HOSTILE) for h in make_plan().headline),
        version=HOSTILE,
    )
    ledger = Ledger(
        strategy_name=HOSTILE,
        rows=(LedgerRow(kind="memory", name=HOSTILE, unit="bytes", predicted=1.0, note=HOSTILE),),
        versions={HOSTILE: HOSTILE},
    )
    measured = Measured(samples=(Sample(prompt=HOSTILE, before=HOSTILE, after=HOSTILE),), command=HOSTILE)
    run = RunFolder(
        path=Path(HOSTILE.replace("\x00", "")), plan=plan, ledger=ledger, measured=measured, notes=(HOSTILE,)
    )
    page = report_page(run)
    seen = outline(page)
    assert not {"script", "img", "textarea"} & set(seen.tags)
    assert "onerror" not in seen.attributes
    assert "\x00" not in page
    assert sum("<script>alert(2)" in text for text in seen.text) > 20


@pytest.mark.parametrize("name", list(PARTS))
def test_a_missing_part_is_named_and_the_rest_is_shown(folder: Path, name: str) -> None:
    (folder / name).unlink()
    found = read_folder(folder)
    assert found.notes == (f"{name} is missing: {PARTS[name]} cannot be shown",)
    page = report_page(found)
    outline(page)
    assert found.notes[0] in page


@pytest.mark.parametrize("name", ["plan.yaml", "ledger.json", "measured.json"])
@pytest.mark.parametrize("text", ["{", "[]", "a: 1", "\x00", "{}"])
def test_a_broken_part_is_named_and_the_rest_is_shown(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    found = read_folder(folder)
    if (name, text) != ("measured.json", "{}"):  # a meter that measured nothing
        assert found.notes[0].startswith(f"{name} cannot be read: ")
    outline(report_page(found))


def test_metrics_survive_a_killed_and_a_resumed_run(folder: Path) -> None:
    lines = [
        {"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": 9.0}, {"step": 3, "loss": 1.5},
        {"step": 3, "eval_loss": 1.7}, {"train/global_step": 4, "train/loss": 1.4, "eval/loss": 1.6}, {"loss": 1.0},
        {"step": 5, "loss": None}, {"step": True, "loss": 1.0}, [1],
    ]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6, "lo'
    (folder / "metrics.jsonl").write_text(text)
    found = read_folder(folder)
    assert found.curves.train == ((1, 3.0), (2, 2.0), (3, 1.5), (4, 1.4))
    assert found.curves.held_out == ((3, 1.7), (4, 1.6))
    assert found.notes == ("metrics.jsonl: 4 lines without a step left out",)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds none of plan\.yaml, ledger\.json"):
        read_folder(tmp_path)
    with pytest.raises(UsageError, match="is not a folder"):
        read_folder(tmp_path / "nowhere")


def test_a_plan_that_nothing_fits_makes_a_page(folder: Path) -> None:
    (folder / "plan.yaml").write_text(codec.to_yaml(make_plan(recommended=None, reason="The smallest needs 60 GB.")))
    page = report_page(read_folder(folder))
    outline(page)
    assert "Nothing fits" in page
    assert "The smallest needs 60 GB." in page


def test_held_out_loss_that_rose_is_said(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 1, "eval_loss": 1.0}\n{"step": 2, "eval_loss": 1.5}\n')
    assert "Held-out loss did not fall: 1.000 to 1.500." in report_page(read_folder(folder))
