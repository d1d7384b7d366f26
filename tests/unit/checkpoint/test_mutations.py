import json
import pickle
from pathlib import Path

import pytest
from checkpoint_damage import damage

from shardwise.errors import CheckpointError
from shardwise.trainer.checkpoint import newest_good, read_manifest
from shardwise.trainer.checkpoint.manifest import MANIFEST, decode_manifest
from shardwise.trainer.checkpoint.tensorfile import HeaderError


def test_sixty_seeded_damages_are_named_and_not_loaded() -> None:
    outcome, _ = damage.run(count=60, seed=2026)
    assert sum(outcome.cases.values()) == 60
    assert set(outcome.cases) == set(damage.KINDS)
    assert not outcome.failures, outcome.failures


def test_the_planted_pickle_is_live(tmp_path: Path) -> None:
    """A control: were it unpickled anywhere, the canary would be there."""
    pickle.loads(pickle.dumps(damage.Bomb(tmp_path / "canary")))
    assert (tmp_path / "canary").exists()


def test_nothing_pickled_is_written(tmp_path: Path) -> None:
    damage.make_run(tmp_path)
    for path in (tmp_path / "checkpoint-2").iterdir():
        raw = path.read_bytes()
        assert path.suffix in (".json", ".safetensors")
        assert not raw.startswith((b"\x80\x02", b"\x80\x04", b"PK"))
        if path.suffix == ".json":
            json.loads(raw)


def test_every_single_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    damage.make_run(tmp_path)
    raw = (tmp_path / "checkpoint-2" / MANIFEST).read_bytes()
    for position in [*range(120), *range(120, len(raw), 41), len(raw) - 1, len(raw) - 2, len(raw) - 3]:
        for bit in range(8):
            flipped = bytearray(raw)
            flipped[position] ^= 1 << bit
            with pytest.raises(HeaderError):
                decode_manifest(bytes(flipped))


def test_a_folder_of_torchs_own_storage_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / ".metadata").write_bytes(pickle.dumps(damage.Bomb(tmp_path / "canary")))
    with pytest.raises(CheckpointError, match="no shardwise checkpoint"):
        read_manifest(tmp_path / "checkpoint-3")
    assert newest_good(tmp_path).path is None
    assert not (tmp_path / "canary").exists()
