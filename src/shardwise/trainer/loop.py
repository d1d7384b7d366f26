"""The run: steps, evaluation, logs, checkpoints, stopping and going on.

[Note: one step behind] The numbers of a step are read after the next one has been handed to the card, so the card never
waits for the host. All ranks then exchange them, with the signals they have received, in one small message over gloo:
so every rank knows the same loss and takes the same decisions at the same step.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.trainer.checkpoint import AppState, Checkpointer, SaveReport
from shardwise.trainer.evaluate import held_out_loss
from shardwise.trainer.feeder import DataSource, Feeder
from shardwise.trainer.meter import Meter, StepClock, StepTokens
from shardwise.trainer.model import Skeleton
from shardwise.trainer.progress import Progress
from shardwise.trainer.schedule import Schedule
from shardwise.trainer.sentinels.hang import HangWatch
from shardwise.trainer.sentinels.watch import StepWatch
from shardwise.trainer.signals import Signals
from shardwise.trainer.state import DataPosition, RunState
from shardwise.trainer.step import StepOutcome, Stepper
from shardwise.trainer.tracking import Tracking
from shardwise.vocabulary.run import RunFile


@dataclass(frozen=True, kw_only=True, eq=False)
class LoopParts:
    """Everything that a run is made of."""

    run: RunFile
    skeleton: Skeleton
    stepper: Stepper
    schedule: Schedule
    train: DataSource
    held_out: DataSource | None
    checkpointer: Checkpointer
    app_state: AppState
    position: DataPosition
    state: RunState
    tracking: Tracking | None
    """On rank 0 only."""
    progress: Progress
    meter: Meter
    watch: StepWatch
    hang: HangWatch


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    """How a run ended."""

    num_steps: int
    """Optimizer steps done, those of earlier starts included."""
    num_steps_here: int
    """Those of this start."""
    seconds: float
    """Of this start, evaluation and checkpoints included."""
    train_loss: float | None
    """Mean over this start's steps; None if there was none."""
    stopped_by: int
    """The signal that stopped it, or 0."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pending:
    """A step whose numbers have not been read."""

    step: int
    clock: StepClock
    num_padded: int
    """Tokens of this rank's tensors, padding included."""
    ready: torch.cuda.Event | None
    host: torch.Tensor
    """Loss share, norm, skipped: on the host once `ready` has passed. [3]"""


class Loop:
    """Runs all steps that are left.

    Args:
        parts: What the run is made of.
    """

    def __init__(self, parts: LoopParts) -> None:
        self._parts = parts
        self.signals = Signals()
        self._pending: _Pending | None = None
        self._window = _Window()
        self._losses: list[float] = []
        self._stop = 0
        self._save = False

    def run(self) -> LoopResult:
        """Every step from where the run stands; then the numbers of the whole.

        Raises:
            TrainingError: The loss stays not finite, or a sentinel finds the training wrong.
            CheckpointError, ResourceError: A checkpoint could not be written.
        """
        parts = self._parts
        feeder = Feeder(parts.train)
        started = time.perf_counter()
        try:
            with self.signals.noted():
                for step in range(parts.position.next_step, parts.train.plan.num_steps):
                    self._step(step, feeder)
                    if self._stop:
                        break
                self._settle()
            if (account := parts.train.plan.account()) is not None:
                parts.progress.say(account)
        finally:
            feeder.close()
            parts.watch.close()
            parts.progress.close()
        return LoopResult(
            num_steps=parts.position.next_step,
            num_steps_here=len(self._losses),
            seconds=time.perf_counter() - started,
            train_loss=sum(self._losses) / len(self._losses) if self._losses else None,
            stopped_by=self._stop,
        )

    def _step(self, step: int, feeder: Feeder) -> None:
        parts, plan = self._parts, self._parts.train.plan
        is_first = step == parts.position.next_step and not self._losses and self._pending is None
        for group in parts.stepper.optimizer.param_groups:
            group["lr"] = parts.schedule.at(step)
        parts.hang.at(f"step {step + 1}: reading its batches")
        batches = feeder.take(step)
        parts.watch.begin(step, batches)
        parts.hang.at(f"step {step + 1}: forward and backward")
        with parts.meter.step(step) as clock:
            outcome = parts.stepper.run(
                feeder.on_device(batches),
                len(batches),
                plan.num_supervised_tokens(step),
                after_backward=functools.partial(parts.watch.backward, step),
            )
        parts.watch.end(step)
        handed = _hand_over(step, outcome, clock, sum(batch.input_ids.numel() for batch in batches))
        self._settle()
        self._pending = handed
        parts.position.next_step = step + 1
        parts.watch.boundary(step + 1, is_last=step + 1 == plan.num_steps)
        if is_first:
            gc.collect()
            gc.freeze()  # model and optimizer are here to stay: the collector need not look at them again
            if parts.run.save_strategy != "no":
                parts.checkpointer.prepare(parts.app_state)  # pins host memory now, so that the first save need not
        self._at_boundary(step + 1)

    def _settle(self) -> None:
        """Reads the numbers of the step before, exchanges them with the other ranks, logs them."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.ready is not None:
            pending.ready.synchronize()
        share, norm, skipped = pending.host.tolist()
        parts = self._parts
        signals = self.signals
        parts.hang.at(f"step {pending.step + 1}: exchange of its numbers")
        own = (share, pending.clock.seconds(), pending.num_padded, signals.stop, signals.save)
        mine = torch.tensor([*own, *parts.watch.numbers(pending.step)], dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(parts.stepper.mesh.control))]
        dist.all_gather(everyone, mine, group=parts.stepper.mesh.control)
        table = torch.stack(everyone)  # [ranks, numbers]
        shares, seconds, padded, stops, saves = table[:, : len(own)].unbind(1)
        self._stop = self._stop or int(stops.max().item())
        self._save = self._save or bool(saves.max().item())
        signals.save = False
        copies = parts.stepper.mesh.copies
        real = parts.train.plan.num_tokens(pending.step)
        parts.meter.note_tokens(pending.step, StepTokens(real=real, padded=round(padded.sum().item()) // copies))
        loss = shares.sum().item() / parts.stepper.mesh.loss_copies
        parts.watch.judge(pending.step, table[:, len(own) :], loss, norm)
        self._window.add(loss, real, seconds.max().item())
        self._count(pending.step, loss, norm, skipped=bool(skipped))

    def _count(self, step: int, loss: float, norm: float, *, skipped: bool) -> None:
        parts, plan = self._parts, self._parts.train.plan
        parts.state.num_tokens += plan.num_tokens(step)
        parts.state.num_skipped += skipped
        self._losses.append(loss)
        logs = (step + 1) % parts.run.logging_steps == 0 or step + 1 == plan.num_steps
        values = {
            **self._window.values(),
            "grad_norm": norm,
            "learning_rate": parts.schedule.at(step),
            "epoch": (step + 1) / plan.steps_per_epoch,
            "num_tokens": float(parts.state.num_tokens),
        }
        parts.progress.step(step + 1, values, logs=logs)
        if logs:
            self._log(step + 1, values)
            self._window = _Window()

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        self._parts.state.log_history.append({**values, "step": step})
        if self._parts.tracking is not None:
            self._parts.tracking.log(values, step)

    def _at_boundary(self, done: int) -> None:
        """Evaluation and checkpoints after `done` steps; everything handed to the card is settled first."""
        parts = self._parts
        is_last = done == parts.train.plan.num_steps
        evaluates = parts.held_out is not None and (is_last or self._is_due(parts.run.eval_strategy, done, "eval"))
        saves = self._is_due(parts.run.save_strategy, done, "save")
        if not (evaluates or saves or self._stop or self._save or is_last):
            self._tell(parts.checkpointer.poll())
            return
        self._settle()
        if evaluates:
            self.evaluate(done)
        if saves or self._stop or self._save or (is_last and parts.run.save_strategy != "no"):
            self.save(done)
            self._save = False

    def _is_due(self, strategy: str, done: int, what: str) -> bool:
        if strategy == "epoch":
            return done % self._parts.train.plan.steps_per_epoch == 0
        every = (
            self._parts.run.eval_steps or self._parts.run.save_steps if what == "eval" else self._parts.run.save_steps
        )
        return strategy == "steps" and done % every == 0

    def evaluate(self, done: int) -> float:
        """Held-out loss after `done` steps; logged as eval_loss."""
        parts = self._parts
        assert parts.held_out is not None, "no held-out set"
        parts.hang.at("held-out evaluation", patient=True)
        with parts.progress.pause():
            loss = held_out_loss(parts.stepper, parts.held_out)
        values = {"eval_loss": loss, "epoch": done / parts.train.plan.steps_per_epoch}
        parts.progress.say(f"step {done}/{parts.train.plan.num_steps} | held-out loss {loss:.4f}")
        self._log(done, values)
        return loss

    def save(self, done: int) -> None:
        """Writes checkpoint-<done>."""
        parts = self._parts
        trainer_state = parts.state.trainer_state(
            parts.train.plan,
            done,
            {
                "logging_steps": parts.run.logging_steps,
                "save_steps": parts.run.save_steps,
                "eval_steps": parts.run.eval_steps,
                "train_batch_size": parts.train.plan.options.micro_batch,
            },
        )
        parts.hang.at(f"save of checkpoint-{done}", patient=True)
        extra: dict[str, Any] = {"trainer_state": trainer_state} if parts.stepper.mesh.is_first else {}
        with parts.progress.pause():
            self._tell(parts.checkpointer.wait())
            self._tell(parts.checkpointer.save(parts.app_state, done, blocking=bool(self._stop), **extra))
        parts.progress.say(f"step {done}/{parts.train.plan.num_steps} | checkpoint-{done}")

    def _tell(self, report: SaveReport | None) -> None:
        for note in report.notes if report is not None else ():
            self._parts.progress.say(note)


def _hand_over(step: int, outcome: StepOutcome, clock: StepClock, num_padded: int) -> _Pending:
    """Starts the copy of a step's numbers to the host, without waiting for them."""
    numbers = torch.stack([outcome.loss.double(), outcome.grad_norm.double(), outcome.skipped.double()])
    if numbers.device.type != "cuda":
        return _Pending(step=step, clock=clock, num_padded=num_padded, ready=None, host=numbers)
    host = torch.empty(3, dtype=torch.float64, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return _Pending(step=step, clock=clock, num_padded=num_padded, ready=ready, host=host)


class _Window:
    """Loss and speed of the steps since the last log. Evaluation and saving are not counted as training's time."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._num_tokens = 0
        self._seconds = 0.0

    def add(self, loss: float, num_tokens: int, seconds: float) -> None:
        """One more step, as its slowest rank has lived it."""
        self._losses.append(loss)
        self._num_tokens += num_tokens
        self._seconds += seconds

    def values(self) -> dict[str, float]:
        """loss, tokens_per_second and step_time."""
        return {
            "loss": sum(self._losses) / len(self._losses),
            "tokens_per_second": self._num_tokens / max(self._seconds, 1e-9),
            "step_time": self._seconds / len(self._losses),
        }
