"""Tensor: the matrices of every block split over tp by torch's `parallelize_module`.

    q, k, v, gate, up    ColwiseParallel       rows of the matrix (out_features), whole heads
    o, down              RowwiseParallel       columns (in_features); outputs are partial sums
    embedding            VocabularyParallel    rows: a part of the vocabulary ([Note: embedding])
    head                 ColwiseParallel       the same part of the vocabulary; the loss sees split logits
    norms                whole on every rank

[Note: one message each way] q, k and v read one DTensor, which `PrepareModuleInput` makes of what enters attention, so
that their three partial gradients are added before they are summed over the ranks, not after; gate and up likewise.
Outputs go on as plain local tensors: DTensor costs host time only where something is split or summed.

[Note: sequence parallel] Between the sums every rank keeps a part of each row's tokens. The embedding's output is a
DTensor [B, T, H] split along T, so that the model's own code still sees the whole T (positions, masks); the first block
takes its local part. Norms then compute on local tokens with plain weights. T must divide by tp.

[Note: embedding] torch's RowwiseParallel gives the right values, but its backward makes the gradient of the whole table
on every rank (1 GB in bf16 for Llama 3), and an embedding that scales its output (Gemma) is summed whole before it is
split along T. Here a rank looks up the tokens of its own rows, and the gradient is that of these rows.

[Note: partial gradients] A weight that every rank holds whole, but whose rank sees a part of the tokens (norms under
sequence parallel) or of the heads (norms of queries and keys), gets a partial gradient on each rank. These are summed
over tp once a step, all in one message, after all micro-batches; `fully_shard` knows nothing of it.

[Note: adapters] LoRA's pair is split on the same side as its matrix: B of q, k, v, gate and up along its rows, A of o
and down along its columns; the other half is whole on every rank, and its gradient a partial one. Matrix and adapter
compute on local tensors, and what both give is summed together: adapters add no message to a micro-batch.

Shapes: B rows, T tokens of a row, H hidden size.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from shardwise.errors import ConfigError
from shardwise.vocabulary.strategy import Strategy

ATTENTION, FEED_FORWARD = "self_attn", "mlp"
COLWISE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWWISE = ("self_attn.o_proj", "mlp.down_proj")
VOCABULARY = ("embed_tokens", "lm_head")
_PARTIAL = "_shardwise_partial_over_tp"
"""Marks a module whose own parameters get partial gradients ([Note: partial gradients])."""


def apply(model: nn.Module, blocks: nn.ModuleList, mesh: DeviceMesh, strategy: Strategy) -> None:
    """Splits a decoder in place; before checkpointing, compile and `fully_shard`.

    Args:
        model: A Hugging Face causal language model; parameters may be on meta.
        blocks: Its decoder blocks.
        mesh: (tp,).
        strategy: For sequence parallel.

    Raises:
        ConfigError: The model has something that this split does not know; names it.
    """
    if problems := _unknown(model, blocks, mesh.size()):
        raise ConfigError(*problems)
    untyped: Any = model
    # None on stages of a pipeline that do not begin or end with them.
    embedding: Any = untyped.get_input_embeddings()
    head: Any = untyped.get_output_embeddings()
    is_tied = None not in (embedding, head) and embedding.weight is head.weight
    split = Shard(1) if strategy.sequence_parallel else Replicate()
    for number, block in enumerate(blocks):
        _parallelize(block, mesh, _block_plan(block, split))
        if number == 0:
            local = PrepareModuleInput(input_layouts=split, desired_input_layouts=split, use_local_output=True)
            _parallelize(block, mesh, local)
    if embedding is not None:
        _parallelize(embedding, mesh, VocabularyParallel(split))
    if head is not None:
        _parallelize(head, mesh, ColwiseParallel(input_layouts=split, use_local_output=False))
    if embedding is not None and head is not None and is_tied:
        cast(nn.Linear, head).weight = cast(nn.Embedding, embedding).weight
    for module in _partial_modules(model, blocks, strategy):
        setattr(module, _PARTIAL, True)


def as_residual(hidden: Tensor, mesh: DeviceMesh, strategy: Strategy) -> Tensor:
    """Hidden states that another stage has sent, as the embedding would have given them ([Note: sequence parallel])."""
    split = Shard(1) if strategy.sequence_parallel else Replicate()
    return DTensor.from_local(hidden, mesh, [split], run_check=False)


def _parallelize(module: nn.Module, mesh: DeviceMesh, plan: ParallelStyle | dict[str, ParallelStyle]) -> None:
    parallelize_module(module, mesh, plan, src_data_rank=None)  # values come later: nothing is sent


def _block_plan(block: nn.Module, split: Placement) -> dict[str, ParallelStyle]:
    """Of one block; `split` is how hidden states lie between the sums."""
    modules = dict(block.named_modules())
    plan: dict[str, ParallelStyle] = {
        ATTENTION: PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": split}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        FEED_FORWARD: PrepareModuleInput(input_layouts=split, desired_input_layouts=Replicate()),
    }
    for name in (*COLWISE, *ROWWISE):
        if hasattr(modules[name], "base_layer"):
            plan |= _adapted_plan(name, modules, split)
        else:
            plan[name] = ColwiseParallel() if name in COLWISE else RowwiseParallel(output_layouts=split)
    return plan


def _adapted_plan(name: str, modules: Mapping[str, nn.Module], split: Placement) -> dict[str, ParallelStyle]:
    """Of a matrix with an adapter ([Note: adapters])."""
    dim = 0 if name in COLWISE else 1
    plan: dict[str, ParallelStyle] = {name: LocalInput() if dim == 0 else SummedOutput(split)}
    for part in modules:
        if part == f"{name}.base_layer" or part.startswith(f"{name}.lora_{'B' if dim == 0 else 'A'}."):
            plan[part] = LocalLinear(dim)
    return plan


class LocalInput(ParallelStyle):
    """Gives a module the local tensor of a replicated DTensor; each rank's gradient for it is a partial sum."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def take(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (inputs[0].to_local(grad_placements=[Partial()]), *inputs[1:])

        module.register_forward_pre_hook(take)
        return module


class SummedOutput(ParallelStyle):
    """Sums what a module gives over the ranks.

    Args:
        output_layout: How the sum lies over them.
    """

    def __init__(self, output_layout: Placement) -> None:
        super().__init__()
        self._layout = output_layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def add_up(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return _summed(output, device_mesh, self._layout).to_local()

        module.register_forward_hook(add_up)
        return module


class LocalLinear(ParallelStyle):
    """A linear layer whose matrix is split, on local tensors: no message.

    Args:
        dim: 0 splits rows and bias; 1 splits columns, so that outputs are partial sums and one rank adds the bias.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self._dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim == 2 or self._dim == 0:
                placed = distribute_tensor(parameter, device_mesh, [Shard(self._dim)], src_data_rank=self.src_data_rank)
                module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))
        adds_bias = self._dim == 0 or device_mesh.get_local_rank() == 0

        def forward(self: Any, hidden: Tensor) -> Tensor:
            bias = self.bias if self.bias is not None and adds_bias else None
            return F.linear(hidden, _local(self.weight), None if bias is None else _local(bias))

        module.forward = types.MethodType(forward, module)
        return module


def _summed(partial: Tensor, mesh: DeviceMesh, layout: Placement) -> DTensor:
    return DTensor.from_local(partial, mesh, [Partial()], run_check=False).redistribute(placements=[layout])


class VocabularyParallel(ParallelStyle):
    """An embedding whose rows are split ([Note: embedding]); gives a DTensor.

    Args:
        output_layout: How the hidden states lie over the ranks.
    """

    def __init__(self, output_layout: Placement) -> None:
        super().__init__()
        self._layout = output_layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight = module.get_parameter("weight")
        part = distribute_tensor(weight, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
        module.register_parameter("weight", nn.Parameter(part, requires_grad=weight.requires_grad))
        layout = self._layout

        def forward(self: Any, input_ids: Tensor) -> DTensor:
            if not layout.is_replicate() and input_ids.shape[1] % device_mesh.size():
                raise ConfigError(
                    f"A row of {input_ids.shape[1]} tokens cannot be cut into {device_mesh.size()} equal parts. Pad it "
                    "to a multiple, or set sequence_parallel: false."
                )
            return _summed(_look_up(self, input_ids, device_mesh), device_mesh, layout)

        module.forward = types.MethodType(forward, module)
        return module


def _look_up(embedding: Any, input_ids: Tensor, mesh: DeviceMesh) -> Tensor:
    """Rows of this rank's tokens, zeros for those of others: [B, T] -> [B, T, H]."""
    weight: Tensor = embedding.weight.to_local()  # [V/tp, H]
    size, first = len(weight), mesh.get_local_rank() * len(weight)
    elsewhere = (input_ids < first) | (input_ids >= first + size)
    padding = None if embedding.padding_idx is None else embedding.padding_idx - first
    if padding is not None and not 0 <= padding < size:
        padding = None
    hidden = F.embedding((input_ids - first).masked_fill(elsewhere, 0), weight, padding)
    scale = getattr(embedding, "embed_scale", None)
    if scale is not None:
        hidden = hidden * scale.to(weight.dtype)
    return hidden.masked_fill(elsewhere[..., None], 0)


def _partial_modules(model: nn.Module, blocks: nn.ModuleList, strategy: Strategy) -> Iterator[nn.Module]:
    """Norms that see a part of the heads, or under sequence parallel of the tokens; whole halves of adapters."""
    adapters = {id(module) for name, module in model.named_modules() if ".lora_" in name}
    inside = {id(module) for block in blocks for module in block.get_submodule(ATTENTION).modules()}
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        is_whole = own and not any(isinstance(parameter, DTensor) for parameter in own)
        if is_whole and (strategy.sequence_parallel or id(module) in inside or id(module) in adapters):
            yield module


def planned_placement(name: str) -> Placement | None:
    """How a parameter of a plain name lies along tp; None for one that every rank holds whole, outside the mesh."""
    owner, _, leaf = name.rpartition(".")
    owner, _, half = owner.partition(".lora_")
    if half:
        split = COLWISE if half.startswith("B.") else ROWWISE if half.startswith("A.") else ()
        return Shard(0 if split is COLWISE else 1) if owner.endswith(split) else None
    is_adapted = owner.endswith(".base_layer")
    owner = owner.removesuffix(".base_layer")
    if owner.endswith((*COLWISE, *VOCABULARY)):
        return Shard(0)
    if owner.endswith(ROWWISE):
        return Shard(1) if leaf == "weight" else None if is_adapted else Replicate()
    return None


def partial_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters with partial gradients, in the order of the model; the same on every rank of tp."""
    marked = [module for module in model.modules() if getattr(module, _PARTIAL, False)]
    return [parameter for module in marked for parameter in module.parameters(recurse=False) if parameter.requires_grad]


@torch.no_grad()
def sum_partial_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sums their gradients over tp in place, by one all_reduce. On every rank of the group, once a step."""
    found = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not found:
        return
    flat = torch.cat([gradient.flatten() for gradient in found])
    if flat.numel():
        dist.all_reduce(flat, group=group)
    for gradient, summed in zip(found, flat.split([gradient.numel() for gradient in found]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_split(parameter: Tensor) -> bool:
    """Whether the ranks of tp hold different parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    placed = dict(zip(names, parameter.placements, strict=True))
    return not cast(Any, placed.get("tp", Replicate())).is_replicate()


def _unknown(model: nn.Module, blocks: nn.ModuleList, tp: int) -> list[str]:
    """What of a model cannot be split, in words."""
    problems: list[str] = []
    block = blocks[0]
    modules = dict(block.named_modules())
    bases = {name: getattr(modules.get(name), "base_layer", modules.get(name)) for name in (*COLWISE, *ROWWISE)}
    missing = [name for name, base in bases.items() if not isinstance(base, nn.Linear)]
    if missing:
        problems.append(
            f"{type(block).__name__} has no linear layer {', '.join(missing)}: tensor parallel splits decoders with q, "
            "k, v, o and gate, up, down projections (Llama, Mistral, Qwen, Gemma and their like). Use tp: 1."
        )
        return problems
    heads = modules[ATTENTION]
    head_dim = int(cast(Any, heads).head_dim)
    if any(".lora_magnitude_vector." in name for name, _ in block.named_parameters()):
        problems.append("DoRA needs the length of whole rows, which tp splits. Use use_dora: false, or tp: 1.")
    for name, module in modules.items():
        own = list(module.parameters(recurse=False))
        if (
            not own
            or ".lora_magnitude_vector" in name
            or module in bases.values()
            or ".lora_A." in name
            or ".lora_B." in name
        ):
            continue
        if any(parameter.ndim > 1 for parameter in own):
            problems.append(f"{type(block).__name__}.{name} ({type(module).__name__}) cannot be split. Use tp: 1.")
        elif name.startswith(f"{ATTENTION}.") and any(parameter.numel() != head_dim for parameter in own):
            problems.append(f"{type(block).__name__}.{name} spans all heads, which tp would split. Use tp: 1.")
    for name in (*COLWISE, *ROWWISE):
        linear = cast(nn.Linear, bases[name])
        size = linear.out_features if name in COLWISE else linear.in_features
        unit = head_dim if name.startswith(f"{ATTENTION}.") else 1
        if size % (unit * tp):
            problems.append(
                f"{name} has {size // unit:,} {'heads' if unit > 1 else 'columns'}, which tp {tp} does not divide."
            )
    return [*problems, *_unknown_ends(model, tp)]


def _unknown_ends(model: nn.Module, tp: int) -> Iterator[str]:
    """What of embedding and head cannot be split, in words."""
    for name, module in model.named_modules():
        is_embedding = isinstance(module, nn.Embedding)
        if not is_embedding and not name.endswith(VOCABULARY):
            continue
        known = nn.Embedding.forward if is_embedding else nn.Linear.forward
        if type(module).forward is not known and not hasattr(module, "embed_scale"):
            yield f"{name} ({type(module).__name__}) computes in a way of its own. Use tp: 1."
        elif not name.endswith(VOCABULARY):
            yield f"{name} is an embedding that tensor parallel does not know. Use tp: 1."
        elif (size := len(module.get_parameter("weight"))) % tp:
            yield f"{name} has {size:,} rows, which tp {tp} does not divide."
