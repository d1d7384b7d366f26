"""A Hugging Face model without memory, and how it gets memory and values once it is split.

    skeleton      parameters on the meta device, buffers real, adapters in, dtypes set
    materialize   memory for what this rank holds; buffers and ties as they were
    initialize    random values, the same for every split; real ones come from `weights`

[Note: buffers] Rotary frequencies and other non-persistent buffers are in no checkpoint; a model that is made on meta
and given memory later computes with garbage in them, and trains wrong without a word. Here buffers are made for real
on the CPU, kept, and copied back after memory was given; `sentinels` compares them again.

[Note: ties] Giving memory to a module gives it to each of two tied parameters on its own. So aliases are written down
before and tied again after.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise.axes.pipeline import apply as pipeline
from shardwise.errors import ConfigError
from shardwise.facts import catalog
from shardwise.levers.adapters import apply as adapters
from shardwise.levers.adapters import apply_nf4 as nf4
from shardwise.levers.offload import apply as offload
from shardwise.levers.precision import apply as precision
from shardwise.trainer.attention import adopt
from shardwise.trainer.checkpoint.state import clean_name
from shardwise.vocabulary.job import LoraSettings
from shardwise.vocabulary.run import RunFile
from shardwise.vocabulary.strategy import Strategy

_ATTENTION = {"sdpa": "sdpa", "eager": "eager", "flash": "flash_attention_2"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Skeleton:
    """A model without memory, and what must come back when it gets some."""

    model: Any
    """A transformers causal language model, or the part of one stage; parameters on meta."""
    template: Any
    """The same without adapters, untouched: what a parameter's values are made from. Parameters on meta."""
    buffers: Mapping[str, Tensor]
    """Every buffer by plain name, on the CPU ([Note: buffers])."""
    aliases: tuple[tuple[str, ...], ...]
    """Plain names that share one parameter ([Note: ties])."""
    adapted: Any
    """The PeftModel around the model if it has adapters, otherwise the model: what is exported."""
    num_frozen: int = 0
    """Elements of the frozen parameters of all stages."""


def load_config(run: RunFile) -> Any:
    """The model's config.json, read as data: it can switch nothing on that the run file has not.

    A model that starts from random weights needs its shape alone, which the catalogue knows without a hub.

    Raises:
        ConfigError: There is no such folder or hub id, or it cannot be read.
    """
    from transformers import AutoConfig

    if (
        run.random_init
        and not Path(run.model_name_or_path).exists()
        and catalog.knows("models", run.model_name_or_path)
    ):
        keys = dict(catalog.model_file(run.model_name_or_path).config)
        return AutoConfig.for_model(str(keys.pop("model_type")), **keys)
    try:
        return AutoConfig.from_pretrained(
            run.model_name_or_path, revision=run.model_revision or "main", trust_remote_code=run.trust_remote_code
        )
    except Exception as error:  # transformers raises what its config classes happen to stumble over
        known = Path(run.model_name_or_path).exists()
        what = "The config.json there cannot be used" if known else "There is no such folder, and no hub id was reached"
        raise ConfigError(f"model_name_or_path {run.model_name_or_path!r}: {what}: {_told(error)}") from error


def build_skeleton(
    config: Any,
    strategy: Strategy,
    lora: LoraSettings,
    attention: str = "sdpa",
    *,
    stage: int = 0,
    trust_remote_code: bool = False,
) -> Skeleton:
    """Makes the model of a config, with adapters and dtypes as the strategy says, without memory for parameters.

    Args:
        config: A transformers config of a causal language model.
        strategy: For tuning and precision; and for pp, which leaves of the model what its stage holds.
        lora: Used where the tuning is LoRA.
        attention: sdpa, flash or eager.
        stage: The stage of the pipeline.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        ConfigError: transformers, PEFT or this engine cannot make such a model.
    """
    config = copy.deepcopy(config)
    config.use_cache = False
    template, model = (_make(config, attention, trust_remote_code=trust_remote_code) for _ in range(2))
    adapted = model if strategy.tuning == "full" else adapters.apply(model, lora)
    precision.apply(model, strategy)
    if strategy.tuning == "qlora":
        nf4.apply(model)
    model.train()
    num_frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    pipeline.apply(model, strategy, stage)
    buffers = {clean_name(name): buffer.detach().clone() for name, buffer in model.named_buffers()}
    return Skeleton(
        model=model,
        template=template,
        buffers=buffers,
        aliases=aliases_of(model),
        adapted=adapted,
        num_frozen=num_frozen,
    )


def _make(config: Any, attention: str, *, trust_remote_code: bool) -> Any:
    import transformers

    try:
        with parameters_on_meta():
            model = transformers.AutoModelForCausalLM.from_config(
                copy.deepcopy(config),
                dtype=torch.float32,
                attn_implementation=_ATTENTION[attention],
                trust_remote_code=trust_remote_code,
            )
        adopt(model)
        return model
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"transformers cannot make a {config.model_type} model with attn_implementation: {attention}: {error} "
            "Another of sdpa, eager and flash may work."
        ) from error
    except Exception as error:  # a value of config.json that the model's code stumbles over: KeyError, TypeError, ...
        keys = _keys_of(config.to_dict(), error.args[0] if error.args else None)
        named = f" That is its {' and '.join(keys)}." if keys else ""
        raise ConfigError(
            f"transformers {transformers.__version__} cannot make a {config.model_type} model of this config.json: "
            f"{_told(error)}.{named} Correct it, or take the transformers that wrote it."
        ) from error


def _told(error: Exception) -> str:
    """An error of somebody else in one line; its kind where the text alone says little."""
    text = " ".join(str(error).split())
    return text if isinstance(error, (OSError, ValueError)) and text else f"{type(error).__name__}: {text}"


def _keys_of(config: Mapping[str, Any], value: object) -> list[str]:
    """The keys of a config, also of what lies in it, that hold a text."""
    found: list[str] = []
    for key, one in config.items():
        if isinstance(one, dict):
            found += [f"{key}.{inner}" for inner in _keys_of(cast("dict[str, Any]", one), value)]
        elif isinstance(value, str) and one == value:
            found.append(key)
    return found


@contextlib.contextmanager
def parameters_on_meta() -> Generator[None]:
    """Modules made inside have parameters without memory, and real buffers."""
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        original(self, name, param)

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = original


def materialize(skeleton: Skeleton, device: torch.device, strategy: Strategy | None = None) -> None:
    """Gives memory to every parameter that this rank holds; brings buffers and ties back.

    Args:
        skeleton: The model, wrapped or not.
        device: Where it computes.
        strategy: Says what waits in host memory instead; None: nothing.
    """
    made: dict[int, nn.Parameter] = {}
    for module in skeleton.model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                place = device if strategy is None else offload.home(parameter, strategy, device)
                empty: Any = torch.empty_like(parameter.detach(), device=place)
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = torch.empty_like(buffer, device=device)
    with torch.no_grad():
        for name, buffer in skeleton.model.named_buffers():
            buffer.copy_(skeleton.buffers[clean_name(name)])


def plain_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter once, under the name that it has in the model without wrappers and adapters."""
    named = model.named_parameters()
    return {clean_name(name).replace(".base_layer.", "."): parameter for name, parameter in named}


def initialize(skeleton: Skeleton, seed: int, device: torch.device) -> None:
    """Random values by the model's own rule, and by PEFT's for adapters: the same for every split of the model.

    Each module draws from a stream of its own, by seed and name, so neither order nor sharding matters.
    """
    targets = plain_parameters(skeleton.model)
    for module_name, module in skeleton.template.named_modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        wanted = [name for name in names if _join(module_name, name) in targets]
        packed = targets.get(_join(module_name, nf4.PACKED))
        if wanted or packed is not None:
            full = _initialized(skeleton.template, module_name, module, seed, device)
            for name in wanted:
                assign(targets[_join(module_name, name)], full[name])
            if packed is not None:
                assign(packed, nf4.pack(full["weight"]))
    initialize_adapters(skeleton, seed, device)


def initialize_adapters(skeleton: Skeleton, seed: int, device: torch.device) -> None:
    """PEFT's values for adapters alone; the base, which must have its values, keeps them. On every rank."""
    for name, parameter in plain_parameters(skeleton.model).items():
        if adapters.is_magnitude(name):
            layer = skeleton.model.get_submodule(adapters.adapted_layer(name))
            assign(parameter, adapters.row_lengths(layer))
        elif adapters.is_adapter(name):
            values = torch.empty(parameter.shape, dtype=torch.float32, device=device)
            adapters.initialize(name, values, torch.Generator(device).manual_seed(_stream(seed, name)))
            assign(parameter, values)


def assign(parameter: Tensor, full: Tensor) -> None:
    """Puts whole values into a parameter of which this rank may hold a part; nothing crosses the wire."""
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            part = distribute_tensor(full.to(parameter.dtype), mesh, placements, src_data_rank=None)
            parameter.to_local().copy_(part.to_local())
        else:
            parameter.copy_(full)


def _initialized(template: Any, name: str, module: nn.Module, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Whole values of one module's own parameters."""
    own = {key: parameter for key, parameter in module.named_parameters(recurse=False)}
    values = {key: nn.Parameter(torch.empty_like(parameter, device=device)) for key, parameter in own.items()}
    twin = copy.copy(module)
    vars(twin)["_parameters"] = {**vars(module)["_parameters"], **values}  # the module itself stays as it is
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(_stream(seed, name))
        template._init_weights(twin)
    return {key: parameter.detach() for key, parameter in values.items()}


def _stream(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "little")


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def aliases_of(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Plain names that share one parameter ([Note: ties])."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(clean_name(name))
    return tuple(tuple(shared) for shared in names.values() if len(shared) > 1)
