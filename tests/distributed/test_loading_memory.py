"""Loading: a rank reads and holds its own part, never the model."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_pool import Pool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.trainer.checkpoint import AppState, load, save
from shardwise.trainer.weights import load_pretrained_sharded

pytestmark = pytest.mark.distributed

CONFIG = LlamaConfig(
    vocab_size=8192, hidden_size=384, intermediate_size=1536, num_hidden_layers=10, num_attention_heads=4,
    tie_word_embeddings=True,
)  # fmt: skip
LARGEST = 8192 * 384 * 4
"""Bytes of the embedding, of which a rank reads its own rows."""
HASHED = 2 * 16 * 2**20
"""Two blocks of the one file that each rank hashes before anything is loaded."""
SLACK = 6 * 2**20
"""Headers, Python's own objects, and what the allocator keeps."""


class AnonymousPeak:
    """The most memory of this process that no file backs, while inside; mapped files are the kernel's to drop."""

    def __enter__(self) -> "AnonymousPeak":
        self.before = self.growth = _anonymous()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.001):
            self.growth = max(self.growth, _anonymous())

    def __exit__(self, *_: object) -> None:
        self.growth = max(self.growth, _anonymous())
        self._over.set()
        self._thread.join()
        self.growth -= self.before


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    pytest.skip("this kernel does not tell anonymous memory")


def sharded() -> LlamaForCausalLM:
    """On meta, sharded, then given memory that has been touched."""
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            parameter.to_local().zero_()
    return model


def load_parts(folder: str) -> tuple[int, int, int, int]:
    """Bytes of the model, bytes read by this rank, growth while reading weights, growth while reading a checkpoint."""
    model = sharded()
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    with AnonymousPeak() as weights:
        read = load_pretrained_sharded(model, Path(folder) / "model").bytes_read
    save(AppState(model=model), folder, 1)
    other = sharded()
    with AnonymousPeak() as checkpoint:
        load(AppState(model=other), Path(folder) / "checkpoint-1")
    ours, theirs = (next(iter(each.parameters())) for each in (model, other))
    assert isinstance(ours, DTensor)
    assert isinstance(theirs, DTensor)
    assert torch.equal(ours.to_local(), theirs.to_local())
    return num_bytes, read, weights.growth, checkpoint.growth


def test_a_rank_holds_its_part_and_never_the_model(ranks: Pool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(tmp_path / "model")
    answers = ranks.run(4, load_parts, str(tmp_path))
    num_bytes = answers[0][0]
    assert num_bytes > 80 * 2**20
    assert sum(read for _, read, _, _ in answers) == num_bytes  # each byte is read by one rank
    for _, read, weights, checkpoint in answers:
        assert read < num_bytes / 3
        assert weights < LARGEST / 4 + SLACK  # beside the shards, which were there before: one box at a time
        assert checkpoint < LARGEST / 4 + HASHED + SLACK
