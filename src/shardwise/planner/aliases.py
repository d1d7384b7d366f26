"""Other names of the same splits: what FSDP1, DeepSpeed, accelerate and people call them.

| name                                   | here                                      |
|----------------------------------------|-------------------------------------------|
| NO_SHARD, ddp                          | stage 0                                   |
| zero1                                  | stage 1                                   |
| SHARD_GRAD_OP, zero2                   | stage 2                                   |
| FULL_SHARD, zero3, fsdp, fsdp2         | stage 3                                   |
| HYBRID_SHARD, hsdp                     | stage 3 inside a machine, replicas across |
| _HYBRID_SHARD_ZERO2, HYBRID_SHARD_ZERO2 | stage 2 inside a machine, replicas across |

Words that say nothing about the split (`auto_wrap`, `offload` in `fsdp: "full_shard auto_wrap offload"`) are read too.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from shardwise.errors import ConfigError, UnknownNameError
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.strategy import ZeroStage

if TYPE_CHECKING:
    from shardwise.planner.search import Wishes

_STAGES: dict[str, ZeroStage] = {
    "no_shard": 0, "ddp": 0, "zero0": 0,
    "zero1": 1, "shard_optimizer": 1,
    "shard_grad_op": 2, "zero2": 2,
    "full_shard": 3, "zero3": 3, "fsdp": 3, "fsdp1": 3, "fsdp2": 3,
    "hybrid_shard": 3, "hsdp": 3,
    "hybrid_shard_zero2": 2,
}  # fmt: skip
_HYBRID = ("hybrid_shard", "hsdp", "hybrid_shard_zero2")
NAMES = (
    "NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2",
    "ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp",
)  # fmt: skip


_MEANINGS: dict[ZeroStage, str] = {
    0: "DDP: every card holds the whole model, and gradients are summed once a step",
    1: "ZeRO-1: the optimizer's states are sharded over {where}",
    2: "ZeRO-2: gradients and the optimizer's states are sharded over {where}, whole weights gathered each micro-batch",
    3: "ZeRO-3: weights, gradients and the optimizer's states are sharded over {where}, blocks gathered for their use",
}
_FROM = {
    "no_shard": "FSDP1's name", "shard_grad_op": "FSDP1's name", "full_shard": "FSDP1's name",
    "hybrid_shard": "FSDP1's name", "hybrid_shard_zero2": "FSDP1's name",
}  # fmt: skip


def read_alias(text: str) -> str:
    """The folded name of a split, without the words that are allowed beside it.

    Raises:
        UnknownNameError: No such name.
    """
    words = [word.strip("_ ").lower().replace("-", "_") for word in text.replace(",", " ").split()]
    names = [word for word in words if word not in ("auto_wrap", "offload")]
    if len(names) != 1 or names[0] not in _STAGES:
        raise UnknownNameError("split", text, NAMES)
    return names[0]


def explained(text: str) -> str:
    """What a name stands for, as a sentence without its end.

    Raises:
        UnknownNameError: No such name.
    """
    name = read_alias(text)
    meaning = _MEANINGS[_STAGES[name]]
    if name in _HYBRID:
        meaning = meaning.format(where="the cards of a machine") + "; replicas across machines (HSDP)"
    return f"{text} is {_FROM.get(name, 'another name')} for {meaning.format(where='all cards')}"


def with_alias(wishes: Wishes, text: str, cluster: Cluster) -> Wishes:
    """The wishes with the split that a name such as `FULL_SHARD` or `full_shard auto_wrap` stands for.

    Args:
        wishes: What else is decided.
        text: One name, with or without the words that accelerate and transformers allow beside it.
        cluster: Says how many cards a machine has, which a hybrid split is made along.

    Raises:
        UnknownNameError: No such name.
        ConfigError: The name contradicts the wishes, or a hybrid split meets a single machine.
    """
    name = read_alias(text)
    stage = _STAGES[name]
    problems: list[str] = []
    if wishes.zero_stage is not None and wishes.zero_stage != stage:
        problems.append(f"{text} is ZeRO stage {stage}, but stage {wishes.zero_stage} was asked for; leave one out")
    changes: dict[str, object] = {"zero_stage": stage}
    if name in _HYBRID:
        if cluster.num_nodes == 1 and wishes.dp_shard is None:
            problems.append(
                f"{text} shards inside a machine and replicates across machines, and there is one machine; "
                "use FULL_SHARD, or say dp_shard"
            )
        changes["dp_shard"] = wishes.dp_shard or cluster.gpus_per_node // (wishes.tp or 1)
    elif stage > 0 and wishes.dp_shard is None and wishes.dp_replicate is None:
        changes["dp_replicate"] = 1
    if "offload" in text.lower().replace(",", " ").split():
        changes["offload"] = "parameters"
    if problems:
        raise ConfigError(*problems)
    return dataclasses.replace(wishes, **changes)  # pyright: ignore[reportArgumentType]
