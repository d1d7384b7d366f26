"""Offload: what waits in host memory, what crosses PCIe for it, and what the host must compute.

[Note: offload]
optimizer    masters and moments live on the host and are updated there; the card keeps weights in compute dtype, sends
             every reduced gradient down and takes the updated weights up (ZeRO-Offload, arXiv:2101.06840)
parameters   the shards of all weights live on the host as well; each all_gather first takes its shard up
             (torch: fully_shard with CPUOffloadPolicy, which offloads gradients and moments too)

Paged moments (paged_adamw_8bit) are managed memory outside torch's allocator, which the driver moves to the host when
the card is full; they are therefore counted on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.levers.optimizer.cost import state_bytes_per_parameter, step_traffic_bytes
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
    """Shards that were taken up for a gather, and reduced gradients on their way down."""
    strategy = place.strategy
    block = place.group("block")
    if strategy.offload == "none" or block is None:
        return ()
    terms: list[Term] = []
    if strategy.offload == "parameters":
        alive = (Instant.FORWARD, Instant.BACKWARD_FIRST, Instant.BACKWARD_LAST, Instant.EVALUATION)
        terms.append(_term("shards taken up", 2 * shard_bytes(place, block), alive, "this block's and the next's"))
    down = -(-block.trainable * place.master_bytes // strategy.dp_shard)
    alive = (Instant.REDUCE_FIRST, Instant.BACKWARD_LAST, Instant.REDUCE_LAST)
    terms.append(_term("gradient shards going down", down, alive, f"{place.master_bytes} B x one block / shards"))
    return tuple(terms)


def _term(name: str, num_bytes: int, alive: tuple[Instant, ...], formula: str) -> Term:
    return Term(category=Category.TEMPORARY, name=name, bytes=num_bytes, alive=alive, formula=formula, source=SOURCE)


def shard_bytes(place: Placement, group: Group) -> int:
    """One rank's part of a group as it lies on the host: masters of what trains, frozen weights as they are."""
    whole = group.trainable * place.master_bytes + place.frozen_bytes_of(group)
    return round(whole / place.strategy.dp_shard)


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Bytes over PCIe for one group: up before each gather, down after each reduction."""

    up: int = 0
    down: int = 0


def copies(place: Placement, group: Group) -> Copies:
    """What one rank copies for one group in a micro-batch."""
    strategy = place.strategy
    if strategy.offload == "none":
        return Copies()
    up = shard_bytes(place, group) if strategy.offload == "parameters" else 0
    return Copies(up=up, down=-(-group.trainable * place.master_bytes // strategy.dp_shard))


def update_seconds(place: Placement, cluster: Cluster) -> float:
    """The host's optimizer step, shared by all ranks of a machine, and the updated weights' way up."""
    seconds = step_traffic_bytes(place) * cluster.gpus_per_node / HOST_UPDATE_BYTES_PER_S
    if place.strategy.offload == "optimizer":
        weights = place.trainable * place.element_bytes / place.strategy.dp_shard
        seconds += weights / pcie_bytes_per_s(cluster)
    return seconds


def pcie_bytes_per_s(cluster: Cluster) -> float:
    """One way between host and card."""
    measured = cluster.measurements.host_to_device_bytes_per_s
    return measured or PCIE_BYTES_PER_S.get(cluster.gpu.architecture, PCIE_BYTES_PER_S["ampere"])


def host_bytes(place: Placement, cluster: Cluster) -> int:
    """Host memory of one machine: its ranks' processes and what they offload; a checkpoint's staging counted in.

    A save stages one rank's masters and moments in host memory, unless they lie there already.
    """
    strategy = place.strategy
    states = state_bytes_per_parameter(strategy.optimizer, place.master_bytes)
    local = place.trainable / strategy.dp_shard
    gradients = place.master_bytes if strategy.offload != "none" else 0
    each = PROCESS_BYTES + local * (place.master_bytes + states + gradients)
    if strategy.offload == "parameters":
        each += place.frozen_bytes / (strategy.dp_shard if place.shards_frozen else 1)
    return round(each * cluster.gpus_per_node)
