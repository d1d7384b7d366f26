"""Adapters that are there, and a library or a device node that is not: NCCL falls back to TCP."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.checks.common import network_severity
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity, gap
from shardwise.doctor.scene import Scene
from shardwise.facts.machine.record import Unreadable

_LIBRARY_FIX = "Install the verbs library in the image: apt install libibverbs1 ibverbs-providers librdmacm1."
_ELASTIC = ("efa", "rdmap")
"""Amazon's adapters, by the kernel's name and by udev's."""
_DEVICE_FIX = (
    "Start the container with --device=/dev/infiniband --ulimit memlock=-1 --cap-add IPC_LOCK "
    "(Kubernetes: the RDMA device plugin)."
)


def look(scene: Scene) -> Iterator[Answer]:
    """Looks only where the kernel shows a working port."""
    ports = scene.machine.ib_ports
    if isinstance(ports, Unreadable):
        if scene.several_nodes:
            yield gap(CHECK.id, "InfiniBand and RoCE adapters", ports)
        return
    active = [port for port in ports if port.active]
    if not active:
        return
    verbs, first = (
        scene.machine.verbs,
        Evidence(what="active port", value=f"{active[0].device}:{active[0].port}", source="/sys/class/infiniband"),
    )
    if isinstance(verbs.library, Unreadable):
        yield gap(CHECK.id, "whether libibverbs can be loaded", verbs.library)
    elif not verbs.library:
        yield _finding(
            scene,
            "libibverbs is not installed, so NCCL cannot use the adapters and takes TCP",
            _LIBRARY_FIX,
            (first, Evidence(what="libibverbs.so.1", value="cannot be loaded", source="dlopen")),
        )
    elif not verbs.devices:
        yield _finding(
            scene,
            "the adapters' device nodes are missing, so NCCL takes TCP",
            _DEVICE_FIX,
            (first, Evidence(what="/dev/infiniband/uverbs*", value="none", source="/dev")),
        )
    elif verbs.refused:
        yield _finding(
            scene,
            "this user may not open the adapters' device nodes, so NCCL takes TCP",
            "Give the user access (group rdma, or a udev rule), or pass the devices to the container.",
            (first, Evidence(what=verbs.refused[0], value="permission denied", source="access")),
        )
    elif any(port.device.startswith(_ELASTIC) for port in active) and not _has_plugin(scene):
        yield _finding(
            scene,
            "Elastic Fabric Adapters are used through a network plugin, and none is here, so NCCL takes TCP",
            "Install aws-ofi-nccl (it comes with the EFA installer) and put its folder on LD_LIBRARY_PATH.",
            (first, Evidence(what="libnccl-net*.so", value="none", source="LD_LIBRARY_PATH and library folders")),
        )


def _has_plugin(scene: Scene) -> bool:
    logged = () if scene.log is None else scene.log.plugins
    named = scene.switches.value("NCCL_NET_PLUGIN") not in ("", "none")
    return bool(scene.machine.net_plugins) or named or any(each.kind == "NET" and each.loaded for each in logged)


def _finding(scene: Scene, headline: str, fix: str, evidence: tuple[Evidence, ...]) -> Finding:
    severity = network_severity(scene)
    logged = scene.log is not None and scene.log.notices_of("verbs_missing", "verbs_open_failed")
    if logged:
        severity = max(severity, Severity.RISK)
        evidence = (*evidence, Evidence(what="NCCL", value=logged[0].text, source=f"log of {logged[0].host}"))
    return Finding(
        check=CHECK.id,
        subject="InfiniBand / RoCE",
        severity=severity,
        certainty=Certainty.READ,
        headline=headline,
        evidence=evidence,
        fix=fix,
        proof=AbTest(
            a="NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET torchrun ...",
            b="the same after the fix",
            expect="`NET/IB : Using [0]...` and `Using network IB` instead of Socket",
        ),
        reference="NVIDIA/nvidia-container-toolkit#1877, NVIDIA/nccl#451",
    )


CHECK = Check(
    id="verbs",
    title="Adapters can be used",
    reads=("/sys/class/infiniband", "/dev/infiniband", "libibverbs.so.1", "libnccl-net*.so", "log"),
    look=look,
)
