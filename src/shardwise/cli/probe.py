"""`shardwise probe`: measure the cards and the wire, and write a cluster file for `plan`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardwise.errors import UsageError
from shardwise.probe.options import ProbeOptions

_MEASURING = ("quick", "ranks", "nodes", "device", "checkpoint_dir", "budget", "out")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the cards (or, without any, the cores) and the wire between them.

    Starts one rank for each card, checks every element that crosses the wire, and writes a cluster file that
    `shardwise plan --cluster` reads. For several machines, torchrun starts it on each.

    Examples:
      shardwise probe --quick --out cluster.yaml
      shardwise probe --inventory
      torchrun --nnodes=2 --nproc-per-node=gpu --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 -m shardwise probe
    """

    quick: bool = False
    """A few sizes within 20 s, instead of 8 B to 1 GiB within 120 s."""
    ranks: int | None = None
    """Ranks on this machine; by default one a card, or two where there is no card."""
    nodes: int = 1
    """Machines; with more than one, torchrun must have started this on each."""
    device: Literal["cuda", "cpu"] | None = None
    """cuda where there is a card, else cpu, if nothing is said."""
    checkpoint_dir: str | None = None
    """The folder whose disk is measured; that of --out, or the current one, if nothing is said."""
    budget: float | None = None
    """Seconds after which nothing more is measured but what every plan needs; 13 (quick) or 95 if nothing is said."""
    inventory: bool = False
    """Only look, measure nothing: no torch, no root, no context on any card."""
    out: str | None = None
    """Write the cluster file (YAML) here."""
    json: bool = False
    """Everything that was measured, as JSON on stdout."""


def run(options: Options) -> int:
    """Measure, show, and return 0."""
    if options.inventory:
        _refuse_measuring(options)
        sys.stdout.write(_inventory(options.json))
        return 0
    from shardwise.probe.launch import probe
    from shardwise.probe.page import report_page
    from shardwise.vocabulary.codec import to_json

    report = probe(probe_options(options))
    if os.environ.get("RANK", "0") != "0":
        return 0
    sys.stdout.write(to_json(report) + "\n" if options.json else report_page(report))
    if options.out is not None:
        _say(f"wrote {options.out}; next: shardwise plan MODEL --cluster {options.out}")
    return 0


def _refuse_measuring(options: Options) -> None:
    """Refuse flags of a measurement beside --inventory.

    Raises:
        UsageError: With every such flag.
    """
    unset = Options()
    given = [name for name in _MEASURING if getattr(options, name) != getattr(unset, name)]
    if given:
        raise UsageError(
            f"--inventory measures nothing, so {', '.join('--' + name.replace('_', '-') for name in given)} would be "
            "without effect; leave one or the other out"
        )


def probe_options(options: Options) -> ProbeOptions:
    """The same wishes in the probe's own words."""
    return ProbeOptions(
        quick=options.quick,
        ranks=options.ranks,
        nodes=options.nodes,
        device=options.device,
        checkpoint_dir=Path(options.checkpoint_dir) if options.checkpoint_dir is not None else None,
        out=Path(options.out) if options.out is not None else None,
        budget_seconds=options.budget,
        progress=_say,
    )


def _inventory(as_json: bool) -> str:
    from shardwise.facts.machine import read_machine
    from shardwise.probe.inventory import take_inventory
    from shardwise.probe.page import inventory_page
    from shardwise.vocabulary.codec import to_json

    inventory = take_inventory(read_machine())
    return to_json(inventory) + "\n" if as_json else inventory_page(inventory)


def _say(text: str) -> None:
    sys.stderr.write(f"probe: {text}\n")
    sys.stderr.flush()
