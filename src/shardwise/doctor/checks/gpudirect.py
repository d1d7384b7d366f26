"""Adapters that could reach GPU memory themselves and do not, on one side or on both."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.checks.common import network_severity
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity, gap
from shardwise.doctor.nccl_log.records import LogEdge
from shardwise.doctor.scene import Scene
from shardwise.facts.machine.pci import pci_path
from shardwise.facts.machine.record import PathType, Unreadable

_LOOKS_AT_MODULE = (2, 23, 0)
_DMABUF_KERNEL = (5, 12)
_FIX = "Load the peer memory module on every machine: sudo modprobe nvidia-peermem (at boot: /etc/modules-load.d)."


def look(scene: Scene) -> Iterator[Answer]:
    """The log's edges first; without them what the modules allow."""
    one_sided = _one_sided(scene)
    if one_sided is not None:
        yield one_sided
        return
    near = _near_adapter(scene)
    if near is None:
        return
    machine = scene.machine
    if isinstance(machine.modules, Unreadable):
        yield gap(CHECK.id, "whether nvidia_peermem is loaded", machine.modules)
        return
    peermem = bool({"nvidia_peermem", "nv_peer_mem"} & machine.modules)
    version = scene.nccl_version
    old = not isinstance(version, Unreadable) and version < _LOOKS_AT_MODULE
    if peermem and old and not machine.legacy_peer_memory:
        shown = ".".join(map(str, version)) if not isinstance(version, Unreadable) else "?"
        yield _finding(
            scene,
            f"NCCL {shown} does not see nvidia_peermem: it looks in the old place only",
            "Use NCCL 2.23 or later (torch 2.7).",
            (
                Evidence(what="nvidia_peermem", value="loaded", source="/sys/module"),
                Evidence(what="nv_mem*", value="not there", source="/sys/kernel/mm/memory_peers"),
            ),
            "NVIDIA/nccl#1676",
        )
    elif not peermem and not machine.legacy_peer_memory and not _dmabuf(scene):
        yield _finding(
            scene,
            "GPUDirect RDMA is not possible: neither nvidia_peermem nor DMA-BUF is there",
            _FIX,
            (
                Evidence(what="nvidia_peermem", value="not loaded", source="/sys/module"),
                Evidence(what="near adapter", value=near, source="PCI tree"),
            ),
            "NVIDIA/nccl#1412",
        )


def _one_sided(scene: Scene) -> Finding | None:
    """A sender whose edge says GDRDMA and a receiver whose edge does not, or the other way round."""
    if scene.log is None:
        return None
    ends: dict[tuple[int, int, int], dict[str, LogEdge]] = {}
    for edge in scene.log.edges:
        if edge.transport == "NET" and edge.method != "Socket" and edge.direction:
            ends.setdefault((edge.channel, edge.source_rank, edge.target_rank), {})[edge.direction] = edge
    for found in ends.values():
        if len(found) == 2 and found["send"].gpu_direct != found["receive"].gpu_direct:
            lacking = found["receive"] if found["send"].gpu_direct else found["send"]
            return Finding(
                check=CHECK.id,
                subject=lacking.host or "one host",
                severity=Severity.LOSS,
                certainty=Certainty.READ,
                headline=f"GPUDirect RDMA works on one side only, not on {lacking.host or 'one host'}",
                evidence=tuple(
                    Evidence(
                        what=f"{edge.source_rank} -> {edge.target_rank} [{edge.direction}]",
                        value=edge.via,
                        source=f"log of {edge.host}",
                    )
                    for edge in found.values()
                ),
                fix=f"On {lacking.host or 'that host'}: sudo modprobe nvidia-peermem (at boot: /etc/modules-load.d).",
                proof=AbTest(
                    a="NCCL_DEBUG=INFO torchrun ...",
                    b="the same after the fix",
                    expect="/GDRDMA on both ends of every network edge",
                ),
                reference="NVIDIA/nccl-tests#152",
            )
    return None


def _near_adapter(scene: Scene) -> str | None:
    """An active adapter at PXB or nearer to a card, the distance from which NCCL uses GPUDirect RDMA by default."""
    for port in scene.ib_ports:
        for card in scene.cards:
            path = pci_path(scene.machine.pci, card.address, port.pci_address)
            if port.active and isinstance(path, PathType) and path <= PathType.PXB:
                return f"{port.device} is {path.name} from GPU {card.index}"
    return None


def _dmabuf(scene: Scene) -> bool:
    kernel, driver = scene.machine.kernel, scene.machine.driver
    if scene.log is not None and scene.log.notices_of("dmabuf_available"):
        return True
    match = re.match(r"(\d+)\.(\d+)", kernel) if isinstance(kernel, str) else None
    new = match is not None and (int(match[1]), int(match[2])) >= _DMABUF_KERNEL
    return new and driver.open_module is True


def _finding(scene: Scene, headline: str, fix: str, evidence: tuple[Evidence, ...], reference: str) -> Finding:
    return Finding(
        check=CHECK.id,
        subject="GPUDirect RDMA",
        severity=network_severity(scene),
        certainty=Certainty.INFERRED,
        headline=headline,
        evidence=evidence,
        fix=fix,
        proof=AbTest(
            a="NCCL_DEBUG=INFO torchrun ... (two machines)",
            b="the same after the fix",
            expect="/GDRDMA on the network edges, and several times the bandwidth",
        ),
        reference=reference,
    )


CHECK = Check(
    id="gpudirect",
    title="GPUDirect RDMA",
    reads=("/sys/module/nvidia_peermem", "/sys/kernel/mm/memory_peers", "driver and kernel version", "log"),
    look=look,
    of_log=True,
)
