"""An IOMMU that translates the addresses of peer traffic: P2P over PCIe hangs, corrupts or crawls."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity, gap
from shardwise.doctor.scene import Scene
from shardwise.facts.machine.record import Unreadable


def look(scene: Scene) -> Iterator[Answer]:
    """Looks only where P2P crosses PCIe on bare metal."""
    if scene.log is not None:
        for notice in scene.log.notices_of("iommu_not_passthrough"):
            yield _finding(
                "IOMMU",
                Evidence(what="RCCL", value=notice.text, source=f"log of {notice.host}"),
                "the kernel command line lacks iommu=pt",
            )
    machine = scene.machine
    if machine.virtual_machine != "" and not isinstance(machine.virtual_machine, Unreadable):
        return  # in a VM the hypervisor's IOMMU isolates guests and has to stay
    over_pcie = [found for found in scene.known_predictions if found.transport == "P2P" and not found.joined_by_nvlink]
    if not over_pcie:
        return
    for index in sorted({index for found in over_pcie for index in (found.pair.a, found.pair.b)}):
        card = scene.cards[index]
        device = machine.pci.get(card.address)
        if device is None or isinstance(device.iommu_type, Unreadable):
            problem = device.iommu_type if device is not None else None
            why = problem if isinstance(problem, Unreadable) else Unreadable(why=f"{card.address} is not in sysfs")
            yield gap(CHECK.id, f"the IOMMU domain of GPU {index}", why)
        elif device.iommu_type is not None and device.iommu_type.startswith("DMA"):
            source = f"/sys/kernel/iommu_groups/{device.iommu_group}/type"
            yield _finding(
                f"GPU {index}",
                Evidence(what=f"GPU {index}", value=device.iommu_type, source=source),
                "the IOMMU translates the cards' addresses, and P2P crosses PCIe",
            )


def _finding(subject: str, evidence: Evidence, headline: str) -> Finding:
    return Finding(
        check=CHECK.id,
        subject=subject,
        severity=Severity.LOSS,
        certainty=Certainty.INFERRED,
        headline=f"{headline}: expect slow P2P, hangs or wrong data",
        evidence=(evidence,),
        fix="Boot with iommu=pt (pass-through), or switch the IOMMU off in the BIOS (amd_iommu=off, intel_iommu=off).",
        proof=AbTest(
            a="shardwise doctor --run --risky",
            b="the same after a boot with iommu=pt",
            expect="peer copies near the speed of host copies, and the P2P all_reduce finishes",
        ),
        reference="NVIDIA/nccl#257, NVIDIA/nccl#120, aikitoria/open-gpu-kernel-modules#6",
    )


CHECK = Check(
    id="iommu",
    title="IOMMU translation on P2P paths",
    reads=("/sys/class/iommu", "/sys/kernel/iommu_groups/*/type", "/proc/cmdline", "log"),
    look=look,
    of_log=True,
)
