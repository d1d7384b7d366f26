"""A whole run on two cards: what the meter says of a card is consistent."""

from pathlib import Path

import pytest

from shardwise.launch.local import LaunchOptions, launch
from shardwise.trainer.run import run_training
from shardwise.vocabulary import codec
from shardwise.vocabulary.measured import Measured
from shardwise.vocabulary.memory import Category
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_is_measured_on_a_card(tmp_path: Path, stage: int) -> None:
    run = RunFile(
        model_name_or_path="smollm2-135m", random_init=True, dataset_name="random:96", max_length=512, max_steps=10,
        output_dir=str(tmp_path / "run"), save_strategy="no", save_final=False,
    )  # fmt: skip
    split = {"dp_replicate": 2} if stage == 0 else {"dp_shard": 2}
    strategy = Strategy(zero_stage=stage, micro_batch_size=2, accumulation=2, **split)  # pyright: ignore[reportArgumentType]
    launch(run_training, (run, strategy), LaunchOptions(num_ranks=2, device="cuda"))
    measured = codec.read_noun(Measured, Path(run.output_dir) / "measured.json")
    assert measured.stored_by_category is not None
    assert measured.peak_by_category is not None
    assert measured.allocated_bytes is not None
    assert measured.reserved_bytes is not None
    assert measured.device_bytes is not None
    stored = measured.stored_by_category[Category.PARAMETER] + measured.stored_by_category[Category.OPTIMIZER]
    assert stored < measured.allocated_bytes <= measured.reserved_bytes < measured.device_bytes
    watched = sum(measured.peak_by_category.values())
    assert watched == pytest.approx(
        measured.allocated_bytes, rel=0.1
    )  # the allocator rounds, libraries have workspaces
    step = measured.step
    assert step is not None
    assert step.compute_seconds + step.exposed_wire_seconds + step.host_seconds == pytest.approx(step.seconds)
    assert step.wire_seconds > 0
    assert step.optimizer_seconds > 0
    assert {span.lane for span in step.spans} == {"compute", "dp_replicate" if stage == 0 else "dp_shard"}
