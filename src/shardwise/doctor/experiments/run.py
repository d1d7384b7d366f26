"""Runs the experiments and gathers what the children wrote."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from shardwise.doctor.experiments.plan import Trial, base_environment, plan_trials, visible_cards
from shardwise.doctor.experiments.processes import run_children
from shardwise.doctor.measurements import Measurement, MeasurementKind
from shardwise.doctor.nccl_log import read_nccl_log
from shardwise.doctor.nccl_log.records import NcclLog
from shardwise.doctor.scene import Scene
from shardwise.errors import MissingExtraError, ResourceError
from shardwise.vocabulary.timeline import bus_factor
from shardwise.vocabulary.units import MIB

COPY_BYTES = 256 * MIB
_CHILD = "shardwise.doctor.experiments.child"


def run_experiments(scene: Scene, *, seconds: float, risky: bool) -> tuple[Measurement, ...]:
    """Measures the cards of a scene.

    Args:
        scene: Machine and switches.
        seconds: Time limit of each child.
        risky: Whether to force P2P between cards that NCCL keeps apart, last of all.

    Returns:
        Measurements; those that did not finish carry the problem.

    Raises:
        MissingExtraError: If torch is not installed.
        ResourceError: If there is no card to measure.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("doctor --run", "train", "torch")
    gpus = visible_cards(scene)
    if not gpus:
        raise ResourceError("There is no GPU to measure; run the doctor without --run for what can be read.")
    base = base_environment(os.environ)
    found = list(run_copies(gpus, base, seconds))
    if len(gpus) > 1:
        for trial in plan_trials(scene, base, risky=risky):
            found.extend(run_trial(trial, gpus, seconds))
    return tuple(found)


def run_copies(gpus: tuple[int, ...], environment: Mapping[str, str], seconds: float) -> Iterator[Measurement]:
    """Host and peer copies, alone and at once, in one child."""
    with tempfile.TemporaryDirectory(prefix="shardwise-doctor-") as folder:
        out = Path(folder) / "copies.jsonl"
        command = [sys.executable, "-m", _CHILD, "copies", "--out", str(out), "--gpus", ",".join(map(str, gpus))]
        problem = run_children([command], [environment], Path(folder), seconds)
        yield from (_measurement(line) for line in _lines(out))
        if problem:
            yield Measurement(kind="peer_copy", variant="alone", gpus=gpus, num_bytes=COPY_BYTES, bytes_per_s=0.0,
                              problem=problem)  # fmt: skip


def run_trial(trial: Trial, gpus: tuple[int, ...], seconds: float) -> Iterator[Measurement]:
    """One collective trial: a process per card, results and NCCL's log gathered afterwards."""
    with tempfile.TemporaryDirectory(prefix="shardwise-doctor-") as name:
        folder = Path(name)
        commands: list[list[str]] = []
        for rank in range(len(gpus)):
            commands.append([
                sys.executable, "-m", _CHILD, "collectives", "--out", str(folder / f"rank{rank}.jsonl"),
                "--gpus", ",".join(map(str, gpus)), "--rank", str(rank), "--store", str(folder / "store"),
                "--ops", ",".join(trial.ops), "--sizes", ",".join(map(str, trial.sizes)), "--backend", trial.backend,
                "--seconds", str(seconds),
            ])  # fmt: skip
        environment = {
            **trial.environment,
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,GRAPH",
            "NCCL_DEBUG_FILE": str(folder / "nccl.%h.%p.log"),
        }
        problem = run_children(commands, [environment] * len(commands), folder, seconds)
        transport = "gloo" if trial.backend == "gloo" else transport_of(
            [read_nccl_log(path) for path in sorted(folder.glob("nccl.*.log"))]
        )  # fmt: skip
        ranks = [_lines(folder / f"rank{rank}.jsonl") for rank in range(len(gpus))]
        yield from _gather(trial, gpus, ranks, transport)
        if problem:
            yield Measurement(
                kind=cast("MeasurementKind", trial.ops[0]),
                variant=trial.variant,
                gpus=gpus,
                num_bytes=trial.sizes[-1],
                bytes_per_s=0.0,
                problem=problem,
                transport=transport,
            )


def _gather(
    trial: Trial, gpus: tuple[int, ...], ranks: list[list[dict[str, Any]]], transport: str
) -> Iterator[Measurement]:
    """Slowest rank of each call, then the median over calls."""
    for results in zip(*ranks, strict=False):  # a killed rank may have written fewer
        first = results[0]
        calls = [max(times) for times in zip(*(result["seconds"] for result in results), strict=True)]
        middle = statistics.median(calls)
        late = sorted(calls)[min(len(calls) - 1, round(0.95 * (len(calls) - 1)))]
        size = int(first["bytes"])
        yield Measurement(
            kind=first["op"],
            variant=trial.variant,
            gpus=gpus,
            num_bytes=size,
            bytes_per_s=size / middle * bus_factor(first["op"], len(gpus)),
            seconds_p50=middle,
            seconds_p95=late,
            data_is_right=all(result["right"] for result in results),
            transport=transport,
            nvlink_bytes=first.get("nvlink_bytes"),
            slowdowns=tuple((int(gpu), str(reason)) for result in results for gpu, reason in result["slowdowns"]),
        )


def transport_of(logs: list[NcclLog]) -> str:
    """The slowest transport among the edges of a trial; empty if no log shows one."""
    edges = [edge for log in logs for edge in log.edges]
    networks = sorted(edge.method for edge in edges if edge.transport == "NET")
    if networks:
        return f"NET/{networks[-1]}"
    kinds = {edge.transport for edge in edges}
    return "SHM" if "SHM" in kinds else "P2P" if "P2P" in kinds else ""


def _lines(path: Path) -> list[dict[str, Any]]:
    """Results written so far; a line cut off by a kill is left out."""
    found: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


def _measurement(line: dict[str, Any]) -> Measurement:
    return Measurement(
        kind=line["kind"],
        variant=line["variant"],
        gpus=tuple(line["gpus"]),
        num_bytes=int(line["bytes"]),
        bytes_per_s=float(line["bytes_per_s"]),
        data_is_right=bool(line["right"]),
        pcie_samples=tuple((int(a), int(b), int(c)) for a, b, c in line["samples"]),
        slowdowns=tuple((int(gpu), str(reason)) for gpu, reason in line["slowdowns"]),
    )
