"""PCIe links that are narrower or slower than the card: slots, risers, bifurcation, chipset lanes.

NCCL reads only the best that a link could do, so a link that trained down is invisible to its own topology and tuning.
At idle a low generation is normal; the speed is judged under load (`--run`), or where it is no idle speed either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Cost, Evidence, Finding, Gap, Severity
from shardwise.doctor.scene import Scene
from shardwise.doctor.thresholds import lanes_rate, pcie_rate, value
from shardwise.facts.machine.record import GpuCard, PciDevice, Unreadable

_IDLE_GENERATION = 1
_CHIPSET_SWITCHES = ("0x1022", "0x1b21")
"""AMD and ASMedia: switches below a root port by these vendors are chipsets."""
_INTEL = "0x8086"
_INTEL_CHIPSET_SLOTS = tuple(f"0000:00:{slot}." for slot in ("1a", "1b", "1c", "1d"))
_MANY_CORRECTED_ERRORS = 1_000


def look(scene: Scene) -> Iterator[Answer]:
    """At most one finding a card for its place, and one for its speed."""
    virtual = scene.machine.virtual_machine
    for card in scene.cards:
        device = scene.machine.pci.get(card.address)
        if isinstance(virtual, str) and virtual:
            yield from _speed(scene, card)  # the bridges are made up, the card's own link is not
            continue
        place = _place(scene, card, device)
        if place is not None:
            yield place
        yield from _speed(scene, card)
        yield from _errors(scene, card, device)


def _place(scene: Scene, card: GpuCard, device: PciDevice | None) -> Finding | None:
    """Where the card sits: chipset, narrow slot, narrow link, old slot; the first that holds."""
    if isinstance(card.pcie_width, Unreadable):
        return None
    full = _full_rate(card, device)
    chipset = None if device is None else _chipset_bridge(scene, device)
    if chipset is not None:
        return _finding(
            card,
            Certainty.READ,
            "sits in a chipset slot: its lanes share one narrow link to the processor",
            "Move the card to a slot that is wired to the processor.",
            chipset,
            _rate(card, chipset),
            full,
        )
    port = None if device is None or not device.upstream else scene.machine.pci.get(device.upstream[-1])
    width_max = card.pcie_width_max if device is None else device.width_max
    if isinstance(width_max, int) and card.pcie_width < width_max:
        slot = port.width_max if port is not None else None
        narrow = isinstance(slot, int) and slot <= card.pcie_width
        headline = (
            (f"has x{card.pcie_width} of its x{width_max} lanes: the slot gives no more (x8/x8 board or narrow slot)")
            if narrow
            else (f"runs x{card.pcie_width} of x{width_max} lanes: riser, seat or bifurcation setting")
        )
        fix = (
            "Use a slot with all lanes, or accept half the host and peer bandwidth."
            if narrow
            else "Reseat the card, change the riser, and look at the BIOS's bifurcation setting."
        )
        return _finding(card, Certainty.READ, headline, fix, port, _rate(card, None), full)
    own, with_slot = card.pcie_gen_card, card.pcie_gen_max
    if isinstance(own, int) and isinstance(with_slot, int) and own > with_slot:
        return _finding(
            card,
            Certainty.READ,
            f"is a Gen{own} card in a Gen{with_slot} slot",
            "Use a faster slot, or a BIOS setting that does not hold the slot back.",
            port,
            _rate(card, None),
            full,
        )
    return None


def _chipset_bridge(scene: Scene, device: PciDevice) -> PciDevice | None:
    bridges = [scene.machine.pci.get(address) for address in device.upstream]
    root = bridges[0] if bridges else None
    if root is not None and root.vendor == _INTEL and root.address.startswith(_INTEL_CHIPSET_SLOTS):
        return root
    return next((bridge for bridge in bridges[1:] if bridge is not None and bridge.vendor in _CHIPSET_SWITCHES), None)


def _speed(scene: Scene, card: GpuCard) -> Iterator[Answer]:
    """Whether the link reaches its generation, from samples under load if there are any."""
    best = card.pcie_gen_max
    if isinstance(best, Unreadable) or isinstance(card.pcie_gen, Unreadable):
        why = best if isinstance(best, Unreadable) else card.pcie_gen
        assert isinstance(why, Unreadable)
        yield Gap(check=CHECK.id, what=f"the PCIe generation of GPU {card.index}", why=why.why, command=why.command)
        return
    samples = [
        (generation, width)
        for found in scene.measurements
        for gpu, generation, width in found.pcie_samples
        if gpu == card.index
    ]
    if samples:
        seen = max(generation for generation, _ in samples)
        if seen < best:
            yield _trained_down(card, seen, best, Certainty.MEASURED, f"{len(samples)} samples under load")
        elif len({sample for sample in samples if sample[0] >= seen - 1}) > 1 and min(samples)[0] < best:
            yield _trained_down(card, min(samples)[0], best, Certainty.POSSIBLE, "the link changed while under load")
        return
    if card.pcie_gen >= best:
        return
    busy = not isinstance(card.processes, Unreadable) and bool(card.processes)
    if card.pcie_gen > _IDLE_GENERATION:
        sure = Certainty.INFERRED if busy else Certainty.POSSIBLE
        yield _trained_down(card, card.pcie_gen, best, sure, "neither its idle speed nor its best")
    else:
        yield Gap(
            check=CHECK.id,
            what=f"the PCIe speed of GPU {card.index} under load",
            essential=False,
            why="the card is idle, where a low speed is normal",
            command="shardwise doctor --run",
        )


def _trained_down(card: GpuCard, now: int, best: int, certainty: Certainty, how: str) -> Finding:
    width = card.pcie_width if isinstance(card.pcie_width, int) else 16
    finding = _finding(
        card,
        certainty,
        f"runs PCIe Gen{now} where card and slot have Gen{best}: the link trained down",
        "Reseat the card, change the riser or cable, then reboot; a bad contact makes the link fall back.",
        None,
        pcie_rate(now, width),
        pcie_rate(best, width),
    )
    evidence = (Evidence(what="how it was seen", value=how, source="NVML"), *finding.evidence)
    return replace(finding, evidence=evidence)


def _errors(scene: Scene, card: GpuCard, device: PciDevice | None) -> Iterator[Finding]:
    if isinstance(card.pcie_replays, int) and card.pcie_replays >= _MANY_CORRECTED_ERRORS:
        yield Finding(
            check=CHECK.id,
            subject=f"GPU {card.index}",
            severity=Severity.RISK,
            certainty=Certainty.READ,
            headline=f"the PCIe link has sent {card.pcie_replays:,} packets again since the driver was loaded",
            evidence=(Evidence(what="replays", value=f"{card.pcie_replays:,}", source="NVML"),),
            fix="Reseat the card, change the riser or cable.",
            proof=AbTest(
                a=f"nvidia-smi -q -i {card.index} | grep -i replay",
                b="the same after an hour of work",
                expect="a higher count",
            ),
        )
        return
    chain = (
        [] if device is None else [device, *(scene.machine.pci[a] for a in device.upstream if a in scene.machine.pci)]
    )
    for place in chain:
        count = place.corrected_errors
        if isinstance(count, int) and count >= _MANY_CORRECTED_ERRORS:
            yield Finding(
                check=CHECK.id,
                subject=f"GPU {card.index}",
                severity=Severity.RISK,
                certainty=Certainty.READ,
                headline=f"the PCIe link has corrected {count:,} errors since boot",
                evidence=(Evidence(what=place.address, value=f"{count:,}", source="aer_dev_correctable"),),
                fix="Reseat the card, change the riser or cable.",
                proof=AbTest(
                    a=f"cat /sys/bus/pci/devices/{place.address}/aer_dev_correctable",
                    b="the same after an hour of work",
                    expect="a higher count",
                ),
            )
            return


def _rate(card: GpuCard, bridge: PciDevice | None) -> float | None:
    if isinstance(card.pcie_gen_max, Unreadable) or isinstance(card.pcie_width, Unreadable):
        return None
    rate = pcie_rate(card.pcie_gen_max, card.pcie_width)
    if bridge is not None and isinstance(bridge.width, int) and isinstance(bridge.speed_gt_max, float):
        rate = min(rate, lanes_rate(bridge.speed_gt_max) * bridge.width)
    return rate or None


def _full_rate(card: GpuCard, device: PciDevice | None) -> float | None:
    width = card.pcie_width_max if device is None else device.width_max
    generation = card.pcie_gen_card if not isinstance(card.pcie_gen_card, Unreadable) else card.pcie_gen_max
    if isinstance(generation, Unreadable) or isinstance(width, Unreadable):
        return None
    return pcie_rate(generation, width) or None


def _finding(
    card: GpuCard,
    certainty: Certainty,
    headline: str,
    fix: str,
    bridge: PciDevice | None,
    now: float | None,
    full: float | None,
) -> Finding:
    share = value("pcie_copy_fraction")
    evidence = [
        Evidence(
            what=f"GPU {card.index} now", value=f"Gen{_word(card.pcie_gen)} x{_word(card.pcie_width)}", source="NVML"
        ),
        Evidence(
            what=f"GPU {card.index} at most",
            value=f"card Gen{_word(card.pcie_gen_card)}, with the slot Gen{_word(card.pcie_gen_max)} "
            f"x{_word(card.pcie_width_max)}",
            source="NVML",
        ),
    ]
    if bridge is not None:
        evidence.append(
            Evidence(
                what=f"bridge {bridge.address}",
                value=f"x{_word(bridge.width)} of x{_word(bridge.width_max)}, {_word(bridge.speed_gt_max)} GT/s",
                source="sysfs",
            )
        )
    return Finding(
        check=CHECK.id,
        subject=f"GPU {card.index}",
        severity=Severity.LOSS,
        certainty=certainty,
        headline=headline,
        evidence=tuple(evidence),
        fix=fix,
        proof=AbTest(
            a="shardwise doctor --run",
            b="the same after the change",
            expect="a higher host to device copy rate for this card",
        ),
        cost=None
        if now is None or full is None or now >= full
        else Cost(actual_bytes_per_s=share * now, expected_bytes_per_s=share * full, basis="typical"),
        reference="local-inference-lab/rtx6kpro PR#88, noonghunna/club-3090",
    )


def _word(reading: object) -> str:
    return "?" if isinstance(reading, Unreadable) else f"{reading:g}" if isinstance(reading, float) else str(reading)


CHECK = Check(
    id="pcie-link",
    title="PCIe width, generation and slot",
    reads=("NVML", "/sys/bus/pci/devices/*/{current,max}_link_{speed,width} of cards and bridges", "--run samples"),
    look=look,
)
