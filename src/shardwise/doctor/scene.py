"""Everything that the checks look at, gathered once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shardwise.doctor.findings import Cost
from shardwise.doctor.measurements import Measurement
from shardwise.doctor.nccl_log.records import LogEdge, NcclLog, version_numbers
from shardwise.doctor.switches import Switches
from shardwise.doctor.thresholds import typical_rate
from shardwise.doctor.transport import Prediction
from shardwise.facts.machine.record import GpuCard, GpuPair, IbPort, Machine, NetInterface, Reading, Unreadable

_NODE_VARIABLES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "NNODES", "PET_NNODES", "GROUP_WORLD_SIZE")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The machine, the switches, the log and what was measured."""

    machine: Machine
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    switches: Switches
    log: NcclLog | None = None
    local_hosts: frozenset[str] = frozenset()
    """Hosts of the log that are this machine, so that their edges can be joined with its cards."""
    nccl_version: Reading[tuple[int, int, int]]
    predictions: Reading[tuple[Prediction, ...]]
    measurements: tuple[Measurement, ...] = ()
    wire_bytes_per_step: int | None = None
    compute_seconds_per_step: float | None = None

    @property
    def cards(self) -> tuple[GpuCard, ...]:
        """The cards; empty where they cannot be read (the inventory check says so)."""
        return () if isinstance(self.machine.gpus, Unreadable) else self.machine.gpus

    @property
    def known_predictions(self) -> tuple[Prediction, ...]:
        """The predictions; empty where they cannot be made (the transport check says so)."""
        return () if isinstance(self.predictions, Unreadable) else self.predictions

    @property
    def ib_ports(self) -> tuple[IbPort, ...]:
        """Ports of InfiniBand and RoCE adapters; empty where they cannot be read."""
        return () if isinstance(self.machine.ib_ports, Unreadable) else self.machine.ib_ports

    @property
    def interfaces(self) -> tuple[NetInterface, ...]:
        """Network interfaces; empty where they cannot be read."""
        return () if isinstance(self.machine.interfaces, Unreadable) else self.machine.interfaces

    @property
    def several_nodes(self) -> bool | None:
        """Whether the job spans machines; None where nothing says."""
        if self.log is not None and self.log.num_nodes is not None:
            return self.log.num_nodes > 1
        for environment in (*self._rank_environments(), self.environment):
            for name in _NODE_VARIABLES:
                if environment.get(name, "").isdigit():
                    return int(environment[name]) > 1
            world, local = environment.get("WORLD_SIZE", ""), environment.get("LOCAL_WORLD_SIZE", "")
            if world.isdigit() and local.isdigit():
                return int(world) > int(local)
        return None

    def _rank_environments(self) -> Iterator[Mapping[str, str]]:
        for process in self.machine.processes:
            if not isinstance(process.environment, Unreadable):
                yield dict(process.environment)

    def pair_name(self, pair: GpuPair) -> str:
        """Such as `GPU 0 - GPU 1`."""
        return f"GPU {pair.a} - GPU {pair.b}"

    def cost(self, pair: GpuPair, actual: str, expected: str) -> Cost | None:
        """What one transport loses against another between two cards: measured if both were, else typical figures."""
        measured = {name: best_rate(self.measurements, name) for name in (actual, expected)}
        now, then = measured[actual], measured[expected]
        if now is not None and then is not None:
            return Cost(actual_bytes_per_s=now, expected_bytes_per_s=then, basis="measured")
        now, then = typical_rate(pair, self.machine, actual), typical_rate(pair, self.machine, expected)
        if now is None or then is None:
            return None
        return Cost(actual_bytes_per_s=now, expected_bytes_per_s=then, basis="typical")

    def edges_here(self) -> Iterator[tuple[LogEdge, GpuPair]]:
        """Edges of the log between two cards of this machine, with their pair."""
        if self.log is None:
            return
        by_pair = {(pair.a, pair.b): pair for pair in self.machine.pairs}
        for edge in edges_inside_hosts(self.log):
            if edge.host not in self.local_hosts:
                continue
            ends = [card_of(self.cards, device) for device in (edge.source_id, edge.target_id)]
            if ends[0] is None or ends[1] is None or ends[0] == ends[1]:
                continue
            pair = by_pair.get((min(ends[0], ends[1]), max(ends[0], ends[1])))
            if pair is not None:
                yield edge, pair


def best_rate(measurements: tuple[Measurement, ...], transport: str) -> float | None:
    """Best bus bandwidth of a large all_reduce that ran over a transport; None if none was measured."""
    rates = [found.bytes_per_s for found in measurements
             if found.kind == "all_reduce" and found.transport == transport and found.is_good]  # fmt: skip
    return max(rates, default=None)


def card_of(cards: tuple[GpuCard, ...], device: str) -> int | None:
    """The card that a log's device id means: a bus id in hex (up to NCCL 2.18.1) or an NVML index (from 2.18.3)."""
    if len(device) >= 3:
        try:
            number = int(device, 16)
        except ValueError:
            return None
        domain, bus, slot, function = number >> 20, (number >> 12) & 0xFF, (number >> 4) & 0xFF, number & 0xF
        address = f"{domain:04x}:{bus:02x}:{slot:02x}.{function:x}"
        return next((card.index for card in cards if card.address == address), None)
    return int(device) if device.isdigit() and int(device) < len(cards) else None


def hosts_of_ranks(log: NcclLog) -> Mapping[int, str]:
    """Host of each rank, where the log shows it; ranks that appear on several hosts are left out."""
    seen: dict[int, set[str]] = {}
    for comm in log.communicators:
        seen.setdefault(comm.rank, set()).add(comm.host)
    for edge in log.edges:
        rank = edge.target_rank if edge.direction == "receive" else edge.source_rank
        seen.setdefault(rank, set()).add(edge.host)
    return {rank: next(iter(hosts)) for rank, hosts in seen.items() if len(hosts) == 1}


def edges_inside_hosts(log: NcclLog) -> tuple[LogEdge, ...]:
    """Edges between two cards of one machine. A network edge counts only if the log shows both ends on one host."""
    hosts = {} if log.num_nodes == 1 else hosts_of_ranks(log)
    found: list[LogEdge] = []
    for edge in log.edges:
        source, target = hosts.get(edge.source_rank), hosts.get(edge.target_rank)
        if edge.transport in ("P2P", "SHM") or log.num_nodes == 1 or (source is not None and source == target):
            found.append(edge)
    return tuple(found)


def local_hosts(machine: Machine, log: NcclLog | None) -> frozenset[str]:
    """Hosts of the log that are this machine: by name, or because the bus ids of its ranks are those of the cards.

    A container has a host name of its own, so the name alone would miss logs written inside one.
    """
    if log is None:
        return frozenset()
    short = machine.hostname.partition(".")[0]
    hosts = {comm.host for comm in log.communicators} | {edge.host for edge in log.edges}
    named = {host for host in hosts if host and host.partition(".")[0] == short}
    cards = () if isinstance(machine.gpus, Unreadable) else machine.gpus
    by_bus: dict[str, list[bool]] = {}
    for comm in log.communicators:
        if comm.bus_id:
            by_bus.setdefault(comm.host, []).append(card_of(cards, comm.bus_id.zfill(3)) is not None)
    all_hosts = {host for host in hosts if host}
    alone = len(all_hosts) == 1 and not named
    return frozenset(named | {host for host, matches in by_bus.items() if alone and matches and all(matches)})


def find_version(machine: Machine, log: NcclLog | None) -> Reading[tuple[int, int, int]]:
    """NCCL's version: the log's, else the first library found."""
    if log is not None and log.version is not None:
        return log.version
    for install in machine.nccl:
        if (numbers := version_numbers(install.version)) is not None:
            return numbers
    return Unreadable(
        why="NCCL's version is unknown: no log says it, no package or library was found",
        command="python -c 'import torch; print(torch.cuda.nccl.version())'",
    )
