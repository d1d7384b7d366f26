"""`--resume` with a name that is neither a run nor a model is told as both."""

from pathlib import Path

import pytest

from shardwise.cli import train
from shardwise.cli.main import main


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_without_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, there: bool
) -> None:
    monkeypatch.setattr(train, "NEEDED", ())
    name = tmp_path / "run"
    if there:
        name.mkdir()
    assert main(["train", str(name), "--data", "random:8", "--resume"]) == 2
    said = capsys.readouterr().err
    assert f"--resume: {name} is not the folder of an earlier run (it holds no plan.yaml and run.yaml)" in said
    assert main(["train", str(name), "--data", "random:8"]) == 2
    assert "--resume" not in capsys.readouterr().err
