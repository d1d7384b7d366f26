"""Strategy: how a job is split over the cards.

[Note: mesh]
The cards form one named grid, outer to inner: pp, dp_replicate, dp_shard, tp. The inner axes get the nearest cards, so
tensor parallel sits inside a node. Groups are slices of this grid. *Axis* is a side of the grid; *dim* is a side of a
tensor; *degree* is the length of an axis.

[Note: ZeRO by one mechanism]
FSDP2 (`fully_shard`) carries every stage; stage 0 (what people call DDP) is its mesh (dp_replicate, 1), see
`axes/replicate` and `axes/shard`. HSDP is a stage above 0 with dp_replicate > 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from shardwise.vocabulary.job import OptimizerName, Precision, ReduceDtype, Tuning
from shardwise.vocabulary.limits import Count, Degree

Checkpointing = Literal["none", "selective", "full"]
LossKind = Literal["plain", "chunked", "fused"]
Offload = Literal["none", "optimizer", "parameters"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
ZeroStage = Literal[0, 1, 2, 3]


class Axis(StrEnum):
    """The sides of the grid of cards, outer to inner."""

    PP = "pp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    TP = "tp"


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Everything that decides memory, wire and time, given a Job and a Cluster."""

    pp: Degree = 1
    dp_replicate: Degree = 1
    dp_shard: Degree = 1
    tp: Degree = 1
    zero_stage: ZeroStage = 0
    micro_batch_size: Count = 1
    """Sequences that one rank passes forward and backward at once (`per_device_train_batch_size`)."""
    accumulation: Count = 1
    """Micro-batches of one optimizer step on one rank (`gradient_accumulation_steps`)."""
    tuning: Tuning = "full"
    checkpointing: Checkpointing = "none"
    loss: LossKind = "plain"
    precision: Precision = "bf16"
    reduce_dtype: ReduceDtype = "fp32"
    optimizer: OptimizerName = "adamw"
    compile_blocks: bool = False
    offload: Offload = "none"
    sequence_parallel: bool = False
    """With tp > 1: norms and residuals split along the sequence dim."""
    pipeline_schedule: PipelineSchedule = "1f1b"
    virtual_stages: Degree = 1
    """Model chunks a rank in interleaved schedules."""
    keep_unsharded: bool = False
    """Stages 2 and 3: keep whole gradients between micro-batches, so that the wire is paid once a step."""

    def degree(self, axis: Axis) -> int:
        """Length of one axis."""
        degree: int = getattr(self, axis.value)
        return degree

    @property
    def num_ranks(self) -> int:
        """Product of all degrees."""
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def data_parallel(self) -> int:
        """Ranks that see different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def global_batch_size(self) -> int:
        """Sequences of one optimizer step over all cards."""
        return self.micro_batch_size * self.accumulation * self.data_parallel

    @property
    def name(self) -> str:
        """As people call it: `DDP`, `ZeRO-3`, `HSDP 2x4`, `TP 8 x PP 4 x ZeRO-1`, or `one card`."""
        if self.num_ranks == 1:
            return "one card"
        parts: list[str] = []
        if self.tp > 1:
            parts.append(f"TP {self.tp}")
        if self.pp > 1:
            parts.append(f"PP {self.pp}")
        if self.zero_stage > 0 and self.dp_replicate > 1 and self.dp_shard > 1:
            stage = "" if self.zero_stage == 3 else f" ZeRO-{self.zero_stage}"
            parts.append(f"HSDP {self.dp_replicate}x{self.dp_shard}{stage}")
        elif self.zero_stage > 0 and self.dp_shard > 1:
            parts.append(f"ZeRO-{self.zero_stage}" + (f" {self.dp_shard}" if parts else ""))
        elif self.data_parallel > 1:
            parts.append("DDP" + (f" {self.data_parallel}" if parts else ""))
        return " x ".join(parts)
