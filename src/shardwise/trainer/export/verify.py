"""Does an exported folder load, and is it the model in memory?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import safe_open
from torch import nn

from shardwise.errors import CheckpointError
from shardwise.trainer.checkpoint.ranks import Ranks
from shardwise.trainer.checkpoint.tensorfile import read_header
from shardwise.trainer.export.files import ADAPTER
from shardwise.trainer.export.options import ExportOptions
from shardwise.trainer.export.pieces import Piece, export_dtype, find_pieces, is_adapter, whole
from shardwise.trainer.weights import find_sources

_LEAST_TOLERANCE: Final = 1e-4
"""fp32 on another device sums in another order; some 30 layers of it stay well below this share of a logit."""


@dataclass(frozen=True, kw_only=True)
class ExportCheck:
    """How an exported folder compares with the model in memory."""

    num_tensors: int
    """Tensors that were compared bit by bit with the model's, converted to their type in the file."""
    max_logit_difference: float
    """Largest difference of a logit, as a share of the largest logit."""
    tolerance: float
    """What rounding of the weights and of the computation explains."""


def verify_export(
    model: nn.Module,
    folder: str | Path,
    input_ids: torch.Tensor,
    *,
    base_folder: str | Path | None = None,
    options: ExportOptions | None = None,
    tolerance: float | None = None,
) -> ExportCheck:
    """Load an exported folder as a user would, and compare it with the model in memory. On every rank.

    Every tensor is compared bit by bit with the model's own, converted to its type in the file; then both compute the
    logits of the same tokens. Rank 0 holds the whole exported model on its host while this runs.

    Args:
        model: The model that was exported.
        folder: What `export` has written.
        input_ids: Tokens, [batch, sequence], the same on every rank, on the model's device.
        base_folder: For adapters, the folder of the base model's weights.
        options: As given to `export`.
        tolerance: Largest difference of a logit, as a share of the largest logit; None takes eight roundings of the
            coarser of the exported type and the type of the model's logits, and never less than 1e-4.

    Returns:
        How well they agree.

    Raises:
        CheckpointError: A tensor is missing, unexpected or different, or the logits differ by more than rounding.
    """
    options, folder, ranks = options or ExportOptions(), Path(folder), Ranks.create()
    try:
        pieces, _ = ranks.agree(lambda: find_pieces(model, options))
        num_tensors = _compare_weights(folder, pieces, ranks)
        expected = _logits(model, input_ids)
        if tolerance is None:
            tolerance = max(8 * torch.finfo(kind).eps for kind in (export_dtype(model, options), expected.dtype))
            tolerance = max(tolerance, _LEAST_TOLERANCE)

        def compare() -> float:
            loaded = _reload(folder, base_folder if is_adapter(model, options) else None)
            found, wanted = _logits(loaded, input_ids.cpu()).float(), expected.float()
            return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)).item()

        difference = ranks.by_coordinator(compare)
        if not difference <= tolerance:
            raise CheckpointError(
                f"{folder} computes other logits than the model in memory: {difference:.3g} of the largest logit, "
                f"rounding explains {tolerance:.3g}. The weights agree, so its config.json does not fit them."
            )
        return ExportCheck(num_tensors=num_tensors, max_logit_difference=difference, tolerance=tolerance)
    finally:
        ranks.close()


def _compare_weights(folder: Path, pieces: Mapping[str, Piece], ranks: Ranks) -> int:
    """Compare this rank's share of the tensors; all ranks take part in the gathering."""
    adapter = folder / ADAPTER
    if adapter.exists():
        paths = dict.fromkeys(read_header(adapter), adapter)
    else:
        paths = {name: source.path for name, source in find_sources(folder).items()}
    problems: list[str] = []
    for i, (name, piece) in enumerate(pieces.items()):
        tensor = piece.produce()
        if i % ranks.size != ranks.rank:
            continue
        if name not in paths:
            problems.append(f"{folder} has no {name}.")
            continue
        with safe_open(str(paths[name]), framework="pt") as opened:
            if not torch.equal(opened.get_tensor(name), tensor.to(piece.spec.dtype).cpu()):
                problems.append(f"{paths[name]}: {name} differs from the model in memory.")
    names = {name for several in ranks.all_gather(list(pieces)) for name in several}
    problems += [f"{folder} holds {name}, which the model has not." for name in sorted(set(paths) - names)]

    def report() -> int:
        if problems:
            raise CheckpointError(*problems[:12])
        return len(names)

    return ranks.agree(report)


@torch.no_grad()
def _logits(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """Logits on the host, [batch, sequence, vocabulary], computed in evaluation mode; the model's mode is put back."""
    training = model.training
    model.eval()
    try:
        output = model(input_ids=input_ids)
    finally:
        model.train(training)
    return whole(output.logits).cpu()


def _reload(folder: Path, base_folder: str | Path | None) -> nn.Module:
    from transformers import AutoModelForCausalLM

    source = folder if base_folder is None else base_folder
    if base_folder is None and (folder / "adapter_config.json").exists():
        raise CheckpointError(f"{folder} holds adapters. Give base_folder, the folder of their base model.")
    answer: Any = AutoModelForCausalLM.from_pretrained(
        str(source), output_loading_info=True, dtype="auto", local_files_only=True
    )
    loaded, info = cast(tuple[nn.Module, dict[str, Any]], answer)
    problems = [f"{source}: {kind} {names}" for kind, names in info.items() if names]
    if problems:
        raise CheckpointError(*problems)
    if base_folder is None:
        return loaded
    from peft import PeftModel

    return PeftModel.from_pretrained(cast(Any, loaded), str(folder))
