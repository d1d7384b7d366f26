"""Which wire a group uses, what its members share, and what compute loses beside a message."""

from __future__ import annotations

import dataclasses

import pytest

from shardwise.facts import catalog
from shardwise.planner.pricing import price
from shardwise.planner.timeline import CONTENTION, CONTENTION_ELSEWHERE, contention_of
from shardwise.planner.wire import GroupShape, group_shape, link_seconds, message_seconds
from shardwise.vocabulary.cluster import Cluster
from shardwise.vocabulary.job import Job
from shardwise.vocabulary.strategy import Axis, Strategy
from shardwise.vocabulary.units import MB

TWO_BY_EIGHT = catalog.parse_gpus("2x8xh100")
SIZE = 512 * MB


def network(cluster: Cluster) -> float:
    """Seconds of the nodes' share of one card's part, over the network."""
    assert cluster.inter_node is not None
    return link_seconds(cluster.inter_node, "all_gather", 2, SIZE // 8)


@pytest.mark.parametrize(
    ("strategy", "axis", "ranks", "nodes"),
    [
        (Strategy(dp_shard=8, dp_replicate=2, zero_stage=3), Axis.DP_SHARD, 8, 1),
        (Strategy(dp_shard=8, dp_replicate=2, zero_stage=3), Axis.DP_REPLICATE, 2, 2),
        (Strategy(dp_shard=16, zero_stage=3), Axis.DP_SHARD, 16, 2),
        (Strategy(tp=8, dp_shard=2, zero_stage=3), Axis.TP, 8, 1),
        (Strategy(tp=8, dp_shard=2, zero_stage=3), Axis.DP_SHARD, 2, 2),
        (Strategy(tp=4, dp_shard=2, pp=2, zero_stage=2, accumulation=2), Axis.DP_SHARD, 2, 1),
        (Strategy(tp=4, dp_shard=2, pp=2, zero_stage=2, accumulation=2), Axis.PP, 2, 2),
    ],
)
def test_inner_axes_get_the_nearest_cards(strategy: Strategy, axis: Axis, ranks: int, nodes: int) -> None:
    assert group_shape(TWO_BY_EIGHT, strategy, axis) == GroupShape(ranks=ranks, nodes=nodes)


def test_a_group_over_machines_sends_each_cards_share_over_its_adapter_beside_the_traffic_inside() -> None:
    inside = link_seconds(TWO_BY_EIGHT.intra_node, "all_gather", 8, SIZE)
    whole = message_seconds(TWO_BY_EIGHT, GroupShape(ranks=16, nodes=2), "all_gather", SIZE)
    assert whole == max(inside, network(TWO_BY_EIGHT))
    slow = catalog.parse_gpus("2x8xh100", network="10gbe")
    assert message_seconds(slow, GroupShape(ranks=16, nodes=2), "all_gather", SIZE) == network(slow) > inside


def test_cards_that_are_alone_in_their_machine_carry_all_of_it() -> None:
    """Two cards of two machines send the whole message; eight pairs of the same machines share the adapters."""
    pair = message_seconds(TWO_BY_EIGHT, GroupShape(ranks=2, nodes=2), "all_gather", SIZE)
    assert pair > 4 * network(TWO_BY_EIGHT)


def test_a_shared_adapter_is_divided_by_its_cards() -> None:
    own, shared = (catalog.parse_gpus(f"2x{cards}xrtx-4090", network="100gbe") for cards in (1, 4))
    assert own.inter_node is not None
    assert shared.inter_node is not None
    assert own.inter_node.bandwidth_bytes_per_s == pytest.approx(4 * shared.inter_node.bandwidth_bytes_per_s)


def test_compute_beside_a_message_is_slower_by_what_was_measured_or_assumed() -> None:
    job = Job(model=catalog.model("llama-3.1-8b"), global_batch_size=16, sequence_length=4096)
    strategy = Strategy(dp_shard=8, zero_stage=3, micro_batch_size=2, compile_blocks=True)
    cluster = catalog.parse_gpus("8xh100")
    assert contention_of(cluster) == CONTENTION["nvlink"] > CONTENTION_ELSEWHERE
    steps = {
        slowdown: price(
            job,
            dataclasses.replace(
                cluster,
                measurements=dataclasses.replace(cluster.measurements, matmul_slowdown_under_wire=slowdown),
            ),
            strategy,
        ).step
        for slowdown in (1.0, 1.2, 1.6)
    }
    hidden = steps[1.0].wire_seconds - steps[1.0].exposed_wire_seconds
    for slowdown, step in steps.items():
        assert step.compute_seconds - steps[1.0].compute_seconds == pytest.approx((slowdown - 1) * hidden)
    assumed = price(job, cluster, strategy).step
    assert assumed.compute_seconds - steps[1.0].compute_seconds == pytest.approx((CONTENTION["nvlink"] - 1) * hidden)
