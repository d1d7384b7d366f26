"""Going on: from the newest good checkpoint, by itself after a restart, on as many ranks as there are.

[Note: restarts] torch's elastic launcher starts all ranks again with the arguments of the first time, which say nothing
of a resume. The number of restarts, in the environment, does; the ranks take the largest among them, since a machine
that has come anew counts from 0.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.errors import CheckpointError, PlanMismatchError
from shardwise.levers.optimizer.cost import state_bytes_per_parameter
from shardwise.trainer.checkpoint import AppState, Checkpointer
from shardwise.trainer.checkpoint.folder import Need, list_checkpoints
from shardwise.trainer.checkpoint.state import clean_name, model_tensors
from shardwise.trainer.data.batches import BatchPlan
from shardwise.trainer.mesh import RankMesh
from shardwise.trainer.progress import Progress
from shardwise.trainer.state import DataPosition
from shardwise.vocabulary.restarts import restart_count
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy


def fit_ranks(run: RunFile, strategy: Strategy) -> Strategy:
    """The strategy for as many ranks as have been started: fewer if a machine was lost, more if one came back.

    Only where the run file allows restarts; otherwise another number of ranks is an error later on. The batch stays the
    same, so each rank takes more micro-batches; replicas are given up before shards.

    Raises:
        PlanMismatchError: The batch does not divide by that number.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if not run.max_restarts or num_ranks == strategy.num_ranks:
        return strategy
    copies = strategy.num_ranks // strategy.data_parallel
    units = strategy.data_parallel * strategy.accumulation
    data = num_ranks // copies
    if num_ranks % copies or not data or units % data:
        fits = ", ".join(str(copies * each) for each in range(1, units + 1) if units % each == 0)
        raise PlanMismatchError(
            f"{num_ranks} ranks are running, but the {units} micro-batches of a step ({strategy.name}) divide over "
            f"{fits} ranks only. Start as many, or make a plan for {num_ranks}."
        )
    keeps_shards = strategy.zero_stage > 0 and data % strategy.dp_shard == 0
    shards = strategy.dp_shard if keeps_shards else data if strategy.zero_stage > 0 else 1
    whole = shards == 1
    return dataclasses.replace(
        strategy,
        dp_shard=shards,
        dp_replicate=data // shards,
        accumulation=units // data,
        zero_stage=0 if whole else strategy.zero_stage,
        keep_unsharded=strategy.keep_unsharded and not whole,
    )


def agree_restarts(mesh: RankMesh) -> int:
    """How often the ranks have been started again: the largest count among them ([Note: restarts])."""
    count = torch.tensor(restart_count(os.environ))
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=mesh.control)
    return int(count.item())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Continued:
    """What is put back into a run that goes on."""

    checkpointer: Checkpointer
    app_state: AppState
    position: DataPosition
    progress: Progress
    num_restarts: int = 0
    """Above 0 the run goes on from what it has saved itself, whatever its run file says."""


def resume(run: RunFile, continued: Continued) -> None:
    """Loads the newest good checkpoint, or the one asked for; refuses a folder with a run that nobody goes on with.

    Raises:
        CheckpointError: The folder holds another run, or the checkpoint asked for is not good.
    """
    named = run.resume_from_checkpoint
    checkpointer, app, progress = continued.checkpointer, continued.app_state, continued.progress
    if continued.num_restarts:
        progress.say(f"Started again after a rank was lost ({continued.num_restarts} of {run.max_restarts}).")
    if isinstance(named, str) and not continued.num_restarts:
        restored = checkpointer.load(app, named)
    else:
        found = checkpointer.newest_good()
        for damaged in found.damaged:
            progress.say(f"Passed over: {damaged}")
        if found.path is not None and not named and not continued.num_restarts:
            raise CheckpointError(
                f"{run.output_dir} holds {found.path.name} of an earlier run. Go on with --resume, or give another "
                "output_dir."
            )
        if found.path is not None:
            restored = checkpointer.load(app, found.path, verified=found.manifest)
        elif isinstance(named, str):
            restored = checkpointer.load(app, named)
        elif named or continued.num_restarts:
            if found.damaged:
                raise CheckpointError(
                    f"No checkpoint in {run.output_dir} is good enough to resume from. Copy one again from where it "
                    "came from, or start a new run in another output_dir.",
                )
            progress.say(f"{run.output_dir} holds no checkpoint to resume from: starting at the beginning.")
            return
        else:
            return
    for note in restored.notes:
        progress.say(note)
    progress.say(f"Goes on after step {continued.position.next_step}.")


def saves_at(run: RunFile, plan: BatchPlan, first_step: int) -> Iterator[int]:
    """The steps after which a run that stands at `first_step` will save of itself."""
    if run.save_strategy == "no":
        return
    every = plan.steps_per_epoch if run.save_strategy == "epoch" else run.save_steps
    for done in range(first_step + 1, plan.num_steps + 1):
        if done % every == 0 or done == plan.num_steps:
            yield done


def disk_need(run: RunFile, strategy: Strategy, continued: Continued, plan: BatchPlan, exported_bytes: int) -> Need:
    """What this rank knows of the disk that the rest of a run needs, before its first step.

    Args:
        run: What is kept and exported.
        strategy: Says the optimizer, whose states do not exist yet.
        continued: The state that will be saved, and where the run stands.
        plan: Of the steps.
        exported_bytes: Of one element of an exported model.
    """
    app, adapts = continued.app_state, strategy.tuning != "full"
    tensors = model_tensors(app.model)
    saved = model_tensors(app.model, trainable_only=True) if adapts else tensors
    trained = {clean_name(name) for name, parameter in app.model.named_parameters() if parameter.requires_grad}
    checkpoint: dict[str, int] = {}
    for name, tensor in saved.items():
        each = tensor.element_size()
        states = state_bytes_per_parameter(strategy.optimizer, each) if name in trained else 0.0
        checkpoint[app.rename(name)] = round(tensor.numel() * (each + states))
    exported: dict[str, int] = {}
    if run.save_final and adapts:
        exported = {app.rename(name): tensor.numel() * tensor.element_size() for name, tensor in saved.items()}
    if run.save_final and (not adapts or run.merge_adapters):
        for name, tensor in tensors.items():
            packed = 1 if tensor.is_floating_point() else 2  # 4-bit weights lie two in a byte
            exported[app.rename(name)] = tensor.numel() * packed * exported_bytes
    return Need(
        checkpoint=checkpoint,
        exported=exported,
        num_saves=sum(1 for _ in saves_at(run, plan, continued.position.next_step)),
        num_there=len(list_checkpoints(Path(run.output_dir))),
        save_total_limit=run.save_total_limit,
    )
