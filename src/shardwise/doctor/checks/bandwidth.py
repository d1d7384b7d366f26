"""Measured bandwidth against what the link should reach."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Cost, Evidence, Finding, Gap, Severity
from shardwise.doctor.measurements import Measurement
from shardwise.doctor.scene import Scene
from shardwise.doctor.thresholds import judge, limit, min_bytes, nvlink_headline, pcie_headline, typical_rate, value
from shardwise.facts.machine.record import PathType
from shardwise.vocabulary.units import format_bandwidth, format_bytes


def look(scene: Scene) -> Iterator[Answer]:
    """Judges large collectives and peer copies; what did not finish is a gap unless another check explains it."""
    for found in scene.measurements:
        if found.problem and found.variant != "forced_p2p":
            yield Gap(
                check=CHECK.id,
                what=f"{found.kind} ({found.variant})",
                why=found.problem,
                command="NCCL_DEBUG=INFO shardwise doctor --run",
            )
    for found in _largest(scene.measurements):
        rule = _rule(scene, found)
        if rule is None or found.num_bytes < min_bytes(rule):
            continue
        headline = _headline(scene, found, nvlink=rule.startswith("nvlink"))
        if headline is None:
            continue
        verdict = judge(rule, found.bytes_per_s / headline)
        if verdict != "good":
            yield _finding(scene, found, rule, headline)
    yield from _symmetry(scene)


def _largest(measurements: tuple[Measurement, ...]) -> list[Measurement]:
    """The largest all_reduce that ran without any switch of the environment, by transport, and peer copies alone."""
    best: dict[tuple[str, str, tuple[int, ...]], Measurement] = {}
    clean = "no_switches" if any(m.variant == "no_switches" for m in measurements) else "as_set"
    for found in measurements:
        wanted = (found.kind == "all_reduce" and found.variant in (clean, "ring")) or (
            found.kind == "peer_copy" and found.variant == "alone"
        )
        if found.is_good and wanted:
            key = (found.kind, found.transport, found.gpus)
            if key not in best or found.num_bytes > best[key].num_bytes:
                best[key] = found
    return list(best.values())


def _rule(scene: Scene, found: Measurement) -> str | None:
    inside = [p for p in scene.known_predictions if {p.pair.a, p.pair.b} <= set(found.gpus)]
    nvlink = bool(inside) and all(p.joined_by_nvlink for p in inside)
    if found.kind == "peer_copy":
        return None if nvlink or not any(p.p2p_possible for p in inside) else "pcie_p2p_copy"
    if found.transport == "P2P":
        if nvlink:
            return "nvlink_pair_all_reduce" if len(found.gpus) == 2 else "nvlink_all_reduce"
        return "pcie_p2p_all_reduce"
    return "shm_all_reduce" if found.transport == "SHM" else None


def _headline(scene: Scene, found: Measurement, *, nvlink: bool) -> float | None:
    if nvlink:
        rates = [
            nvlink_headline(pair, scene.machine) for pair in scene.machine.pairs if {pair.a, pair.b} <= set(found.gpus)
        ]
    else:
        rates = [pcie_headline(card, scene.machine) for card in scene.cards if card.index in found.gpus]
    known = [rate for rate in rates if rate is not None]
    return min(known) if known and len(known) == len(rates) else None


def _finding(scene: Scene, found: Measurement, rule: str, headline: float) -> Finding:
    share = found.bytes_per_s / headline
    grave = judge(rule, share) == "fail"
    expected = value("pcie_copy_fraction") * headline if found.kind == "peer_copy" else _typical(scene, found)
    return Finding(
        check=CHECK.id,
        subject=f"{found.kind} over {found.transport or 'the link'}",
        severity=Severity.LOSS,
        certainty=Certainty.MEASURED,
        headline=f"{found.kind} reaches {share:.0%} of the link's one-way headline, {'far ' if grave else ''}below "
        f"{limit(rule):.0%}",
        evidence=(
            Evidence(
                what=f"{found.kind} of {format_bytes(found.num_bytes)} on {len(found.gpus)} cards",
                value=format_bandwidth(found.bytes_per_s),
                source="experiment",
            ),
            Evidence(what="one-way headline", value=format_bandwidth(headline), source="link width and generation"),
        ),
        fix="The other findings name suspects; without any, compare with the same machine model elsewhere.",
        proof=AbTest(
            a="shardwise doctor --run",
            b="NCCL_ALGO=Ring shardwise doctor --run",
            expect="a wire fault stays, a tuning fault goes away",
        ),
        cost=None
        if expected is None
        else Cost(actual_bytes_per_s=found.bytes_per_s, expected_bytes_per_s=expected, basis="measured"),
    )


def _typical(scene: Scene, found: Measurement) -> float | None:
    """What the slowest pair of the cards that were measured typically reaches over that transport."""
    pairs = [pair for pair in scene.machine.pairs if {pair.a, pair.b} <= set(found.gpus)]
    rates = [typical_rate(pair, scene.machine, found.transport) for pair in pairs]
    return min((rate for rate in rates if rate is not None), default=None)


def _symmetry(scene: Scene) -> Iterator[Finding]:
    """Pairs joined alike should be alike."""
    by_path: dict[PathType, list[Measurement]] = {}
    for found in scene.measurements:
        pair = next((pair for pair in scene.machine.pairs if {pair.a, pair.b} == set(found.gpus)), None)
        if (
            found.kind == "peer_copy"
            and found.variant == "alone"
            and found.is_good
            and pair is not None
            and isinstance(pair.path, PathType)
        ):
            by_path.setdefault(pair.path, []).append(found)
    for path, copies in by_path.items():
        slowest, fastest = min(copies, key=_speed), max(copies, key=_speed)
        share = slowest.bytes_per_s / fastest.bytes_per_s
        if judge("pair_symmetry", share) == "fail":
            yield Finding(
                check=CHECK.id,
                subject=" - ".join(f"GPU {gpu}" for gpu in slowest.gpus),
                severity=Severity.LOSS,
                certainty=Certainty.MEASURED,
                headline=f"this pair reaches {share:.0%} of another pair that is joined alike ({path.name})",
                evidence=tuple(
                    Evidence(
                        what=" - ".join(f"GPU {gpu}" for gpu in found.gpus),
                        value=format_bandwidth(found.bytes_per_s),
                        source="experiment",
                    )
                    for found in (slowest, fastest)
                ),
                fix="Compare slots, risers and link speeds of the two pairs.",
                proof=AbTest(
                    a="shardwise doctor --run",
                    b="the same with the cards swapped",
                    expect="the slow pair moves with the card, or stays with the slot",
                ),
                cost=Cost(
                    actual_bytes_per_s=slowest.bytes_per_s, expected_bytes_per_s=fastest.bytes_per_s, basis="measured"
                ),
            )


def _speed(found: Measurement) -> float:
    return found.bytes_per_s


CHECK = Check(
    id="bandwidth",
    title="Measured bandwidth against the link",
    reads=("experiments (--run)", "thresholds.yaml"),
    look=look,
)
