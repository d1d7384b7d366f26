"""Every error a user can see.

    ShardwiseError                      exit code 1
    ├── UsageError                      exit code 2   what was asked for cannot be read or makes no sense
    │   ├── UnknownNameError            an unknown model, card, link or key; carries the nearest names
    │   ├── ConfigError                 a wrong run file, plan, cluster file or config.json; all problems
    │   ├── DataError                   a data set that cannot be trained on; names the file and the line
    │   └── MissingExtraError           an optional part is not installed; carries the pip command
    ├── DoesNotFitError                 exit code 3   no strategy fits; carries the smallest changes
    ├── PlanMismatchError               exit code 4   what runs differs from what was planned
    ├── CheckpointError                 a checkpoint is missing, unfinished or damaged; names the file
    ├── ResourceError                   the machine lacks something now: disk, memory, a port, a card
    └── TrainingError                   the run itself went wrong: loss not finite, a rank lost, a hang

Each message gives the value, the limit and the way out. `assert` is for our own mistakes only.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class ShardwiseError(Exception):
    """Base of every error that is the answer to something a user did.

    Args:
        *problems: One sentence each: the value, the limit and the way out. At least one.
    """

    exit_code = 1

    def __init__(self, *problems: str) -> None:
        assert problems, "an error without a problem"
        self.problems: tuple[str, ...] = problems
        super().__init__(*problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return f"{len(self.problems)} problems:" + "".join(f"\n  - {problem}" for problem in self.problems)


class UsageError(ShardwiseError):
    """What was asked for cannot be read, or makes no sense."""

    exit_code = 2


class UnknownNameError(UsageError):
    """A name that is in no catalogue.

    Args:
        kind: What sort of thing was looked for, such as "model".
        name: The name as the user wrote it.
        known: Every name that would have been accepted.
        way_out: A sentence appended to the message, if there is another way to say it.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], way_out: str = "") -> None:
        self.kind = kind
        self.name = name
        self.nearest: tuple[str, ...] = tuple(nearest_names(name, list(known)))
        text = f"Unknown {kind} {name!r}."
        if self.nearest:
            text += " Did you mean " + " or ".join(repr(near) for near in self.nearest) + "?"
        super().__init__(f"{text} {way_out}".rstrip())


class ConfigError(UsageError):
    """A run file, plan, cluster file or config.json that is wrong. Carries all problems at once."""


class DataError(UsageError):
    """A data set that cannot be trained on. Names the file and the line."""


class MissingExtraError(UsageError):
    """An optional part is not installed.

    Args:
        feature: What the user wanted to do, such as "Training".
        extra: The extra that brings it.
        module: The module whose import failed.
    """

    def __init__(self, feature: str, extra: str, module: str) -> None:
        super().__init__(f'{feature} needs the package {module!r}, which is not installed. Install it with: '
                         f'pip install "shardwise[{extra}]"')  # fmt: skip


class DoesNotFitError(ShardwiseError):
    """No strategy fits the cards."""

    exit_code = 3


class PlanMismatchError(ShardwiseError):
    """What runs differs from what was planned."""

    exit_code = 4


class CheckpointError(ShardwiseError):
    """A checkpoint is missing, unfinished or damaged."""


class ResourceError(ShardwiseError):
    """The machine lacks something now: disk, memory, a port, a card."""


class TrainingError(ShardwiseError):
    """The run itself went wrong: loss not finite, a rank lost, a hang."""


def nearest_names(name: str, known: Sequence[str], count: int = 3) -> list[str]:
    """The known names that look most like `name`, best first; empty if none is near."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.casefold(), list(by_folded), n=count, cutoff=0.6)
    return [by_folded[match] for match in matches]
