"""A run folder keeps the files of the run whose checkpoints it holds, and nothing of the user's is written over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import CheckpointError, ResourceError, UsageError
from shardwise.facts.catalog import parse_gpus
from shardwise.verify import opening, preflight, trials
from shardwise.vocabulary import codec
from shardwise.vocabulary.run import RunFile


def trial_in(folder: Path, **keys: Any) -> trials.Trial:
    run = RunFile(model_name_or_path="qwen2.5-0.5b", output_dir=str(folder), **keys)
    return trials.prepare(run, trials.plan_run(run, parse_gpus("2xh100")))


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.yaml")}


def with_checkpoint(folder: Path) -> dict[str, str]:
    trials.write_before(trial_in(folder))
    (folder / "checkpoint-10").mkdir()
    (folder / "checkpoint-10" / "manifest.json").write_text("{}", encoding="utf-8")
    return texts(folder)


def test_an_earlier_run_is_not_written_over(tmp_path: Path) -> None:
    before = with_checkpoint(tmp_path / "run")
    with pytest.raises(CheckpointError, match="holds checkpoint-10 of an earlier run"):
        trials.write_before(trial_in(tmp_path / "run", max_steps=2))
    assert texts(tmp_path / "run") == before


def test_a_resumed_run_that_fails_before_a_step_gives_the_files_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = with_checkpoint(tmp_path / "run")
    trial = trial_in(tmp_path / "run", seed=7, resume_from_checkpoint=True)

    def fails(*_: object) -> None:
        assert "seed: 7" in texts(trial.folder)["run.yaml"]
        raise CheckpointError("another data plan")

    monkeypatch.setattr("shardwise.launch.local.launch", fails)
    with pytest.raises(CheckpointError, match="another data plan"):
        trials.execute(trial, cuda=False)
    assert texts(trial.folder) == before


def test_a_resumed_run_that_has_stepped_keeps_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_checkpoint(tmp_path / "run")
    trial = trial_in(tmp_path / "run", seed=7, resume_from_checkpoint=True)

    def steps_and_fails(*_: object) -> None:
        (trial.folder / opening.METRICS_FILE).write_text("{}\n", encoding="utf-8")
        raise CheckpointError("a rank was lost")

    monkeypatch.setattr("shardwise.launch.local.launch", steps_and_fails)
    with pytest.raises(CheckpointError, match="a rank was lost"):
        trials.execute(trial, cuda=False)
    assert "seed: 7" in texts(trial.folder)["run.yaml"]


def test_a_file_of_the_users_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("# my own words\nmodel_name_or_path: m\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"run.yaml would be written over"):
        trials.write_before(trial_in(tmp_path))
    assert texts(tmp_path) == {"run.yaml": "# my own words\nmodel_name_or_path: m\n"}


def test_a_cluster_file_that_says_the_same_may_lie_there(tmp_path: Path) -> None:
    trial = trial_in(tmp_path)
    (tmp_path / "cluster.yaml").write_text(codec.to_yaml(trial.plan.cluster), encoding="utf-8")
    trials.write_before(trial)
    assert set(texts(tmp_path)) == {"plan.yaml", "cluster.yaml", "run.yaml"}


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match=r"output_dir .*file is a file"):
        trials.write_before(trial_in(tmp_path / "file"))
    with pytest.raises(ResourceError, match=r"output_dir .*run cannot be written"):
        trials.write_before(trial_in(tmp_path / "file" / "run"))


def test_a_preflight_that_cannot_write_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match=r"output_dir .*file cannot be written"):
        preflight.run_preflight(trial_in(tmp_path / "file"), cuda=False, writes=True)
