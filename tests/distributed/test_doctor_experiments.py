"""The experiments' own machinery, on CPU tensors over gloo: results, verification, time limit, failures."""

from __future__ import annotations

import os
import time

import pytest

from shardwise.doctor.experiments.plan import Trial
from shardwise.doctor.experiments.run import run_trial, transport_of
from shardwise.doctor.nccl_log import parse_nccl_log
from shardwise.vocabulary.units import MIB

pytestmark = pytest.mark.distributed
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def trial(*ops: str, **environment: str) -> Trial:
    return Trial(variant="as_set", environment={**ENVIRONMENT, **environment}, ops=ops, sizes=(MIB,), backend="gloo")


def test_every_collective_is_measured_and_right() -> None:
    found = list(run_trial(trial("all_reduce", "all_gather", "reduce_scatter"), (0, 1), 120))
    assert [m.kind for m in found] == ["all_reduce", "all_gather", "reduce_scatter"]
    for m in found:
        assert m.is_good, m.problem
        assert (m.num_bytes, m.gpus, m.transport) == (MIB, (0, 1), "gloo")
        assert m.seconds_p95 >= m.seconds_p50 > 0
        factor = 1.0 if m.kind == "all_reduce" else 0.5
        assert m.bytes_per_s == pytest.approx(MIB / m.seconds_p50 * factor)


def test_a_size_that_would_take_too_long_is_left_out() -> None:
    """On a slow wire the smaller size is all bandwidth; nobody waits for 64 GiB over gloo."""
    wanted = Trial(
        variant="as_set", environment=ENVIRONMENT, ops=("all_reduce", "all_gather"), sizes=(4 * MIB, 65_536 * MIB),
        backend="gloo",
    )  # fmt: skip
    found = list(run_trial(wanted, (0, 1), 120))
    assert [(m.kind, m.num_bytes, m.problem) for m in found] == [
        ("all_reduce", 4 * MIB, ""),
        ("all_gather", 4 * MIB, ""),
    ]


def test_a_trial_that_takes_too_long_is_ended() -> None:
    started = time.monotonic()
    (found,) = run_trial(trial("all_reduce"), (0, 1), 0.3)
    assert "did not finish within 0.3 s" in found.problem
    assert not found.is_good
    assert time.monotonic() - started < 20


def test_a_child_that_fails_ends_the_trial_with_its_last_words() -> None:
    started = time.monotonic()
    (found,) = run_trial(trial("no_such_collective"), (0, 1), 120)
    assert "failed" in found.problem
    assert "no_such_collective" in found.problem or "exit code" in found.problem
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("via", "transport"),
    [("P2P/CUMEM", "P2P"), ("SHM/direct/direct", "SHM"), ("NET/Socket/0", "NET/Socket"), ("NET/IB/0/GDRDMA", "NET/IB")],
)
def test_transport_of_a_log(via: str, transport: str) -> None:
    log = parse_nccl_log(f"a:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via {via}\n")
    assert transport_of([log]) == transport
    assert transport_of([]) == ""
