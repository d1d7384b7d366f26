"""The files that a run folder opens with: plan.yaml, cluster.yaml and run.yaml.

They belong to the run whose checkpoints lie beside them, and `shardwise train FOLDER --resume` rests on them. So they
are written only where no other run and no file of the user's stands in the way, and a resumed run that ends before its
first step gives back what was there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError, ConfigError, ResourceError, UsageError
from shardwise.vocabulary import codec

PLAN_FILE, CLUSTER_FILE, RUN_FILE = "plan.yaml", "cluster.yaml", "run.yaml"
METRICS_FILE = "metrics.jsonl"
_CHECKPOINTS = "checkpoint-*/manifest.json"


def look(folder: Path, nouns: Mapping[str, Any], *, resumes: bool) -> None:
    """Look whether these files may be written into a folder.

    Args:
        folder: The run folder, which need not exist.
        nouns: What is to be written, by file name.
        resumes: Whether a run that is there is gone on with.

    Raises:
        CheckpointError: The folder holds an earlier run that nobody goes on with.
        UsageError: A file of that name is none that a run has written.
        ResourceError: The place is no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise ResourceError(f"output_dir {folder} is a file; give a folder, or a name that is free")
    found = sorted(folder.glob(_CHECKPOINTS), key=lambda path: (len(path.parent.name), path.parent.name))
    if found and not resumes:
        raise CheckpointError(
            f"{folder} holds {found[-1].parent.name} of an earlier run. Go on with --resume, or give another "
            "output_dir."
        )
    there = [name for name in nouns if (folder / name).exists()]
    if len(there) == len(nouns):
        return
    foreign = [name for name in there if not _says(folder / name, nouns[name])]
    if foreign:
        raise UsageError(
            *(
                f"{folder / name} would be written over, and no run wrote it; give another output_dir"
                for name in foreign
            )
        )


def _says(path: Path, noun: Any) -> bool:
    try:
        return codec.read_yaml(path) == codec.to_data(noun)
    except ConfigError:
        return False


def write(folder: Path, nouns: Mapping[str, Any]) -> None:
    """Write the files, all of them or none.

    Raises:
        ResourceError: The disk refuses.
    """
    before = _kept(folder, nouns)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, noun in nouns.items():
            (folder / name).write_text(codec.to_yaml(noun), encoding="utf-8")
    except OSError as error:
        with contextlib.suppress(OSError):
            _give_back(folder, nouns, before)
        raise ResourceError(
            f"output_dir {folder} cannot be written ({error.strerror or error}); free or unlock it, or give another"
        ) from error


@contextlib.contextmanager
def kept_until_a_step(folder: Path, nouns: Mapping[str, Any]) -> Generator[None]:
    """If an earlier run was there and what is inside fails before it logs a step, put that run's files back."""
    before, logged = _kept(folder, nouns), _logged_bytes(folder)
    try:
        yield
    except BaseException:
        if before and _logged_bytes(folder) == logged:
            with contextlib.suppress(OSError):
                _give_back(folder, nouns, before)
        raise


def _kept(folder: Path, nouns: Mapping[str, Any]) -> dict[str, bytes]:
    with contextlib.suppress(OSError):
        return {name: (folder / name).read_bytes() for name in nouns if (folder / name).is_file()}
    return {}


def _give_back(folder: Path, nouns: Mapping[str, Any], before: Mapping[str, bytes]) -> None:
    for name in nouns:
        if name in before:
            (folder / name).write_bytes(before[name])
        else:
            (folder / name).unlink(missing_ok=True)


def _logged_bytes(folder: Path) -> int:
    path = folder / METRICS_FILE
    return path.stat().st_size if path.is_file() else 0
