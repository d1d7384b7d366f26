"""How fast is a large NCCL log read, and does memory stay flat? Kinds of lines that a long job prints, by the megabyte.

    PYTHONPATH=src python benchmarks/log_speed.py --megabytes 200

Prints processor seconds (which other programs on the machine do not stretch) and the process's peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from shardwise.doctor.nccl_log import read_nccl_log

PRE = "node-a:2144:2556 [2] NCCL INFO "
LIMIT_SECONDS = 10.0


def edge(i: int) -> str:
    return f"{PRE}Channel {i % 32:02d}/0 : {i % 64}[{i % 8}] -> {(i + 1) % 64}[{(i + 1) % 8}] via P2P/CUMEM\n"


def call(i: int) -> str:
    sent = random.getrandbits(48)
    return f"{PRE}AllReduce: opCount {i:x} sendbuff 0x{sent:x} count {i} datatype 7 op 0 comm 0x55d0c0 [nranks=8]\n"


def training(i: int) -> str:
    return f"step {i} loss {random.random()} tokens/s 1234 {'x' * 40}\n"


def warning(i: int) -> str:
    where = f"node-a:{2000 + i % 8}:2556 [{i % 8}] transport/net_ib.cc:101"
    return f"{where} NCCL WARN NET/IB : Got completion from peer 192.0.2.1<{i}> with status=12 opcode=1 len=0\n"


def choice(i: int) -> str:
    return f"{PRE}AllReduce: {8 * i} Bytes -> Algo RING proto SIMPLE channel{{Lo..Hi}}={{0..31}}\n"


def mixture(i: int) -> str:
    return (edge, call, training, warning, choice)[i % 5](i // 5)


KINDS: dict[str, Callable[[int], str]] = {
    "mixture": mixture, "edges": edge, "calls": call, "training": training, "warnings": warning, "choices": choice,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--out", type=Path, help="file for the result")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, line in KINDS.items():
            path = Path(folder) / kind
            with path.open("w") as stream:
                written = i = 0
                while written < arguments.megabytes * 1e6:
                    piece = "".join(line(i + k) for k in range(2000))
                    written += stream.write(piece)
                    i += 2000
            rows.append(measure(kind, path))
            path.unlink()
        junk = Path(folder) / "junk"
        with junk.open("wb") as stream:
            for _ in range(arguments.megabytes):
                stream.write(os.urandom(1_000_000))
        rows.append(measure("binary junk", junk))
    print(json.dumps(rows, indent=2))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"megabytes": arguments.megabytes, "rows": rows}, indent=2) + "\n")
    limit = LIMIT_SECONDS * arguments.megabytes / 200
    return 0 if all(row["cpu_seconds"] <= limit for row in rows) else 1


def measure(kind: str, path: Path) -> dict[str, float | int | str]:
    started = time.process_time()
    log = read_nccl_log(path)
    spent = time.process_time() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"kind": kind, "cpu_seconds": round(spent, 2), "lines": log.num_lines, "edges": len(log.edges),
            "warnings": sum(found.calls for found in log.warnings), "peak_bytes": peak}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
