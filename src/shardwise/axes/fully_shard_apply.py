"""`fully_shard` group by group: what replicate and shard do to a module, with other settings.

[Note: groups] FSDP2 gathers and reduces parameters in groups. Ours are every block; the embedding on its own where it
is not tied; and the root, which is what is left (norm and head, and the embedding where it is tied). A tied embedding
and head must lie in one group: on torch 2.11 a group of the embedding alone trains wrong without a word.

[Note: averaging] FSDP2 averages gradients over the ranks; the loss is therefore scaled by the number of ranks
(`levers/accumulation/apply.py`) so that what comes out is the sum. Averaging by a power of two is exact in any dtype.
Otherwise NCCL would multiply by a rounded 1/n (in bf16 wrong by up to 0.4 % for every element alike), so the sum is
taken first and divided afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy

GroupSite = Literal["embedding", "block", "root"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """The modules that become groups, bottom up ([Note: groups])."""

    root: nn.Module
    blocks: Sequence[nn.Module]
    """In the order of the forward pass; as wrapped for checkpointing and compile."""
    embedding: nn.Module | None
    """None where it is tied to the head, and so belongs to the root."""

    def inner(self) -> Iterator[tuple[GroupSite, nn.Module]]:
        """Every group but the root."""
        if self.embedding is not None:
            yield "embedding", self.embedding
        for block in self.blocks:
            yield "block", block


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupSettings:
    """What `fully_shard` is told."""

    mesh: DeviceMesh
    """1-D (dp_shard), or 2-D (dp_replicate, dp_shard). Its device type decides where parameters live."""
    precision: MixedPrecisionPolicy
    reshard_after_forward: bool
    """Of blocks and embedding."""
    reshard_root_after_forward: bool | None
    """None: torch's default, the root stays gathered until its backward."""
    offload: OffloadPolicy
    """Whether what is managed waits in host memory."""
    shards_frozen: bool
    """Whether parameters that do not train are sharded; otherwise each rank keeps them and none cross the wire."""


def apply_groups(groups: Groups, settings: GroupSettings) -> None:
    """Makes every group an FSDP module, the root last."""
    from torch.distributed.fsdp import fully_shard

    frozen: set[nn.Parameter] = set()
    if not settings.shards_frozen:
        frozen = {parameter for parameter in groups.root.parameters() if not parameter.requires_grad}
    shared: dict[str, Any] = {
        "mesh": settings.mesh,
        "mp_policy": settings.precision,
        "offload_policy": settings.offload,
        "ignored_params": frozen,
    }
    for _, module in groups.inner():
        if any(parameter not in frozen for parameter in module.parameters()):
            fully_shard(module, reshard_after_forward=settings.reshard_after_forward, **shared)
    fully_shard(groups.root, reshard_after_forward=settings.reshard_root_after_forward, **shared)
    num_ranks = settings.mesh.size()
    if num_ranks & (num_ranks - 1):  # not a power of two, see [Note: averaging]
        for module in fsdp_modules(groups.root):
            module.set_force_sum_reduction_for_comms(True)


def prefetch_within(groups: Groups) -> None:
    """In backward a group gathers the one before it ahead of time, and never one of another micro-batch.

    By itself FSDP2 goes back through the forwards that it has seen; where several micro-batches are under way, it would
    gather the last group of another one after the first of this. A group that is told to gather itself gathers nothing.
    """
    from torch.distributed.fsdp import FSDPModule

    order = [module for module in (*groups.blocks, groups.root) if isinstance(module, FSDPModule)]
    for before, module in zip(order[:1] + order, order, strict=False):
        module.set_modules_to_backward_prefetch([before])
    if isinstance(groups.embedding, FSDPModule):
        groups.embedding.set_modules_to_backward_prefetch([groups.embedding])


def fsdp_modules(root: nn.Module) -> list[FSDPModule]:
    """Every module under `root` that is a group, root included."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def as_fsdp(root: nn.Module) -> FSDPModule:
    """The root as the FSDP module that `apply_groups` has made of it."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(root, FSDPModule), f"{type(root).__name__} was not wrapped"
    return cast("FSDPModule", root)
