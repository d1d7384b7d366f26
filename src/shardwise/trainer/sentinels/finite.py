"""Numbers that stay finite, and steps that learn something: what is not is skipped, counted, and ends the run."""

from __future__ import annotations

import math

from shardwise.errors import TrainingError

MAX_IN_A_ROW = 5
"""Steps without a finite loss and norm, or without a learned token, after which a run is given up."""


class FiniteWatch:
    """Counts steps that went wrong.

    Args:
        peak: The largest learning rate, for the message.
    """

    def __init__(self, peak: float) -> None:
        self._peak = peak
        self._bad_in_a_row = 0
        self._empty_in_a_row = 0

    def count(self, step: int, loss: float, norm: float) -> str | None:
        """One step is over.

        Args:
            step: The optimizer step, from 0.
            loss: Mean over all ranks.
            norm: Of the gradient; the update was skipped on the card if it was not finite.

        Returns:
            A sentence if something was wrong.

        Raises:
            TrainingError: Too many in a row.
        """
        good = math.isfinite(norm) and math.isfinite(loss)
        self._bad_in_a_row = 0 if good else self._bad_in_a_row + 1
        if self._bad_in_a_row >= MAX_IN_A_ROW:
            raise TrainingError(
                f"The gradient's norm or the loss was not finite in {MAX_IN_A_ROW} steps in a row, up to step "
                f"{step + 1} (loss {loss:.4g}, norm {norm:.4g}). Lower learning_rate ({self._peak:g}), warm up longer, "
                "or look at the data of these steps; the newest checkpoint is untouched."
            )
        if math.isfinite(norm) and not math.isfinite(loss):
            return f"Step {step + 1}: the loss is {loss} although the gradient is finite."
        return None if good else f"Step {step + 1}: the gradient's norm is {norm}; nothing was updated."

    def count_tokens(self, step: int, num_supervised: int) -> str | None:
        """How many tokens a step learns from, over all ranks.

        Returns:
            A sentence if there are none.

        Raises:
            TrainingError: Too many such steps in a row.
        """
        self._empty_in_a_row = self._empty_in_a_row + 1 if num_supervised == 0 else 0
        if self._empty_in_a_row >= MAX_IN_A_ROW:
            raise TrainingError(
                f"{MAX_IN_A_ROW} steps in a row, up to step {step + 1}, had no token to learn from. Look at what is "
                "supervised with: shardwise data show"
            )
        if num_supervised == 0:
            return f"Step {step + 1}: no token of it is learned; its loss of 0 means nothing."
        return None
