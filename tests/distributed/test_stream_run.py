"""A whole run on a stream: read while it trains, and gone on with on another number of ranks."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from checkpoint_pool import Pool
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from shardwise.trainer.data import stream
from shardwise.trainer.run import RunWishes, run_training
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy

pytestmark = pytest.mark.distributed

TWO = Strategy(precision="fp32", micro_batch_size=2, dp_replicate=2)
ONE = dataclasses.replace(TWO, dp_replicate=1, accumulation=2)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"w{index}": index for index in range(62)}
    backend = Tokenizer(models.WordLevel({**words, "<unk>": 62, "<eos>": 63}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)
    return folder


def train(run: RunFile, strategy: Strategy) -> list[tuple[int, float]]:
    stream.WINDOW_STEPS = 3
    run_training(run, strategy, RunWishes(measure=False))
    lines = [json.loads(line) for line in (Path(run.output_dir) / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def test_a_stream_goes_on_with_fewer_ranks(ranks: Pool, model_folder: Path, tmp_path: Path) -> None:
    rows = [{"text": " ".join(f"w{(7 * row + word) % 62}" for word in range(3 + row % 9))} for row in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = RunFile(
        model_name_or_path=str(model_folder),
        dataset_name=str(tmp_path / "data.jsonl"),
        streaming=True,
        max_length=16,
        max_steps=11,  # more than the file has: it starts again
        save_steps=5,
        save_total_limit=None,
        learning_rate=1e-2,
        save_final=False,
        output_dir=str(tmp_path / "run"),
    )
    whole = ranks.run(2, train, run, TWO)[0]
    assert [step for step, _ in whole] == list(range(1, 12))
    again = dataclasses.replace(
        run, output_dir=str(tmp_path / "again"), resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5")
    )
    rest = ranks.run(1, train, again, ONE)[0]
    assert [step for step, _ in rest] == list(range(6, 12))
    assert [loss for _, loss in rest] == pytest.approx([loss for _, loss in whole[5:]], abs=1e-5)
