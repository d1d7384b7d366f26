"""Pretrained weights straight from safetensors files into a sharded model, each rank its own part.

A rank reads from each tensor only the box that its shard covers, one tensor at a time, so host memory holds one box
and never a model, and a 70B model loads on a machine whose memory it would not fit. The model must be on its device
already: built on meta, sharded, then `to_empty`. What is not in any file has to be rebuilt, not loaded: non-persistent
buffers such as the rotary `inv_freq` are whatever the memory held after `to_empty`; `rebuild_rotary` does it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import CheckpointError
from shardwise.levers.adapters.apply_nf4 import PACKED, pack, packed_layers
from shardwise.trainer.checkpoint.state import clean_name, model_tensors, unwrap
from shardwise.trainer.checkpoint.tensorfile import HeaderError, StoredTensor, parse_json, read_header
from shardwise.trainer.model import assign

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
_ROTARY: Final = re.compile(r"(^|\.)rotary_emb\.(original_)?inv_freq$")
"""Older files carry the rotary frequencies of every layer; they follow from config.json."""


@dataclass(frozen=True, kw_only=True)
class LoadedWeights:
    """What a load did, on this rank."""

    num_tensors: int
    """Tensors of the model that were filled."""
    bytes_read: int
    """Bytes taken from the files by this rank."""
    converted: tuple[str, ...]
    """Tensors whose type in the file differs from the model's; they were rounded or widened."""
    ignored: tuple[str, ...]
    """Tensors of the files that the model does not need: rotary frequencies, and the second name of a tied weight."""


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where a stored tensor lies."""

    path: Path
    stored: StoredTensor


@dataclass(frozen=True, kw_only=True, eq=False)
class _Packed:
    """A 4-bit layer's bytes, which are made from the whole matrix of the files, one matrix at a time."""

    held: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype = torch.uint8
    """Never the files': what is read is always converted."""

    @property
    def is_meta(self) -> bool:
        """Whether it has no memory yet."""
        return self.held.is_meta


_Target = torch.Tensor | _Packed
"""What a tensor of the files is read into."""


def plain_name(name: str) -> str | None:
    """The name that a parameter has in the plain model's files; None if it is an adapter's own.

    PEFT calls `layers.0.q_proj.weight` `base_model.model.layers.0.q_proj.base_layer.weight`, and keeps two copies of
    each of `modules_to_save`.
    """
    name = clean_name(name).removeprefix("base_model.model.")
    parts = name.split(".")
    if any(part.startswith("lora_") for part in parts):
        return None
    kept: list[str] = []
    skip = False
    for part in parts:
        if skip or part in ("base_layer", "original_module"):
            skip = False
        elif part == "modules_to_save":
            skip = True  # the adapter's name follows
        else:
            kept.append(part)
    return ".".join(kept)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Second names of shared parameters, to their first name. Both as in the plain model's files."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        plain = plain_name(name)
        if plain is None:
            continue
        if (known := first.setdefault(id(parameter), plain)) != plain:
            aliases[plain] = known
    return aliases


def declared_ties(model: nn.Module) -> dict[str, str]:
    """The ties that the configuration asks for: second name to first. Empty if `tie_word_embeddings` is off."""
    model = unwrap(model)
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    declared: Any = getattr(unpeft(model), "_tied_weights_keys", None)
    if not getattr(text, "tie_word_embeddings", False) or not isinstance(declared, dict):
        return {}
    return {str(alias): str(first) for alias, first in cast(dict[str, str], declared).items()}


def unpeft(model: nn.Module) -> nn.Module:
    """The Hugging Face model inside a PeftModel."""
    model = unwrap(model)
    get_base = getattr(model, "get_base_model", None)
    return cast(nn.Module, get_base()) if callable(get_base) else model


def load_pretrained_sharded(model: nn.Module, folder: str | Path, *, whole: nn.Module | None = None) -> LoadedWeights:
    """Fill a model from the safetensors files of a Hugging Face folder.

    Args:
        model: A transformers model, plain, sharded, tensor-parallel or with PEFT adapters around it, on its device. Its
            parameters keep their type; what is stored in another floating-point type is converted.
        folder: Holds `model.safetensors`, or `model.safetensors.index.json` and its shards.
        whole: The whole model, where `model` is a stage's part of it; its other names may be in the files.

    Returns:
        What was read on this rank.

    Raises:
        CheckpointError: A file is missing or damaged, a tensor is missing, unexpected or of another shape, or the model
            is still on meta; all problems at once, and nothing has been loaded then.
    """
    folder = Path(folder)
    sources = find_sources(folder)
    targets = _targets(model)
    if whole is not None:
        elsewhere = set(_targets(whole)) - set(targets)
        sources = {name: source for name, source in sources.items() if name not in elsewhere}
    ignored, problems = _compare(model, sources, targets, folder)
    if problems:
        raise CheckpointError(*problems)
    converted: list[str] = []
    bytes_read = 0
    for path, names in _by_file(targets, sources).items():
        with safe_open(str(path), framework="pt") as opened:
            for name in names:
                for target in targets[name]:
                    bytes_read += _fill(target, opened, name)
                if sources[name].stored.dtype != targets[name][0].dtype:
                    converted.append(name)
    return LoadedWeights(
        num_tensors=len(targets), bytes_read=bytes_read, converted=tuple(converted), ignored=tuple(ignored)
    )


def find_sources(folder: Path) -> dict[str, _Source]:
    """Every tensor of a Hugging Face folder: its file and its header, checked.

    Raises:
        CheckpointError: No weights, or a file that is missing, damaged, or named outside the folder.
    """
    if (folder / INDEX).is_file():
        files = _read_index(folder)
    elif (folder / SINGLE).is_file():
        files = [SINGLE]
    else:
        raise CheckpointError(
            f"{folder} holds neither {SINGLE} nor {INDEX}. Give a folder with safetensors weights; "
            "pickled weights (pytorch_model.bin) are not read, convert them first."
        )
    sources: dict[str, _Source] = {}
    problems: list[str] = []
    for file in files:
        path = folder / file
        try:
            found = read_header(path)
        except (HeaderError, OSError) as error:
            problems.append(f"{path} is missing or damaged: {error}. Download it again.")
            continue
        problems += [f"{path}: {name} is also in {sources[name].path}." for name in found if name in sources]
        sources |= {name: _Source(path=path, stored=stored) for name, stored in found.items()}
    if problems:
        raise CheckpointError(*problems)
    return sources


def _read_index(folder: Path) -> list[str]:
    try:
        index = parse_json((folder / INDEX).read_bytes())
        files = sorted(set(cast(dict[str, str], index["weight_map"]).values()))
    except (HeaderError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX} is damaged: {error}. Download it again.") from None
    if odd := [file for file in files if Path(file).name != file or not file.endswith(".safetensors")]:
        raise CheckpointError(f"{folder / INDEX} names {odd[0]!r}, which is no safetensors file of the folder.")
    return files


def _targets(model: nn.Module) -> dict[str, list[_Target]]:
    """The tensors to fill, by the name in the files; several where PEFT keeps copies, or a tie has come apart."""
    ties = declared_ties(model)
    packed = {f"{clean_name(name)}.{PACKED}": layer for name, layer in packed_layers(unwrap(model)).items()}
    targets: dict[str, list[_Target]] = {}
    for name, tensor in model_tensors(model).items():
        plain = plain_name(name)
        if plain is not None and name in packed:
            plain = plain.removesuffix(PACKED) + "weight"
            targets.setdefault(plain, []).append(_Packed(held=tensor, shape=packed[name].shape))
        elif plain is not None:
            targets.setdefault(ties.get(plain, plain), []).append(tensor)
    return targets


def _compare(
    model: nn.Module, sources: Mapping[str, _Source], targets: Mapping[str, Sequence[_Target]], folder: Path
) -> tuple[list[str], list[str]]:
    """Names in the files that may be ignored, and every problem."""
    patterns: Iterable[str] = getattr(unpeft(model), "_keys_to_ignore_on_load_unexpected", None) or ()
    needless = set(tied_names(model)) | set(declared_ties(model))
    extra = sorted(set(sources) - set(targets))
    ignored = [
        name
        for name in extra
        if _ROTARY.search(name) or name in needless or any(re.search(pattern, name) for pattern in patterns)
    ]
    problems = [f"{folder} has no {name}, which the model needs." for name in sorted(set(targets) - set(sources))]
    problems += [
        f"{sources[name].path} holds {name}, which the model has not." for name in extra if name not in ignored
    ]
    for name, tensors in targets.items():
        for tensor in tensors:
            if name in sources and (problem := _misfit(tensor, sources[name].stored)):
                problems.append(f"{name} {problem}")
    if len(problems) > 12:
        problems = [*problems[:12], f"... and {len(problems) - 12} more. Is this the folder of another model?"]
    return ignored, problems


def _misfit(tensor: _Target, stored: StoredTensor) -> str | None:
    if tensor.is_meta:
        return "is on the meta device. Call to_empty(device=...) after sharding, before loading."
    if tuple(tensor.shape) != stored.shape:
        return f"has the shape {stored.shape} in the file and {tuple(tensor.shape)} in the model."
    takes_floats = isinstance(tensor, _Packed) or tensor.is_floating_point()
    if tensor.dtype != stored.dtype and not (takes_floats and stored.dtype.is_floating_point):
        return f"is {stored.dtype} in the file and {tensor.dtype} in the model. Quantized weights are not converted."
    return None


def _by_file(targets: Iterable[str], sources: Mapping[str, _Source]) -> dict[Path, list[str]]:
    files: dict[Path, list[str]] = {}
    for name in targets:
        files.setdefault(sources[name].path, []).append(name)
    return files


@torch.no_grad()
def _fill(target: _Target, opened: Any, name: str) -> int:
    """Read the box that this rank holds of a tensor, and return its bytes in the file."""
    if isinstance(target, _Packed):
        whole: torch.Tensor = opened.get_tensor(name)
        assign(target.held, pack(whole.to(target.held.device)))
        return whole.numel() * whole.element_size()
    local = target
    box: tuple[slice, ...] = tuple(slice(0, size) for size in target.shape)
    if isinstance(target, DTensor):
        local = target.to_local()
        if local.numel() == 0:
            return 0
        [chunk] = target.__create_chunk_list__()
        box = tuple(slice(start, start + extent) for start, extent in zip(chunk.offsets, chunk.sizes, strict=True))
    read: torch.Tensor = opened.get_slice(name)[box] if box else opened.get_tensor(name)
    assert read.shape == local.shape, f"{name}: box {tuple(read.shape)}, shard {tuple(local.shape)}"
    local.copy_(read)
    return read.numel() * read.element_size()


@torch.no_grad()
def rebuild_rotary(model: nn.Module) -> tuple[str, ...]:
    """Compute the non-persistent buffers of rotary embeddings again from the configuration.

    Args:
        model: The model, after `to_empty`.

    Returns:
        The names of the modules that were rebuilt.

    Raises:
        CheckpointError: A non-persistent buffer that is not a rotary embedding's: it cannot be told how to compute it.
    """
    rebuilt: list[str] = []
    problems: list[str] = []
    for name, module in unwrap(model).named_modules():
        lost: set[str] = getattr(module, "_non_persistent_buffers_set", set[str]())  # torch has no public way to ask
        if not lost:
            continue
        config = getattr(module, "config", None)
        if config is None or not any("inv_freq" in buffer for buffer in lost):
            names = ", ".join(sorted(lost))
            problems.append(f"{clean_name(name)} ({type(module).__name__}) has buffers in no file: {names}.")
            continue
        fresh = type(module)(config=config)  # pyright: ignore[reportCallIssue]
        for buffer, value in fresh.named_buffers(recurse=False):
            held = getattr(module, buffer)
            setattr(module, buffer, value.to(device=held.device, dtype=held.dtype))
        rebuilt.append(clean_name(name))
    if problems:
        raise CheckpointError(*problems, "Build such a model on a real device instead of meta.")
    return tuple(rebuilt)
