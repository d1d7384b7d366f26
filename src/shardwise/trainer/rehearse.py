"""A run in small, on the real ranks: the longest batch, a save, a resume, an evaluation, an export, and their sum.

The data set is replaced by its longest samples, as many as one optimizer step takes, so that every step is the dearest
that this run will see. Four steps are trained with a save after the second; then everything is built anew, resumed from
that save, and the last two steps must give the same losses. What runs is the engine itself, sentinels included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise.trainer.checkpoint import SaveReport
from shardwise.trainer.data.batches import plan_batches
from shardwise.trainer.data.store import TokenizedSet, from_samples
from shardwise.trainer.evaluate import forward_only
from shardwise.trainer.export import ExportCheck, ExportReport, export, verify_export
from shardwise.trainer.loop import Loop, LoopParts
from shardwise.trainer.mesh import build_mesh, choose_device, join_ranks, local_rank
from shardwise.trainer.parallelize import refuse_unsupported
from shardwise.trainer.prepare import Prepared, RunWishes, prepare_run
from shardwise.trainer.run import RunStart, assemble, compare_with_plain, export_options, guarded, weights_folder
from shardwise.vocabulary.measured import Measured
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy

NUM_STEPS, SAVE_AT = 4, 2
RESUMED_FOLDER, EXPORT_FOLDER = "resumed", "export"
_MAX_EXPORT_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What was seen, on rank 0."""

    seconds: dict[str, float]
    """Of each phase, in order."""
    longest_tokens: int
    """Tokens of the longest sample (or packed row) that was computed."""
    accumulation: int
    """Micro-batches of a step; fewer than the run's, since more of them need no more memory."""
    measured: Measured
    losses: tuple[float, ...]
    """Of the four steps."""
    resumed_losses: tuple[float, ...]
    """Of the last two, computed again after a resume."""
    eval_loss: float
    checkpoint_bytes: int
    blocked_s: float
    """How long a save keeps the training waiting, in seconds."""
    durable_s: float
    """Until it is safe on disk, in seconds."""
    export_bytes: int
    export_check: ExportCheck | None
    """None where the base model's weights are random, so that nothing can be loaded beside adapters, and where the
    layers lie on several stages."""


def rehearse(run: RunFile, strategy: Strategy, wishes: RunWishes | None = None) -> Rehearsal:
    """Runs it; called on every rank, by `shardwise.launch.local.launch`.

    Args:
        run: The run that is meant; its output_dir is where the rehearsal writes, and nothing else.
        strategy: How it is split.
        wishes: Places outside the run folder.

    Raises:
        ShardwiseError: Whatever would have gone wrong in the run.
    """
    refuse_unsupported(strategy)
    wishes = wishes or RunWishes()
    clock = _Clock()
    device = choose_device(local_rank())
    short = dataclasses.replace(strategy, accumulation=min(strategy.accumulation, max(2, 2 * strategy.pp)))
    small = dataclasses.replace(
        run, max_steps=NUM_STEPS, save_strategy="steps", save_steps=SAVE_AT, save_total_limit=None, logging_steps=1,
        eval_strategy="steps", eval_steps=NUM_STEPS, report_to=("none",), sample_prompt=None,
        resume_from_checkpoint=False, warmup_steps=0, warmup_ratio=0.0,
    )  # fmt: skip
    with clock.phase("read and tokenize"):
        prepared = longest_of(prepare_run(small, short, wishes), small, short)
    join_ranks(device)
    try:
        mesh = build_mesh(short, device)
        start = RunStart(run=small, strategy=short, wishes=wishes, prepared=prepared, mesh=mesh)
        with guarded(start):
            seen = _first_run(start, clock)
        _free_memory()
        again = dataclasses.replace(
            small,
            output_dir=str(Path(run.output_dir) / RESUMED_FOLDER),
            resume_from_checkpoint=str(Path(run.output_dir) / f"checkpoint-{SAVE_AT}"),
            save_strategy="no",
        )
        start = RunStart(run=again, strategy=short, wishes=wishes, prepared=prepared, mesh=mesh)
        with guarded(start):
            resumed = _resumed_run(start, clock)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return dataclasses.replace(
        seen,
        seconds=dict(clock.seconds),
        resumed_losses=resumed,
        longest_tokens=int(prepared.plan.packing.row_tokens.max()),
        accumulation=short.accumulation,
    )


def _first_run(start: RunStart, clock: _Clock) -> Rehearsal:
    """Four steps with a save and an evaluation, then the export."""
    with clock.phase("build the model"):
        parts, _ = assemble(start)
    with clock.phase("compare with the plain model"):
        compare_with_plain(start.run, parts, start.strategy, start.mesh)
    loop = _TimedLoop(parts, clock)
    with clock.phase(f"{NUM_STEPS} steps of the longest batch"):
        loop.run()
    start.hang.at("export", patient=True)
    with clock.phase("wait for the last save"):
        saved = parts.checkpointer.wait()
    assert saved is not None, "no save at the last step"
    measured = parts.meter.measured()
    report, check = _export(start, parts, clock)
    _close(parts)
    return _rehearsal(parts, measured, saved, report, check)


def _rehearsal(
    parts: LoopParts, measured: Measured, saved: SaveReport, report: ExportReport, check: ExportCheck | None
) -> Rehearsal:
    eval_loss = parts.state.last_eval_loss()
    assert eval_loss is not None, "no evaluation at the last step"
    return Rehearsal(
        seconds={},
        longest_tokens=0,
        accumulation=0,
        measured=measured,
        losses=_losses(parts),
        resumed_losses=(),
        eval_loss=eval_loss,
        checkpoint_bytes=saved.num_bytes,
        blocked_s=saved.blocked_s,
        durable_s=saved.total_s,
        export_bytes=report.num_bytes,
        export_check=check,
    )


def _export(start: RunStart, parts: LoopParts, clock: _Clock) -> tuple[ExportReport, ExportCheck | None]:
    run, folder = start.run, Path(start.run.output_dir) / EXPORT_FOLDER
    options = export_options(run, start.prepared.config)
    with clock.phase("export"):
        report = export(parts.skeleton.adapted, folder, tokenizer=start.prepared.tokenizer, options=options)
    adapters = start.strategy.tuning != "full"
    if start.strategy.pp > 1:
        parts.progress.say("The export is not computed with: no rank holds all layers beside it.")
        return report, None
    if adapters and run.random_init:
        return report, None
    ids, _ = start.prepared.train.sample(0)
    input_ids = torch.from_numpy(np.asarray(ids[:_MAX_EXPORT_TOKENS], dtype=np.int64))[None].to(start.mesh.device)
    with clock.phase("reload the export"), forward_only(parts.skeleton.model):
        base = weights_folder(run) if adapters else None
        return report, verify_export(parts.skeleton.adapted, folder, input_ids, base_folder=base, options=options)


def _resumed_run(start: RunStart, clock: _Clock) -> tuple[float, ...]:
    """Everything built anew and resumed; the losses of the steps after the save."""
    with clock.phase("build again and resume"):
        parts, _ = assemble(start)
    with clock.phase(f"{NUM_STEPS - SAVE_AT} steps again"):
        Loop(dataclasses.replace(parts, held_out=None)).run()
    losses = _losses(parts)[SAVE_AT:]
    _close(parts)
    return losses


def _losses(parts: LoopParts) -> tuple[float, ...]:
    return tuple(line["loss"] for line in parts.state.log_history if "loss" in line)


def _close(parts: LoopParts) -> None:
    parts.checkpointer.close()
    if parts.tracking is not None:
        parts.tracking.close()


def _free_memory() -> None:
    gc.unfreeze()  # the loop has told the collector that the model would stay
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def longest_of(prepared: Prepared, run: RunFile, strategy: Strategy) -> Prepared:
    """The same with the longest samples only: as many as a step takes, and a few to evaluate."""
    num_rows = strategy.global_batch_size
    train = _longest(prepared.train, num_rows, num_rows * run.max_length if run.packing else None)
    num_held_out = 2 * run.per_device_eval_batch_size * strategy.data_parallel
    held_out = _longest(prepared.held_out or prepared.train, num_held_out, None)
    options = dataclasses.replace(prepared.plan.options, shuffle=False, max_steps=NUM_STEPS)
    return dataclasses.replace(prepared, train=train, plan=plan_batches(train, options), held_out=held_out)


def _longest(tokenized: TokenizedSet, num_samples: int, num_tokens: int | None) -> TokenizedSet:
    """The longest samples, longest first: a number of them, or as many as hold a number of tokens."""
    order = np.argsort(-tokenized.lengths, kind="stable")
    if num_tokens is not None:
        num_samples = int(np.searchsorted(np.cumsum(tokenized.lengths[order]), num_tokens)) + 1
    samples: list[list[int]] = []
    marks: list[list[int]] = []
    for index in order[:num_samples].tolist():
        ids, supervised = tokenized.sample(index)
        samples.append(ids.tolist())
        marks.append(supervised.tolist())
    return from_samples(samples, marks, source=f"the longest of {tokenized.report.source}")


class _Clock:
    """Seconds of each phase, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Generator[None]:
        """What happens inside is one phase, or more of it; phases inside it are counted for themselves."""
        started, inner = time.perf_counter(), sum(self.seconds.values())
        yield
        spent = time.perf_counter() - started - (sum(self.seconds.values()) - inner)
        self.seconds[name] = self.seconds.get(name, 0.0) + spent


class _TimedLoop(Loop):
    """The loop, with saves and evaluations counted apart from steps."""

    def __init__(self, parts: LoopParts, clock: _Clock) -> None:
        super().__init__(parts)
        self._clock = clock

    def evaluate(self, done: int) -> float:
        """As the loop does it."""
        with self._clock.phase("evaluate"):
            return super().evaluate(done)

    def save(self, done: int) -> Any:
        """As the loop does it."""
        with self._clock.phase("save (training waits)"):
            super().save(done)
