"""Pipeline: blocks in stages; a stage idles while micro-batches fill and drain.

With p stages and m micro-batches the idle share of a step is (p - 1) / (m + p - 1) for GPipe and 1F1B,
(p - 1) / (v m + p - 1) with v chunks a rank, and about a third of 1F1B's for the zero-bubble schedule
(arXiv:1811.06965, 2104.04473, 2401.10241).

[Note: tied ends] A tied embedding and head lie on the first and on the last stage: both hold the weight, their
gradients are added once a step between the two, and both make the same update.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.memory import Category, Instant, Term, span
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.plan import Refusal
from shardwise.vocabulary.strategy import Axis, Strategy
from shardwise.vocabulary.timeline import Collective

SOURCE = "GPipe, arXiv:1811.06965; 1F1B and interleaving, arXiv:2104.04473; zero bubble, arXiv:2401.10241"
INTERLEAVING = ("interleaved_1f1b", "zero_bubble")
"""Schedules that take several chunks a stage."""


def legal(job: Job, cluster: Cluster, strategy: Strategy) -> tuple[Refusal, ...]:
    """Stages need layers and micro-batches, and a schedule that fits the rest."""
    del cluster
    if strategy.pp == 1:
        return ()
    found = list(problems(strategy))
    layers, chunks = job.model.num_hidden_layers, strategy.pp * strategy.virtual_stages
    if layers < chunks:
        message = f"{job.model.name} has {layers} layers, fewer than {chunks} pipeline stages; use at most {layers}"
        found.append(("layers_fill_stages", message))
    if strategy.accumulation < strategy.pp:
        message = (
            f"{strategy.accumulation} micro-batch{'' if strategy.accumulation == 1 else 'es'} a step "
            f"would leave most of {strategy.pp} stages idle; use at least {strategy.pp}"
        )
        found.append(("micro_batches_fill_stages", message))
    elif strategy.pipeline_schedule in INTERLEAVING and not divides(strategy.accumulation, strategy.pp):
        message = (
            f"{strategy.pipeline_schedule} passes {strategy.accumulation} micro-batches in "
            f"{strategy.accumulation // strategy.pp} equal rounds; use a multiple of {strategy.pp}"
        )
        found.append(("interleaving_divides", message))
    return tuple(Refusal(strategy=strategy, rule=rule, message=message) for rule, message in found)


def problems(strategy: Strategy) -> Iterator[tuple[str, str]]:
    """What a pipeline cannot be combined with, whatever the model: rule and sentence."""
    schedule = strategy.pipeline_schedule
    if strategy.pp == 1:
        return
    if strategy.virtual_stages > 1 and schedule not in INTERLEAVING:
        message = (
            f"{schedule} has one chunk a stage, not {strategy.virtual_stages}; use interleaved_1f1b or zero_bubble"
        )
        yield "chunks_need_interleaving", message
    if schedule == "zero_bubble" and strategy.zero_stage > 1:
        message = (
            f"zero_bubble computes the weights' gradients late, when ZeRO-{strategy.zero_stage} has given the weights "
            "back; use stage 0 or 1, or 1f1b"
        )
        yield "zero_bubble_keeps_weights", message
    if schedule == "zero_bubble" and strategy.compile_blocks:
        message = "zero_bubble takes the backward of a block apart, a compiled one is one piece; use 1f1b or no compile"
        yield "zero_bubble_splits_backward", message
    if schedule == "zero_bubble" and strategy.checkpointing != "none":
        message = "zero_bubble takes backwards apart, and both parts would compute a block again; use 1f1b, or keep all"
        yield "zero_bubble_keeps_activations", message
    if schedule == "zero_bubble" and strategy.loss != "plain":
        message = f"zero_bubble takes backwards apart, and a {strategy.loss} loss is one piece; use loss plain, or 1f1b"
        yield "zero_bubble_plain_loss", message
    if strategy.tuning != "full" and strategy.virtual_stages > 1:
        message = f"adapters are not cut into {strategy.virtual_stages} chunks a stage; use virtual_stages 1"
        yield "adapters_in_one_chunk", message
    if strategy.offload != "none":
        message = "the schedules keep a stage's weights on its card; use more shards or stages instead of offloading"
        yield "no_offload_in_pipeline", message


def divides(num_micro_batches: int, num_stages: int) -> bool:
    """Whether an interleaved schedule can pass them in equal rounds of at least `num_stages`."""
    return num_micro_batches % max(1, num_micro_batches // num_stages) == 0


def idle_share(strategy: Strategy) -> float:
    """Idle share of a step (the bubble), all stages taken equal."""
    stages, micro_batches = strategy.pp, strategy.accumulation
    if stages == 1:
        return 0.0
    idle = float(stages - 1)
    if strategy.pipeline_schedule == "zero_bubble":
        idle /= 3
    if strategy.pipeline_schedule in INTERLEAVING:
        idle /= strategy.virtual_stages
    return idle / (micro_batches + idle)


def stores(place: Placement) -> tuple[Term, ...]:
    """What zero bubble keeps besides activations: gradients of products, until those of the weights are made of them.

    Stage r makes them r + 1 chunks late.
    """
    strategy = place.strategy
    if strategy.pp == 1 or strategy.pipeline_schedule != "zero_bubble":
        return ()
    late = min(place.stage + 1, strategy.accumulation * strategy.virtual_stages)
    model = place.model
    rows = sum(linear.copies * linear.out_features for linear in model.linears) // strategy.tp + 2 * model.hidden_size
    each = place.num_blocks * rows / strategy.virtual_stages
    head = (model.vocab_size // strategy.tp + model.hidden_size) if place.is_last else 0
    size = round(late * place.tokens * place.element_bytes * (each + head))
    return (
        Term(
            category=Category.TEMPORARY,
            name="gradients of products",
            bytes=size,
            alive=span(Instant.FORWARD, Instant.BACKWARD_LAST),
            formula=f"{late} chunks late: {place.element_bytes} B x {place.tokens:,} tokens x outputs of matrices",
            source=SOURCE,
        ),
    )


def sends(place: Placement) -> tuple[Collective, ...]:
    """Hidden states to the next stage, their gradients to the one before; norm and tied gradients once a step."""
    if place.strategy.pp == 1:
        return ()
    return (*_hidden_states(place), *_tied_gradients(place), _norm(place))


def _hidden_states(place: Placement) -> Iterator[Collective]:
    """Every chunk but the last of all sends forward, every one but the first backward."""
    strategy = place.strategy
    size = place.tokens * place.model.hidden_size * place.element_bytes
    size //= strategy.tp if strategy.sequence_parallel else 1
    ends = {"forward": place.is_last, "backward": place.is_first}
    for during, name in (("forward", "send hidden states"), ("backward", "send their gradients")):
        chunks = strategy.virtual_stages - (1 if ends[during] else 0)
        if chunks:
            yield Collective(
                op="send",
                axis=Axis.PP,
                ranks=2,
                bytes=size,
                count=strategy.accumulation * chunks,
                site="root",
                during="forward" if during == "forward" else "backward",
                name=name,
                formula=f"{place.element_bytes} B x {place.tokens:,} tokens x {place.model.hidden_size}",
                source=SOURCE,
            )


def _tied_gradients(place: Placement) -> Iterator[Collective]:
    """[Note: tied ends]."""
    ends = place.group("embedding") if place.is_first else place.group("root") if place.is_last else None
    if not place.model.tie_word_embeddings or ends is None:
        return
    table = ends.trainable - (place.model.hidden_size if place.is_last else 0)
    if table > 0:  # not where adapters train alone
        yield Collective(
            op="all_reduce",
            axis=Axis.PP,
            ranks=2,
            bytes=-(-table // place.strategy.dp_shard) * place.master_bytes,
            count=1,
            site="step",
            during="optimizer",
            every="step",
            hides_behind="nothing",
            name="all_reduce of the tied embedding's gradient",
            formula=f"{place.master_bytes} B x {table:,} / {place.strategy.dp_shard}",
            source="trainer/pipeline_step.py, [Note: tied ends]",
        )


def _norm(place: Placement) -> Collective:
    """The sum of squares over the stages, for clipping by the norm of the whole gradient."""
    return Collective(
        op="all_reduce",
        axis=Axis.PP,
        ranks=place.strategy.pp,
        bytes=4,
        count=1,
        site="step",
        during="optimizer",
        every="step",
        hides_behind="nothing",
        name="all_reduce of the gradient's norm over the stages",
        formula="one fp32 number",
        source="trainer/step.py, [Note: true norm]",
    )
