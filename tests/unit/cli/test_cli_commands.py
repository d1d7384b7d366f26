from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.unit.factories import make_plan, make_run_folder

from shardwise.cli import train, train_options
from shardwise.cli.main import main
from shardwise.cli.options import parse
from shardwise.cli.target import keys_of, read_target
from shardwise.errors import ConfigError, MissingExtraError, PlanMismatchError, UsageError
from shardwise.vocabulary import codec
from shardwise.vocabulary.plan import Plan
from shardwise.vocabulary.run import RunFile

SMALL = ("plan", "qwen2.5-0.5b", "--gpus", "2xrtx-4090")


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(codec.to_yaml(make_plan()))
    return path


# ------------------------------------------------------------------------------------------------------------ plan


def test_plan_prints_a_page_and_writes_a_plan_that_reads_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "plan.yaml"
    assert main([*SMALL, "--tuning", "full", "--out", str(out)]) == 0
    page, words = capsys.readouterr()
    plan = codec.read_noun(Plan, out)
    assert plan.recommended is not None
    assert f"▸ {plan.recommended.strategy.name}" in page
    assert words == f"wrote {out}\n"


def test_plan_as_json_is_all_that_stdout_carries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main([*SMALL, "--json", "--out", str(out)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["recommended"]["fits"] is True
    assert data["recommended"]["memory"]["device_bytes"] == codec.read_noun(Plan, out).recommended.memory.device_bytes  # type: ignore[union-attr]  # a missing plan fails the test as well


def test_nothing_fits_has_its_own_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-70b", "--gpus", "rtx-4090", "--tuning", "full"]) == 3
    assert "Nothing fits." in capsys.readouterr().out
    assert main(["plan", "llama-3.1-70b", "--gpus", "rtx-4090", "--tuning", "full", "--json"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out)["recommended"] is None
    assert err.startswith("shardwise: ")


def test_micro_batch_and_accumulation_decide_the_global_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--micro-batch", "2", "--accumulation", "3", "--tuning", "full"]) == 0
    assert "micro-batch 2 × accumulation 3 × 2 data-parallel ranks = 12 sequences" in capsys.readouterr().out


def test_the_usual_batch_divides_over_the_cards(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "qwen2.5-0.5b", "--gpus", "3xrtx-4090", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["global_batch_size"] == 33


def test_a_cluster_file_takes_the_place_of_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(codec.to_yaml(make_plan().cluster))
    assert main(["plan", "qwen2.5-0.5b", "--cluster", str(file)]) == 0
    assert "2 × rtx-5090" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------- report


def test_report_writes_a_page_into_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run_folder(tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert capsys.readouterr() == ("", f"wrote {folder / 'report.html'}\n")


def test_report_draws_a_plan(plan_file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    assert main(["report", "--plan", str(plan_file), "--svg", str(picture)]) == 0
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert not list(tmp_path.glob("*.html"))


def test_report_as_text_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run_folder(tmp_path / "run")
    (folder / "measured.json").unlink()
    assert main(["report", str(folder), "--text"]) == 0
    out, err = capsys.readouterr()
    assert "▸ ZeRO-2" in out
    assert "Predicted and measured" in out
    assert "measured.json is missing" in out
    assert err == ""
    assert not (folder / "report.html").exists()


def test_report_says_where_it_cannot_write(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--plan", str(plan_file), "--svg", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main(["report", "--plan", str(plan_file)]) == 2
    assert "say --out FILE.html, --svg FILE.svg or --text" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- train


def test_a_model_is_a_target(tmp_path: Path) -> None:
    target = read_target("Qwen/Qwen2.5-0.5B", {"dataset_name": "chats.jsonl"})
    assert target.plan is None
    assert (target.run.model_name_or_path, target.run.dataset_name) == ("Qwen/Qwen2.5-0.5B", "chats.jsonl")
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    assert read_target(str(config), {}).run.model_name_or_path == str(config)


def test_a_run_file_is_a_target(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: m\nmax_length: 64\n")
    run = read_target(str(file), {"max_length": 128}).run
    assert (run.model_name_or_path, run.max_length) == ("m", 128)
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read"):
        read_target(str(tmp_path / "nowhere.yaml"), {})


def test_a_plan_decides_the_keys_it_rests_on(plan_file: Path) -> None:
    target = read_target(str(plan_file), {"dataset_name": "chats.jsonl", "max_steps": 3})
    assert target.plan == make_plan()
    run = target.run
    assert (run.per_device_train_batch_size, run.gradient_accumulation_steps, run.zero_stage) == (2, 8, 2)
    assert (run.max_length, run.tuning, run.max_steps) == (2048, "full", 3)
    with pytest.raises(PlanMismatchError) as caught:
        read_target(str(plan_file), {"max_length": 128, "lora_r": 16, "zero_stage": 3})
    assert len(caught.value.problems) == 2
    assert "rests on max_length = 2048, and 128 is asked for; plan again with --seq 128, or" in caught.value.problems[0]


def test_both_spellings_of_checkpointing_are_the_same(plan_file: Path) -> None:
    assert read_target(str(plan_file), {"gradient_checkpointing": False}).run.zero_stage == 2
    with pytest.raises(PlanMismatchError):
        read_target(str(plan_file), {"gradient_checkpointing": True})


def test_a_plan_without_a_recommendation_cannot_run() -> None:
    with pytest.raises(ConfigError, match="nothing to run: too large"):
        keys_of(make_plan(recommended=None, reason="too large"))


def test_an_earlier_run_goes_on_with_its_own_plan(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "run")
    run = RunFile(model_name_or_path="m", dataset_name="d", output_dir="elsewhere", resume_from_checkpoint=True)
    (folder / "run.yaml").write_text(codec.to_yaml(run))
    target = read_target(str(folder), {"max_steps": 40})
    assert target.plan == make_plan()
    assert (target.run.output_dir, target.run.max_steps) == (str(folder), 40)
    assert target.run.resume_from_checkpoint is False  # only if this command line says so
    with pytest.raises(PlanMismatchError, match="max_length = 1024, and 99 is asked for"):
        read_target(str(folder), {"max_length": 99})


def test_short_flags_of_train_are_keys() -> None:
    options = parse(train_options.Options, ["m", "--data", "d.jsonl", "--out", "runs/x", "--resume", "--seed", "7"])
    assert train.key_flags(options) == {
        "seed": 7, "dataset_name": "d.jsonl", "output_dir": "runs/x", "resume_from_checkpoint": True,
    }  # fmt: skip
    with pytest.raises(UsageError, match="--data and --dataset-name are the same"):
        train.key_flags(parse(train_options.Options, ["m", "--data", "a", "--dataset-name", "b"]))


def test_train_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(train, "NEEDED", ("a_module_that_is_not_there",))
    assert main(["train", "qwen2.5-0.5b"]) == 2
    assert 'pip install "shardwise[train]"' in capsys.readouterr().err
    with pytest.raises(MissingExtraError):
        train.require_training()


def test_train_needs_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "qwen2.5-0.5b"]) == 2
    assert "name a file, a hub id or random:N with --data" in capsys.readouterr().err


def test_ranks_of_a_launcher_need_one_plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    variables: dict[str, Any] = {
        "RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "localhost", "MASTER_PORT": 29500,
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert main(["train", "qwen2.5-0.5b", "--data", "random:4"]) == 2
    assert "torchrun started 2 ranks" in capsys.readouterr().err


def test_every_key_of_a_run_file_is_a_flag_of_train() -> None:
    names = {field.name for field in dataclasses.fields(RunFile)}
    words = [f"--{name}=a=1" for name in sorted(names)]
    given = parse(train_options.Options, ["m", *words]).keys
    assert set(given) == names


# ------------------------------------------------------------------------------------------------------------ data


def test_data_show_marks_bad_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": \n{"prompt": "c", "completion": "d"}\n')
    assert main(["data", "show", str(file)]) == 0
    out = capsys.readouterr().out
    assert "2 rows" in out
    assert "line 2" in out
    assert main(["data", "show", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_bad_rows"] == 1
    assert main(["data", "show", str(file), "--split", "test"]) == 2
    assert "is a file and has no split 'test'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--bytes", "1e999GB"], "more than the limit of 1,152,921,504,606,846,976 bytes"),
        (["--bytes", "1GB", "--ranks", "99999999999999"], "--ranks must be at most 65,536"),
        (["--bytes", "1GB", "--compute", "9" * 400 + "s"], "is not a time"),
    ],
)
def test_wire_refuses_what_no_wire_carries(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wire", "--link", "ndr", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--log", "--env"])
def test_doctor_does_not_wait_for_a_device(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", flag, "/dev/zero"]) == 2
    assert "/dev/zero" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--network", "ndr"], "the network 'ndr' is between machines"),
        (["--sequence-parallel"], "--sequence-parallel splits along --tp"),
        (["--pipeline-schedule", "1f1b"], "--pipeline-schedule orders stages"),
        (["--virtual-stages", "4"], "--virtual-stages divides stages"),
        (["--keep-unsharded", "--zero", "1"], "--keep-unsharded is for ZeRO 2 and 3"),
        (["--tuning", "full", "--lora-r", "64"], "--lora-r 64 belongs to adapters"),
        (["--epochs", "3"], "--epochs 3 are passes over --data"),
        (["--json", "--explain"], "leave one out"),
        (["--all", "--explain"], "leave one out"),
    ],
)
def test_plan_accepts_no_flag_that_it_would_ignore(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *flags]) == 2
    assert words in capsys.readouterr().err


def test_plan_accepts_flags_that_belong_to_degrees_solved_from_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    degrees = ["--pp", "1", "--dp-replicate", "1", "--dp-shard", "1"]
    assert main([*SMALL, *degrees, "--sequence-parallel"]) in (0, 3)
    assert "TP 2" in capsys.readouterr().out


def test_demo_refuses_no_steps_before_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "0", "--ranks", "-1"]) == 2
    message = capsys.readouterr().err
    assert "--steps must be at least 1, not 0" in message
    assert "--ranks must be at least 1, not -1" in message
