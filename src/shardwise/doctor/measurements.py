"""Results of the experiments, as the checks see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MeasurementKind = Literal["host_to_device", "device_to_host", "peer_copy", "all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One experiment at one size."""

    kind: MeasurementKind
    variant: str
    """as_set, no_switches, p2p_off, ring, forced_p2p; for copies alone or at_once."""
    gpus: tuple[int, ...]
    num_bytes: int
    bytes_per_s: float
    """One way; bus bandwidth as nccl-tests defines it for collectives; 0 if it did not finish."""
    seconds_p50: float = 0.0
    seconds_p95: float = 0.0
    data_is_right: bool = True
    problem: str = ""
    """Why it did not finish: a time-out or an error; empty if it did."""
    transport: str = ""
    """What its log says it ran over: P2P, SHM, NET/Socket, NET/IB; empty where unknown."""
    nvlink_bytes: int | None = None
    """NVLink traffic of all cards meanwhile; None where it cannot be counted."""
    pcie_samples: tuple[tuple[int, int, int], ...] = ()
    """(card, generation, width) while it ran."""
    slowdowns: tuple[tuple[int, str], ...] = ()
    """(card, reason) while it ran."""

    @property
    def is_good(self) -> bool:
        """Whether it finished with right data."""
        return not self.problem and self.data_is_right and self.bytes_per_s > 0
