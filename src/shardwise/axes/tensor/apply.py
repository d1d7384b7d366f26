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

Shapes: B rows, T tokens of a row, H hidden size.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
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
        _parallelize(block, mesh, _block_plan(split))
        if number == 0:
            local = PrepareModuleInput(input_layouts=split, desired_input_layouts=split, use_local_output=True)
            _parallelize(block, mesh, local)
    if embedding is not None:
        _parallelize(embedding, mesh, VocabularyParallel(split))
    if head is not None:
        _parallelize(head, mesh, ColwiseParallel(input_layouts=split, use_local_output=False))
    if is_tied:
        head.weight = embedding.weight
    for module in _partial_modules(model, blocks, strategy):
        setattr(module, _PARTIAL, True)


def as_residual(hidden: Tensor, mesh: DeviceMesh, strategy: Strategy) -> Tensor:
    """Hidden states that another stage has sent, as the embedding would have given them ([Note: sequence parallel])."""
    split = Shard(1) if strategy.sequence_parallel else Replicate()
    return DTensor.from_local(hidden, mesh, [split], run_check=False)


def _parallelize(module: nn.Module, mesh: DeviceMesh, plan: ParallelStyle | dict[str, ParallelStyle]) -> None:
    parallelize_module(module, mesh, plan, src_data_rank=None)  # values come later: nothing is sent


def _block_plan(split: Placement) -> dict[str, ParallelStyle]:
    """Of one block; `split` is how hidden states lie between the sums."""
    plan: dict[str, ParallelStyle] = {
        ATTENTION: PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": split}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        FEED_FORWARD: PrepareModuleInput(input_layouts=split, desired_input_layouts=Replicate()),
    }
    plan |= {name: ColwiseParallel() for name in COLWISE}
    plan |= {name: RowwiseParallel(output_layouts=split) for name in ROWWISE}
    return plan


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
            hidden = _look_up(self, input_ids, device_mesh)
            return DTensor.from_local(hidden, device_mesh, [Partial()], run_check=False).redistribute(
                placements=[layout]
            )

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
    """Norms that see a part of the heads, or under sequence parallel a part of the tokens."""
    inside = {id(module) for block in blocks for module in block.get_submodule(ATTENTION).modules()}
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        is_whole = own and not any(isinstance(parameter, DTensor) for parameter in own)
        if is_whole and (strategy.sequence_parallel or id(module) in inside):
            yield module


def planned_placement(name: str) -> Placement | None:
    """How a parameter of a plain name lies along tp; None for one that every rank holds whole, outside the mesh."""
    owner, _, leaf = name.rpartition(".")
    owner = owner.removesuffix(".base_layer")
    if owner.endswith((*COLWISE, *VOCABULARY)):
        return Shard(0)
    if owner.endswith(ROWWISE):
        return Shard(1) if leaf == "weight" else Replicate()
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
    missing = [name for name in (*COLWISE, *ROWWISE) if not isinstance(modules.get(name), nn.Linear)]
    if missing:
        problems.append(
            f"{type(block).__name__} has no linear layer {', '.join(missing)}: tensor parallel splits decoders with q, "
            "k, v, o and gate, up, down projections (Llama, Mistral, Qwen, Gemma and their like). Use tp: 1."
        )
        return problems
    heads = modules[ATTENTION]
    head_dim = int(cast(Any, heads).head_dim)
    for name, module in modules.items():
        own = list(module.parameters(recurse=False))
        if not own or name in (*COLWISE, *ROWWISE):
            continue
        if any(parameter.ndim > 1 for parameter in own):
            problems.append(f"{type(block).__name__}.{name} ({type(module).__name__}) cannot be split. Use tp: 1.")
        elif name.startswith(f"{ATTENTION}.") and any(parameter.numel() != head_dim for parameter in own):
            problems.append(f"{type(block).__name__}.{name} spans all heads, which tp would split. Use tp: 1.")
    for name in (*COLWISE, *ROWWISE):
        linear = cast(nn.Linear, modules[name])
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
