"""Stage 0: every rank holds the whole model, gradients are summed by one all_reduce a group, once a step.

[Note: DDP by fully_shard] On the mesh (dp_replicate, 1) `fully_shard` gathers nothing and scatters nothing. Against
DistributedDataParallel with autocast it keeps fp32 masters, computes wholly in bf16 (residual stream too) and frees
the bf16 copies block by block. `tests/distributed/test_parity.py` holds it equal to DistributedDataParallel.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise.axes.fully_shard_apply import Groups, GroupSettings, apply_groups, as_fsdp


def apply(groups: Groups, mesh: DeviceMesh, precision: MixedPrecisionPolicy) -> None:
    """Replicates every group over the mesh (dp_replicate, dp_shard=1), or (dp_shard,) for one rank."""
    settings = GroupSettings(
        mesh=mesh,
        precision=precision,
        reshard_after_forward=True,  # frees the copies in compute dtype; nothing crosses the wire
        reshard_root_after_forward=None,
        shards_frozen=False,
    )
    apply_groups(groups, settings)


def before_micro_batch(root: nn.Module, *, is_last: bool) -> None:
    """Gradients are summed over the ranks with the last micro-batch only."""
    as_fsdp(root).set_requires_gradient_sync(is_last)
