"""Out of memory, at any time, ends in a page: which category grew, at which instant, what was predicted, what fits.

The instant is read from the stack of the failure; states are counted tensor by tensor, what is left of the allocator's
peak is activations and temporaries; the prediction and the other candidates are those of the run folder's plan.yaml.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import ShardwiseError, TrainingError
from shardwise.trainer.mesh import RankMesh
from shardwise.trainer.meter.memory import stored_bytes
from shardwise.vocabulary import codec
from shardwise.vocabulary.memory import Category, Instant, MemoryBreakdown
from shardwise.vocabulary.plan import Candidate, Plan
from shardwise.vocabulary.strategy import Strategy
from shardwise.vocabulary.units import GIB, format_bytes, format_percent, parse_bytes

PLAN_FILE = "plan.yaml"
_STATES = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER)
_PLACES: tuple[tuple[str, str, Instant], ...] = (
    # a part of the file's path, a function (any if empty), the instant; the innermost frame that fits decides
    ("trainer/checkpoint/", "", Instant.SAVE),
    ("trainer/export/", "", Instant.SAVE),
    ("trainer/evaluate.py", "", Instant.EVALUATION),
    ("trainer/weights.py", "", Instant.LOAD),
    ("trainer/model.py", "materialize", Instant.LOAD),
    ("levers/loss/", "", Instant.LOSS),
    ("torch/optim/", "", Instant.OPTIMIZER),
    ("levers/optimizer/", "", Instant.OPTIMIZER),
    ("trainer/step.py", "_update", Instant.OPTIMIZER),
    ("_fsdp_collectives.py", "foreach_reduce", Instant.REDUCE_FIRST),
    ("torch/autograd/", "", Instant.BACKWARD_FIRST),
    ("trainer/step.py", "summed_loss", Instant.FORWARD),
    ("trainer/pipeline_step.py", "forward_one_chunk", Instant.FORWARD),
)
_OUTER = (Instant.SAVE, Instant.EVALUATION, Instant.LOAD)
"""Instants that stay what they are, whatever is called inside."""
_SPOKEN = {
    Instant.LOAD: "while the weights were loaded",
    Instant.FORWARD: "in forward",
    Instant.LOSS: "in the loss",
    Instant.BACKWARD_FIRST: "in backward",
    Instant.REDUCE_FIRST: "while gradients were reduced",
    Instant.OPTIMIZER: "in the optimizer's step",
    Instant.EVALUATION: "in evaluation",
    Instant.SAVE: "while saving",
}


@dataclass(frozen=True, kw_only=True)
class MemoryFound:
    """Memory of one rank when it ran out, in bytes; None where this device cannot say."""

    stored: Mapping[Category, int] = field(default_factory=dict[Category, int])
    """Parameters, gradients and optimizer states, counted tensor by tensor."""
    allocated: int | None = None
    """Largest sum that torch had handed out in this step."""
    reserved: int | None = None
    """What its allocator held."""
    device: int | None = None
    """What the driver counts, other processes included."""
    total: int | None = None
    """Of the card."""
    requested: int | None = None
    """What could not be had."""

    def by_category(self) -> dict[str, int]:
        """Every category that is known; activations and temporaries together."""
        found = {category.value: self.stored[category] for category in _STATES if category in self.stored}
        if self.allocated is not None:
            moving = self.allocated + (self.requested or 0) - sum(found.values())
            found["activation and temporary"] = max(0, moving)
        if self.device is not None and self.allocated is not None:
            found["runtime"] = max(0, self.device - self.allocated)
        return found


class MemoryWitness:
    """Knows what to count when memory runs out.

    Args:
        folder: The run folder, with plan.yaml if there is one.
        strategy: What runs.
        mesh: This rank's place.
    """

    def __init__(self, folder: Path, strategy: Strategy, mesh: RankMesh) -> None:
        self._folder, self._strategy, self._mesh = folder, strategy, mesh
        self.model: Any = None
        self.optimizer: torch.optim.Optimizer | None = None

    @contextlib.contextmanager
    def explaining(self) -> Generator[MemoryWitness]:
        """Turns running out of memory inside into the page.

        Raises:
            TrainingError: The page.
        """
        try:
            yield self
        except ShardwiseError:
            raise
        except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(*self.page(error)) from error

    def page(self, error: BaseException) -> tuple[str, ...]:
        """What to say about this failure."""
        plan = _read_plan(self._folder / PLAN_FILE)
        return explain(_instant_of(error), self._found(error), plan, self._strategy, rank=dist.get_rank())

    def _found(self, error: BaseException) -> MemoryFound:
        stored: dict[Category, int] = {}
        if self.model is not None:
            counted = stored_bytes(self.model, self.optimizer)
            stored = {
                Category.PARAMETER: counted.parameters + counted.frozen + counted.buffers,
                Category.GRADIENT: counted.gradients,
                Category.OPTIMIZER: counted.optimizer,
            }
        requested, device = _requested(str(error)), self._mesh.device
        if device.type != "cuda":
            return MemoryFound(stored=stored, requested=requested)
        free, total = torch.cuda.mem_get_info(device)
        return MemoryFound(
            stored=stored,
            allocated=torch.cuda.max_memory_allocated(device),
            reserved=torch.cuda.memory_reserved(device),
            device=total - free,
            total=total,
            requested=requested,
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a card or the host has run out of memory."""
    text = str(error).casefold()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError)
        and any(words in text for words in ("out of memory", "can't allocate memory", "cannot allocate memory"))
    )


def _requested(text: str) -> int | None:
    """Bytes asked for, from `Tried to allocate 1.50 GiB` or `you tried to allocate 123 bytes`."""
    match = re.search(r"tried to allocate ([0-9.]+) (bytes|[KMGT]?i?B)", text, re.IGNORECASE)
    return None if match is None else parse_bytes(match[1] + ("" if match[2] == "bytes" else match[2]))


def _instant_of(error: BaseException) -> Instant | None:
    """When it was, from the stack; None if no frame tells."""
    found: Instant | None = None
    for frame in traceback.extract_tb(error.__traceback__):
        path = frame.filename.replace("\\", "/")
        for part, function, instant in _PLACES:
            if part in path and function in ("", frame.name):
                found = instant
        if found in _OUTER:
            break
    return found


def _read_plan(path: Path) -> Plan | None:
    """The plan of the run folder; None if there is none that can be read: the page then says less."""
    with contextlib.suppress(ShardwiseError, OSError):
        return codec.read_noun(Plan, path) if path.is_file() else None
    return None


def explain(
    instant: Instant | None, found: MemoryFound, plan: Plan | None, strategy: Strategy, *, rank: int
) -> tuple[str, ...]:
    """The page: what happened, which category grew, what fits.

    Args:
        instant: When memory ran out.
        found: What was counted then.
        plan: The plan of the run; None if unknown.
        strategy: What ran.
        rank: Whose memory it was.
    """
    when = _SPOKEN[instant] if instant is not None else "outside a step"
    asked = f" for {format_bytes(found.requested)} more" if found.requested is not None else ""
    lines = [
        f"Rank {rank} ran out of memory {when}, asking{asked}." if asked else f"Rank {rank} ran out of memory {when}."
    ]
    if found.device is not None and found.total is not None and found.allocated is not None:
        lines.append(
            f"Of the card's {format_bytes(found.total)}, {format_bytes(found.device)} were taken: allocated "
            f"{format_bytes(found.allocated)}, held by torch's allocator {format_bytes(found.reserved or 0)}."
        )
    candidate = next((each for each in plan.candidates if each.strategy == strategy), None) if plan else None
    if plan is None or candidate is None:
        return (*lines, *_counted(found), "No plan of this run is known; `shardwise plan` says what fits.")
    predicted = _predicted(candidate.memory, instant)
    return (*lines, *_grown(found, predicted), *_way_out(plan, candidate, found))


def _counted(found: MemoryFound) -> list[str]:
    counted = ", ".join(f"{name} {format_bytes(size)}" for name, size in found.by_category().items())
    return [f"Counted: {counted}."] if counted else []


def _predicted(memory: MemoryBreakdown, instant: Instant | None) -> dict[str, int]:
    by_category = memory.by_category(instant)
    return {
        **{category.value: by_category[category] for category in _STATES},
        "activation and temporary": by_category[Category.ACTIVATION] + by_category[Category.TEMPORARY],
        "runtime": by_category[Category.RUNTIME],
    }


def _grown(found: MemoryFound, predicted: Mapping[str, int]) -> list[str]:
    """Every category beside its prediction, and the one that is furthest above."""
    counted = found.by_category()
    if not counted:
        return []
    rows = ", ".join(
        f"{name} {format_bytes(size)} (predicted {format_bytes(predicted[name])})" for name, size in counted.items()
    )
    excess = {name: size - predicted[name] for name, size in counted.items()}
    worst = max(excess, key=lambda name: excess[name])
    if excess[worst] > 0.02 * max(1, sum(predicted.values())):
        return [f"What grew is {worst}, by {format_bytes(excess[worst])} over the plan: {rows}."]
    return [f"No category is above its prediction: {rows}. Something else takes memory of this device."]


def _way_out(plan: Plan, ran: Candidate, found: MemoryFound) -> list[str]:
    """The best other candidate that fits even if it errs as much as this one did."""
    predicted = ran.memory.device_bytes
    needed = (found.device or 0) + (found.requested or 0)
    growth = max(1.0, needed / predicted) if predicted else 1.0
    limit = found.total or plan.cluster.gpu.cuda_memory_bytes or plan.cluster.gpu.memory_bytes
    for other in plan.candidates:
        bytes_then = round(other.memory.device_bytes * growth)
        smaller = other.memory.device_bytes < predicted
        if other.fits and smaller and other.strategy != ran.strategy and bytes_then <= limit:
            slower = ran.tokens_per_s / other.tokens_per_s - 1 if other.tokens_per_s else 0.0
            cost = f"{format_percent(slower)} more time" if slower > 0.005 else "no more time"
            return [
                f"The next plan that fits: {other.strategy.name}, predicted {other.memory.device_bytes / GIB:.1f} GiB "
                f"({bytes_then / GIB:.1f} GiB if it errs as this one did), {cost}: shardwise train ... "
                f"{flags_of(other.strategy)}"
            ]
    return ["No smaller plan of plan.yaml fits; shorten max_length, or use adapters (--tuning lora) or more cards."]


def flags_of(strategy: Strategy) -> str:
    """What to add to `shardwise train` to get this strategy."""
    return (
        f"--zero-stage {strategy.zero_stage} --per-device-train-batch-size {strategy.micro_batch_size} "
        f"--gradient-accumulation-steps {strategy.accumulation} --gradient-checkpointing {strategy.checkpointing} "
        f"--loss {strategy.loss}" + ("" if strategy.tuning == "full" else f" --tuning {strategy.tuning}")
    )
