"""The transport in the log against the one predicted, and networks that were taken where a better one is there."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity
from shardwise.doctor.nccl_log.records import LogEdge
from shardwise.doctor.scene import Scene, edges_inside_hosts
from shardwise.facts.machine.record import GpuPair, Unreadable

_QUALITY = {"P2P": 2, "SHM": 1, "NET": 0, "COLLNET": 0}


def look(scene: Scene) -> Iterator[Answer]:
    """Reports differences only; what a switch or another check explains is left to it."""
    if scene.log is None:
        return
    compared: set[tuple[int, int]] = set()
    by_pair = {(found.pair.a, found.pair.b): found for found in scene.known_predictions}
    for edge, pair in scene.edges_here():
        key = (pair.a, pair.b)
        predicted = by_pair.get(key)
        if predicted is None or key in compared or edge.transport == "COLLNET":
            continue
        compared.add(key)
        if _QUALITY[edge.transport] < _QUALITY[predicted.transport]:
            yield _worse(scene, edge, pair, predicted.transport)
        elif _QUALITY[edge.transport] > _QUALITY[predicted.transport]:
            yield _better(scene, edge, pair, predicted.transport)
    if not compared:
        yield from _of_log_alone(scene)
    yield from _socket_between_hosts(scene)


def _worse(scene: Scene, edge: LogEdge, pair: GpuPair, predicted: str) -> Finding:
    now = f"NET/{edge.method}" if edge.transport == "NET" else edge.transport
    return Finding(
        check=CHECK.id,
        subject=scene.pair_name(pair),
        severity=Severity.LOSS,
        certainty=Certainty.READ,
        headline=f"the log shows {now} where topology, version and switches say {predicted}",
        evidence=(
            Evidence(what=f"channel {edge.channel}", value=edge.via, source=f"log of {edge.host}"),
            Evidence(what="predicted", value=predicted, source="NCCL's rules"),
        ),
        fix="Read the environment of the rank itself (--pid): a launcher or a conf file may have set a switch. Then "
        "compare the ranks' /dev/shm mounts.",
        proof=AbTest(a="shardwise doctor --pid <rank>", b="shardwise doctor --run", expect="the switch, or P2P edges"),
        cost=scene.cost(pair, "NET/Socket" if edge.transport == "NET" else edge.transport, predicted),
    )


def _better(scene: Scene, edge: LogEdge, pair: GpuPair, predicted: str) -> Finding:
    return Finding(
        check=CHECK.id,
        subject=scene.pair_name(pair),
        severity=Severity.NOTE,
        certainty=Certainty.READ,
        headline=f"the log shows {edge.transport} where {predicted} was predicted: the log is from other settings",
        evidence=(
            Evidence(what=f"channel {edge.channel}", value=edge.via, source=f"log of {edge.host}"),
            Evidence(what="predicted", value=predicted, source="NCCL's rules"),
        ),
        fix="Nothing to repair; the settings of that run are the better ones.",
        proof=AbTest(a="shardwise doctor --log <log>", b="shardwise doctor --run", expect="the same transport"),
    )


def _of_log_alone(scene: Scene) -> Iterator[Finding]:
    """Edges inside one host of a log that cannot be joined with the cards of this machine."""
    assert scene.log is not None
    inside = edges_inside_hosts(scene.log)
    sockets = [edge for edge in inside if edge.transport == "NET" and edge.method == "Socket"]
    if sockets and not (scene.switches.is_on("NCCL_P2P_DISABLE") and scene.switches.is_on("NCCL_SHM_DISABLE")):
        yield Finding(
            check=CHECK.id,
            subject=sockets[0].host or "a host",
            severity=Severity.LOSS,
            certainty=Certainty.READ,
            headline="cards of one machine talk over TCP: P2P and shared memory are both off, or /dev/shm is split",
            evidence=(
                Evidence(
                    what=f"{sockets[0].source_rank} -> {sockets[0].target_rank}",
                    value=sockets[0].via,
                    source=f"log of {sockets[0].host}",
                ),
            ),
            fix="Unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE; give all containers of the machine --ipc=host.",
            proof=AbTest(
                a="the job as it is",
                b="env -u NCCL_P2P_DISABLE -u NCCL_SHM_DISABLE, with --ipc=host",
                expect="P2P or SHM edges",
            ),
        )
    through_host = [edge for edge in inside if edge.transport == "SHM"]
    if through_host and not scene.switches.value("NCCL_P2P_DISABLE"):
        yield Finding(
            check=CHECK.id,
            subject=through_host[0].host or "a host",
            severity=Severity.NOTE,
            certainty=Certainty.READ,
            headline="cards of one machine talk through host memory: normal on GeForce 40 and 50, slow elsewhere",
            evidence=(
                Evidence(
                    what=f"{through_host[0].source_rank} -> {through_host[0].target_rank}",
                    value=through_host[0].via,
                    source=f"log of {through_host[0].host}",
                ),
            ),
            fix="Run the doctor on that machine: the log alone does not say whether P2P is possible there.",
            proof=AbTest(
                a="shardwise doctor --log <log> (there)",
                b="shardwise doctor --run (there)",
                expect="the reason, and the transport that is best",
            ),
        )


def _socket_between_hosts(scene: Scene) -> Iterator[Finding]:
    """TCP between machines although an adapter here works, where no other check explains it."""
    assert scene.log is not None
    if not any(name == "Socket" for host, name in scene.log.networks if host in scene.local_hosts):
        return
    verbs = scene.machine.verbs
    explained = (
        scene.switches.is_on("NCCL_IB_DISABLE")
        or scene.switches.value("NCCL_NET")
        or verbs.library is not True
        or not verbs.devices
        or verbs.refused
    )
    active = [port for port in scene.ib_ports if port.active]
    if scene.several_nodes and active and not explained and not isinstance(scene.machine.ib_ports, Unreadable):
        yield Finding(
            check=CHECK.id,
            subject="network",
            severity=Severity.LOSS,
            certainty=Certainty.READ,
            headline=f"NCCL took TCP although {active[0].device}:{active[0].port} is active",
            evidence=(
                Evidence(what="network", value="Socket", source="log"),
                Evidence(what="port", value=f"{active[0].device} {active[0].state}", source="sysfs"),
            ),
            fix="Look at NCCL_IB_HCA and at the container's devices; the log's NET lines name the reason.",
            proof=AbTest(
                a="NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET torchrun ...",
                b="the same with NCCL_NET=IB",
                expect="an error that names the reason, or `Using network IB`",
            ),
            reference="areal-project/AReaL#639",
        )


CHECK = Check(
    id="transport",
    title="Transport in the log against the one predicted",
    reads=("log", "NVML topology", "NCCL version", "switches"),
    look=look,
    of_log=True,
)
