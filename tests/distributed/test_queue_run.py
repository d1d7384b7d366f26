"""`shardwise train A B --one-per-card` from end to end on a machine without cards: two jobs, of which one fails."""

import dataclasses
from pathlib import Path

import pytest
import torch
from tests.unit.factories import make_cluster
from transformers import Qwen2Config, Qwen2ForCausalLM

from shardwise.cli.main import main
from shardwise.vocabulary import codec
from shardwise.vocabulary.measured import Measured

pytestmark = pytest.mark.distributed


def test_one_fails_the_other_ends_and_a_resume_skips_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    usual = make_cluster()
    gpu = dataclasses.replace(
        usual.gpu, name="cpu", architecture="cpu", memory_bytes=8 * 2**30, peak_flops={"fp32": 1e11}
    )
    (tmp_path / "cluster.yaml").write_text(codec.to_yaml(dataclasses.replace(usual, gpu=gpu)))
    for name, data in (("good", "random:8"), ("bad", "nowhere.jsonl")):
        (tmp_path / f"{name}.yaml").write_text(
            f"model_name_or_path: {tmp_path / 'model'}\ndataset_name: {data}\nmax_length: 8\nmax_steps: 6\n"
            "global_batch_size: 4\nbf16: false\ntuning: full\nsave_final: false\n"
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
    command = ["train", "good.yaml", "bad.yaml", "--one-per-card", "--cluster", "cluster.yaml", "--out", "runs"]
    assert main(command) == 1
    out, err = capsys.readouterr()
    states = {line.split()[0]: line.split()[1] for line in out.splitlines()[1:]}
    assert states == {"good.yaml": "done", "bad.yaml": "failed"}, out + err
    assert "6/6" in out
    assert "bad.yaml: exit code" in err
    assert "nowhere.jsonl" in err
    measured = codec.read_noun(Measured, Path("runs/good/measured.json"))
    assert measured.command.startswith("python -m shardwise train good.yaml --out runs/good --cluster ")
    (tmp_path / "bad.yaml").unlink()
    assert main(["train", "good.yaml", "--one-per-card", "--resume", "--cluster", "cluster.yaml", "--out", "runs"]) == 0
    assert "skipped" in capsys.readouterr().out
