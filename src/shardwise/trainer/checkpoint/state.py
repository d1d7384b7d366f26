"""What a run is made of: gathered into one flat state dict for a save, and put back by a load.

    model.<name>                    every parameter (or only the trainable ones) and persistent buffer, aliases once
    optimizer.state.<name>.<key>    the optimizer's tensors and numbers for the parameter <name>
    optimizer.group.<name>          its hyperparameters, kept by parameter: groups may be cut otherwise after a resume
    extra.<key>                     the state_dict() of the scheduler, the sampler, and whatever else the run has
    rng.<rank>                      random number generators, one entry a rank

Names are those of the plain model, so that a checkpoint of a compiled, wrapped or pipelined model fits any other.
[Note: in place] Tensors are loaded into the very tensors that the model and the optimizer hold. `Optimizer.
load_state_dict` would cast states to the type of their parameter, so bf16 states of fp32 weights, or the reverse,
would come back as something else.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata as packages
from typing import Any, Final, Protocol, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.optim import Optimizer

from shardwise.axes.pipeline.apply import CHUNKS
from shardwise.errors import CheckpointError
from shardwise.trainer.checkpoint.manifest import Manifest

FlatState = dict[str, Any]
_WRAPPERS: Final = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_CHUNK: Final = re.compile(rf"(^|\.){CHUNKS}\.\d+\.")
_PACKAGES: Final = ("torch", "transformers", "peft", "safetensors", "bitsandbytes", "torchao")
_VOLATILE_CONFIG: Final = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
    | {"attn_implementation", "_attn_implementation", "_attn_implementation_internal", "architectures"}
)


class HasState(Protocol):
    """Anything with a state of numbers, text, lists and dicts: a scheduler, a sampler."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take it back."""
        ...


def same_name(name: str) -> str:
    """The name as it is."""
    return name


@dataclass(frozen=True, kw_only=True)
class AppState:
    """Everything that a resumed run needs to go on as if it had never stopped."""

    model: nn.Module
    """The model, sharded or not, wrapped or not; or what a stage of a pipeline holds of it."""
    optimizers: Sequence[Optimizer] = ()
    """Every optimizer over the model's parameters."""
    extra: Mapping[str, HasState] = field(default_factory=dict[str, HasState])
    """Scheduler, sampler and so on by name. The same on every rank: one is stored, and a difference is an error."""
    counters: Mapping[str, int | float] = field(default_factory=dict[str, int | float])
    """Plain numbers of the run, such as tokens seen; `Restored.counters` gives them back."""
    trainable_only: bool = False
    """Store only parameters with requires_grad (adapters). The base is then named by `base_identity`."""
    mesh: Mapping[str, int] = field(default_factory=dict[str, int])
    """Degree of each mesh axis, outer to inner."""
    strategy: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The strategy as plain JSON, for the reader of a manifest."""
    data_rank: int | None = None
    """Which data this rank sees: ranks that share a model draw alike. None: every rank draws on its own."""
    seed: int = 0
    """The run's seed; new random streams are derived from it if the number of ranks has changed."""
    num_frozen: int | None = None
    """Elements of the frozen parameters of the whole model, where `model` is a stage's part of it."""
    rename: Callable[[str], str] = same_name
    """A name in `model` to the name in the plain model, for pipeline stages whose layers are renumbered."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a load has brought back."""

    step: int
    """Optimizer steps done."""
    counters: Mapping[str, int | float]
    """As they were saved."""
    rng_restored: bool
    """Whether the random streams go on; otherwise they were derived anew from seed, step and rank."""
    notes: tuple[str, ...]
    """Sentences for the user: what differs from the run that saved."""
    manifest: Manifest
    """The manifest of the checkpoint."""


def clean_name(name: str) -> str:
    """A parameter's name without what compile, checkpointing, DDP and several chunks of a pipeline put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return _CHUNK.sub(r"\1", name) if CHUNKS in name else name


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def model_tensors(model: nn.Module, *, trainable_only: bool = False) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of a model by plain name; a tied weight appears once, under its first name.

    Args:
        model: The model. FSDP2 modules that are gathered are sharded again by this.
        trainable_only: Only parameters with requires_grad, and no buffers.

    Returns:
        Tensors that share their memory with the model's.
    """
    model = unwrap(model)
    state = {clean_name(name): value for name, value in get_model_state_dict(model).items()}
    parameters = {clean_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        parameter = parameters.get(name)
        if not isinstance(tensor, torch.Tensor):
            continue
        if parameter is None:
            if not trainable_only:
                tensors[name] = tensor
        elif id(parameter) not in seen and (parameter.requires_grad or not trainable_only):
            seen.add(id(parameter))
            tensors[name] = tensor
    return tensors


def base_identity(model: nn.Module, num_frozen: int | None = None) -> str:
    """A short name for the model that adapters belong to: its configuration and size, not its weights.

    Args:
        model: The model, or a stage's part of it.
        num_frozen: Elements of the frozen parameters of all stages; None: those of `model`.

    Two bases of the same shape with other weights have the same identity; a checkpoint of adapters cannot tell them
    apart.
    """
    config: Any = getattr(unwrap(model), "config", None)
    described: dict[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    kept = {key: value for key, value in described.items() if key not in _VOLATILE_CONFIG}
    text = json.dumps(kept, sort_keys=True, default=str)
    count = num_frozen
    if count is None:
        count = sum(parameter.numel() for parameter in unwrap(model).parameters() if not parameter.requires_grad)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:32]} frozen:{count}"


@functools.cache
def versions() -> Mapping[str, str]:
    """Python and the packages that decide what the numbers are; read once, since a save waits for it."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = packages.version(name)
        except packages.PackageNotFoundError:
            continue
    return found


def describe(state: AppState, world_size: int) -> dict[str, Any]:
    """What the manifest says about the run."""
    return {
        "world_size": world_size,
        "mesh": dict(state.mesh),
        "strategy": dict(state.strategy),
        "counters": dict(state.counters),
        "seed": state.seed,
        "trainable_only": state.trainable_only,
        "base_model": base_identity(state.model, state.num_frozen) if state.trainable_only else None,
        "versions": dict(versions()),
    }


def gather_state(state: AppState, rank: int) -> FlatState:
    """The flat state dict of this rank. Tensors share their memory with the run's."""
    flat: FlatState = {}
    for name, tensor in model_tensors(state.model, trainable_only=state.trainable_only).items():
        flat[f"model.{state.rename(name)}"] = tensor
    for optimizer in state.optimizers:
        if optimizer.state:  # before the first step there is nothing, and nothing must be made up
            flat |= _optimizer_entries(state, optimizer)
    for key, value in state.extra.items():
        flat[f"extra.{key}"] = value.state_dict()
    flat[f"rng.{rank:05d}"] = rng_state()
    return flat


def _optimizer_entries(state: AppState, optimizer: Optimizer) -> FlatState:
    flat: FlatState = {}
    for name, parameter, group in _optimized(state, optimizer):
        flat[f"optimizer.group.{name}"] = {key: value for key, value in group.items() if key != "params"}
        for key, value in optimizer.state.get(parameter, {}).items():
            flat[f"optimizer.state.{name}.{key}"] = value
    return flat


def _optimized(state: AppState, optimizer: Optimizer) -> list[tuple[str, nn.Parameter, dict[str, Any]]]:
    """Name, parameter and group of everything that an optimizer updates."""
    model = unwrap(state.model)
    names = {id(parameter): state.rename(clean_name(name)) for name, parameter in model.named_parameters()}
    found: list[tuple[str, nn.Parameter, dict[str, Any]]] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"The optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the model. "
                    "Make the optimizer after the model has been wrapped and sharded."
                )
            found.append((names[id(parameter)], parameter, group))
    return found


def shared_digest(flat: FlatState) -> dict[str, str]:
    """A hash of each value of `extra`, to find ranks that disagree. Values with tensors in them are not compared."""
    digests: dict[str, str] = {}
    for name, value in flat.items():
        if name.startswith("extra."):
            digests[name] = hashlib.sha256(repr(value).encode()).hexdigest()
    return digests


def load_targets(state: AppState, manifest: Manifest, rank: int) -> FlatState:
    """The flat state dict to load into: the run's own tensors, and None where a value will come.

    Optimizers without a state are given one (a step with gradients and learning rate of zero), as DCP does.

    Raises:
        CheckpointError: The optimizer has gradients waiting, so that no state can be made.
    """
    has_optimizer = any(name.startswith("optimizer.") for name in manifest.values)
    for optimizer in state.optimizers:
        if has_optimizer and not optimizer.state:
            optimizer.zero_grad(set_to_none=True)
            get_optimizer_state_dict(unwrap(state.model), optimizer)
    flat = gather_state(state, rank)
    if not has_optimizer:
        flat = {name: value for name, value in flat.items() if not name.startswith("optimizer.")}
    if f"rng.{rank:05d}" not in manifest.values:
        del flat[f"rng.{rank:05d}"]
    return {name: value for name, value in flat.items() if not _lazy(name, manifest)}


def _lazy(name: str, manifest: Manifest) -> bool:
    """Optimizer state that this run has made up for a parameter that never had any when the checkpoint was saved."""
    return name.startswith("optimizer.state.") and name not in manifest.tensors and name not in manifest.values


def check_names(targets: Sequence[set[str]], manifest: Manifest) -> list[str]:
    """Problems with what all ranks want against what the checkpoint has. Random states are each rank's own affair."""
    wanted = {name for names in targets for name in names if not name.startswith("rng.")}
    stored = {name for name in (*manifest.tensors, *manifest.values) if not name.startswith("rng.")}
    problems: list[str] = []
    for names, what, way_out in (
        (wanted - stored, "missing from the checkpoint", "Resume with the model and optimizer that saved it."),
        (
            stored - wanted,
            "in the checkpoint but not in this run",
            "Resume with the model and optimizer that saved it.",
        ),
    ):
        if names:
            shown = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            problems.append(f"{len(names)} entries are {what}: {shown}. {way_out}")
    return problems


def check_shapes(flat: FlatState, manifest: Manifest) -> list[str]:
    """Tensors whose whole shape or type differs from the stored one."""
    problems: list[str] = []
    for name, value in flat.items():
        entry = manifest.tensors.get(name)
        if isinstance(value, torch.Tensor) and entry is not None and tuple(value.shape) != entry.shape:
            problems.append(
                f"{name} has the shape {entry.shape} in the checkpoint and {tuple(value.shape)} in this run."
            )
    return problems


def check_base(state: AppState, manifest: Manifest) -> list[str]:
    """Whether adapters are put onto the base that they were trained on."""
    stored = manifest.about.get("base_model")
    if bool(manifest.about.get("trainable_only")) != state.trainable_only:
        holds = "only trainable parameters" if manifest.about.get("trainable_only") else "all parameters"
        return [f"The checkpoint holds {holds}, this run wants otherwise. Resume with the same tuning."]
    if state.trainable_only and stored != (current := base_identity(state.model, state.num_frozen)):
        return [f"The checkpoint belongs to the base model {stored}, this run has {current}. Give the same base model."]
    return []


def check_groups(state: AppState, values: FlatState) -> None:
    """Whether the parameters of each of the optimizers' groups were saved with the same hyperparameters.

    Raises:
        CheckpointError: They were not, so no single value of the group could be right.
    """
    problems: list[str] = []
    for optimizer in state.optimizers:
        first: dict[int, tuple[str, dict[str, Any]]] = {}
        for name, _, group in _optimized(state, optimizer):
            saved = values.get(f"optimizer.group.{name}")
            if saved is None:
                continue
            other, settings = first.setdefault(id(group), (name, saved))
            if odd := [key for key in settings if repr(settings[key]) != repr(saved.get(key))]:
                problems.append(
                    f"{other} and {name} are in one group of the optimizer, but were saved with {odd[0]} "
                    f"{settings[odd[0]]} and {saved.get(odd[0])}. Group the parameters as the run that saved them."
                )
    if problems:
        raise CheckpointError(*problems[:3])


def apply_values(state: AppState, flat: FlatState, rank: int) -> None:
    """Put what is not a tensor back: hyperparameters, scheduler, sampler, random streams. Tensors already are."""
    for optimizer in state.optimizers:
        loaded = any(name.startswith("optimizer.") for name in flat)
        for name, parameter, group in _optimized(state, optimizer) if loaded else []:
            group.update(cast(dict[str, Any], flat[f"optimizer.group.{name}"]))
            held = cast(dict[str, Any], optimizer.state.get(parameter, {}))
            for key in list(held):
                full = f"optimizer.state.{name}.{key}"
                if full not in flat:
                    del held[key]
                elif not isinstance(held[key], torch.Tensor):
                    held[key] = flat[full]
            if not held:
                optimizer.state.pop(parameter, None)
    for key, value in state.extra.items():
        value.load_state_dict(flat[f"extra.{key}"])
    if (saved := flat.get(f"rng.{rank:05d}")) is not None:
        set_rng_state(cast(dict[str, Any], saved))


def rng_state() -> dict[str, Any]:
    """Every random stream of this process: torch on the CPU and on its GPU, Python, NumPy."""
    import numpy as np

    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast(Any, np.random.get_state())
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, words, gauss),
        "numpy": (str(name), torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """The opposite of `rng_state`."""
    import numpy as np

    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def reseed(seed: int, step: int, rank: int) -> None:
    """New random streams that depend on seed, step and rank alone: the same resume gives the same run."""
    import numpy as np

    text = f"shardwise resume seed={seed} step={step} rank={rank}"
    derived = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
    torch.manual_seed(derived)
    random.seed(derived)
    np.random.seed(derived)


def compare_runs(state: AppState, manifest: Manifest, world_size: int) -> list[str]:
    """Sentences about what differs between the run that saved and this one, harmless or not."""
    about = manifest.about
    notes: list[str] = []
    if about.get("world_size") != world_size:
        notes.append(f"saved on {about.get('world_size')} ranks, resumed on {world_size}")
    if (mesh := about.get("mesh")) != dict(state.mesh):
        notes.append(f"saved on the mesh {mesh}, resumed on {dict(state.mesh)}")
    saved, current = cast(dict[str, str], about.get("versions") or {}), versions()
    for name in sorted(set(saved) | set(current)):
        if saved.get(name) != current.get(name):
            notes.append(f"saved with {name} {saved.get(name, 'absent')}, resumed with {current.get(name, 'absent')}")
    return notes
