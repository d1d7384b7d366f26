"""The life of a checkpoint folder inside a run folder.

    checkpoint-20.partial/   being written, or left by a save that was killed; holds the file UNFINISHED
    checkpoint-20/           durable and complete: its manifest was written last, then the folder was renamed
    checkpoint-10.old/       on its way out: renamed first, so that a killed removal never leaves half a checkpoint

Nothing is removed that this module did not make: a folder must carry one of the three names and a manifest of ours or
the UNFINISHED marker, and inside it only the files that the manifest lists (or, unfinished, files with our names) are
removed. A folder with anything else in it stays, and the reason is told. Symbolic links are never followed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from shardwise.errors import CheckpointError, ResourceError
from shardwise.trainer.checkpoint.manifest import MANIFEST, Manifest, is_file_name, read_manifest, write_manifest
from shardwise.trainer.checkpoint.ranks import Ranks
from shardwise.trainer.checkpoint.tensorfile import FileRecord, fsync_folder, write_bytes
from shardwise.trainer.checkpoint.verify import verify_folder
from shardwise.vocabulary.units import format_bytes

UNFINISHED: Final = "UNFINISHED"
TRAINER_STATE: Final = "trainer_state.json"
_UNFINISHED_TEXT: Final = b"A shardwise checkpoint that is being written, or whose save was cut off. Safe to delete.\n"
_NAME: Final = re.compile(r"checkpoint-(\d{1,18})(\.partial|\.old)?")
_OURS: Final = re.compile(r"rank-\d{5}(-\d{5})?\.(safetensors|json)")
_SLACK_BYTES: Final = 64 * 2**20
"""Asked for beyond the tensors: headers, values, manifest, and what the file system needs for itself."""


def checkpoint_path(run_folder: Path, step: int) -> Path:
    """`checkpoint-<step>` in a run folder."""
    return run_folder / f"checkpoint-{step}"


def partial_path(run_folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is written before it is complete."""
    return run_folder / f"checkpoint-{step}.partial"


def list_checkpoints(run_folder: Path, suffix: str | None = None) -> list[tuple[int, Path]]:
    """Step and folder of every checkpoint by name alone, newest first; `suffix` ".partial" or ".old" lists those."""
    found: list[tuple[int, Path]] = []
    if not run_folder.is_dir():
        return found
    for path in run_folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and match[2] == suffix and path.is_dir() and not path.is_symlink():
            found.append((int(match[1]), path))
    return sorted(found, reverse=True)


@dataclass(frozen=True, kw_only=True)
class Need:
    """What the rest of a run will write, as far as one rank knows."""

    checkpoint: Mapping[str, int] = field(repr=False)
    """Whole bytes of each tensor of a checkpoint, optimizer states included, by name."""
    exported: Mapping[str, int] = field(repr=False)
    """Whole bytes of each tensor that is exported at the end, by name."""
    num_saves: int
    """How often it will save of itself."""
    num_there: int = 0
    """Checkpoints that are in the run folder already."""
    save_total_limit: int | None = None

    def joined(self, others: Iterable[Need]) -> Need:
        """The same with what other ranks know: stages of a pipeline hold different tensors."""
        checkpoint, exported = dict(self.checkpoint), dict(self.exported)
        for other in others:
            checkpoint.update(other.checkpoint)
            exported.update(other.exported)
        return replace(self, checkpoint=checkpoint, exported=exported)

    @property
    def num_at_once(self) -> int:
        """New checkpoints that must fit: one more than are kept, since an older one goes after the new one is durable.

        With no limit only the next one is asked for: whoever keeps all may carry them away.
        """
        limit = self.save_total_limit
        return min(self.num_saves, 1 if limit is None else max(limit + 1 - self.num_there, 1))

    @property
    def num_bytes(self) -> int:
        """Beyond what is there now: the fuller of the last save and of the export beside what is kept."""
        one, limit = sum(self.checkpoint.values()), self.save_total_limit
        kept = min(self.num_saves, 1 if limit is None else max(limit - self.num_there, 0))
        return max(self.num_at_once * one, kept * one + sum(self.exported.values()))


def check_room(run_folder: Path, need: Need) -> None:
    """Whether the disk has room for everything that a run will write; asked before its first step.

    Args:
        run_folder: The run folder, or a folder that will be made.
        need: Of all ranks, joined.

    Raises:
        ResourceError: It has not; with needed and free bytes.
    """
    if not need.num_bytes:
        return
    needed, free = need.num_bytes + _SLACK_BYTES, _free_bytes(run_folder)
    if free >= needed:
        return
    one, exported = sum(need.checkpoint.values()), sum(need.exported.values())
    parts = [f"{need.num_at_once} × {format_bytes(one)} for checkpoints"] if need.num_saves else []
    if need.num_saves and need.save_total_limit is not None:
        parts[0] += f" (save_total_limit {need.save_total_limit}, and one more while the newest is written)"
    if exported:
        parts.append(f"{format_bytes(exported)} for the export at the end")
    raise ResourceError(
        f"The run needs {format_bytes(needed)} ({needed} bytes) in {run_folder}: {' and '.join(parts)}; "
        f"{format_bytes(free)} ({free} bytes) are free. Free some space, lower save_total_limit, set save_strategy or "
        "save_final otherwise, or give another output_dir."
    )


def _free_bytes(folder: Path) -> int:
    """Of the disk of a folder, or of its nearest parent that exists."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_disk(run_folder: Path, num_bytes: int) -> None:
    """Whether the disk has room for one more checkpoint.

    Args:
        run_folder: The run folder, or a folder that will be made; the nearest parent that exists is asked.
        num_bytes: Bytes of all tensors of all ranks.

    Raises:
        ResourceError: It has not; with needed and free bytes.
    """
    needed, free = num_bytes + _SLACK_BYTES, _free_bytes(run_folder)
    if free < needed:
        raise ResourceError(
            f"A checkpoint needs {format_bytes(needed)} ({needed} bytes) in {run_folder}, {format_bytes(free)} "
            f"({free} bytes) are free. Free some space, lower save_total_limit, or give another output_dir. "
            "An older checkpoint is removed only after the new one is durable, so both must fit for a while."
        )


def start_partial(run_folder: Path, step: int, extra_names: Iterable[str] = ()) -> Path:
    """A fresh folder for the checkpoint of a step; what a killed save of the same step left behind is removed.

    Args:
        run_folder: The run folder; made if it does not exist.
        step: Optimizer steps done.
        extra_names: The files that `write_extra_files` will write; the marker lists them, so that they can be removed.

    Raises:
        CheckpointError: A folder of that name holds files that are not ours.
        OSError: The disk refuses.
    """
    run_folder.mkdir(parents=True, exist_ok=True)
    path = partial_path(run_folder, step)
    if (path.exists() or path.is_symlink()) and (reason := remove(path)):
        raise CheckpointError(f"{path} is in the way: {reason}. Move it elsewhere.")
    path.mkdir()
    write_bytes(path / UNFINISHED, _UNFINISHED_TEXT + "".join(f"{name}\n" for name in extra_names).encode())
    fsync_folder(run_folder)
    return path


def write_extra_files(folder: Path, files: Mapping[str, bytes]) -> dict[str, FileRecord]:
    """Write files that belong to the checkpoint beside the tensors, such as `trainer_state.json`.

    Raises:
        CheckpointError: A name that is not a plain file name, or that the checkpoint uses itself.
        OSError: The disk is full or refuses.
    """
    for name in files:
        if not is_file_name(name) or name == UNFINISHED or _OURS.fullmatch(name):
            raise CheckpointError(
                f"{name!r} cannot be a file of a checkpoint. Give a plain file name, such as config.json."
            )
    return {name: write_bytes(folder / name, data) for name, data in files.items()}


def encode_trainer_state(state: Mapping[str, Any]) -> bytes:
    """`trainer_state.json` as transformers' Trainer writes it; every plotting script reads its `log_history`."""
    return (json.dumps(dict(state), indent=2, sort_keys=True) + "\n").encode()


def complete(run_folder: Path, manifest: Manifest) -> Path:
    """Mark a written checkpoint as complete: manifest, fsync, rename, fsync.

    A checkpoint of the same step from before (a run that was resumed from an older one) makes way, and is removed once
    the new one stands.

    Raises:
        CheckpointError: `checkpoint-<step>` exists and is not ours.
        OSError: The disk is full or refuses.
    """
    partial, final = partial_path(run_folder, manifest.step), checkpoint_path(run_folder, manifest.step)
    write_manifest(partial, manifest)
    (partial / UNFINISHED).unlink(missing_ok=True)
    fsync_folder(partial)
    old = final.with_name(final.name + ".old")
    if final.exists() or final.is_symlink():
        if reason := _not_ours(final) or (old.exists() and remove(old)):
            raise CheckpointError(f"{final} is in the way: {reason}. Move it elsewhere.")
        final.rename(old)
    partial.rename(final)
    fsync_folder(run_folder)
    if old.exists():
        remove(old)
    return final


def rotate(run_folder: Path, saved_step: int, limit: int | None) -> list[str]:
    """Keep the newest checkpoints and remove what is left of older ones. Call it once the new one is durable.

    Args:
        run_folder: The run folder.
        saved_step: The step just saved; it always stays.
        limit: `save_total_limit`: how many to keep, at least 1; None keeps all.

    Returns:
        A sentence for every folder that should have gone but stays.
    """
    notes: list[str] = []
    doomed = [path for _, path in list_checkpoints(run_folder, ".old")]
    doomed += [path for step, path in list_checkpoints(run_folder, ".partial") if step < saved_step]
    if limit is not None:
        kept = 1  # the one just saved
        for step, path in list_checkpoints(run_folder):
            if step != saved_step and (kept := kept + 1) > max(limit, 1):
                doomed.append(path)
    for path in doomed:
        if reason := remove(path):
            notes.append(f"{path} was not removed: {reason}.")
    return notes


def remove(path: Path) -> str | None:
    """Remove a checkpoint folder of ours, completely or not at all but for its own files.

    Returns:
        Why it stays, or None once it is gone.
    """
    if reason := _not_ours(path):
        return reason
    match = _NAME.fullmatch(path.name)
    if match and match[2] is None:  # out of sight first: a removal that is killed leaves no half checkpoint behind
        out = path.with_name(path.name + ".old")
        if out.exists() and (reason := remove(out)):
            return reason
        path.rename(out)
        path = out
    names = [entry.name for entry in path.iterdir()]
    for name in sorted(names, key=lambda name: name in (MANIFEST, UNFINISHED)):  # the proof that it is ours goes last
        (path / name).unlink()
    path.rmdir()
    return None


def _not_ours(path: Path) -> str | None:
    """Why a folder must not be removed, or None."""
    if path.is_symlink() or not path.is_dir() or not _NAME.fullmatch(path.name):
        return "it is not a checkpoint folder"
    names = {entry.name for entry in path.iterdir()}
    allowed = {MANIFEST, UNFINISHED}
    if UNFINISHED in names:
        allowed |= _unfinished_extras(path) | {name for name in names if _OURS.fullmatch(name)}
    elif MANIFEST in names:
        try:
            allowed |= set(read_manifest(path).files)
        except CheckpointError:
            return "its manifest is damaged, so its files cannot be told from others"
    elif names:
        return "it has neither a manifest nor the marker of an unfinished save"
    strangers = sorted(names - allowed)
    if strangers or any((path / name).is_dir() for name in names):
        return f"it holds {', '.join(strangers[:3]) or 'folders'}, which the checkpoint did not write"
    return None


def _unfinished_extras(path: Path) -> set[str]:
    """The extra files that the marker of an unfinished save announces."""
    try:
        return set((path / UNFINISHED).read_text().splitlines()[1:])
    except (OSError, UnicodeDecodeError):
        return set()


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a run folder holds."""

    path: Path | None
    """The newest good checkpoint; None if there is none."""
    manifest: Manifest | None
    """Its manifest."""
    damaged: tuple[str, ...]
    """A sentence for every newer checkpoint that is damaged, naming the file."""
    unfinished: tuple[str, ...]
    """The folders of saves that were cut off."""

    @property
    def step(self) -> int | None:
        """Steps done at the newest good checkpoint."""
        return None if self.manifest is None else self.manifest.step


def newest_good(run_folder: str | Path, ranks: Ranks | None = None) -> Found:
    """Find the newest checkpoint whose every file is what its manifest says.

    Args:
        run_folder: The run folder. It may not exist yet.
        ranks: Every rank of it must call this; each hashes its share. None checks everything in this process.

    Returns:
        The checkpoint, and the damaged and unfinished ones that were passed over.
    """
    run_folder = Path(run_folder)
    ranks = ranks or Ranks(None)
    candidates = ranks.by_coordinator(lambda: _candidates(run_folder))
    unfinished = ranks.by_coordinator(
        lambda: tuple(str(path) for suffix in (".partial", ".old") for _, path in list_checkpoints(run_folder, suffix))
    )
    damaged: list[str] = []
    for path in candidates:
        try:
            manifest = verify_folder(path, ranks)
        except CheckpointError as error:
            damaged += error.problems if path.suffix == "" else ()
            continue
        return Found(path=path, manifest=manifest, damaged=tuple(damaged), unfinished=unfinished)
    return Found(path=None, manifest=None, damaged=tuple(damaged), unfinished=unfinished)


def _candidates(run_folder: Path) -> list[Path]:
    """Every folder that may be good, best first.

    A checkpoint that replaces one of the same step is, for an instant, complete but not yet renamed while the other
    already has made way. Killed right then, either of them is as good as it was.
    """
    suffixes = (None, ".partial", ".old")
    ranked = [
        (-step, place, path)
        for place, suffix in enumerate(suffixes)
        for step, path in list_checkpoints(run_folder, suffix)
        if suffix is None or (path / MANIFEST).is_file()
    ]
    return [path for _, _, path in sorted(ranked)]
