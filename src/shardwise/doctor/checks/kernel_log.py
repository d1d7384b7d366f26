"""What the kernel logged about PCIe, the IOMMU, GPUs and adapters."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity, gap
from shardwise.doctor.scene import Scene
from shardwise.facts.machine.record import Unreadable

_PATTERNS: tuple[tuple[re.Pattern[str], Severity, str, str], ...] = (
    (re.compile(r"IO_PAGE_FAULT|DMAR:.*fault"), Severity.FAULT, "the IOMMU blocked accesses of a device",
     "Boot with iommu=pt, or switch the IOMMU off."),
    (re.compile(r"Xid.*: 79,"), Severity.FAULT, "a GPU fell off the bus (Xid 79)",
     "Look at power and at the slot or riser; then reboot."),
    (re.compile(r"Xid.*: 74,"), Severity.FAULT, "an NVLink error was logged (Xid 74)",
     "Reset the GPU; seat the bridge again or have the baseboard looked at."),
    (re.compile(r"Xid.*: 31,"), Severity.RISK, "a GPU touched memory that was not mapped (Xid 31)",
     "Often a program's fault; on peer traffic look at the IOMMU."),
    (re.compile(r"AER:.*(?:Uncorrected|Uncorrectable|fatal)", re.IGNORECASE), Severity.FAULT,
     "PCIe reported uncorrected errors", "Reseat the card, change the riser or cable."),
    (re.compile(r"mlx5.*(?:link down|Port.*down)", re.IGNORECASE), Severity.RISK, "an adapter's link went down",
     "Look at cable and switch port."),
)  # fmt: skip


def look(scene: Scene) -> Iterator[Answer]:
    """One finding for each kind of line; a gap that does not weigh where the log is for root."""
    if len(scene.cards) < 1:
        return
    lines = scene.machine.kernel_log
    if isinstance(lines, Unreadable):
        yield gap(CHECK.id, "the kernel's log", lines, essential=False)
        return
    for pattern, severity, headline, fix in _PATTERNS:
        found = [line for line in lines if pattern.search(line)]
        if found:
            yield Finding(
                check=CHECK.id,
                subject="kernel",
                severity=severity,
                certainty=Certainty.READ,
                headline=f"{headline} ({len(found)} times since boot)",
                evidence=(Evidence(what="last line", value=found[-1][:200], source="/dev/kmsg"),),
                fix=fix,
                proof=AbTest(a="sudo dmesg --follow (during a job)", b="the same after the fix", expect="no such line"),
                reference="stas00/ml-engineering#1",
            )


CHECK = Check(id="kernel-log", title="The kernel's log", reads=("/dev/kmsg",), look=look)
