import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.cli.probe import Options, probe_options
from shardwise.probe import launch
from shardwise.probe.build import build_report
from shardwise.probe.findings import Findings, Inventory, ProbeReport, RankFacts
from shardwise.probe.options import ProbeOptions
from shardwise.vocabulary.codec import from_data


def report() -> ProbeReport:
    rank = RankFacts(rank=0, node=0, host="node-a", device_name="Some CPU", device_memory_bytes=8, architecture="cpu")
    return build_report(Findings(ranks=(rank,), copy_bytes_per_s=1e9))


def test_inventory_needs_no_torch() -> None:
    code = (
        "import sys; from shardwise.cli.main import main; code = main(['probe', '--inventory', '--json']);"
        "sys.exit(code or ('torch' in sys.modules and 9))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert from_data(Inventory, json.loads(done.stdout)).num_cpus >= 1


def test_every_flag_reaches_the_probe(tmp_path: Path) -> None:
    out = str(tmp_path / "c.yaml")
    options = Options(
        quick=True, ranks=3, nodes=2, device="cpu", checkpoint_dir=str(tmp_path), budget=7.0, out=out, json=True
    )
    given = probe_options(options)
    assert (given.quick, given.ranks, given.nodes, given.device) == (True, 3, 2, "cpu")
    assert (given.checkpoint_dir, given.out, given.budget_seconds) == (tmp_path, Path(out), 7.0)


def test_page_json_and_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[ProbeOptions] = []

    def fake(options: ProbeOptions) -> ProbeReport:
        asked.append(options)
        return report()

    monkeypatch.setattr(launch, "probe", fake)
    monkeypatch.delenv("RANK", raising=False)
    assert main(["probe", "--quick"]) == 0
    assert "Some CPU" in capsys.readouterr().out
    assert main(["probe", "--json"]) == 0
    assert from_data(ProbeReport, json.loads(capsys.readouterr().out)) == report()
    assert [options.quick for options in asked] == [True, False]
    monkeypatch.setenv("RANK", "1")
    assert main(["probe"]) == 0
    assert capsys.readouterr().out == ""


def test_what_makes_no_sense_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert main(["probe", "--ranks", "0", "--out", "/no/such/folder/c.yaml"]) == 2
    text = capsys.readouterr().err
    assert "ranks is 0" in text
    assert "/no/such/folder" in text
    assert main(["probe", "--nodes", "2"]) == 2
    assert "torchrun --nnodes=2" in capsys.readouterr().err
    assert main(["probe", "--qick"]) == 2
    assert "--quick" in capsys.readouterr().err


def test_an_inventory_takes_no_flags_of_a_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--inventory", "--quick", "--budget", "5", "--out", "c.yaml", "--checkpoint-dir", "."]) == 2
    text = capsys.readouterr().err
    assert "--quick, --checkpoint-dir, --budget, --out would be without effect" in text
