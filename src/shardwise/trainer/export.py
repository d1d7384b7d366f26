"""A plain Hugging Face folder from a sharded model, without the whole model on any rank.

One tensor at a time is gathered by the ranks that hold its shards, and written by the rank that its file belongs to;
files are dealt out among the ranks, so that all of them write. Peak memory beyond the model: on the device the largest
tensor in the model's type and once more in the export's (the embedding, usually); on the host three such tensors.
Merging adapters gathers one layer's weight in fp32 besides.

The folder appears under its name only when it is complete and durable. `shardwise_export.json` in it lists every file
with size and hash; a later export to the same name replaces a folder only if it holds nothing else.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, cast

import torch
import yaml
from safetensors import safe_open
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.errors import CheckpointError
from shardwise.levers.adapters.apply_nf4 import PACKED, Nf4Linear, packed_layers
from shardwise.trainer.checkpoint.folder import check_disk
from shardwise.trainer.checkpoint.ranks import Ranks
from shardwise.trainer.checkpoint.state import clean_name, model_tensors, unwrap
from shardwise.trainer.checkpoint.tensorfile import (
    FileRecord,
    TensorFileWriter,
    TensorSpec,
    file_order,
    fsync_file,
    fsync_folder,
    hash_file,
    read_header,
)
from shardwise.trainer.weights import INDEX, SINGLE, declared_ties, find_sources, plain_name, tied_names, unpeft

LISTING: Final = "shardwise_export.json"
ADAPTER: Final = "adapter_model.safetensors"
_MAX_PENDING: Final = 2
"""Tensors that wait for the disk on each rank."""
_LEAST_TOLERANCE: Final = 1e-4
"""fp32 on another device sums in another order; some 30 layers of it stay well below this share of a logit."""


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


@dataclass(frozen=True, kw_only=True)
class ExportCheck:
    """How an exported folder compares with the model in memory."""

    num_tensors: int
    """Tensors that were compared bit by bit with the model's, converted to their type in the file."""
    max_logit_difference: float
    """Largest difference of a logit, as a share of the largest logit."""
    tolerance: float
    """What rounding of the weights and of the computation explains."""


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A tensor to export; `produce` gathers it, on all ranks that hold it."""

    spec: TensorSpec
    produce: Callable[[], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class _OutFile:
    """One file of the export."""

    specs: tuple[TensorSpec, ...]
    owner: int


def export(
    model: nn.Module, folder: str | Path, *, tokenizer: Any = None, options: ExportOptions | None = None
) -> ExportReport:
    """Write a folder that `AutoModelForCausalLM.from_pretrained`, or for adapters `PeftModel`, loads. On every rank.

    Args:
        model: A transformers model or PeftModel, sharded or not.
        folder: The folder to make, on storage that all machines share.
        tokenizer: Saved beside the weights, with its chat template.
        options: Type, merging, file sizes, model card.

    Returns:
        What was written.

    Raises:
        CheckpointError: The folder exists and holds other files, the model cannot be exported, or ties have come apart.
        ResourceError: The disk has no room.
    """
    options, folder, ranks = options or ExportOptions(), Path(folder), Ranks.create()
    try:
        partial = folder.with_name(folder.name + ".partial")
        ranks.by_coordinator(lambda: _make_room(folder, partial))
        pieces, dropped = ranks.agree(lambda: _pieces(model, options))
        files = _deal(_gather_specs(pieces, ranks), options.max_shard_bytes, single=_is_adapter(model, options))
        names = _file_names(len(files), adapter=_is_adapter(model, options))
        num_bytes = sum(spec.num_bytes for file in files for spec in file.specs)
        ranks.by_coordinator(lambda: check_disk(folder.parent, num_bytes))
        mine = _write_files(partial, files, names, pieces, ranks)
        records = [record for several in ranks.all_gather(mine) for record in several]

        def finish() -> None:
            if len(files) > 1:
                _write_index(partial, files, names, num_bytes)
            _write_companions(model, partial, tokenizer, options)
            _complete(folder, partial, records)

        ranks.by_coordinator(finish)
        num_tensors = sum(len(file.specs) for file in files)
        return ExportReport(folder=folder, num_tensors=num_tensors, num_bytes=num_bytes, dropped=tuple(dropped))
    finally:
        ranks.close()


def _is_adapter(model: nn.Module, options: ExportOptions) -> bool:
    return hasattr(unwrap(model), "peft_config") and not options.merge


# What to write -------------------------------------------------------------------------------------------------------


def _pieces(model: nn.Module, options: ExportOptions) -> tuple[dict[str, _Piece], list[str]]:
    """The tensors that this rank holds a part of, by exported name, and the ties that were left out."""
    if _is_adapter(model, options):
        return _adapter_pieces(model, options), []
    _refuse_unknown(unpeft(model))
    dtype = export_dtype(model, options)
    packed = {f"{clean_name(name)}.{PACKED}": layer for name, layer in packed_layers(unwrap(model)).items()}
    pieces: dict[str, _Piece] = {}
    for name, tensor in model_tensors(model).items():
        plain = plain_name(name)
        if plain is None or _is_shadowed(name, model, options):
            continue
        shape, out = tuple(tensor.shape), dtype if tensor.is_floating_point() else tensor.dtype
        produce = _merged(model, name, options) or (lambda tensor=tensor: whole(tensor))
        if (layer := packed.get(name)) is not None:
            plain, shape, out = plain.removesuffix(PACKED) + "weight", tuple(layer.shape), dtype
            produce = _merged(model, name, options) or (lambda layer=layer: unpacked(layer).weight)
        pieces[plain] = _Piece(spec=TensorSpec(key=plain, dtype=out, shape=shape), produce=produce)
    return _settle_ties(model, pieces)


def _settle_ties(model: nn.Module, pieces: dict[str, _Piece]) -> tuple[dict[str, _Piece], list[str]]:
    """Leave out the second name of a tie that loading restores; write both names of one that it would not."""
    declared, shared = declared_ties(model), tied_names(model)
    for alias, first in shared.items():
        if alias not in declared and first in pieces:
            spec = TensorSpec(key=alias, dtype=pieces[first].spec.dtype, shape=pieces[first].spec.shape)
            pieces[alias] = _Piece(spec=spec, produce=pieces[first].produce)
    for alias, first in declared.items():
        if (
            alias in pieces
            and first in pieces
            and not torch.equal(pieces.pop(alias).produce(), pieces[first].produce())
        ):
            raise CheckpointError(
                f"{alias} and {first} differ, but config.json says that they are tied, so loading would drop {alias}. "
                "Train with tied weights, or set tie_word_embeddings: false."
            )
    return pieces, sorted(declared)


def export_dtype(model: nn.Module, options: ExportOptions) -> torch.dtype:
    """The type of the exported weights: as asked, or the model's own, or bf16."""
    if options.dtype is not None:
        return options.dtype
    named = getattr(unwrap(model).config, "dtype", None)
    named = getattr(torch, named, None) if isinstance(named, str) else named
    return named if isinstance(named, torch.dtype) else torch.bfloat16


def _refuse_unknown(model: nn.Module) -> None:
    """Models whose files are not their parameters one by one.

    Raises:
        CheckpointError: transformers rearranges this architecture's weights between file and memory.
    """
    from transformers import conversion_mapping

    model_type = getattr(model.config, "model_type", "")
    if conversion_mapping.get_checkpoint_conversion_mapping(model_type):
        raise CheckpointError(
            f"transformers stores {model_type} in files otherwise than in memory (fused experts, renamed layers), "
            "which the sharded export does not undo. Use the model's own save_pretrained on gathered weights."
        )


def _is_shadowed(name: str, model: nn.Module, options: ExportOptions) -> bool:
    """Whether PEFT's `modules_to_save` keeps a trained copy beside this tensor, or it belongs to another adapter."""
    if ".modules_to_save." in name:
        return f".modules_to_save.{options.adapter_name}." not in name
    return ".original_module." in name


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with all its shards, on its device; a collective for a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _merged(model: nn.Module, name: str, options: ExportOptions) -> Callable[[], torch.Tensor] | None:
    """How to make the weight or bias of a layer with adapters; None for any other tensor.

    Adapters of a 4-bit layer are merged into what its bytes stand for, which is what they were trained beside.
    """
    owner, dot, leaf = name.rpartition(".base_layer.")
    if not dot:
        return None
    layer = _find_module(model, owner)
    leaf = "weight" if leaf == PACKED else leaf
    return lambda: cast(torch.Tensor, getattr(_merge_layer(layer, options).get_submodule("base_layer"), leaf)).detach()


def unpacked(layer: Nf4Linear) -> nn.Linear:
    """A 4-bit layer as a plain one in fp32, without its bias; a collective if its bytes are sharded."""
    return layer.unpacked(whole(layer.packed_weight), torch.float32)


def _find_module(model: nn.Module, name: str) -> nn.Module:
    for full, module in unwrap(model).named_modules():
        if clean_name(full) == name:
            return module
    raise CheckpointError(f"{name} is not a module of the model.")


@torch.no_grad()
def _merge_layer(layer: nn.Module, options: ExportOptions) -> nn.Module:
    """A whole copy of one adapted layer, in fp32, with its adapter merged by PEFT itself (LoRA, rsLoRA, DoRA).

    The copy is made with the gathered parameters in place of the shards and without hooks, so that neither FSDP nor
    tensor parallelism knows of it. fp32, so that the sum is rounded once, when it is written.
    """
    memo: dict[int, Any] = {}
    base = layer.get_submodule("base_layer")
    if isinstance(base, Nf4Linear):
        plain = unpacked(base)
        if (bias := cast(nn.Parameter | None, base.bias)) is not None:
            plain.bias = nn.Parameter(whole(bias).float(), requires_grad=False)
        memo[id(base)] = plain
    for parameter in layer.parameters():
        if not parameter.is_floating_point():
            continue
        memo[id(parameter)] = nn.Parameter(whole(parameter).float(), requires_grad=False)
    for module in layer.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            memo[id(getattr(module, name))] = OrderedDict()
    clone = copy.deepcopy(layer, memo)
    cast(Any, clone).merge(safe_merge=True, adapter_names=[options.adapter_name])
    return clone


def _adapter_pieces(model: nn.Module, options: ExportOptions) -> dict[str, _Piece]:
    from peft import get_peft_model_state_dict

    peft_model = cast(Any, unwrap(model))
    if options.adapter_name not in peft_model.peft_config:
        known = ", ".join(peft_model.peft_config)
        raise CheckpointError(f"The model has no adapter {options.adapter_name!r}; it has {known}.")
    state = get_peft_model_state_dict(
        peft_model,
        state_dict=model_tensors(model),
        adapter_name=options.adapter_name,
        save_embedding_layers=False,  # "auto" asks the hub
    )
    pieces: dict[str, _Piece] = {}
    for name, tensor in state.items():
        dtype = options.dtype if options.dtype is not None and tensor.is_floating_point() else tensor.dtype
        spec = TensorSpec(key=name, dtype=dtype, shape=tuple(tensor.shape))
        pieces[name] = _Piece(spec=spec, produce=lambda tensor=tensor: whole(tensor))
    return pieces


# Who writes what -----------------------------------------------------------------------------------------------------


def _gather_specs(pieces: Mapping[str, _Piece], ranks: Ranks) -> dict[tuple[int, ...], list[TensorSpec]]:
    """Every rank's tensors, grouped by the ranks that hold them: pipeline stages differ."""
    holders: dict[str, list[int]] = {}
    specs: dict[str, TensorSpec] = {}
    for rank, several in enumerate(ranks.all_gather([piece.spec for piece in pieces.values()])):
        for spec in several:
            holders.setdefault(spec.key, []).append(rank)
            specs[spec.key] = spec
    groups: dict[tuple[int, ...], list[TensorSpec]] = {}
    for name, spec in specs.items():
        groups.setdefault(tuple(holders[name]), []).append(spec)
    return groups


def _deal(groups: Mapping[tuple[int, ...], list[TensorSpec]], limit: int, *, single: bool) -> list[_OutFile]:
    """Pack each group into files below the limit, and deal the files out among the group's ranks."""
    if single and len(groups) > 1:
        raise CheckpointError("Adapters of a pipeline lie on several stages; export with merge, or without a pipeline.")
    files: list[_OutFile] = []
    for holders, specs in groups.items():
        packed: list[list[TensorSpec]] = []
        room = 0
        for spec in specs:
            if not packed or (spec.num_bytes > room and not single):
                packed.append([])
                room = limit
            packed[-1].append(spec)
            room -= spec.num_bytes
        files += [_OutFile(specs=tuple(several), owner=holders[i % len(holders)]) for i, several in enumerate(packed)]
    if not files:
        raise CheckpointError("The model has no tensor to export.")
    return files


def _file_names(num_files: int, *, adapter: bool) -> list[str]:
    if adapter:
        return [ADAPTER]
    if num_files == 1:
        return [SINGLE]
    return [f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]


def _write_files(
    folder: Path, files: Sequence[_OutFile], names: Sequence[str], pieces: Mapping[str, _Piece], ranks: Ranks
) -> list[FileRecord]:
    """Gather every tensor and write the files that belong to this rank. All ranks walk the same tensors in step."""
    outputs: dict[int, _Output] = {}
    failures: list[Exception] = []
    with ThreadPoolExecutor(1) as disk:
        for i, spec in _walk(files, ranks.size):
            if spec.key not in pieces:
                continue  # of another pipeline stage
            tensor = pieces[spec.key].produce()
            if files[i].owner != ranks.rank or failures:
                continue  # a rank whose disk has failed still takes part in the gathering, or the others would hang
            try:
                if i not in outputs:
                    outputs[i] = _Output(TensorFileWriter(folder / names[i], files[i].specs, {"format": "pt"}), disk)
                outputs[i].put(tensor.to(spec.dtype))
            except (OSError, CheckpointError) as error:
                failures.append(error)

        def finish() -> list[FileRecord]:
            if failures:
                raise failures[0]
            return [output.finish() for output in outputs.values()]

        try:
            return ranks.agree(finish)
        finally:
            for output in outputs.values():
                output.writer.abandon()


class _Output:
    """One file on its way to the disk, a few tensors behind the gathering."""

    def __init__(self, writer: TensorFileWriter, disk: ThreadPoolExecutor) -> None:
        self.writer = writer
        self._disk = disk
        self._pending: deque[Future[None]] = deque()

    def put(self, tensor: torch.Tensor) -> None:
        """Hand over a tensor; waits while too many are pending."""
        on_host = tensor.cpu()
        while len(self._pending) >= _MAX_PENDING:
            self._pending.popleft().result()
        self._pending.append(self._disk.submit(self.writer.add, on_host))

    def finish(self) -> FileRecord:
        """Wait for the rest."""
        while self._pending:
            self._pending.popleft().result()
        return self.writer.finish()


def _walk(files: Sequence[_OutFile], num_ranks: int) -> Iterator[tuple[int, TensorSpec]]:
    """The order of gathering: as many files at a time as there are ranks, a tensor of each in turn; so all write."""
    for start in range(0, len(files), num_ranks):
        wave = range(start, min(start + num_ranks, len(files)))
        for row in zip_longest(*(file_order(files[i].specs) for i in wave)):
            yield from ((i, spec) for i, spec in zip(wave, row, strict=True) if spec is not None)


# Beside the weights --------------------------------------------------------------------------------------------------


def _make_room(folder: Path, partial: Path) -> None:
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


def _write_index(folder: Path, files: Sequence[_OutFile], names: Sequence[str], num_bytes: int) -> None:
    weight_map = {spec.key: names[i] for i, file in enumerate(files) for spec in file.specs}
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_companions(model: nn.Module, folder: Path, tokenizer: Any, options: ExportOptions) -> None:
    """Configuration, tokenizer and model card; on rank 0."""
    if _is_adapter(model, options):
        config = copy.deepcopy(cast(Any, unwrap(model)).peft_config[options.adapter_name])
        config.inference_mode = True
        if options.base_model is not None:
            config.base_model_name_or_path = options.base_model
        config.save_pretrained(str(folder))
    else:
        _write_config(unpeft(model), folder, export_dtype(model, options))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    (folder / "README.md").write_text(model_card(options, adapter=_is_adapter(model, options)))


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


def model_card(options: ExportOptions, *, adapter: bool) -> str:
    """README.md with the front matter that the hub reads."""
    facts: dict[str, Any] = {
        "base_model": options.base_model,
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": list(options.tags),
        "datasets": list(options.datasets),
    }
    front = yaml.safe_dump({key: value for key, value in facts.items() if value}, sort_keys=False)
    what = "LoRA adapters for" if adapter else "A fine-tune of"
    base = options.base_model or "its base model"
    return f"---\n{front}---\n\n# Model card\n\n{what} {base}, trained with shardwise.\n"


def _complete(folder: Path, partial: Path, records: Sequence[FileRecord]) -> None:
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
        shutil.rmtree(folder)  # only what its listing names; `_make_room` has looked
    partial.rename(folder)
    fsync_folder(folder.parent)


# Does it load? -------------------------------------------------------------------------------------------------------


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
        pieces, _ = ranks.agree(lambda: _pieces(model, options))
        num_tensors = _compare_weights(folder, pieces, ranks)
        expected = _logits(model, input_ids)
        if tolerance is None:
            tolerance = max(8 * torch.finfo(kind).eps for kind in (export_dtype(model, options), expected.dtype))
            tolerance = max(tolerance, _LEAST_TOLERANCE)

        def compare() -> float:
            loaded = _reload(folder, base_folder if _is_adapter(model, options) else None)
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


def _compare_weights(folder: Path, pieces: Mapping[str, _Piece], ranks: Ranks) -> int:
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
