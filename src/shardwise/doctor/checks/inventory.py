"""The cards themselves: without them nothing about the wire between them can be judged."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import Answer, Gap, gap
from shardwise.doctor.scene import Scene
from shardwise.facts.machine.record import Unreadable


def look(scene: Scene) -> Iterator[Answer]:
    """A gap for every reading of the cards that the other checks stand on."""
    if isinstance(scene.machine.gpus, Unreadable):
        yield gap(CHECK.id, "the GPUs", scene.machine.gpus)
        return
    if not scene.cards:
        yield Gap(check=CHECK.id, what="the GPUs", why="the driver shows no GPU", command="nvidia-smi -L")
    if len(scene.cards) < 2:
        return
    for pair in scene.machine.pairs:
        for what, reading in (("path", pair.path), ("P2P status", pair.read)):
            if isinstance(reading, Unreadable):
                yield gap(CHECK.id, f"{what} between {scene.pair_name(pair)}", reading)


CHECK = Check(
    id="inventory",
    title="The cards can be seen",
    reads=("NVML", "/proc/driver/nvidia/gpus", "/sys/bus/pci/devices"),
    look=look,
)
