"""Pipeline: a Hugging Face decoder cut into the chunks of one stage; the family's own classes stay.

A chunk is the whole model with what belongs to other chunks taken out: `layers` are a part of the layers, the
embedding is there on the first chunk only, norm and head on the last only. Between chunks go hidden states, which the
decoder takes as `inputs_embeds`. Its config is a copy that is as deep as the chunk, with every list of one entry a
layer cut alike (`layer_types` and the like), because decoders walk through layers and config together.

[Note: names] A layer keeps its number in the whole model, so a parameter has one name wherever it lies: loading,
checkpoints, export and sentinels need no translation. Several chunks of one stage lie side by side under CHUNKS, which
`clean_name` takes out again.

[Note: tied ends] The last chunk of a model with a tied head keeps the embedding beside the head, tied as ever and never
called; the first has it for itself. They are one weight under one name; `trainer/pipeline_step.py` keeps them equal.

Shapes: B rows, T tokens of a row, H hidden size.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.vocabulary.placement import blocks_of_chunk
from shardwise.vocabulary.strategy import Strategy

CHUNKS = "pipeline_chunks"
"""Attribute of the model that holds several chunks; part of their parameters' raw names."""


class StageLayers(nn.ModuleList):
    """Some layers of a decoder under the numbers that they have in the whole ([Note: names]); positions count from 0.

    Args:
        layers: All of them.
        numbers: Which of them.
    """

    def __init__(self, layers: nn.ModuleList, numbers: range) -> None:
        super().__init__()
        for number in numbers:
            self.add_module(str(number), layers[number])

    def __getitem__(self, index: Any) -> Any:
        """The layer at a position, or the layers of a slice of positions."""
        return list(self._modules.values())[index]

    def __setitem__(self, index: int, module: nn.Module) -> None:
        """Puts another module, such as a wrapper, at a position."""
        self._modules[list(self._modules)[index]] = module


def apply(model: nn.Module, strategy: Strategy, stage: int) -> None:
    """Leaves of a model without memory what belongs to one stage, in place.

    Args:
        model: A Hugging Face causal language model; parameters on meta, buffers real.
        strategy: For pp and virtual_stages.
        stage: Which stage, from 0.

    Raises:
        ConfigError: The model is no plain stack of layers between an embedding and a norm.
    """
    if strategy.pp == 1:
        return
    _refuse_strangers(model)
    if strategy.virtual_stages == 1:
        _cut(model, strategy, stage)
        return
    whole = copy.deepcopy(model)
    chunks = [copy.deepcopy(model) for _ in range(strategy.virtual_stages)]
    for turn, chunk in enumerate(chunks):
        _cut(chunk, strategy, stage + turn * strategy.pp)
    for name, _ in list(whole.named_children()):
        delattr(model, name)
    setattr(model, CHUNKS, nn.ModuleList(chunks))


def chunks_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """The chunks of this rank, first to last; the model itself where there is but one."""
    several = getattr(model, CHUNKS, None)
    return (model,) if several is None else tuple(several)


def chunk_numbers(strategy: Strategy, stage: int) -> tuple[int, ...]:
    """The numbers of a stage's chunks in the whole pipeline."""
    return tuple(stage + turn * strategy.pp for turn in range(strategy.virtual_stages))


def layers_of(model: nn.Module) -> dict[int, str]:
    """The layers that a rank holds: number in the whole model, and class."""
    found: dict[int, str] = {}
    for module in model.modules():
        if isinstance(module, StageLayers):
            found |= {int(number): type(layer).__name__ for number, layer in module.named_children()}
    return found


def embedding_of(model: nn.Module) -> nn.Module | None:
    """The embedding of a model or of a chunk that has it; None on others."""
    decoder = _decoder(model)
    if isinstance(getattr(decoder, "layers", None), StageLayers):
        return decoder.embed_tokens
    return cast(Any, model).get_input_embeddings()


def _decoder(model: nn.Module) -> Any:
    get_decoder: Any = getattr(model, "get_decoder", None)
    return get_decoder() if callable(get_decoder) else None


def _cut(model: nn.Module, strategy: Strategy, chunk: int) -> None:
    decoder: Any = cast(Any, model).get_decoder()
    num_chunks = strategy.pp * strategy.virtual_stages
    numbers = blocks_of_chunk(len(decoder.layers), num_chunks, chunk)
    is_first, is_last = chunk == 0, chunk == num_chunks - 1
    tied = cast(Any, model).get_output_embeddings().weight is decoder.embed_tokens.weight
    decoder.config = _shallower(decoder.config, numbers)
    decoder.layers = StageLayers(decoder.layers, numbers)
    if not is_first and not (is_last and tied):
        decoder.embed_tokens = None
    if not is_last:
        decoder.norm = nn.Identity()
        setattr(model, _head_name(model), None)
        model.forward = types.MethodType(_hidden_states, model)


def _hidden_states(self: Any, **inputs: Any) -> Tensor:
    """The forward of every chunk but the last: [B, T] tokens or [B, T, H] hidden states -> [B, T, H]."""
    return self.get_decoder()(use_cache=False, **inputs).last_hidden_state


def _shallower(config: Any, numbers: range) -> Any:
    """The config of a decoder with these layers only."""
    depth = config.num_hidden_layers
    cut = copy.deepcopy(config)
    for key, value in list(vars(cut).items()):
        if isinstance(value, list | tuple) and len(cast(list[Any], value)) == depth:
            vars(cut)[key] = value[numbers.start : numbers.stop]
    vars(cut)["num_hidden_layers"] = len(numbers)
    return cut


def _head_name(model: nn.Module) -> str:
    head = cast(Any, model).get_output_embeddings()
    return next(name for name, child in model.named_children() if child is head)


def _refuse_strangers(model: nn.Module) -> None:
    """Only what is known can be cut.

    Raises:
        ConfigError: The model has parts that no chunk would get, or computes something between embedding and layers.
    """
    found = list(_strangers(model))
    if not found:
        found = list(_odd_inputs(model))
    if found:
        raise ConfigError(*(f"{type(model).__name__} cannot be cut into a pipeline: {each}" for each in found))


def _strangers(model: nn.Module) -> Iterator[str]:
    way_out = "use sharding or tensor parallel"
    decoder = _decoder(model)
    if decoder is None or decoder is model:
        yield f"it has no decoder of its own; {way_out}."
        return
    missing = [
        name for name in ("embed_tokens", "layers", "norm") if not isinstance(getattr(decoder, name, None), nn.Module)
    ]
    if missing or not isinstance(decoder.layers, nn.ModuleList):
        yield f"its decoder has no {', '.join(missing) or 'list of layers'}; {way_out}."
        return
    known = {"embed_tokens", "layers", "norm"}
    head = cast(Any, model).get_output_embeddings()
    for name, child in (*model.named_children(), *decoder.named_children()):
        if child is decoder or child is head or name in known or not any(True for _ in child.parameters()):
            continue
        yield f"no stage is known for its {name} ({type(child).__name__}); {way_out}."


@torch.no_grad()
def _odd_inputs(model: nn.Module) -> Iterator[str]:
    """A decoder without layers must give back the hidden states that it is given: nothing may be scaled or added."""
    decoder = copy.copy(cast(Any, model).get_decoder())
    vars(decoder)["_modules"] = {
        **decoder._modules, "layers": nn.ModuleList(), "norm": nn.Identity(), "embed_tokens": None
    }  # fmt: skip
    decoder.config = _shallower(decoder.config, range(0))
    hidden = torch.linspace(-1.0, 1.0, 2 * decoder.config.hidden_size).view(1, 2, -1)  # [B = 1, T = 2, H]
    given_back = decoder(inputs_embeds=hidden, use_cache=False).last_hidden_state
    if not torch.equal(given_back, hidden):
        yield "its decoder changes the hidden states before the first layer, and so would every stage; use sharding."
