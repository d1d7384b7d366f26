"""Which entry of the link catalogue a wire of this machine is, so that nothing is written down twice.

The driver's own line rate is no substitute: it counts line coding, and virtual machines often hide it.
"""

from __future__ import annotations

from shardwise.facts import catalog
from shardwise.vocabulary.cluster import Link

_LINKS_TOGETHER = {
    "nvlink2": 6,
    "nvlink3": 12,
    "nvlink4": 18,
    "nvlink5": 18,
    "nvlink-bridge": 4,
    "nvlink-bridge-600": 12,
}
"""NVLinks of one card that an entry's bandwidth counts; the same data sheets as the entries'."""
_BY_CAPABILITY = {
    (7, 0): "nvlink2",
    (8, 0): "nvlink3",
    (8, 6): "nvlink-bridge",
    (9, 0): "nvlink4",
    (10, 0): "nvlink5",
    (10, 3): "nvlink5",
}
"""For cards that the catalogue does not hold (H800, A30, GB200): the chip tells the generation, not how many links."""
_PCIE_GENERATIONS = (3, 4, 5)
_PCIE_WIDTHS = (4, 8, 16)


def nvlink_entry(card_name: str, capability: tuple[int, int] | None = None) -> Link | None:
    """The catalogue's NVLink of a card.

    Args:
        card_name: As the driver says it.
        capability: CUDA compute capability, for cards that the catalogue does not hold.

    Returns:
        The entry, with the bandwidth of all links of a card together; None for cards without NVLink.
    """
    name = None
    if catalog.knows("gpus", card_name):
        machine = catalog.card_file(card_name).machine
        name = machine.nvlink or machine.nvlink_bridge
    name = name or (None if capability is None else _BY_CAPABILITY.get(capability))
    return None if name is None else catalog.link(name)


def bytes_per_s_of_one_link(entry: Link) -> float:
    """One way, of one NVLink of those that the entry counts together."""
    return entry.bandwidth_bytes_per_s / _LINKS_TOGETHER[entry.name]


def pcie_entry(generation: int, width: int, *, through_host: bool) -> Link:
    """The catalogue's PCIe link nearest to a generation and a number of lanes.

    Args:
        generation: 1 to 6; what the catalogue lacks is answered with the nearest that it has.
        width: Lanes.
        through_host: Whether the cards go through host memory instead of reading each other.
    """
    nearest = min(_PCIE_GENERATIONS, key=lambda known: abs(known - generation))
    lanes = min(_PCIE_WIDTHS, key=lambda known: abs(known - width))
    return catalog.link(f"pcie{nearest}-x{lanes}" + ("-host" if through_host else ""))
