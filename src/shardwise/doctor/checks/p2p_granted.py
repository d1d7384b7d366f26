"""P2P over PCIe that is granted on cards for which NVIDIA's driver has none: a patched driver, or a false report."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity
from shardwise.doctor.scene import Scene
from shardwise.facts.machine.record import GpuCard, GpuPair, P2pStatus, PathType
from shardwise.vocabulary.units import GIB, format_bytes

_WITHOUT_P2P = ("GeForce RTX 40", "GeForce RTX 50")
_SMALL_WINDOW = GIB
"""A patched driver maps all of a card's memory through its window on the bus; without Resizable BAR it is 256 MiB."""


def look(scene: Scene) -> Iterator[Answer]:
    """A risk until a measurement has shown right data; then a window that is too small."""
    for pair in scene.machine.pairs:
        cards = (scene.cards[pair.a], scene.cards[pair.b])
        granted = pair.read == P2pStatus.OK and pair.write == P2pStatus.OK and pair.path != PathType.NVLINK
        if not granted or not any(word in card.name for card in cards for word in _WITHOUT_P2P):
            continue
        small = next((card for card in cards if _window(card) < _SMALL_WINDOW), None)
        if small is not None:
            yield _finding(
                scene,
                pair,
                f"P2P is granted through a window of {format_bytes(round(_window(small)))}: Resizable BAR is off",
                "Switch Resizable BAR (and Above 4G Decoding) on in the BIOS.",
                small,
            )
        elif not _shown_right(scene, pair):
            yield _finding(
                scene,
                pair,
                "P2P is granted on GeForce cards that have none in NVIDIA's driver: a patched driver, or an old one "
                "that reports what the card cannot do",
                "Test it before any training: shardwise doctor --run compares the data on the far side. If it is "
                "wrong or hangs, set NCCL_P2P_DISABLE=1.",
                cards[0],
            )


def _window(card: GpuCard) -> float:
    return float(card.bar1_bytes) if isinstance(card.bar1_bytes, int) else float("inf")


def _shown_right(scene: Scene, pair: GpuPair) -> bool:
    copies = [m for m in scene.measurements if m.kind == "peer_copy" and set(m.gpus) == {pair.a, pair.b}]
    return bool(copies) and all(copy.is_good for copy in copies)


def _finding(scene: Scene, pair: GpuPair, headline: str, fix: str, card: GpuCard) -> Finding:
    driver = scene.machine.driver.version
    window = format_bytes(card.bar1_bytes) if isinstance(card.bar1_bytes, int) else "unreadable"
    return Finding(
        check=CHECK.id,
        subject=scene.pair_name(pair),
        severity=Severity.RISK,
        certainty=Certainty.POSSIBLE,
        headline=headline,
        evidence=(
            Evidence(what="P2P status", value="OK", source="NVML"),
            Evidence(what="cards", value=card.name, source="NVML"),
            Evidence(what="window (BAR1)", value=window, source="NVML"),
            Evidence(what="driver", value=driver if isinstance(driver, str) else "unreadable", source="NVML"),
        ),
        fix=fix,
        proof=AbTest(
            a="shardwise doctor --run",
            b="NCCL_P2P_DISABLE=1 shardwise doctor --run",
            expect="right data and a finished all_reduce in both, a higher rate in a",
        ),
        reference="NVIDIA/nccl-tests#117, aikitoria/open-gpu-kernel-modules#6",
    )


CHECK = Check(
    id="p2p-granted",
    title="P2P that NVIDIA's driver does not have",
    reads=("NVML P2P status, names, BAR1", "experiments (--run)"),
    look=look,
)
