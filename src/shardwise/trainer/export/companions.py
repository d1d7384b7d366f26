"""Beside the weights: index, configuration, tokenizer, model card, listing; and the folder's way to its name."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
import yaml
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.errors import CheckpointError
from shardwise.trainer.checkpoint.state import unwrap
from shardwise.trainer.checkpoint.tensorfile import FileRecord, fsync_file, fsync_folder, hash_file
from shardwise.trainer.export.files import OutFile
from shardwise.trainer.export.options import ExportOptions
from shardwise.trainer.export.pieces import export_dtype, is_adapter
from shardwise.trainer.weights import INDEX, unpeft

LISTING: Final = "shardwise_export.json"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.jsonl)(?<!\.json)(?<!\.csv)(?<!\.parquet)")


def make_room(folder: Path, partial: Path) -> None:
    """Whether the name is free, and a fresh folder beside it."""
    for path in (folder, partial):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise CheckpointError(f"{path} exists and is not a folder. Give another name for the export.")
    if folder.exists() and (strangers := _strangers(folder)):
        raise CheckpointError(
            f"{folder} holds {', '.join(strangers[:3])}, which no export has written. Give another name for the export."
        )
    if partial.exists():
        if any(partial.iterdir()) and not (partial / LISTING).exists():
            raise CheckpointError(f"{partial} is in the way and was not left by an export. Move it elsewhere.")
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    (partial / LISTING).write_text('{"unfinished": true}\n')


def _strangers(folder: Path) -> list[str]:
    """Files of an exported folder that its listing does not name."""
    names = {path.name for path in folder.iterdir()}
    try:
        listing = json.loads((folder / LISTING).read_text())
        listed = set(listing["files"]) | {LISTING}
    except (OSError, ValueError, KeyError, TypeError):
        listed: set[str] = set()
    return sorted(names - listed)


def write_index(folder: Path, files: Sequence[OutFile], names: Sequence[str], num_bytes: int) -> None:
    """Which tensor lies in which file, as transformers reads it."""
    weight_map = {spec.key: names[i] for i, file in enumerate(files) for spec in file.specs}
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_companions(model: nn.Module, folder: Path, tokenizer: Any, options: ExportOptions) -> None:
    """Configuration, tokenizer and model card; on rank 0."""
    if is_adapter(model, options):
        config = copy.deepcopy(cast(Any, unwrap(model)).peft_config[options.adapter_name])
        config.inference_mode = True
        if options.base_model is not None:  # a folder too: PEFT loads the base from it
            config.base_model_name_or_path = hub_id(options.base_model) or options.base_model
        config.save_pretrained(str(folder))
    else:
        _write_config(unpeft(model), folder, export_dtype(model, options))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    (folder / "README.md").write_text(model_card(options, adapter=is_adapter(model, options)))


def _write_config(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    config = copy.deepcopy(cast(Any, model.config))
    plain = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    config.architectures = [plain.__name__]  # fully_shard changes the class of the module that it wraps
    config.dtype = dtype
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(str(folder))
    generation = getattr(model, "generation_config", None)
    if generation is not None and cast(Any, model).can_generate():
        generation.save_pretrained(str(folder))


def hub_id(name: str) -> str | None:
    """The hub id that a name is, or that a folder of the hub's cache belongs to; None for any other place."""
    cached = re.search(r"(?:models|datasets)--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\]", name + "/")
    if cached:
        return f"{cached[1]}/{cached[2]}"
    return name if _HUB_ID.fullmatch(name) and not Path(name).exists() else None


def model_card(options: ExportOptions, *, adapter: bool) -> str:
    """README.md with the front matter that the hub reads; folders of this machine mean nothing there and stay out."""
    base_model = None if options.base_model is None else hub_id(options.base_model)
    facts: dict[str, Any] = {
        "base_model": base_model,
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": list(options.tags),
        "datasets": [found for name in options.datasets if (found := hub_id(name)) is not None],
    }
    front = yaml.safe_dump({key: value for key, value in facts.items() if value}, sort_keys=False)
    what = "LoRA adapters for" if adapter else "A fine-tune of"
    base = base_model or "its base model"
    return f"---\n{front}---\n\n# Model card\n\n{what} {base}, trained with shardwise.\n"


def complete(folder: Path, partial: Path, records: Sequence[FileRecord]) -> None:
    """List, make durable, rename. An export of before makes way."""
    (partial / LISTING).unlink()
    known = {record.name: record for record in records}
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(partial.iterdir()):
        record = known.get(path.name)
        sha256 = record.sha256 if record else hash_file(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256}
    (partial / LISTING).write_text(json.dumps({"format": "shardwise-export", "files": files}, indent=2) + "\n")
    for path in partial.iterdir():
        fsync_file(path)
    fsync_folder(partial)
    if folder.exists():
        shutil.rmtree(folder)  # only what its listing names; `make_room` has looked
    partial.rename(folder)
    fsync_folder(folder.parent)
