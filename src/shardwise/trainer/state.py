"""What a run remembers besides weights and optimizer: where it stands in its data, what it has logged and counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from shardwise.trainer.checkpoint import AppState
from shardwise.trainer.data.batches import BatchPlan, BatchState
from shardwise.trainer.model import Skeleton
from shardwise.vocabulary import codec
from shardwise.vocabulary.strategy import Axis, Strategy


class DataPosition:
    """The run's place in its data, as a checkpoint keeps it."""

    def __init__(self, plan: BatchPlan) -> None:
        self._plan = plan
        self.next_step = 0
        """The optimizer step that comes next."""

    def state_dict(self) -> dict[str, Any]:
        """Epoch, step, seed and fingerprint."""
        return dataclasses.asdict(self._plan.state(self.next_step))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint stood.

        Raises:
            PlanMismatchError: It drew other samples.
        """
        self.next_step = self._plan.resume(BatchState(**state_dict))


class RunState:
    """Counts and logged numbers of a run over all its interruptions."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Tokens seen over all ranks, padding not counted."""
        self.num_skipped = 0
        """Steps without an update, because the gradient's norm was not finite."""
        self.log_history: list[dict[str, float]] = []
        """Every logged line, in HF's keys."""

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {"num_tokens": self.num_tokens, "num_skipped": self.num_skipped, "log_history": self.log_history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back."""
        self.num_tokens = state_dict["num_tokens"]
        self.num_skipped = state_dict["num_skipped"]
        self.log_history = [dict(line) for line in state_dict["log_history"]]

    def first_eval_loss(self) -> float | None:
        """Held-out loss before the first step; None if there was none."""
        first = next((line for line in self.log_history if "eval_loss" in line), None)
        return first["eval_loss"] if first is not None and first["step"] == 0 else None

    def last_eval_loss(self) -> float | None:
        """The newest held-out loss after a step; None if there was none."""
        last = next((line for line in reversed(self.log_history) if "eval_loss" in line), None)
        return last["eval_loss"] if last is not None and last["step"] > 0 else None

    def trainer_state(self, plan: BatchPlan, step: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The content of trainer_state.json, which every plotting script reads."""
        return {
            "global_step": step,
            "max_steps": plan.num_steps,
            "num_train_epochs": plan.num_steps / plan.steps_per_epoch,
            "epoch": step / plan.steps_per_epoch,
            "num_input_tokens_seen": self.num_tokens,
            "log_history": self.log_history,
            **settings,
        }


def app_state(
    skeleton: Skeleton, optimizer: Any, strategy: Strategy, extra: Mapping[str, Any], *, seed: int, data_rank: int
) -> AppState:
    """Everything that a checkpoint keeps of a run."""
    return AppState(
        model=skeleton.model,
        optimizers=(optimizer,),
        extra=dict(extra),
        trainable_only=strategy.tuning != "full",
        mesh={str(axis): strategy.degree(axis) for axis in Axis},
        strategy=codec.to_data(strategy),
        seed=seed,
        data_rank=data_rank,
        num_frozen=skeleton.num_frozen,
    )
