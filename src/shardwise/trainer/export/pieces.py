"""What to write: every tensor under its exported name, and how to gather it; ties and merged adapters."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import CheckpointError
from shardwise.levers.adapters.apply_nf4 import PACKED, Nf4Linear, packed_layers
from shardwise.trainer.checkpoint.state import clean_name, model_tensors, unwrap
from shardwise.trainer.checkpoint.tensorfile import TensorSpec
from shardwise.trainer.export.options import ExportOptions
from shardwise.trainer.weights import declared_ties, plain_name, tied_names, unpeft


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A tensor to export; `produce` gathers it, on all ranks that hold it."""

    spec: TensorSpec
    produce: Callable[[], torch.Tensor]


def is_adapter(model: nn.Module, options: ExportOptions) -> bool:
    """Whether adapters alone are exported."""
    return hasattr(unwrap(model), "peft_config") and not options.merge


def find_pieces(model: nn.Module, options: ExportOptions) -> tuple[dict[str, Piece], list[str]]:
    """The tensors that this rank holds a part of, by exported name, and the ties that were left out."""
    if is_adapter(model, options):
        return _adapter_pieces(model, options), []
    _refuse_unknown(unpeft(model))
    dtype = export_dtype(model, options)
    packed = {f"{clean_name(name)}.{PACKED}": layer for name, layer in packed_layers(unwrap(model)).items()}
    pieces: dict[str, Piece] = {}
    for name, tensor in model_tensors(model).items():
        plain = plain_name(name)
        if plain is None or _is_shadowed(name, model, options):
            continue
        shape, out = tuple(tensor.shape), dtype if tensor.is_floating_point() else tensor.dtype
        produce = _merged(model, name, options) or (lambda tensor=tensor: whole(tensor))
        if (layer := packed.get(name)) is not None:
            plain, shape, out = plain.removesuffix(PACKED) + "weight", tuple(layer.shape), dtype
            produce = _merged(model, name, options) or (lambda layer=layer: unpacked(layer).weight)
        pieces[plain] = Piece(spec=TensorSpec(key=plain, dtype=out, shape=shape), produce=produce)
    return _settle_ties(model, pieces)


def _settle_ties(model: nn.Module, pieces: dict[str, Piece]) -> tuple[dict[str, Piece], list[str]]:
    """Leave out the second name of a tie that loading restores; write both names of one that it would not."""
    declared, shared = declared_ties(model), tied_names(model)
    for alias, first in shared.items():
        if alias not in declared and first in pieces:
            spec = TensorSpec(key=alias, dtype=pieces[first].spec.dtype, shape=pieces[first].spec.shape)
            pieces[alias] = Piece(spec=spec, produce=pieces[first].produce)
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


def _adapter_pieces(model: nn.Module, options: ExportOptions) -> dict[str, Piece]:
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
    pieces: dict[str, Piece] = {}
    for name, tensor in state.items():
        dtype = options.dtype if options.dtype is not None and tensor.is_floating_point() else tensor.dtype
        spec = TensorSpec(key=name, dtype=dtype, shape=tuple(tensor.shape))
        pieces[name] = Piece(spec=spec, produce=lambda tensor=tensor: whole(tensor))
    return pieces
