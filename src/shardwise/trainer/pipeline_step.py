"""A step through a pipeline: torch's schedules say what comes when, the stages here say how.

torch.distributed.pipelining gives the order of forwards and backwards, of sends and receives (GPipe, 1F1B, interleaved
1F1B, interleaved zero bubble). Its own `PipelineStage` is not used, for two reasons: it freezes the shape of the first
micro-batch, while ours are as long as their longest row; and it gathers and reduces shards by a rule of its own, where
ours follow the ZeRO stage (`parallelize.before_micro_batch`) in every schedule alike.

All ranks of a pipeline read the same micro-batches, so tokens, positions, masks and labels never travel: only hidden
states and their gradients do, in buffers that live as long as they are needed.

[Note: one sum] The last stage scales each micro-batch's summed loss for the step's tokens, so the schedules must not
scale gradients again (`scale_grads=False`), and what comes out is the same sum as without a pipeline.

[Note: tied ends] First and last stage hold the one weight of a tied embedding and head ([Note: tied ends] of
axes/pipeline). After a step's backward the two add up their gradients over a group of their own; it then counts once in
the norm, and both make the same update from the same states.

Shapes: B rows, T tokens of a row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.stage import _PipelineStageBase  # pyright: ignore[reportPrivateUsage]
from torch.distributed.tensor import DTensor

from shardwise.axes.pipeline.apply import chunk_numbers, chunks_of, embedding_of
from shardwise.axes.pipeline.cost import INTERLEAVING, divides
from shardwise.errors import PlanMismatchError
from shardwise.levers.precision.apply import compute_dtype
from shardwise.trainer.data.collate import IGNORE_INDEX, Batch
from shardwise.trainer.mesh import RankMesh
from shardwise.trainer.model import Skeleton
from shardwise.vocabulary.strategy import Strategy

EMPTY_TOKENS = 8
"""Tokens of a micro-batch that only fills a schedule, on each rank of tp."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Passes:
    """How a chunk computes."""

    forward: Callable[[nn.Module, Batch, Tensor | None], Tensor]
    """Chunk, micro-batch and hidden states [B, T, H] (None on the first chunk) to hidden states, or the loss: []."""
    before_backward: Callable[[nn.Module, bool], None]
    """Told the chunk, and whether this is its last backward of the step."""


@dataclass(frozen=True, kw_only=True)
class Wire:
    """What travels between chunks."""

    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup
    """The ranks of this pipeline."""
    token_parts: int = 1
    """Into how many parts tensor parallel cuts the tokens of a row, of which each rank sends its own."""


@dataclass(eq=False)
class _Flight:
    """A chunk's micro-batches between their forward and the end of their backward, by number."""

    received: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Hidden states from the chunk before. [B, T, H]"""
    computed: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Hidden states for the chunk after, until they are sent. [B, T, H]"""
    inputs: dict[int, Tensor | None] = field(default_factory=dict[int, Tensor | None])
    """Where a backward ends. [B, T, H]"""
    outputs: dict[int, Any] = field(default_factory=dict[int, Any])
    """Where a backward begins: an edge of the graph, or a tensor where the schedule takes backwards apart."""
    given: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Gradients from the chunk after. [B, T, H]"""
    made: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Gradients for the chunk before, until they are sent. [B, T, H]"""
    late: dict[int, Callable[[], None]] = field(default_factory=dict[int, Callable[[], None]])
    """What is left of a backward that was taken apart: the weights' gradients."""


class ChunkStage(_PipelineStageBase):
    """One chunk of the model, as torch's schedules want to drive it.

    Args:
        chunk: The module.
        number: Its number in the whole pipeline, and how many there are.
        wire: What travels.
        passes: How it computes.
        splits_backward: Whether the schedule takes backwards apart.
    """

    def __init__(
        self, chunk: nn.Module, number: tuple[int, int], wire: Wire, passes: Passes, *, splits_backward: bool
    ) -> None:
        # The schedules look for FSDP modules to gather and reduce by their own rule; they are to find none.
        super().__init__(nn.Identity(), *number, wire.device, wire.group)
        self._chunk, self._wire, self._passes, self._splits = chunk, wire, passes, splits_backward
        self._flight = _Flight()
        self._batches: Sequence[Batch] = ()
        self._scale = 1.0
        self.loss = torch.zeros((), device=wire.device)
        """Summed over the micro-batches so far, on the last chunk: []."""

    def begin(self, batches: Sequence[Batch], scale: float = 1.0) -> None:
        """Takes the micro-batches that come next, and what their losses are multiplied with before backward."""
        self._flight, self._batches, self._scale = _Flight(), batches, scale
        self.loss = torch.zeros((), device=self._wire.device)

    # Messages ---------------------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Hidden states from the chunk before."""
        if self.is_first:
            return []
        self._flight.received[fwd_chunk_id] = self._buffer(fwd_chunk_id)
        return [self._message(dist.irecv, self._flight.received[fwd_chunk_id], self.stage_index - 1)]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Hidden states to the chunk after."""
        if self.is_last:
            return []
        return [self._message(dist.isend, self._flight.computed.pop(fwd_chunk_id), self.stage_index + 1)]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Gradients from the chunk after."""
        if self.is_last or not self.has_backward:
            return []
        self._flight.given[bwd_chunk_id] = self._buffer(bwd_chunk_id)
        return [self._message(dist.irecv, self._flight.given[bwd_chunk_id], self.stage_index + 1)]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Gradients to the chunk before."""
        if self.is_first or not self.has_backward:
            return []
        return [self._message(dist.isend, self._flight.made.pop(bwd_chunk_id), self.stage_index - 1)]

    def _buffer(self, index: int) -> Tensor:
        rows, tokens = self._batches[index].input_ids.shape
        shape = (rows, tokens // self._wire.token_parts, self._wire.hidden_size)
        return torch.empty(shape, dtype=self._wire.dtype, device=self._wire.device)

    def _message(self, op: Callable[..., Any], tensor: Tensor, chunk: int) -> dist.P2POp:
        peer = self.stage_index_to_group_rank[chunk]
        return dist.P2POp(op, tensor, dist.get_global_rank(self._wire.group, peer), self._wire.group)

    # Compute ----------------------------------------------------------------------------------------------------------

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any = (), kwargs: Any = None, save_forward_output: bool = True
    ) -> Tensor:
        """Forward of one micro-batch; what the schedule has to give, nothing, is not looked at."""
        del args, kwargs, save_forward_output
        flight = self._flight
        hidden = None if self.is_first else flight.received.pop(fwd_chunk_id)
        if hidden is not None and torch.is_grad_enabled():
            hidden.requires_grad_()
        output = self._passes.forward(self._chunk, self._batches[fwd_chunk_id], hidden)
        if self.is_last:
            self.loss = self.loss + output.detach()
            output = output * self._scale
        else:
            flight.computed[fwd_chunk_id] = self._checked(output.detach())
        if torch.is_grad_enabled():
            flight.inputs[fwd_chunk_id] = hidden
            # An edge keeps the graph alive, and not what was sent.
            keeps_tensor = self._splits or self.is_last
            flight.outputs[fwd_chunk_id] = output if keeps_tensor else torch.autograd.graph.get_gradient_edge(output)
        return output

    def _checked(self, hidden: Tensor) -> Tensor:
        if hidden.dtype != self._wire.dtype:
            raise PlanMismatchError(
                f"Chunk {self.stage_index} of the pipeline makes hidden states in {hidden.dtype}, and the next one "
                f"waits for {self._wire.dtype}: this model does not keep its residual stream in the run's precision."
            )
        return hidden.contiguous()

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Backward of one micro-batch; without `full_backward` only as far as the chunk before needs it."""
        flight = self._flight
        output, hidden = flight.outputs.pop(bwd_chunk_id), flight.inputs.pop(bwd_chunk_id)
        given = None if self.is_last else flight.given.pop(bwd_chunk_id)
        if full_backward:
            self._passes.before_backward(self._chunk, last_backward)
            torch.autograd.backward(output, given)
        else:
            self._passes.before_backward(self._chunk, False)
            flight.late[bwd_chunk_id] = self._backward_of_input(output, given, hidden)
        if hidden is not None:
            gradient, hidden.grad = hidden.grad, None
            assert gradient is not None, "hidden states without a gradient"
            flight.made[bwd_chunk_id] = gradient

    def _backward_of_input(self, output: Tensor, given: Tensor | None, hidden: Tensor | None) -> Callable[[], None]:
        """The gradient of what came in; returns how to get the weights'. The first chunk does all of it late."""
        if hidden is None:
            return lambda: torch.autograd.backward(output, given)
        gradients = None if given is None else [given]
        _, rest = stage_backward_input([output], gradients, [hidden], self._chunk.parameters())
        return lambda: cast(None, stage_backward_weight(self._chunk.parameters(), rest) and None)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The rest of a backward that was taken apart."""
        del last_backward
        self._flight.late.pop(bwd_chunk_id)()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """After the last backward: reduces what `fully_shard` was not told to, where backwards are taken apart.

        Its own hooks have run with the inputs' gradients, before the weights' existed, so torch's pipeline runs them
        once more by hand.
        """
        if self._splits:
            self._passes.before_backward(self._chunk, True)
            own, self.submod = self.submod, self._chunk
            super().perform_reduce_grad(grad_scale_factor)
            self.submod = own

    # What is settled without asking ----------------------------------------------------------------------------------

    def clear_runtime_states(self) -> None:
        """Nothing outlives a step."""

    def _prepare_forward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> Any:
        self.chunks = num_microbatches
        self.args_recv_info[0] = ()

    def _prepare_backward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> Any:
        self.chunks = num_microbatches

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        return ()


class Pipeline:
    """This rank's chunks, and the schedules that drive them.

    Args:
        skeleton: The model of this rank, wrapped.
        mesh: This rank's place.
        strategy: For the schedule.
        passes: How a chunk computes.
    """

    def __init__(self, skeleton: Skeleton, mesh: RankMesh, strategy: Strategy, passes: Passes) -> None:
        assert mesh.pipeline is not None, "a pipeline of one stage"
        self._strategy, self._mesh = strategy, mesh
        group = mesh.pipeline.get_group()
        config = skeleton.model.config
        wire = Wire(
            hidden_size=config.get_text_config().hidden_size,
            dtype=_hidden_dtype(skeleton.model, strategy),
            device=mesh.device,
            group=group,
            token_parts=strategy.tp if strategy.sequence_parallel else 1,
        )
        total = strategy.pp * strategy.virtual_stages
        self._stages = [
            ChunkStage(
                chunk, (number, total), wire, passes, splits_backward=strategy.pipeline_schedule == "zero_bubble"
            )
            for chunk, number in zip(chunks_of(skeleton.model), chunk_numbers(strategy, mesh.stage), strict=True)
        ]
        self._schedules: dict[int, Any] = {}
        self._tied = tied_parameter(skeleton)
        self._ends = _ends(mesh) if is_tied(skeleton) else None

    def backward(self, batches: Sequence[Batch], scale: float) -> Tensor:
        """Forward and backward of a step's micro-batches; their summed loss on the last stage, 0 on others: []."""
        batches = self._filled(batches)
        for stage in self._stages:
            stage.begin(batches, scale)
        schedule = self._schedule(len(batches))
        # The schedules ask for a target of each micro-batch before they take a loss; the stages know theirs.
        schedule.step(target=torch.arange(len(batches)), return_outputs=False)
        loss = self._stages[-1].loss
        self._add_tied_gradients()
        for stage in self._stages:
            stage.begin(())
        return loss

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch]) -> Tensor:
        """Summed loss of micro-batches without gradients, on the last stage; 0 on others: [].

        Chunk after chunk, each with all micro-batches, so that the stages work at the same time.
        """
        sent: list[Any] = []
        for stage in self._stages:
            stage.begin(batches)
            for index in range(len(batches)):
                for message in stage.get_fwd_recv_ops(index):
                    dist.recv(message.tensor, message.peer, message.group)
                stage.forward_one_chunk(index)
                sent += [dist.isend(one.tensor, one.peer, one.group) for one in stage.get_fwd_send_ops(index)]
        for work in sent:
            work.wait()
        loss = self._stages[-1].loss
        for stage in self._stages:
            stage.begin(())
        return loss

    def counted_elsewhere(self) -> nn.Parameter | None:
        """The tied weight on the last stage: its gradient counts in the norm on the first. None if there is none."""
        return self._tied if self._mesh.is_last_stage else None

    def _schedule(self, num_micro_batches: int) -> Any:
        if num_micro_batches not in self._schedules:
            make: Any = {
                "gpipe": ScheduleGPipe,
                "1f1b": Schedule1F1B,
                "interleaved_1f1b": ScheduleInterleaved1F1B,
                "zero_bubble": ScheduleInterleavedZeroBubble,
            }[self._strategy.pipeline_schedule]
            stages = self._stages if self._strategy.pipeline_schedule in INTERLEAVING else self._stages[0]
            self._schedules[num_micro_batches] = make(stages, num_micro_batches, loss_fn=_as_it_is, scale_grads=False)
        return self._schedules[num_micro_batches]

    def _filled(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """With empty micro-batches behind, as many as the schedule needs in a last step that has fewer."""
        count = max(len(batches), 1 if self._strategy.pipeline_schedule == "gpipe" else self._strategy.pp)
        while self._strategy.pipeline_schedule in INTERLEAVING and not divides(count, self._strategy.pp):
            count += 1
        return [*batches, *(_empty(batches[0], self._strategy.tp) for _ in range(count - len(batches)))]

    @torch.no_grad()
    def _add_tied_gradients(self) -> None:
        if self._tied is None or self._tied.grad is None:
            return
        gradient: Any = self._tied.grad
        dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=self._ends)


def _as_it_is(loss: Tensor, _: Any) -> Tensor:
    """The last chunk's output is the loss."""
    return loss


def _empty(like: Batch, tp: int) -> Batch:
    """A micro-batch from which nothing is learned."""
    ids = torch.zeros(1, EMPTY_TOKENS * tp, dtype=torch.long, device=like.input_ids.device)
    positions = torch.arange(ids.shape[1]).to(ids)[None]
    return Batch(input_ids=ids, labels=torch.full_like(ids, IGNORE_INDEX), position_ids=positions)


def _hidden_dtype(model: nn.Module, strategy: Strategy) -> torch.dtype:
    if strategy.precision != "fp32":
        return compute_dtype(strategy)
    return next(parameter.dtype for parameter in model.parameters())


def is_tied(skeleton: Skeleton) -> bool:
    """Whether the whole model's head is its embedding."""
    head = skeleton.template.get_output_embeddings()
    return head is not None and head.weight is skeleton.template.get_input_embeddings().weight


def tied_parameter(skeleton: Skeleton) -> nn.Parameter | None:
    """The weight that the first and the last stage share, if this rank has it and trains it."""
    if not is_tied(skeleton):
        return None
    for chunk in chunks_of(skeleton.model):
        embedding: Any = embedding_of(chunk)
        if embedding is not None and embedding.weight.requires_grad:
            return embedding.weight
    return None


def _ends(mesh: RankMesh) -> dist.ProcessGroup | None:
    """The group of this pipeline's first and last rank. Every rank must call it; others get None."""
    assert mesh.pipeline is not None
    ranks = mesh.pipeline.mesh.tolist()
    pipelines: list[Any] = [None] * dist.get_world_size(mesh.control)
    dist.all_gather_object(pipelines, ranks, group=mesh.control)
    mine: dist.ProcessGroup | None = None
    for first, last in sorted({(several[0], several[-1]) for several in pipelines}):
        group = dist.new_group([first, last])
        if mesh.rank in (first, last):
            mine = cast(dist.ProcessGroup, group)
    return mine
