"""NVLinks that are down, missing, slow or in error, and NVSwitch fabrics that are not ready."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Cost, Evidence, Finding, Severity, gap
from shardwise.doctor.scene import Scene
from shardwise.doctor.thresholds import expected_links, nvlink_fraction, nvlink_rate
from shardwise.facts.machine.record import GpuCard, NvLink, Unreadable

_SWITCHED = ("SXM", "HGX", "H100 80GB HBM3", "H200", "B200", "B300", "GB200")


def look(scene: Scene) -> Iterator[Answer]:
    """Judges every card's links against its model and against its siblings."""
    for card in scene.cards:
        expected = expected_links(card.name)
        if isinstance(card.nvlinks, Unreadable):
            if expected is not None and len(scene.cards) > 1:
                yield gap(CHECK.id, f"the NVLinks of GPU {card.index}", card.nvlinks)
            continue
        if len(scene.cards) < 2:
            continue
        yield from _links(card, card.nvlinks)
        yield from _fabric(card)


def _links(card: GpuCard, links: tuple[NvLink, ...]) -> Iterator[Finding]:
    expected = expected_links(card.name)
    active = [link for link in links if link.active]
    wanted = len(links) if expected is None else expected.links
    bridge = expected is None or expected.needs_bridge
    if bridge and not active:
        return  # no bridge between these cards, which is a way to build them
    if len(active) < wanted:
        down = [link.index for link in links if not link.active]
        part = "seat the bridge again" if bridge else "have the card or the baseboard looked at"
        yield Finding(
            check=CHECK.id,
            subject=f"GPU {card.index}",
            severity=Severity.LOSS,
            certainty=Certainty.READ,
            headline=f"{wanted - len(active)} of {wanted} NVLinks are down; every ring through this card slows down",
            evidence=(
                Evidence(
                    what="links down", value=", ".join(map(str, down)) or "not listed by the driver", source="NVML"
                ),
                Evidence(what="links up", value=f"{len(active)} of {wanted}", source="NVML and data sheet"),
            ),
            fix=f"Reset the GPU (nvidia-smi --gpu-reset, with no job on it); if the links stay down, {part}.",
            proof=AbTest(
                a=f"nvidia-smi nvlink -s -i {card.index}",
                b="the same after the reset",
                expect=f"{wanted} links with a speed",
            ),
            cost=_cost(card, len(active), wanted),
            reference="NVIDIA/nccl#557, NVIDIA/nccl#340",
        )
    speeds = {link.speed_bytes_per_s for link in active if not isinstance(link.speed_bytes_per_s, Unreadable)}
    if len(speeds) > 1:
        yield _simple(
            card,
            Severity.LOSS,
            "some NVLinks run slower than others",
            f"{min(speeds) / 1e9:g} to {max(speeds) / 1e9:g} GB/s a link",
            "nvidia-smi nvlink -s",
        )
    recoveries = {link.index: link.errors["recovery"] for link in active if link.errors.get("recovery", 0) > 0}
    if recoveries:
        yield _simple(
            card,
            Severity.RISK,
            "NVLinks had to recover from errors",
            ", ".join(f"link {index}: {count}" for index, count in recoveries.items()),
            "nvidia-smi nvlink -e",
        )


def _cost(card: GpuCard, active: int, wanted: int) -> Cost | None:
    """A ring is as fast as its narrowest card."""
    per_link = nvlink_rate(card)
    if per_link is None or active == 0:
        return None
    share = nvlink_fraction(card)
    return Cost(
        actual_bytes_per_s=share * per_link * active,
        expected_bytes_per_s=share * per_link * wanted,
        basis="typical",
    )


def _fabric(card: GpuCard) -> Iterator[Answer]:
    state, status = card.fabric_state, card.fabric_status
    if isinstance(state, Unreadable) or isinstance(status, Unreadable):
        problem = state if isinstance(state, Unreadable) else status
        if any(word in card.name for word in _SWITCHED) and isinstance(problem, Unreadable):
            yield gap(CHECK.id, f"the NVSwitch fabric of GPU {card.index}", problem, essential=False)
    elif state is not None and (state != "completed" or status):
        yield Finding(
            check=CHECK.id,
            subject=f"GPU {card.index}",
            severity=Severity.FAULT,
            certainty=Certainty.READ,
            headline="the NVSwitch fabric is not ready; CUDA answers `system not yet initialized`",
            evidence=(Evidence(what="fabric", value=f"{state}, status {status}", source="NVML"),),
            fix="Start the Fabric Manager (systemctl start nvidia-fabricmanager, of the driver's own version), then "
            "reset the GPUs.",
            proof=AbTest(a="nvidia-smi -q | grep -A2 Fabric", b="the same after the start", expect="State: Completed"),
            reference="NVIDIA/nccl-tests#264, NVIDIA/nccl#976",
        )


def _simple(card: GpuCard, severity: Severity, headline: str, seen: str, command: str) -> Finding:
    return Finding(
        check=CHECK.id,
        subject=f"GPU {card.index}",
        severity=severity,
        certainty=Certainty.READ,
        headline=headline,
        evidence=(Evidence(what="NVLink", value=seen, source="NVML"),),
        fix="Reset the GPU; if it comes back, seat the bridge again or have the card looked at.",
        proof=AbTest(a=f"{command} -i {card.index}", b="the same after the reset", expect="no more of them"),
    )


CHECK = Check(
    id="nvlink",
    title="NVLink and NVSwitch",
    reads=("NVML link state, remote, version, speed, error counters, fabric state",),
    look=look,
)
