"""The sentinels of a running training, in the order in which the loop meets them.

begin       before a step      tokens to learn from; what this rank is about to compute on is noted
backward    its gradients      not zero, until every trained parameter has had one
numbers     after it           what this rank has seen, to travel with its loss to the others
judge       a step later       samples as planned, loss and norm finite, weights really moved
boundary    now and then       replicas equal; after the first step buffers and ties too
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise.trainer.data.batches import BatchPlan
from shardwise.trainer.data.collate import Batch
from shardwise.trainer.model import Skeleton
from shardwise.trainer.schedule import Schedule
from shardwise.trainer.sentinels.adapters import check_adapters
from shardwise.trainer.sentinels.buffers import check_buffers
from shardwise.trainer.sentinels.drift import check_drift
from shardwise.trainer.sentinels.finite import FiniteWatch
from shardwise.trainer.sentinels.gradients import GradientWatch
from shardwise.trainer.sentinels.movement import MovementWatch, judge_movement
from shardwise.trainer.sentinels.samples import StepData, check_data, data_of, planned_data
from shardwise.trainer.sentinels.ties import check_ties
from shardwise.trainer.step import Stepper

LOOK_EVERY = 200
"""Steps between two looks at replicas and at moved weights."""
NUM_NUMBERS = 5
"""How many numbers of a step travel."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WatchParts:
    """What is watched."""

    skeleton: Skeleton
    stepper: Stepper
    plan: BatchPlan
    schedule: Schedule
    say: Callable[[str], None]
    """Where sentences go that stop nothing."""
    look_every: int = LOOK_EVERY


@dataclass(eq=False)
class _Own:
    """This rank's part of a step."""

    samples: tuple[int, ...]
    data: StepData
    movement: Tensor | None = None
    """Elements unchanged and compared, on the device: [2]"""


class StepWatch:
    """Watches the steps of one start.

    Args:
        parts: What is watched.
    """

    def __init__(self, parts: WatchParts) -> None:
        self._parts = parts
        self._gradients = GradientWatch(parts.skeleton.model, parts.stepper.mesh.control)
        self._movement = MovementWatch(parts.stepper.optimizer)
        self._finite = FiniteWatch(parts.schedule.peak)
        self._own: dict[int, _Own] = {}
        self._num_steps = 0
        self._num_moved = 0
        self._moves = False

    def begin(self, step: int, batches: Sequence[Batch]) -> None:
        """A step is about to be computed.

        Raises:
            TrainingError: Too many steps in a row learn from nothing.
        """
        samples = tuple(sample for batch in batches for sample in batch.sample_ids)
        self._own[step] = _Own(samples=samples, data=data_of(batches))
        said = self._finite.count_tokens(step, self._parts.plan.num_supervised_tokens(step))
        if said is not None:
            self._parts.say(said)
        moves = self._parts.schedule.at(step) > 0 and self._parts.plan.num_supervised_tokens(step) > 0
        if moves and self._num_moved % self._parts.look_every == 0:
            self._movement.arm()
        self._num_moved += moves
        self._moves = moves

    def backward(self, step: int) -> None:
        """The gradients of a step exist.

        Raises:
            TrainingError: Some are missing, or zero for too long.
        """
        if not self._gradients.is_done and self._parts.plan.num_supervised_tokens(step) > 0:
            self._gradients.look(moved=self._num_moved > self._moves)

    def end(self, step: int) -> None:
        """A step has been handed to the device."""
        self._own[step].movement = self._movement.take()

    def numbers(self, step: int) -> tuple[float, ...]:
        """What this rank has seen of a step, for all ranks: [NUM_NUMBERS]."""
        own = self._own[step]
        moved = (0.0, 0.0) if own.movement is None else own.movement.tolist()
        return (own.data.num_samples, own.data.num_supervised, own.data.hash_sum, *moved)

    def judge(self, step: int, numbers: Tensor, loss: float, norm: float) -> None:
        """A step's numbers have come from all ranks.

        Args:
            step: The optimizer step, from 0.
            numbers: What every rank has seen. [ranks, NUM_NUMBERS]
            loss: Mean over all ranks.
            norm: Of the whole gradient.

        Raises:
            TrainingError: The step was not the one that was planned, or nothing moves, or numbers stay not finite.
        """
        parts, mesh = self._parts, self._parts.stepper.mesh
        own = self._own.pop(step)
        num_samples, num_supervised, hash_sum, unchanged, compared = numbers.sum(dim=0).tolist()
        found = StepData(
            num_samples=round(num_samples) // mesh.copies,
            num_supervised=round(num_supervised) // mesh.copies,
            hash_sum=round(hash_sum) // mesh.copies,
        )
        check_data(step, found, planned_data(parts.plan, step), own.samples, mesh)
        said = self._finite.count(step, loss, norm)
        if said is None:
            pure = parts.stepper.strategy.precision == "bf16_pure"
            said = judge_movement(step, (unchanged, compared), parts.schedule.at(step), pure=pure)
        if said is not None:
            parts.say(said)

    def boundary(self, done: int, *, is_last: bool) -> None:
        """After `done` steps, with every rank at the same place.

        Raises:
            TrainingError: Replicas have drifted apart, or adapters are dead.
            PlanMismatchError: Buffers or ties are not what they were.
        """
        model, mesh = self._parts.skeleton.model, self._parts.stepper.mesh
        is_first, self._num_steps = self._num_steps == 0, self._num_steps + 1
        if is_first:
            check_buffers(model, self._parts.skeleton.buffers)
        if is_first or is_last:
            check_ties(model, self._parts.skeleton.aliases)
        if is_first or is_last or self._num_steps % self._parts.look_every == 0:
            check_drift(model, mesh.control, done)
        if is_last and self._num_moved:
            check_adapters(model, mesh.control)

    def close(self) -> None:
        """Nothing is watched any more."""
        self._movement.close()


def watch_of(skeleton: Skeleton, stepper: Stepper, plan: BatchPlan, schedule: Schedule, say: Any) -> StepWatch:
    """The usual sentinels of a run."""
    return StepWatch(WatchParts(skeleton=skeleton, stepper=stepper, plan=plan, schedule=schedule, say=say))
