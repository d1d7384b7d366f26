"""PCIe access control (ACS) that sends peer traffic up to the processor and back instead of straight across."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Gap, Severity
from shardwise.doctor.scene import Scene
from shardwise.doctor.transport import Prediction
from shardwise.facts.machine.record import PathType, PciDevice, Unreadable

_SWITCHED_OFF = ("disable_acs_redir", "config_acs")


def look(scene: Scene) -> Iterator[Answer]:
    """Reads the control bits of every bridge between cards that use P2P over PCIe, or infers them without root."""
    machine = scene.machine
    if machine.virtual_machine != "" and not isinstance(machine.virtual_machine, Unreadable):
        return  # ACS isolates guests and has to stay on; the remedy there is ATS
    for found in scene.known_predictions:
        if found.transport == "P2P" and not found.joined_by_nvlink:
            yield from _look_at_pair(scene, found)


def _look_at_pair(scene: Scene, found: Prediction) -> Iterator[Answer]:
    machine, pair = scene.machine, found.pair
    ends = [machine.pci.get(scene.cards[index].address) for index in (pair.a, pair.b)]
    bridges = [
        machine.pci[address] for end in ends if end is not None for address in end.upstream if address in machine.pci
    ]
    redirecting = [b for b in bridges if b.acs is not None and not isinstance(b.acs, Unreadable) and b.acs.redirects]
    if redirecting:
        yield _finding(
            scene,
            found,
            Certainty.READ,
            tuple(
                Evidence(what=f"ACS redirect on bridge {bridge.address}", value="on", source="PCI configuration space")
                for bridge in dict.fromkeys(redirecting)
            ),
        )
        return
    unread = next((bridge for bridge in bridges if isinstance(bridge.acs, Unreadable)), None)
    if unread is None or not isinstance(unread.acs, Unreadable):
        return
    command_line = machine.kernel_command_line
    if isinstance(command_line, str) and any(word in command_line for word in _SWITCHED_OFF):
        return
    if pair.pci_path in (PathType.PIX, PathType.PXB) and all(_isolated(end) for end in ends):
        yield _finding(
            scene,
            found,
            Certainty.INFERRED,
            (
                Evidence(
                    what="both cards are below one switch, each alone in its IOMMU group",
                    value="isolation is on",
                    source="/sys/kernel/iommu_groups",
                ),
            ),
        )
        return
    yield Gap(
        check=CHECK.id,
        what=f"ACS of the bridges between {scene.pair_name(pair)}",
        why=unread.acs.why,
        command="sudo lspci -vvv | grep -E '^[0-9a-f]|ACSCtl'",
    )


def _isolated(device: PciDevice | None) -> bool:
    return device is not None and isinstance(device.iommu_group, str) and device.iommu_group_size == 1


def _finding(scene: Scene, found: Prediction, certainty: Certainty, evidence: tuple[Evidence, ...]) -> Finding:
    return Finding(
        check=CHECK.id,
        subject=scene.pair_name(found.pair),
        severity=Severity.LOSS,
        certainty=certainty,
        headline="ACS sends traffic between these cards up to the processor and back; all_reduce may also hang",
        evidence=evidence,
        fix="Switch ACS off in the BIOS, boot with pci=disable_acs_redir=<bridges>, or clear the bits on root ports "
        "and switch ports: sudo setpci -s <bridge> ECAP_ACS+6.w=0000",
        proof=AbTest(
            a="shardwise doctor --run --risky",
            b="the same after clearing the bits",
            expect="peer copies near the speed of host copies",
        ),
        cost=scene.cost(found.pair, "SHM", "P2P"),
        reference="NVIDIA/nccl#2079, NVIDIA/nccl#1086, NVIDIA/nccl#304",
    )


CHECK = Check(
    id="acs",
    title="PCIe access control between cards",
    reads=("/sys/bus/pci/devices/*/config (root)", "/sys/kernel/iommu_groups", "/proc/cmdline"),
    look=look,
)
