"""Stages 1 to 3: shards over dp_shard, under HSDP replicated over dp_replicate.

| stage | reshard after forward (blocks, embedding / root) | between micro-batches                            |
|-------|--------------------------------------------------|--------------------------------------------------|
| 1     | no / no                                          | stays gathered; reduced with the last one        |
| 2     | no / no                                          | gathered again for each forward; reduced by each |
| 3     | yes / no (torch's default)                       | gathered twice by each; reduced by each          |

[Note: replicas] Under HSDP each micro-batch's gradients are reduce-scattered over dp_shard and added up there; the sum
is all-reduced over dp_replicate, which is the slower wire, with the last micro-batch (`sums_shards_first` says where).
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardwise.axes.fully_shard import sums_shards_first
from shardwise.axes.fully_shard_apply import Groups, GroupSettings, apply_groups, as_fsdp, prefetch_within
from shardwise.vocabulary.strategy import Strategy


def apply(
    groups: Groups, mesh: DeviceMesh, precision: MixedPrecisionPolicy, offload: OffloadPolicy, strategy: Strategy
) -> None:
    """Shards every group over the mesh (dp_shard,) or (dp_replicate, dp_shard)."""
    full = strategy.zero_stage == 3
    settings = GroupSettings(
        mesh=mesh,
        precision=precision,
        offload=offload,
        reshard_after_forward=full,
        reshard_root_after_forward=None if full else False,
        shards_frozen=full,
    )
    apply_groups(groups, settings)
    if strategy.pp > 1:
        prefetch_within(groups)


def before_micro_batch(root: nn.Module, strategy: Strategy, *, is_last: bool) -> None:
    """Which micro-batches gather and reduce."""
    module = as_fsdp(root)
    if strategy.zero_stage == 1:
        module.set_requires_gradient_sync(is_last)
        module.set_reshard_after_backward(is_last)
        module.set_is_last_backward(is_last)
    elif strategy.keep_unsharded:
        module.set_requires_gradient_sync(is_last)
    elif sums_shards_first(strategy):
        module.set_requires_all_reduce(is_last)
