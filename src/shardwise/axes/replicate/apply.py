"""Stage 0: every rank holds the whole model, gradients are summed by one all_reduce a group, once a step.

[Note: DDP by fully_shard] On the mesh (dp_replicate, 1) `fully_shard` gathers nothing and scatters nothing. Against
DistributedDataParallel with autocast it keeps fp32 masters, computes wholly in bf16 (residual stream too) and frees
the bf16 copies block by block. `tests/distributed/test_parity.py` holds it equal to DistributedDataParallel.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardwise.axes.fully_shard_apply import Groups, GroupSettings, apply_groups, as_fsdp
from shardwise.vocabulary.strategy import Strategy


def apply(
    groups: Groups, mesh: DeviceMesh, precision: MixedPrecisionPolicy, offload: OffloadPolicy, strategy: Strategy
) -> None:
    """Replicates every group over the mesh (dp_replicate, dp_shard=1), or (dp_shard,) for one rank."""
    stays = _stays(strategy)
    settings = GroupSettings(
        mesh=mesh,
        precision=precision,
        offload=offload,
        reshard_after_forward=not stays,  # frees the copies in compute dtype; nothing crosses the wire
        reshard_root_after_forward=False if stays else None,
        shards_frozen=False,
    )
    apply_groups(groups, settings)


def before_micro_batch(root: nn.Module, strategy: Strategy, *, is_last: bool) -> None:
    """Gradients are summed over the ranks with the last micro-batch only."""
    module = as_fsdp(root)
    module.set_requires_gradient_sync(is_last)
    if _stays(strategy):
        module.set_reshard_after_backward(is_last)
        module.set_is_last_backward(is_last)


def _stays(strategy: Strategy) -> bool:
    """Whether the copies in compute dtype stay on the card for the step.

    Because the masters are on the host; or because a pipeline asks for the gradients of weights long after the backward
    that would give the copies back.
    """
    return strategy.offload == "optimizer" or (strategy.pp > 1 and strategy.pipeline_schedule == "zero_bubble")
