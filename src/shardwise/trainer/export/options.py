"""What an export should be, and what it was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What the exported folder should be."""

    dtype: torch.dtype | None = None
    """Type of the floating-point weights; None takes the model's `config.dtype`, or bf16 if it names none."""
    merge: bool = False
    """With PEFT adapters: write the whole model with the adapters merged into it, instead of the adapters."""
    adapter_name: str = "default"
    """Which of the adapters."""
    max_shard_bytes: int = 5 * 10**9
    """A file ends before this many bytes, unless one tensor alone is larger."""
    base_model: str | None = None
    """Hub id or path of the model that was fine-tuned, for the model card and adapter_config.json."""
    datasets: tuple[str, ...] = ()
    """Hub ids of the data, for the model card."""
    tags: tuple[str, ...] = ("shardwise", "sft")
    """Tags of the model card."""


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was written."""

    folder: Path
    """The finished folder."""
    num_tensors: int
    """Tensors in it."""
    num_bytes: int
    """Bytes of the weight files."""
    dropped: tuple[str, ...]
    """Second names of tied weights, which loading ties again."""
