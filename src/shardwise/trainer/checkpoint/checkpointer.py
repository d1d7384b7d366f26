"""Save and load the state of a run, on all ranks together, in the foreground or behind the training's back.

A save has four parts, and only the first two keep the training waiting:

    plan     DCP's planner: which rank writes what; made once, then only confirmed to be the same
    stage    copies into host memory (staging.py)
    write    each rank its files, hashed as they are written, made durable
    finish   rank 0: manifest, rename, removal of older checkpoints

Whatever fails on one rank is raised on every rank: at once while planning and staging, and by the next `poll` once the
writing has moved to its thread. The folder of the checkpoint before is not touched until the new one is durable.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from shardwise.errors import CheckpointError, ResourceError, ShardwiseError
from shardwise.trainer.checkpoint import folder as folders
from shardwise.trainer.checkpoint.manifest import Manifest
from shardwise.trainer.checkpoint.ranks import Ranks
from shardwise.trainer.checkpoint.staging import Source, StagedItems, Stager, tensors_of
from shardwise.trainer.checkpoint.state import (
    AppState,
    FlatState,
    Restored,
    apply_values,
    check_base,
    check_groups,
    check_names,
    check_shapes,
    compare_runs,
    describe,
    gather_state,
    load_targets,
    reseed,
    shared_digest,
)
from shardwise.trainer.checkpoint.storage import (
    MAX_FILE_BYTES,
    ItemSource,
    SafetensorsReader,
    SafetensorsWriter,
    ValueLoadPlanner,
    ValueSavePlanner,
)
from shardwise.trainer.checkpoint.verify import verify_folder


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How checkpoints are written."""

    save_total_limit: int | None = None
    """How many to keep; None keeps all. The newest is never removed."""
    max_file_bytes: int = MAX_FILE_BYTES
    """A rank starts another file beyond this many bytes."""
    timeout_s: float = 1800.0
    """How long a rank waits for the others before it gives up."""


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What a finished save did, on this rank."""

    path: Path
    """The checkpoint folder."""
    step: int
    """Optimizer steps done."""
    num_bytes: int
    """Bytes of the whole checkpoint, all ranks together."""
    blocked_s: float
    """How long the training waited, in seconds."""
    total_s: float
    """From the call until it was durable, in seconds."""
    notes: tuple[str, ...] = ()
    """What the user should know: older folders that stay, and why; a save that could not go on in the background."""


@dataclass
class _Job:
    """A save on its way."""

    step: int
    about: dict[str, Any]
    extra_files: dict[str, bytes]
    started: float
    blocked_s: float = 0.0
    report: SaveReport | None = None
    error: BaseException | None = None
    notes: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class _Planned:
    """The outcome of planning, kept for the next save."""

    signature: object
    plan: SavePlan
    metadata: Metadata | None
    num_bytes: int


class Checkpointer:
    """Saves and loads the checkpoints of one run folder. Every rank makes one, and calls the same methods in step.

    Args:
        run_folder: The run folder, the same on every rank, on storage that all machines share.
        options: How checkpoints are written.

    Raises:
        CheckpointError, ResourceError: From every method that works with all ranks; the same error on all of them.
    """

    def __init__(self, run_folder: str | Path, options: SaveOptions | None = None) -> None:
        self.run_folder = Path(run_folder)
        self.options = options or SaveOptions()
        self._ranks = Ranks.create(self.options.timeout_s)
        self._stager = Stager()
        self._planned: _Planned | None = None
        self._thread: threading.Thread | None = None
        self._job: _Job | None = None
        self._allotting: threading.Thread | None = None

    def save(
        self,
        state: AppState,
        step: int,
        *,
        blocking: bool = True,
        trainer_state: Mapping[str, Any] | None = None,
        extra_files: Mapping[str, bytes] | None = None,
    ) -> SaveReport | None:
        """Write `checkpoint-<step>`. A save that is still on its way is waited for first.

        Args:
            state: What to save. Pass the optimizers after their step and before the next one.
            step: Optimizer steps done.
            blocking: False returns as soon as the state has been copied, or on a GPU is being copied; call `poll` at
                every step and `wait` at the end.
            trainer_state: Written as `trainer_state.json` with `global_step`; give `log_history`. From rank 0.
            extra_files: Further small files by plain name, such as config.json. From rank 0.

        Returns:
            The report of a blocking save, None otherwise; `poll` and `wait` give it later. Where the host has no memory
            for copies the training waits all the same, and the report says so.

        Raises:
            ResourceError: The disk has no room, by needed and free bytes; or it filled up while writing.
            CheckpointError: The state holds something that cannot be stored, or ranks disagree, or a write failed.
        """
        self.wait()
        started = time.perf_counter()
        files = dict(extra_files or {})
        if trainer_state is not None:
            files[folders.TRAINER_STATE] = folders.encode_trainer_state({**trainer_state, "global_step": step})
        job = _Job(step=step, about={}, extra_files=files, started=started)
        planner, planned = self._agree_plan(state)
        self._open(state, job, planned.num_bytes)
        writer = SafetensorsWriter(
            folders.partial_path(self.run_folder, step),
            step=step,
            about=job.about,
            max_file_bytes=self.options.max_file_bytes,
            finisher=lambda manifest: self._finish(manifest, job),
        )
        if blocking:
            self._write(job, writer, planner, planned)
            return self._collect(job)
        self.wait_until_prepared()
        source: ItemSource = planner
        try:
            source = self._ranks.agree(lambda: self._stager.stage(planned.plan, planner))
        except ResourceError as error:  # no host memory for copies: slower, but saved
            job.notes.append(f"checkpoint-{step} was written while the training waited. {error.problems[0]}")
        self._stager.guard(state.optimizers)
        job.blocked_s = time.perf_counter() - started
        self._job = job
        self._thread = threading.Thread(
            target=self._write, args=(job, writer, source, planned), name="shardwise-save", daemon=True
        )
        self._thread.start()
        if source is planner:
            self._thread.join()
        return None

    def poll(self) -> SaveReport | None:
        """Ask, without waiting, whether the save in the background is done. Call it at every step.

        Returns:
            Its report, once; None while it runs, or if there is none.

        Raises:
            CheckpointError, ResourceError: It has failed, on this rank or another.
        """
        if self._job is None or self._thread is None or self._thread.is_alive():
            return None
        return self.wait()

    def wait(self) -> SaveReport | None:
        """Wait for the save in the background.

        Returns:
            Its report; None if there was none.

        Raises:
            CheckpointError, ResourceError: It has failed.
        """
        job, thread = self._job, self._thread
        if job is None or thread is None:
            return None
        thread.join()
        self._job = self._thread = None
        return self._collect(job)

    def close(self) -> None:
        """Wait for the save in the background and give the group and the memory back."""
        try:
            self.wait()
        finally:
            self._stager.close()
            self._ranks.close()

    def check_room(self, need: folders.Need) -> None:
        """Whether the disk has room for what the rest of the run will write, as the ranks together know it.

        Raises:
            ResourceError: It has not; with needed and free bytes.
        """
        needs = self._ranks.together(lambda: need)
        self._ranks.by_coordinator(lambda: folders.check_room(self.run_folder, needs[0].joined(needs[1:])))

    def newest_good(self) -> folders.Found:
        """The newest checkpoint of the run folder that is not damaged; each rank checks its share of the files."""
        return folders.newest_good(self.run_folder, self._ranks)

    def load(self, state: AppState, path: str | Path, *, verified: Manifest | None = None) -> Restored:
        """Put a checkpoint into the run, whatever the number of ranks and the sharding that saved it.

        Args:
            state: What to load into: sharded and on its device. Gradients must have been set to None.
            path: The checkpoint folder.
            verified: The manifest from `newest_good`, to spare a second check of the files.

        Returns:
            The step, the counters, and what differs from the run that saved.

        Raises:
            CheckpointError: A file is damaged, or the checkpoint is of another model; nothing has been loaded then.
        """
        self.wait()
        return _load(state, Path(path), self._ranks, verified)

    def prepare(self, state: AppState) -> None:
        """Plan the saves and find the host memory for them ahead of time, in the background; on every rank.

        Optional: it takes the pinning of memory (some tenths of a second per GB) off the first save in the background.
        Call it once the optimizer has taken its first step, since its states do not exist before.

        Args:
            state: What will be saved.
        """
        planner, planned = self._agree_plan(state)
        sources = tensors_of(planned.plan, planner)
        self._allotting = threading.Thread(target=self._allot, args=(sources,), name="shardwise-pin", daemon=True)
        self._allotting.start()

    def wait_until_prepared(self) -> None:
        """Wait until `prepare` has found the memory; a save in the background does so by itself."""
        if self._allotting is not None:
            self._allotting.join()

    def _allot(self, sources: list[Source]) -> None:
        try:
            self._stager.allot(sources)
        except ResourceError:
            return  # the save itself will say so, on all ranks together

    def _agree_plan(self, state: AppState) -> tuple[ValueSavePlanner, _Planned]:
        """A planner that finds the tensors of this rank, and the plan: the one of before if nothing has changed."""
        ranks = self._ranks
        planner = ValueSavePlanner(flatten_state_dict=False)
        flat: FlatState = {}

        def look() -> tuple[bool, dict[str, str]]:
            flat.update(gather_state(state, ranks.rank))
            planner.set_up_planner(flat, is_coordinator=ranks.is_coordinator)
            same = self._planned is not None and self._planned.signature == _signature(flat)
            return same, shared_digest(flat)

        seen = ranks.together(look)
        _check_shared([digest for _, digest in seen])
        if not all(same for same, _ in seen):
            self._planned = self._plan(planner, flat)
        assert self._planned is not None
        planner.finish_plan(self._planned.plan)
        return planner, self._planned

    def _open(self, state: AppState, job: _Job, num_bytes: int) -> None:
        """Check the disk and make the folder; all ranks agree on the outcome."""

        def open_folder() -> None:
            folders.check_disk(self.run_folder, num_bytes)
            folders.start_partial(self.run_folder, job.step, job.extra_files)

        job.about = describe(state, self._ranks.size)
        self._ranks.by_coordinator(open_folder)

    def _plan(self, planner: ValueSavePlanner, flat: FlatState) -> _Planned:
        ranks = self._ranks
        kept: list[Metadata] = []

        def whole(plans: list[SavePlan]) -> list[SavePlan]:
            combined, metadata = planner.create_global_plan(plans)
            kept.append(metadata)
            return SafetensorsWriter(self.run_folder).prepare_global_plan(combined)

        plan = ranks.plan(planner.create_local_plan, whole)
        num_bytes = sum(ranks.all_gather(sum(item.tensor_storage_size() or 0 for item in plan.items)))
        metadata = kept[0] if kept else None
        return _Planned(signature=_signature(flat), plan=plan, metadata=metadata, num_bytes=num_bytes)

    def _write(self, job: _Job, writer: SafetensorsWriter, source: ItemSource, planned: _Planned) -> None:
        """Write and finish; every failure ends up in the job, on every rank."""

        def write() -> list[Any]:
            self._stager.wait()
            return writer.write_items(planned.plan, source)

        def finish() -> tuple[Path, int, tuple[str, ...]]:
            assert planned.metadata is not None
            writer.finish(planned.metadata, results)
            path = folders.checkpoint_path(self.run_folder, job.step)
            return path, job.about["num_bytes"], tuple(job.notes)

        try:
            results = self._ranks.gather(self._ranks.agree(write))
            path, num_bytes, notes = self._ranks.by_coordinator(finish)
        except ShardwiseError as error:
            job.error = error
            self._clean_up(job)
        except BaseException as error:  # a lost rank ends the collective with torch's own error
            job.error = CheckpointError(f"The save of step {job.step} was cut off: {type(error).__name__}: {error}")
            job.error.__cause__ = error
        else:
            total = time.perf_counter() - job.started
            blocked = job.blocked_s if isinstance(source, StagedItems) else total
            job.report = SaveReport(
                path=path, step=job.step, num_bytes=num_bytes, blocked_s=blocked, total_s=total, notes=notes
            )

    def _finish(self, manifest: Manifest, job: _Job) -> None:
        """On the coordinator: write what is small, complete the folder, remove older checkpoints."""
        partial = folders.partial_path(self.run_folder, job.step)
        extra = folders.write_extra_files(partial, job.extra_files)
        manifest = Manifest(
            step=manifest.step,
            files={**manifest.files, **extra},
            tensors=manifest.tensors,
            values=manifest.values,
            paths=manifest.paths,
            about=manifest.about,
        )
        folders.complete(self.run_folder, manifest)
        job.about["num_bytes"] = manifest.num_bytes
        job.notes += folders.rotate(self.run_folder, job.step, self.options.save_total_limit)

    def _clean_up(self, job: _Job) -> None:
        """Remove what a failed save has written, so that a full disk is not left full; best effort."""
        if self._ranks.is_coordinator:
            try:
                folders.remove(folders.partial_path(self.run_folder, job.step))
            except OSError:
                return  # the marker inside says that it is unfinished; the next save removes it

    def _collect(self, job: _Job) -> SaveReport:
        if job.error is not None:
            raise job.error
        assert job.report is not None
        return job.report


def _signature(flat: FlatState) -> object:
    """What a plan depends on: names, shapes, types and placements, but no contents."""
    described: list[tuple[object, ...]] = []
    meshes: dict[int, object] = {}  # asking a mesh for its ranks costs 0.1 ms, and hundreds of tensors share one
    for name, value in flat.items():
        if isinstance(value, DTensor):
            mesh = value.device_mesh
            if id(mesh) not in meshes:
                meshes[id(mesh)] = (tuple(mesh.mesh.flatten().tolist()), tuple(mesh.shape))
            described.append((name, tuple(value.shape), value.dtype, value.placements, meshes[id(mesh)]))
        elif isinstance(value, torch.Tensor):
            described.append((name, tuple(value.shape), value.dtype))
        else:
            described.append((name,))
    return described


def _check_shared(digests: list[dict[str, str]]) -> None:
    names = sorted(set().union(*digests))
    differing = [name for name in names if len({digest.get(name) for digest in digests}) > 1]
    if differing:
        raise CheckpointError(
            *(
                f"{name.removeprefix('extra.')} is not the same on all ranks, and one copy is stored. "
                "Give it a state that does not depend on the rank."
                for name in differing
            )
        )


def _load(state: AppState, path: Path, ranks: Ranks, verified: Manifest | None) -> Restored:
    manifest = verified or verify_folder(path, ranks)
    flat: FlatState = {}

    def look() -> set[str]:
        flat.update(load_targets(state, manifest, ranks.rank))
        problems = check_base(state, manifest) + check_shapes(flat, manifest)
        if problems:
            raise CheckpointError(*problems)
        return set(flat)

    problems = check_names(ranks.together(look), manifest)
    if problems:
        raise CheckpointError(*(f"{path}: {problem}" for problem in problems))
    about = manifest.about
    same_layout = about.get("world_size") == ranks.size and about.get("mesh") == dict(state.mesh)
    rng_restored = all(ranks.all_gather(same_layout and f"rng.{ranks.rank:05d}" in flat))
    if not rng_restored:
        flat.pop(f"rng.{ranks.rank:05d}", None)
    values = {name: value for name, value in flat.items() if name in manifest.values}
    _read(values, path, manifest, ranks)
    ranks.agree(lambda: check_groups(state, values))
    _read({name: value for name, value in flat.items() if name not in values}, path, manifest, ranks)
    flat.update(values)
    ranks.agree(lambda: apply_values(state, flat, ranks.rank))
    notes = compare_runs(state, manifest, ranks.size)
    if not rng_restored:
        reseed(state.seed, manifest.step, ranks.rank if state.data_rank is None else state.data_rank)
        notes.append(f"random streams derived anew from seed {state.seed}, step {manifest.step} and rank")
    return Restored(
        step=manifest.step,
        counters=dict(about.get("counters") or {}),
        rng_restored=rng_restored,
        notes=tuple(notes),
        manifest=manifest,
    )


def _read(flat: FlatState, path: Path, manifest: Manifest, ranks: Ranks) -> None:
    """Load in place with DCP's planner; its failures are not `Exception`s, so they are translated."""
    reader = SafetensorsReader(path, manifest)
    planner = ValueLoadPlanner(flatten_state_dict=False)

    def read() -> None:
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, ranks.is_coordinator)
        planner.set_up_planner(flat, metadata, ranks.is_coordinator)
        plan = planner.finish_plan(planner.create_local_plan())
        reader.read_data(plan, planner).wait()

    try:
        ranks.agree(read)
    except CheckpointException as error:  # a BaseException: `except Exception` would let it pass
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error


def save(
    state: AppState, run_folder: str | Path, step: int, *, options: SaveOptions | None = None, **files: Any
) -> SaveReport:
    """Write one checkpoint and wait for it: `Checkpointer` for a single use.

    Args:
        state: What to save.
        run_folder: The run folder; `checkpoint-<step>` appears in it.
        step: Optimizer steps done.
        options: How it is written.
        **files: `trainer_state` and `extra_files` of `Checkpointer.save`.

    Raises:
        CheckpointError, ResourceError: As `Checkpointer.save`.
    """
    checkpointer = Checkpointer(run_folder, options)
    try:
        report = checkpointer.save(state, step, **files)
        assert report is not None
        return report
    finally:
        checkpointer.close()


def load(state: AppState, path: str | Path) -> Restored:
    """Put a checkpoint into the run: `Checkpointer.load` for a single use.

    Args:
        state: What to load into.
        path: The checkpoint folder.

    Raises:
        CheckpointError: A file is damaged, or the checkpoint is of another model; nothing has been loaded then.
    """
    ranks = Ranks.create()
    try:
        return _load(state, Path(path), ranks, None)
    finally:
        ranks.close()
