"""Offload: what waits in host memory, what crosses PCIe for it, and what the host must compute.

[Note: offload]
Both are torch's `CPUOffloadPolicy`: masters, moments and reduced gradients live on the host and are updated there; each
gather first takes this rank's shard up as it lies there (fp32 masters) and casts it on the card; each reduced gradient
goes down.

optimizer    what was gathered stays on the card in compute dtype: for the step under stages 0 and 1, for a micro-batch
             under stage 2 (ZeRO-Offload's idea, arXiv:2101.06840). Refused under stage 3, which gives it back
parameters   one block at a time: under stage 3, or on one card

Paged moments (paged_adamw_8bit) are managed memory outside torch's allocator, which the driver moves to the host when
the card is full; they are therefore counted on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.levers.optimizer.cost import state_bytes, step_traffic_bytes
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.memory import Category, Instant, Term
from shardwise.vocabulary.placement import Group, Placement
from shardwise.vocabulary.plan import Refusal
from shardwise.vocabulary.strategy import Strategy
from shardwise.vocabulary.units import GB, format_gb

SOURCE = "[Note: offload]"
PCIE_BYTES_PER_S = {"volta": 12e9, "turing": 12e9, "ampere": 25e9, "ada": 25e9, "hopper": 54e9, "blackwell": 54e9}
"""Pinned copies between host and card, one way, on 16 lanes of PCIe 3, 4 or 5, where `probe` did not measure them."""
HOST_UPDATE_BYTES_PER_S = 100e9
"""Host memory traffic that a vectorized optimizer reaches on all processors of a machine; assumed."""
PROCESS_BYTES = 4 * GB
"""Host memory of one rank with torch and CUDA loaded; assumed."""


def legal(job: Job, cluster: Cluster, strategy: Strategy) -> tuple[Refusal, ...]:
    """Weights can wait on the host only where they are sharded, or on one card; and the host must have the room."""
    if strategy.offload == "optimizer" and strategy.zero_stage == 3:
        message = (
            "offloading the optimizer keeps the weights on the card, which ZeRO-3 gives back after each block. "
            "Offload the parameters, or use a lower stage"
        )
        return (Refusal(strategy=strategy, rule="optimizer_offload_keeps_weights", message=message),)
    if strategy.offload == "parameters" and strategy.zero_stage < 3 and strategy.data_parallel > 1:
        message = (
            f"weights are offloaded where they are sharded; ZeRO-{strategy.zero_stage} keeps them whole on each card. "
            "Use stage 3, or offload the optimizer only"
        )
        return (Refusal(strategy=strategy, rule="offload_needs_shards", message=message),)
    limit = cluster.host_memory_bytes
    if strategy.offload != "none" and limit is not None:
        needed = host_bytes(Placement(job=job, strategy=strategy), cluster)
        if needed > limit:
            message = (
                f"offload {strategy.offload} needs {format_gb(needed)} of host memory on each machine, which has "
                f"{format_gb(limit)}; spread it over more machines, or train adapters"
            )
            return (Refusal(strategy=strategy, rule="host_has_room", message=message),)
    if strategy.offload != "none" and cluster.gpu.architecture == "cpu":
        message = "ranks on processors hold everything in host memory already; leave offload out"
        return (Refusal(strategy=strategy, rule="offload_needs_a_card", message=message),)
    return ()


def stores(place: Placement) -> tuple[Term, ...]:
    """Shards that were taken up for a gather, what stays gathered, and reduced gradients on their way down."""
    strategy = place.strategy
    block = place.group("block")
    if strategy.offload == "none" or block is None:
        return ()
    terms: list[Term] = []
    if strategy.offload == "optimizer" and strategy.zero_stage == 0:
        terms.append(_stays(place))
    if strategy.offload == "parameters":
        alive = (Instant.FORWARD, Instant.BACKWARD_FIRST, Instant.BACKWARD_LAST, Instant.EVALUATION)
        terms.append(_term("shards taken up", 2 * shard_bytes(place, block), alive, "this block's and the next's"))
    down = -(-block.trainable * place.master_bytes // strategy.dp_shard)
    alive = (Instant.REDUCE_FIRST, Instant.BACKWARD_LAST, Instant.REDUCE_LAST)
    terms.append(_term("gradient shards going down", down, alive, f"{place.master_bytes} B x one block / shards"))
    return tuple(terms)


def _stays(place: Placement) -> Term:
    """Stage 0's copies in compute dtype, which fully_shard's own terms count for one block and the root only."""
    block = place.group("block")
    more = 0 if block is None else (block.count - 1) * block.trainable
    embedding = place.group("embedding")
    more += 0 if embedding is None else embedding.trainable
    alive = (Instant.FORWARD, Instant.LOSS, Instant.BACKWARD_FIRST, Instant.REDUCE_FIRST, Instant.BACKWARD_LAST)
    return _term("weights that stay", more * place.element_bytes, alive, f"{place.element_bytes} B x all other groups")


def _term(name: str, num_bytes: int, alive: tuple[Instant, ...], formula: str) -> Term:
    return Term(category=Category.TEMPORARY, name=name, bytes=num_bytes, alive=alive, formula=formula, source=SOURCE)


def shard_bytes(place: Placement, group: Group) -> int:
    """One rank's part of a group as it lies on the host: masters of what trains, frozen weights as they are."""
    whole = group.trainable * place.master_bytes + (place.frozen_bytes_of(group) if group.frozen else 0.0)
    return round(whole / place.strategy.dp_shard)


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Bytes over PCIe for one group: up before each gather, down after each reduction."""

    up: int = 0
    down: int = 0


def copies(place: Placement, group: Group) -> Copies:
    """What one rank copies for one group in a micro-batch.

    Frozen weights below stage 3 are not managed and stay on the card.
    """
    strategy = place.strategy
    if strategy.offload == "none":
        return Copies()
    managed = group if place.shards_frozen else replace(group, frozen=0)
    down = -(-group.trainable * place.master_bytes // strategy.dp_shard)
    return Copies(up=shard_bytes(place, managed), down=down)


def stays(place: Placement) -> bool:
    """Whether weights that were taken up stay for the whole step, so that they are taken up once."""
    return place.strategy.offload == "optimizer" and place.strategy.zero_stage <= 1


def update_seconds(place: Placement, cluster: Cluster) -> float:
    """The host's optimizer step, shared by all ranks of a machine."""
    return step_traffic_bytes(place) * cluster.gpus_per_node / HOST_UPDATE_BYTES_PER_S


def pcie_bytes_per_s(cluster: Cluster) -> float:
    """One way between host and card."""
    measured = cluster.measurements.host_to_device_bytes_per_s
    return measured or PCIE_BYTES_PER_S.get(cluster.gpu.architecture, PCIE_BYTES_PER_S["ampere"])


def host_bytes(place: Placement, cluster: Cluster) -> int:
    """Host memory of one machine: its ranks' processes and what they offload; a checkpoint's staging counted in.

    A save stages one rank's masters and moments in host memory, unless they lie there already.
    """
    strategy = place.strategy
    gradients = place.master_bytes if strategy.offload != "none" else 0
    local = place.trainable * (place.master_bytes + gradients) + state_bytes(place)
    each = PROCESS_BYTES + local / strategy.dp_shard
    if strategy.offload == "parameters" and place.shards_frozen:
        each += place.frozen_bytes / strategy.dp_shard
    return round(each * cluster.gpus_per_node)
