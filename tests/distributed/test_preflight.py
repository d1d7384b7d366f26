"""The whole preflight on CPU ranks: a tiny model, real data, go; and what makes it a no-go."""

import dataclasses
from pathlib import Path

import pytest
import torch
from tests.unit.factories import make_cluster
from transformers import Qwen2Config, Qwen2ForCausalLM

from shardwise.cli.preflight import page
from shardwise.errors import ShardwiseError, UsageError
from shardwise.report.style import Style
from shardwise.trainer.checkpoint import Checkpointer
from shardwise.trainer.data.batches import BatchOptions, plan_batches
from shardwise.trainer.data.store import from_samples
from shardwise.trainer.prepare import Prepared
from shardwise.trainer.rehearse import Rehearsal, longest_of
from shardwise.verify.preflight import Preflight, failed, judge, run_preflight
from shardwise.verify.trials import Trial, plan_run, prepare
from shardwise.vocabulary import codec
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.measured import Measured
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy

pytestmark = pytest.mark.distributed


def cpu_cluster() -> Cluster:
    usual = make_cluster()
    gpu = dataclasses.replace(
        usual.gpu, name="cpu", architecture="cpu", memory_bytes=8 * 2**30, peak_flops={"fp32": 1e11}
    )
    return dataclasses.replace(usual, name="cpu", gpu=gpu)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def trial(model_folder: Path, tmp_path: Path) -> Trial:
    run = RunFile(
        model_name_or_path=str(model_folder), dataset_name="random:40", max_length=16, global_batch_size=16,
        per_device_train_batch_size=2, zero_stage=3, bf16=False, tuning="full", output_dir=str(tmp_path / "run"),
    )  # fmt: skip
    return prepare(run, plan_run(run, cpu_cluster()))


def test_a_whole_preflight_is_go_and_leaves_one_file(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    answer = run_preflight(trial, cuda=False)
    text = page(answer, Style())
    assert answer.is_go, text
    assert text.startswith("Preflight of ZeRO-3: GO\n")
    found = {check.name: check for check in answer.checks}
    assert found["losses after a resume"].found == "equal to the last bit"
    assert "loaded again: 26 tensors equal" in found["export"].found
    assert "(longest batch: 16 tokens a row)" in found["memory allocated"].found
    assert {"build the model", "build again and resume", "export", "reload the export", "evaluate"} <= set(
        answer.seconds
    )
    assert [path.name for path in trial.folder.iterdir()] == ["preflight.json"]
    assert codec.read_noun(Preflight, trial.folder / "preflight.json") == answer


def test_what_goes_wrong_is_a_no_go(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    one = dataclasses.replace(trial.candidate.strategy, dp_shard=1, zero_stage=0, dp_replicate=1)
    alone = dataclasses.replace(trial, candidate=dataclasses.replace(trial.candidate, strategy=one))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29511")

    def fill_the_disk(*_: object, **__: object) -> None:
        raise ShardwiseError("A checkpoint needs 9 GB in runs, 1 GB are free.")

    monkeypatch.setattr(Checkpointer, "save", fill_the_disk)
    answer = run_preflight(alone, cuda=False)
    assert not answer.is_go
    assert [check.found for check in answer.checks] == ["A checkpoint needs 9 GB in runs, 1 GB are free."]
    assert "no-go  rehearsal  A checkpoint needs 9 GB" in page(answer, Style())
    assert not (trial.folder / "preflight").exists()


def rehearsed(**changes: object) -> Rehearsal:
    usual = Rehearsal(
        seconds={"export": 1.0}, longest_tokens=16, accumulation=2,
        measured=Measured(allocated_bytes=10**6, device_bytes=10**7),
        losses=(4.0, 3.9, 3.8, 3.7), resumed_losses=(3.8, 3.7), eval_loss=3.6, checkpoint_bytes=10**9, blocked_s=0.2,
        durable_s=3.0, export_bytes=10**8, export_check=None,
    )  # fmt: skip
    return dataclasses.replace(usual, **changes)


@pytest.mark.parametrize(
    ("changes", "free", "name"),
    [
        ({"resumed_losses": (3.8, 3.71)}, 10**12, "losses after a resume"),
        ({"resumed_losses": ()}, 10**12, "losses after a resume"),
        ({"losses": (4.0, float("nan"), 3.8, 3.7)}, 10**12, "losses"),
        ({"eval_loss": float("inf")}, 10**12, "evaluation"),
        ({}, 3 * 10**9, "disk"),
        ({"measured": Measured(device_bytes=9 * 2**30)}, 10**12, "memory of the card"),
    ],
)
def test_each_broken_promise_is_a_no_go(trial: Trial, changes: dict[str, object], free: int, name: str) -> None:
    assert [check.name for check in judge(trial, rehearsed(**changes), free) if check.verdict == "no-go"] == [name]


def test_all_kept_is_go(trial: Trial) -> None:
    checks = judge(trial, rehearsed(), 10**12)
    assert Preflight(strategy=Strategy(), checks=checks, seconds={}).is_go
    assert failed(ShardwiseError("a", "b"))[1].found == "b"


def test_the_longest_samples_are_taken() -> None:
    data = from_samples([[1] * length for length in (3, 9, 5, 9, 2, 7)])
    options = BatchOptions(global_batch=2, micro_batch=1, num_ranks=1)
    prepared = Prepared(config=None, tokenizer=None, train=data, plan=plan_batches(data, options), held_out=None)
    run = RunFile(model_name_or_path="m", per_device_eval_batch_size=1)
    found = longest_of(prepared, run, Strategy(micro_batch_size=1, accumulation=2))
    assert found.train.lengths.tolist() == [9, 9]
    assert found.plan.num_steps == 4
    assert found.held_out is not None
    assert found.held_out.lengths.tolist() == [9, 9]


def test_a_folder_that_is_taken_is_left_alone(trial: Trial) -> None:
    (trial.folder / "preflight").mkdir(parents=True)
    (trial.folder / "preflight" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="was not made by a preflight"):
        run_preflight(trial, cuda=False)
    assert (trial.folder / "preflight" / "thesis.txt").read_text() == "mine"
