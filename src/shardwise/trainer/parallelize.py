"""The one recipe: what is done to a model, in which order, and the proof that it took.

    model.py       adapters, dtypes, the layers of this stage    (the skeleton comes with them)
    1  loss        the model's forward answers with its summed loss
    2  tensor      matrices split over tp
    3  fp8         the blocks' products in 8 bits
    4  checkpoint  blocks keep less
    5  compile     blocks compiled, in place
    6  data        groups sharded over dp_shard or replicated over dp_replicate; offloaded with that

All of it chunk by chunk where a stage of a pipeline has several. Checkpointing comes before compile so that the
compiler sees what is recomputed; both before `fully_shard`, whose gathering must stay outside.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.axes import engine
from shardwise.axes.fully_shard_apply import Groups
from shardwise.axes.pipeline import cost as pipeline
from shardwise.axes.pipeline.apply import chunks_of, embedding_of
from shardwise.axes.replicate import apply as replicate
from shardwise.axes.shard import apply as shard
from shardwise.axes.tensor import apply as tensor
from shardwise.axes.tensor import cost as tensor_cost
from shardwise.errors import ConfigError
from shardwise.levers.adapters import apply_nf4 as nf4
from shardwise.levers.checkpointing import apply as checkpointing
from shardwise.levers.loss import apply as loss
from shardwise.levers.offload import apply as offload
from shardwise.levers.optimizer.apply_8bit import load_bitsandbytes
from shardwise.levers.precision import apply as precision
from shardwise.levers.precision import apply_fp8 as fp8
from shardwise.trainer.checkpoint.state import clean_name
from shardwise.trainer.mesh import RankMesh
from shardwise.trainer.model import Skeleton
from shardwise.vocabulary.strategy import Strategy


def parallelize(skeleton: Skeleton, mesh: RankMesh, strategy: Strategy) -> None:
    """Applies a strategy to a model without memory, in place.

    Raises:
        ConfigError: The engine cannot do what the strategy says; all of it.
    """
    refuse_unsupported(strategy)
    refuse_machine(strategy, mesh.device)
    for chunk in chunks_of(skeleton.model):
        _before_groups(chunk, mesh, strategy)
    split = replicate.apply if strategy.zero_stage == 0 else shard.apply
    for groups in find_groups(skeleton):
        split(groups, mesh.data, precision.policy(strategy), offload.policy(strategy, mesh.device), strategy)


def _before_groups(model: Any, mesh: RankMesh, strategy: Strategy) -> None:
    """Everything that happens to a model, or to a stage's chunk of it, before it falls into groups."""
    if model.get_output_embeddings() is not None:  # not where a chunk ends with hidden states
        loss.apply(model, strategy.loss, compiled=strategy.compile_blocks)
    blocks = decoder_blocks(model)
    if mesh.tensor is not None:
        tensor.apply(model, blocks, mesh.tensor, strategy)
    if strategy.precision == "fp8":
        fp8.apply(blocks)
    checkpointing.apply(blocks, strategy.checkpointing)
    if strategy.compile_blocks:
        for block in blocks:
            block.compile()


def before_micro_batch(model: nn.Module, strategy: Strategy, *, is_last: bool) -> None:
    """Tells the groups whether this micro-batch is the last of its step."""
    if strategy.zero_stage == 0:
        replicate.before_micro_batch(model, strategy, is_last=is_last)
    else:
        shard.before_micro_batch(model, strategy, is_last=is_last)


def refuse_unsupported(strategy: Strategy) -> None:
    """What the planner knows and this engine does not run.

    Raises:
        ConfigError: All of it.
    """
    problems = list(engine.not_run(strategy))
    problems += offload.problems(strategy)
    problems += [f"{message}." for _, message in (*tensor_cost.problems(strategy), *pipeline.problems(strategy))]
    if strategy.zero_stage > 0 and strategy.dp_shard == 1:
        problems.append(f"ZeRO stage {strategy.zero_stage} over one shard splits nothing; use stage 0.")
    if strategy.zero_stage == 0 and strategy.dp_shard > 1:
        problems.append(f"ZeRO stage 0 does not shard, but dp_shard is {strategy.dp_shard}; use dp_replicate.")
    if problems:
        raise ConfigError(*problems)


def refuse_machine(strategy: Strategy, device: torch.device) -> None:
    """What this machine or its packages lack for a strategy; asked before anything is loaded.

    Raises:
        ConfigError: The card cannot do it.
        MissingExtraError: A package is not installed.
    """
    if strategy.precision == "fp8":
        if problems := fp8.problems(device):
            raise ConfigError(*problems)
        fp8.load_float8()
    if strategy.tuning == "qlora":
        nf4.load_bitsandbytes()
    if strategy.optimizer in ("adamw_8bit", "paged_adamw_8bit"):
        load_bitsandbytes("An 8-bit optimizer")


def decoder_blocks(model: nn.Module) -> nn.ModuleList:
    """The list of equal blocks that makes a decoder.

    Raises:
        ConfigError: The model has none.
    """
    names: set[str] = set(cast(Any, model)._no_split_modules or ())
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) and plain_class(module[0]) in names:
            return module
    raise ConfigError(f"{type(model).__name__} has no list of {', '.join(sorted(names)) or 'blocks'} to split by.")


def plain_class(module: Any) -> str:
    """Name of a module's own class, under checkpointing and `fully_shard`."""
    inner = getattr(module, "_checkpoint_wrapped_module", module)
    return next(kind.__name__ for kind in type(inner).__mro__ if not issubclass(kind, FSDPModule))


def find_groups(skeleton: Skeleton) -> tuple[Groups, ...]:
    """Of each chunk: blocks, the embedding if it is not tied (to a head on this rank), and the root."""
    tied = {name.rsplit(".", 1)[0] for names in skeleton.aliases for name in names}
    return tuple(_groups(chunk, tied) for chunk in chunks_of(skeleton.model))


def _groups(model: Any, tied: set[str]) -> Groups:
    embedding = embedding_of(model)
    names = {id(module): clean_name(name) for name, module in model.named_modules()}
    alone = embedding if embedding is not None and names[id(embedding)] not in tied else None
    return Groups(root=model, blocks=tuple(decoder_blocks(model)), embedding=alone)
