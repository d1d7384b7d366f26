"""The door of the children: `python -m shardwise.doctor.experiments.child copies|collectives ...`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardwise.doctor.experiments.collectives import RankTask, collectives_child
from shardwise.doctor.experiments.copies import copies_child
from shardwise.vocabulary.units import MIB


def _main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("copies", "collectives"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--store", type=Path, default=Path())
    parser.add_argument("--ops", default="all_reduce")
    parser.add_argument("--sizes", default=str(MIB))
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args(arguments)
    gpus = tuple(int(word) for word in given.gpus.split(","))
    if given.what == "copies":
        copies_child(given.out, gpus)
    else:
        sizes = tuple(int(word) for word in given.sizes.split(","))
        collectives_child(RankTask(out=given.out, gpus=gpus, rank=given.rank, store=given.store,
                                ops=tuple(given.ops.split(",")), sizes=sizes, backend=given.backend,
                                seconds=given.seconds))  # fmt: skip


if __name__ == "__main__":
    _main(sys.argv[1:])
