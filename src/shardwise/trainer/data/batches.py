"""The global plan: which samples belong to which optimizer step, and who computes them.

[Note: three cuts] The plan is made in three cuts, and only the last one knows the number of ranks:

    1. epoch -> steps          a seeded shuffle of the rows, cut into global batches
    2. step -> micro-batches   rows of similar cost together; the same contents on any number of ranks
    3. micro-batches -> ranks  heaviest first, each round of `num_ranks` side by side, so that ranks wait little

So a step holds the same samples on 1 rank or on 7, and a run may resume on another number of ranks. Every rank gets
the same number of micro-batches in every step; where the samples do not suffice, some are empty ([Note: labels]
in the package says how the loss is normalized, which makes an empty one harmless).

[Note: shuffle] The order of an epoch is the sort of a hash of (seed, epoch, row). It needs no random number
generator, is the same on every machine and numpy version, and epoch 1,000 costs no more than epoch 0.

[Note: cost] Cost is counted in tokens. A row of length L costs L + L^2 / attention_crossover: the crossover is the
length at which causal attention costs as much as all matrix products of a block. With 12 h^2 weights in a block,
these cost 24 h^2 FLOPs a token forward and attention 2 h L, so the crossover is 12 h. In a packed row every document
counts its own square.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError, DataError, PlanMismatchError
from shardwise.trainer.data.packing import Packing, one_sample_per_row, pack
from shardwise.trainer.data.store import TokenizedSet


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How to cut a set into steps, micro-batches and ranks."""

    global_batch: int
    """Rows (samples, or packed rows) of one optimizer step over all ranks."""
    micro_batch: int
    """Rows that one rank computes at once, at most; `per_device_train_batch_size`."""
    num_ranks: int
    """Data-parallel ranks ([Note: rank])."""
    seed: int = 42
    """Seed of the shuffle."""
    num_train_epochs: float = 1.0
    """Passes over the set; a fraction is rounded up to a whole step. Ignored if `max_steps` is set."""
    max_steps: int | None = None
    """Optimizer steps, the set repeated as often as needed; None counts by epochs."""
    packing: bool = False
    """Whether several samples share a row of `max_length` tokens."""
    max_length: int | None = None
    """Token budget of a packed row; required with `packing`."""
    dataloader_drop_last: bool = False
    """Drop the last, smaller step of an epoch; otherwise it is computed with fewer rows."""
    shuffle: bool = True
    """Reorder the rows in every epoch; evaluation turns it off."""
    attention_crossover: int = 24_576
    """Tokens at which attention costs as much as the matrix products ([Note: cost]); 12 x hidden_size."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What one rank computes at once."""

    rows: tuple[tuple[int, ...], ...]
    """The samples of each row; one sample a row unless packed. No rows: an empty micro-batch."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to compute, but the rank must still take part in the collectives."""
        return not self.rows

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """All samples, in the order of the rows."""
        return tuple(sample for row in self.rows for sample in row)


@dataclass(frozen=True, kw_only=True)
class BatchState:
    """Where a run stands in its data: all that a checkpoint has to keep."""

    epoch: int
    """Epoch of the next step, from 0."""
    step: int
    """The next optimizer step, from 0, counted over all epochs."""
    seed: int
    """Seed of the shuffle."""
    fingerprint: str
    """`BatchPlan.fingerprint`: the same samples at the same steps."""
    cursor: str = ""
    """Streams only: where the window of the next step starts in the source, as JSON."""


class BatchPlan:
    """Which samples belong to which step, and who computes them ([Note: three cuts]). Made by `plan_batches`."""

    def __init__(self, tokenized: TokenizedSet, options: BatchOptions, packing: Packing) -> None:
        self.options = options
        self.packing = packing
        self._tokenized = tokenized
        self._lengths = tokenized.lengths
        self._supervised_counts = tokenized.supervised_counts
        self._costs = _row_costs(packing, self._lengths, options.attention_crossover)
        whole, rest = divmod(packing.num_rows, options.global_batch)
        self.steps_per_epoch = whole if options.dataloader_drop_last or not rest else whole + 1
        """Optimizer steps in one pass over the set."""
        self.num_steps = (
            options.max_steps
            if options.max_steps is not None
            else math.ceil(round(options.num_train_epochs * self.steps_per_epoch, 9))
        )
        """Optimizer steps of the whole run."""
        self.fingerprint = _fingerprint(tokenized, options, packing)
        """Equal when every step holds the same samples; does not depend on ranks or micro-batch."""
        layout = f"{self.fingerprint} {options.num_ranks} {options.micro_batch} {self.num_steps}"
        self.layout_fingerprint = hashlib.sha256(layout.encode()).hexdigest()
        """Equal when the samples also lie on the same ranks: all ranks compare it before step 0."""
        self._epoch_order = functools.lru_cache(maxsize=2)(self._shuffled)

    def epoch(self, step: int) -> int:
        """The epoch that a step belongs to, from 0."""
        return step // self.steps_per_epoch

    def set_at(self, step: int) -> TokenizedSet:
        """The set that the sample numbers of a step count in: the whole one, or a window of a stream."""
        del step
        return self._tokenized

    def row_indices(self, step: int) -> NDArray[np.int64]:
        """The packing rows of a step, in shuffled order: [rows of the step].

        Raises:
            IndexError: The step is not in the plan.
        """
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} is outside the plan of {self.num_steps} steps")
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.options.global_batch
        return self._epoch_order(epoch)[start : start + self.options.global_batch]

    def sample_ids(self, step: int) -> tuple[int, ...]:
        """All samples of a step, over all ranks."""
        return tuple(sample for row in self.row_indices(step).tolist() for sample in self.packing.row(row))

    def num_supervised_tokens(self, step: int) -> int:
        """Predicted and learned tokens of a step over all ranks, after the shift: what normalizes the loss."""
        return int(self._supervised_counts[list(self.sample_ids(step))].sum())

    def num_tokens(self, step: int) -> int:
        """Tokens of a step over all ranks, padding not counted."""
        return int(self.packing.row_tokens[self.row_indices(step)].sum())

    def num_micro_steps(self, step: int) -> int:
        """Micro-batches that every rank computes in a step; fewer than usual in a last, smaller step."""
        return math.ceil(len(self.row_indices(step)) / (self.options.micro_batch * self.options.num_ranks))

    def micro_batches(self, step: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of a step over all ranks, heaviest first; the same on any number of ranks."""
        return tuple(self._micro_batch(group) for group in self._groups(step))

    def for_rank(self, step: int, rank: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of one rank in a step, in order; equally many on every rank, some perhaps empty."""
        if not 0 <= rank < self.options.num_ranks:
            raise IndexError(f"rank {rank} is outside the plan of {self.options.num_ranks} data-parallel ranks")
        groups = self._groups(step)
        placed = place([self._group_cost(group) for group in groups], self.options.num_ranks)
        return tuple(
            MicroBatch(rows=()) if index is None else self._micro_batch(groups[index]) for index in placed[rank]
        )

    def balance(self, step: int) -> float:
        """Mean cost of a rank over what the slowest rank of every round costs, 0 to 1; 1 means nobody waits."""
        costs = [self._group_cost(group) for group in self._groups(step)]
        placed = place(costs, self.options.num_ranks)
        rounds = zip(*placed, strict=True)
        slowest = sum(max(0.0 if index is None else costs[index] for index in one) for one in rounds)
        return sum(costs) / self.options.num_ranks / slowest

    def state(self, step: int) -> BatchState:
        """What a checkpoint keeps so that the run resumes with `step` as its next step."""
        return BatchState(
            epoch=self.epoch(step), step=step, seed=self.options.seed, fingerprint=self.fingerprint
        )  # fmt: skip

    def resume(self, state: BatchState) -> int:
        """The step to go on with. Costs nothing: no sample is read or skipped.

        Raises:
            PlanMismatchError: The saved run drew other samples: another set, tokenizer, length, batch or seed.
        """
        problems: list[str] = []
        if state.seed != self.options.seed:
            problems.append(
                f"The checkpoint's data order has seed {state.seed}, this run has {self.options.seed}. "
                f"Resume with seed {state.seed}, or start a new run."
            )
        elif state.fingerprint != self.fingerprint:
            problems.append(
                f"The checkpoint's data plan is {state.fingerprint[:12]}, this run's is {self.fingerprint[:12]}: the "
                "data file, the tokenizer or template, max_length, packing or the global batch has changed. "
                "Restore them (the number of ranks and the micro-batch may change freely), or start a new run."
            )
        if state.step > self.num_steps:
            problems.append(
                f"The checkpoint stands at step {state.step}, but this run ends at {self.num_steps}. "
                "Raise max_steps or num_train_epochs."
            )
        if problems:
            raise PlanMismatchError(*problems)
        return state.step

    def describe(self) -> str:
        """The effective batch and the steps in words, for the start of a run."""
        options = self.options
        unit = f"packed rows of {self.packing.budget:,} tokens" if options.packing else "sequences"
        accumulation = math.ceil(options.global_batch / (options.micro_batch * options.num_ranks))
        places = options.micro_batch * accumulation * options.num_ranks
        tokens = float(self.packing.row_tokens.mean()) * min(options.global_batch, self.packing.num_rows)
        text = f"{options.micro_batch} x {accumulation} x {options.num_ranks} ranks = {places} {unit}"
        if places > options.global_batch:
            text += f", of which {places - options.global_batch} stay empty: the global batch is {options.global_batch}"
        text += f" = about {tokens:,.0f} tokens a step; {self.steps_per_epoch} steps an epoch, {self.num_steps} in all"
        num_rows, rest = self.packing.num_rows, self.packing.num_rows % options.global_batch
        if num_rows < options.global_batch:
            return (
                f"{text}. Warning: the set has only {num_rows} {unit}, fewer than the global batch of "
                f"{options.global_batch}: a step is a whole epoch of {num_rows}, and the learning rate was chosen for "
                f"{options.global_batch}. Lower global_batch_size to {num_rows} or less"
                + (", or turn packing off" if options.packing else "")
            )
        if rest:
            fate = "are left out of each epoch" if options.dataloader_drop_last else "form a smaller last step"
            text += f"; the remaining {'packed rows' if options.packing else 'sequences'} ({rest}) {fate}"
        return text

    def account(self) -> str | None:
        """What reading has come to, if it went on while training: streams only."""
        return None

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        num_rows = self.packing.num_rows
        if not self.options.shuffle:
            return np.arange(num_rows, dtype=np.int64)
        return shuffled(num_rows, self.options.seed, epoch)

    def _groups(self, step: int) -> list[list[int]]:
        """Rows of a step in micro-batches, heaviest first. Equal for any number of ranks."""
        rows = self.row_indices(step)
        order = rows[np.lexsort((rows, -self._costs[rows]))].tolist()
        size = self.options.micro_batch
        # Neighbors in cost are neighbors in length: the least padding, and rounds of equal weight.
        return [order[start : start + size] for start in range(0, len(order), size)]

    def _group_cost(self, group: Sequence[int]) -> float:
        costs = self._costs[list(group)]
        return float(costs.sum()) if self.options.packing else float(costs.max()) * len(group)  # padded to the longest

    def _micro_batch(self, group: Sequence[int]) -> MicroBatch:
        return MicroBatch(rows=tuple(self.packing.row(row) for row in group))


def plan_batches(tokenized: TokenizedSet, options: BatchOptions) -> BatchPlan:
    """Plans every step of a run. The same inputs give the same plan on every rank and machine.

    Args:
        tokenized: The data set.
        options: How to cut it.

    Raises:
        ConfigError: A count is not positive, or the packing has no budget or one that is too small.
        DataError: No sample, or fewer than one whole step with `dataloader_drop_last`.
    """
    problems = [
        f"{name} is {value}; it must be at least 1."
        for name, value in (
            ("global_batch", options.global_batch),
            ("micro_batch", options.micro_batch),
            ("num_ranks", options.num_ranks),
            ("attention_crossover", options.attention_crossover),
        )
        if value < 1
    ]
    if options.max_steps is not None and options.max_steps < 1:
        problems.append(f"max_steps is {options.max_steps}; it must be at least 1, or not set to count by epochs.")
    if options.max_steps is None and not options.num_train_epochs > 0:
        problems.append(f"num_train_epochs is {options.num_train_epochs}; it must be above 0, or set max_steps.")
    if options.packing and options.max_length is None:
        problems.append("packing needs max_length, the token budget of a row; it is not set.")
    if problems:
        raise ConfigError(*problems)
    if not len(tokenized):
        raise DataError(f"{tokenized.report.source} has no sample left to train on.")
    lengths = tokenized.lengths
    if options.packing and options.max_length is not None:
        packing = pack(lengths, options.max_length)
    else:
        packing = one_sample_per_row(lengths, options.max_length or int(lengths.max()))
    if options.dataloader_drop_last and packing.num_rows < options.global_batch:
        raise DataError(
            f"{tokenized.report.source} gives {packing.num_rows} rows, fewer than the global batch of "
            f"{options.global_batch}, and dataloader_drop_last drops the rest: no step is left. "
            f"Lower the global batch to {packing.num_rows}, or set dataloader_drop_last: false."
        )
    return BatchPlan(tokenized, options, packing)


def place(costs: Sequence[float], num_ranks: int) -> list[list[int | None]]:
    """Spreads micro-batches over ranks so that ranks wait little for each other.

    Ranks meet after every micro-batch when parameters or gradients are sharded, so each round takes neighbors in
    cost; within a round the heaviest goes to the rank that has had the least so far.

    Args:
        costs: Cost of each micro-batch, heaviest first.
        num_ranks: Data-parallel ranks.

    Returns:
        For each rank the index of its micro-batch in every round; None is an empty one. Equally many on every rank.
    """
    placed: list[list[int | None]] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    for start in range(0, len(costs), num_ranks):
        lightest_first = sorted(range(num_ranks), key=lambda rank: (load[rank], rank))
        for position, rank in enumerate(lightest_first):
            index = start + position
            placed[rank].append(index if index < len(costs) else None)
            load[rank] += costs[index] if index < len(costs) else 0.0
    return placed


def shuffled(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of `num_rows` that depends on nothing but its arguments ([Note: shuffle]): [num_rows]."""
    digest = hashlib.sha256(f"shardwise epoch order {seed} {epoch}".encode()).digest()
    key = np.uint64(int.from_bytes(digest[:8], "little"))
    # splitmix64 (Steele, Lea, Flood 2014): a bijection of 64 bits, so distinct rows have distinct keys.
    with np.errstate(over="ignore"):
        mixed = np.arange(1, num_rows + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return np.argsort(mixed, kind="stable").astype(np.int64)


def _row_costs(packing: Packing, lengths: NDArray[np.int64], crossover: int) -> NDArray[np.float64]:
    """Cost of each row in tokens ([Note: cost]): [num_rows]."""
    squares = np.square(lengths[packing.samples].astype(np.float64))  # [num_samples], in row order
    running = np.concatenate(([0.0], np.cumsum(squares)))
    per_row = running[packing.offsets[1:]] - running[packing.offsets[:-1]]
    return packing.row_tokens + per_row / crossover


def _fingerprint(tokenized: TokenizedSet, options: BatchOptions, packing: Packing) -> str:
    settings = {
        "set": tokenized.fingerprint,
        "global_batch": options.global_batch,
        "seed": options.seed,
        "shuffle": options.shuffle,
        "drop_last": options.dataloader_drop_last,
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for array in (tokenized.offsets, tokenized.supervised_counts, packing.samples, packing.offsets):
        digest.update(np.ascontiguousarray(array).astype("<i8").tobytes())
    return digest.hexdigest()
