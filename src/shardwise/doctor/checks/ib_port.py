"""Ports of InfiniBand and RoCE adapters: state, rate, mixed layers, addresses, error counters."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.checks.common import network_severity
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity
from shardwise.doctor.scene import Scene
from shardwise.facts.machine.record import IbPort, Unreadable

_AUTOMATIC_GID = (2, 21, 0)
_GRAVE_COUNTERS = ("link_downed", "link_error_recovery", "local_ack_timeout_err", "rnr_nak_retry_err", "packet_seq_err")
_MANY = 100


def look(scene: Scene) -> Iterator[Answer]:
    """Compares ports with each other; an unused Ethernet port is left alone."""
    ports = scene.ib_ports
    active = [port for port in ports if port.active]
    if not active:
        for port in ports:
            if port.link_layer == "InfiniBand":
                yield _finding(
                    scene, port, "is not active, and no other port is", f"{port.state}, {port.physical_state}"
                )
        return
    for port in ports:
        if not port.active and port.link_layer == "InfiniBand":
            hint = " (no subnet manager?)" if port.state == "INIT" else ""
            yield _finding(
                scene,
                port,
                f"is {port.state}{hint} while its siblings are active",
                f"{port.state}, {port.physical_state}",
            )
    yield from _rates(scene, active)
    layers = {port.link_layer for port in active}
    if len(layers) > 1 and not scene.switches.value("NCCL_IB_HCA"):
        yield _finding(
            scene,
            active[0],
            "InfiniBand and Ethernet adapters are mixed in NCCL's choice",
            ", ".join(f"{port.device} {port.link_layer}" for port in active),
            "Name the fast ones: NCCL_IB_HCA=<devices>.",
        )
    for port in active:
        yield from _counters(scene, port)
        yield from _gid(scene, port)


def _rates(scene: Scene, active: list[IbPort]) -> Iterator[Finding]:
    known = {port.device: port.rate_bits_per_s for port in active if not isinstance(port.rate_bits_per_s, Unreadable)}
    by_layer: dict[str, list[IbPort]] = {}
    for port in active:
        by_layer.setdefault(port.link_layer, []).append(port)
    chosen = scene.switches.value("NCCL_IB_HCA")
    for siblings in by_layer.values():
        rates = [known[port.device] for port in siblings if port.device in known]
        for port in siblings:
            rate = known.get(port.device)
            if rate is not None and rate < max(rates) and not chosen:
                yield _finding(
                    scene,
                    port,
                    f"runs at {rate / 1e9:g} Gb/s where a sibling has {max(rates) / 1e9:g}",
                    f"{rate / 1e9:g} Gb/s",
                    "Change the cable or the switch port; or leave the port out with NCCL_IB_HCA.",
                )


def _counters(scene: Scene, port: IbPort) -> Iterator[Finding]:
    grave = {name: port.counters[name] for name in _GRAVE_COUNTERS if port.counters.get(name, 0) >= _MANY}
    if grave:
        yield _finding(
            scene,
            port,
            "has counted many link or transport errors since boot",
            ", ".join(f"{name} {count}" for name, count in grave.items()),
            "Look at cable and switch port; on RoCE at flow control (PFC, ECN).",
        )


def _gid(scene: Scene, port: IbPort) -> Iterator[Finding]:
    """NCCL before 2.21 takes the index that it is told, 0 by default; later versions look for RoCE v2 themselves."""
    version = scene.nccl_version
    wanted = scene.switches.value("NCCL_IB_GID_INDEX")
    automatic = isinstance(version, Unreadable) or version >= _AUTOMATIC_GID
    if port.link_layer != "Ethernet" or (automatic and not wanted):
        return
    index = int(wanted) if wanted.isdigit() else 0
    gid = next((entry for entry in port.gids if entry.index == index), None)
    if gid is None or gid.address.startswith("fe80") or "v1" in gid.kind:
        better = next((e for e in port.gids if "v2" in e.kind and not e.address.startswith("fe80")), None)
        way = f"Set NCCL_IB_GID_INDEX={better.index}" if better else "Set NCCL_IB_GID_INDEX to a RoCE v2 entry"
        yield _finding(
            scene,
            port,
            f"uses address {index}, which cannot be routed",
            "empty" if gid is None else f"{gid.address} ({gid.kind})",
            f"{way}, or unset it and use NCCL 2.21 or later.",
        )


def _finding(
    scene: Scene, port: IbPort, headline: str, seen: str, fix: str = "Look at cable, switch port and subnet manager."
) -> Finding:
    folder = f"/sys/class/infiniband/{port.device}/ports/{port.port}"
    severity = network_severity(scene)
    return Finding(
        check=CHECK.id,
        subject=f"{port.device}:{port.port}",
        severity=severity if severity is not Severity.NOTE else Severity.NOTE,
        certainty=Certainty.READ,
        headline=headline,
        evidence=(Evidence(what=f"{port.device}:{port.port}", value=seen, source=folder),),
        fix=fix,
        proof=AbTest(a=f"ibv_devinfo -v -d {port.device}", b="the same after the fix", expect="PORT_ACTIVE, full rate"),
        reference="NVIDIA/nccl#426, NVIDIA/nccl#769",
    )


CHECK = Check(
    id="ib-port",
    title="InfiniBand and RoCE ports",
    reads=("/sys/class/infiniband/*/ports/*",),
    look=look,
)
