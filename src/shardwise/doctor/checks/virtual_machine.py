"""Virtual machines that hide the PCI tree from NCCL."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity
from shardwise.doctor.scene import Scene
from shardwise.facts.machine.record import Unreadable

_TOPOLOGY_FIX = (
    "Set NCCL_TOPO_FILE to the cloud's topology file for this machine type (Azure: ndv4-topo.xml and its like in the "
    "HPC images), or let the hypervisor show the real tree."
)
_SLOWEST_REAL_LINK = 6.0
"""GB/s in NCCL's model: half a PCIe 3.0 x16; a real GPU slot is not below."""


def look(scene: Scene) -> Iterator[Answer]:
    """A finding where the tree is made up and no file replaces it."""
    virtual = scene.machine.virtual_machine
    if scene.log is not None and not scene.switches.value("NCCL_TOPO_FILE"):
        slow = [
            link
            for link in scene.log.topology
            if link.kind == "PCI"
            and link.gb_per_s < _SLOWEST_REAL_LINK
            and link.target.startswith(("GPU", "PCI", "NIC"))
        ]
        if slow:
            yield _finding(
                Severity.LOSS,
                Certainty.READ,
                "NCCL sees a made-up PCI tree with links below Gen3",
                Evidence(what="topology", value=f"PCI[{slow[0].gb_per_s:g}] - {slow[0].target}", source="log"),
            )
            return
    if isinstance(virtual, Unreadable) or not virtual or len(scene.cards) < 2:
        return
    if virtual == "WSL":
        yield Finding(
            check=CHECK.id,
            subject="WSL",
            severity=Severity.NOTE,
            certainty=Certainty.READ,
            headline="under WSL processes cannot share GPU memory; every collective goes through host memory",
            evidence=(Evidence(what="kernel", value="WSL", source="/proc/version"),),
            fix="Nothing to repair; boot Linux itself for more.",
            proof=AbTest(a="shardwise doctor --run", b="the same under Linux", expect="P2P edges, if the cards can"),
        )
        return
    if scene.switches.value("NCCL_TOPO_FILE") or scene.machine.virtual_topology_file or not _flat(scene):
        return
    all_nvlink = all(found.joined_by_nvlink for found in scene.known_predictions)
    leaves = scene.several_nodes or any(port.active for port in scene.ib_ports)
    severity = Severity.LOSS if scene.several_nodes else Severity.RISK
    if all_nvlink and scene.known_predictions and not leaves:
        severity = Severity.NOTE  # the tree matters only to PCIe paths and to adapters
    yield _finding(
        severity,
        Certainty.INFERRED,
        "the virtual machine hides which cards and adapters share a PCIe switch",
        Evidence(what="virtual machine", value=virtual, source="/sys/class/dmi/id"),
    )


def _flat(scene: Scene) -> bool:
    """Whether no card has a switch above it."""
    devices = [scene.machine.pci.get(card.address) for card in scene.cards]
    return all(device is None or len(device.upstream) <= 1 for device in devices)


def _finding(severity: Severity, certainty: Certainty, headline: str, evidence: Evidence) -> Finding:
    return Finding(
        check=CHECK.id,
        subject="virtual machine",
        severity=severity,
        certainty=certainty,
        headline=headline,
        evidence=(evidence, Evidence(what="NCCL_TOPO_FILE", value="not set", source="switches in force")),
        fix=_TOPOLOGY_FIX,
        proof=AbTest(
            a="NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=GRAPH torchrun ...",
            b="the same with NCCL_TOPO_FILE",
            expect="PCI[24.0] or faster above every GPU, and GDRDMA on the network edges",
        ),
        reference="NVIDIA/nccl-tests#256, NVIDIA/nccl#1843",
    )


CHECK = Check(
    id="virtual-machine",
    title="The PCI tree of a virtual machine",
    reads=("/proc/cpuinfo", "/sys/class/dmi/id", "NCCL_TOPO_FILE", "log (GRAPH)"),
    look=look,
    of_log=True,
)
