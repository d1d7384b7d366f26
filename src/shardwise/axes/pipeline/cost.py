"""Pipeline: blocks in stages; a stage idles while micro-batches fill and drain.

With p stages and m micro-batches the idle share of a step is (p - 1) / (m + p - 1) for GPipe and 1F1B,
(p - 1) / (v m + p - 1) with v chunks a rank, and about a third of 1F1B's for the zero-bubble schedule
(arXiv:1811.06965, 2104.04473, 2401.10241).
"""

from __future__ import annotations

from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.placement import Placement
from shardwise.vocabulary.plan import Refusal
from shardwise.vocabulary.strategy import Axis, Strategy
from shardwise.vocabulary.timeline import Collective

SOURCE = "GPipe, arXiv:1811.06965; 1F1B and interleaving, arXiv:2104.04473; zero bubble, arXiv:2401.10241"


def legal(job: Job, cluster: Cluster, strategy: Strategy) -> tuple[Refusal, ...]:
    """Stages need layers and micro-batches; a stage keeps its weights between micro-batches."""
    del cluster
    pp, layers = strategy.pp, job.model.num_hidden_layers
    if pp == 1:
        return ()
    refusals: list[Refusal] = []
    chunks = pp * strategy.virtual_stages
    if layers < chunks:
        message = f"{job.model.name} has {layers} layers, fewer than {chunks} pipeline stages; use at most {layers}"
        refusals.append(Refusal(strategy=strategy, rule="layers_fill_stages", message=message))
    if strategy.accumulation < pp:
        message = f"{strategy.accumulation} micro-batches leave most of {pp} stages idle; use at least {pp}"
        refusals.append(Refusal(strategy=strategy, rule="micro_batches_fill_stages", message=message))
    if strategy.pipeline_schedule == "interleaved_1f1b" and strategy.accumulation % pp:
        message = f"interleaved 1F1B needs micro-batches in multiples of {pp}, not {strategy.accumulation}"
        refusals.append(Refusal(strategy=strategy, rule="interleaving_divides", message=message))
    if strategy.zero_stage == 3:
        message = "ZeRO-3 would gather a stage's weights again for each micro-batch; use stage 1 or 2 inside a pipeline"
        refusals.append(Refusal(strategy=strategy, rule="no_regathering_in_pipeline", message=message))
    if job.model.tie_word_embeddings:
        message = (
            f"{job.model.name} ties its head to the embedding, which a pipeline puts on different cards; "
            "use sharding or tensor parallel"
        )
        refusals.append(Refusal(strategy=strategy, rule="tied_head_in_one_stage", message=message))
    return tuple(refusals)


def idle_share(strategy: Strategy) -> float:
    """Idle share of a step (the bubble), all stages taken equal."""
    stages, micro_batches = strategy.pp, strategy.accumulation
    if stages == 1:
        return 0.0
    idle = float(stages - 1)
    if strategy.pipeline_schedule == "zero_bubble":
        idle /= 3
    if strategy.pipeline_schedule == "interleaved_1f1b":
        idle /= strategy.virtual_stages
    return idle / (micro_batches + idle)


def sends(place: Placement) -> tuple[Collective, ...]:
    """Hidden states to the next stage, their gradients to the one before."""
    strategy = place.strategy
    if strategy.pp == 1:
        return ()
    hidden = place.tokens * place.model.hidden_size * place.element_bytes
    hidden //= strategy.tp if strategy.sequence_parallel else 1
    count = strategy.accumulation * strategy.virtual_stages
    messages: list[Collective] = []
    for during, has_peer in (("forward", not place.is_last), ("backward", not place.is_first)):
        if has_peer or strategy.virtual_stages > 1:
            messages.append(
                Collective(
                    op="send",
                    axis=Axis.PP,
                    ranks=2,
                    bytes=hidden,
                    count=count,
                    site="root",
                    during="forward" if during == "forward" else "backward",
                    name="send hidden states" if during == "forward" else "send their gradients",
                    formula=f"{place.element_bytes} B x {place.tokens:,} tokens x {place.model.hidden_size}",
                    source=SOURCE,
                )
            )
    return tuple(messages)
