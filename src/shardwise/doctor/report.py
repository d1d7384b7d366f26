"""The doctor's page for people, and the same for machines."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from shardwise.doctor.diagnose import Diagnosis, Verdict
from shardwise.doctor.findings import Certainty, Cost, Finding, Gap, Severity
from shardwise.doctor.scene import Scene
from shardwise.doctor.transport import Prediction
from shardwise.facts.machine.record import Unreadable
from shardwise.vocabulary.units import format_bandwidth, format_bytes, format_seconds

_WIDTH = 100
_MAX_SUBJECTS = 3
_MARKS = {Severity.FAULT: "FAULT", Severity.LOSS: "SLOW", Severity.RISK: "RISK", Severity.NOTE: "note"}
_SURE = {
    Certainty.MEASURED: "measured",
    Certainty.READ: "read directly",
    Certainty.INFERRED: "inferred",
    Certainty.POSSIBLE: "possible",
}
SCHEMA = 1
"""Of the JSON page; grows when a field changes its meaning or goes away."""


def render_text(diagnosis: Diagnosis) -> str:
    """The page for people: verdict, findings worst first, notes, what could not be read."""
    lines = [*_summary(diagnosis), ""]
    for number, finding in enumerate(diagnosis.findings, start=1):
        lines += [*_finding(number, finding, diagnosis.scene), ""]
    if diagnosis.scene.measurements:
        lines += [*_measured(diagnosis.scene), ""]
    if diagnosis.notes:
        lines.append("Notes")
        for note in diagnosis.notes:
            lines += _wrap(f"{_subject(note)}: {note.headline}. {note.fix}", "  - ", "    ")
        lines.append("")
    if diagnosis.gaps:
        lines.append("Could not be read (and so is not called healthy)")
        for gap in diagnosis.gaps:
            lines += _gap(gap)
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def headline(diagnosis: Diagnosis) -> str:
    """The verdict in one sentence."""
    if diagnosis.verdict is Verdict.FINDINGS:
        count = len(diagnosis.findings)
        return f"{count} finding{'s' if count > 1 else ''}, worst first."
    if diagnosis.verdict is Verdict.COULD_NOT_LOOK:
        return "Could not look: nothing was found, but what follows could not be read."
    if diagnosis.gaps:
        return "No findings in what could be read; some of it was out of reach (below)."
    return "Healthy: no findings."


def _summary(diagnosis: Diagnosis) -> list[str]:
    scene, machine = diagnosis.scene, diagnosis.scene.machine
    lines = [headline(diagnosis)]
    if diagnosis.machine_skipped:
        lines += _wrap(f"Only the log was judged: {diagnosis.machine_skipped}.", "", "")
    else:
        lines.append(f"Machine   {machine.hostname}: {_cards(scene)}")
        lines.append(f"Versions  NCCL {_version(scene)}, driver {_reading(machine.driver.version)}, "
                     f"CPU {_reading(machine.cpu.vendor)}{_where(scene)}")  # fmt: skip
        if scene.known_predictions:
            lines.append(f"Wire      {_wire(scene)}")
    if scene.log is not None:
        log = scene.log
        lines.append(f"Log       {log.num_lines:,} lines, {len(log.edges)} edges, {len(log.rings)} rings, "
                     f"{len(log.warnings)} warnings")  # fmt: skip
    lines.append(f"Checks    {len(diagnosis.looked)}")
    return lines


def _cards(scene: Scene) -> str:
    if not scene.cards:
        gpus = scene.machine.gpus
        return gpus.why if isinstance(gpus, Unreadable) else "no GPU"
    names: dict[str, int] = {}
    for card in scene.cards:
        names[card.name] = names.get(card.name, 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in names.items())


def _wire(scene: Scene) -> str:
    """Pairs by path and predicted transport."""
    kinds: dict[str, int] = {}
    for found in scene.known_predictions:
        path = _path(found)
        text = f"{path} over {found.transport}"
        kinds[text] = kinds.get(text, 0) + 1
    return ", ".join(f"{count} pair{'s' if count > 1 else ''} {text}" for text, count in kinds.items())


def _path(found: Prediction) -> str:
    links, path = found.pair.num_nvlinks, found.pair.path
    if found.joined_by_nvlink:
        return "NVLink" if isinstance(links, Unreadable) else f"NV{links}"
    return "?" if isinstance(path, Unreadable) else path.name


def _where(scene: Scene) -> str:
    virtual = scene.machine.virtual_machine
    words = [scene.machine.container and f"in {scene.machine.container}"]
    words.append(f"in a VM ({virtual})" if isinstance(virtual, str) and virtual else "")
    return "".join(f", {word}" for word in words if word)


def _version(scene: Scene) -> str:
    version = scene.nccl_version
    return "unknown" if isinstance(version, Unreadable) else ".".join(map(str, version))


def _reading(reading: object) -> str:
    return "unreadable" if isinstance(reading, Unreadable) else str(reading)


def _finding(number: int, finding: Finding, scene: Scene) -> list[str]:
    lines = _wrap(f"{number}. [{_MARKS[finding.severity]}] {_subject(finding)}: {finding.headline}", "", "   ")
    if finding.cost is not None:
        lines += _wrap(f"Cost      {_cost(finding.cost, scene)}", "   ", "             ")
    for evidence in finding.evidence:
        lines += _wrap(f"Evidence  {evidence.what}: {evidence.value}  ({evidence.source})", "   ", "             ")
    lines += _wrap(f"Sure      {_SURE[finding.certainty]}", "   ", "             ")
    lines += _wrap(f"Fix       {finding.fix}", "   ", "             ")
    lines += _wrap(f"Proof     a: {finding.proof.a}", "   ", "             ")
    lines += _wrap(f"          b: {finding.proof.b}", "   ", "             ")
    lines += _wrap(f"          expect {finding.proof.expect}", "   ", "             ")
    if finding.reference:
        lines += _wrap(f"See       {finding.reference}", "   ", "             ")
    return lines


def _subject(finding: Finding) -> str:
    """The subject, with long lists cut; the JSON page has all of them."""
    parts = finding.subject.split(", ")
    if len(parts) <= _MAX_SUBJECTS:
        return finding.subject
    return ", ".join(parts[:_MAX_SUBJECTS]) + f" and {len(parts) - _MAX_SUBJECTS} more"


def _cost(cost: Cost, scene: Scene) -> str:
    text = (
        f"{format_bandwidth(cost.actual_bytes_per_s)} instead of {format_bandwidth(cost.expected_bytes_per_s)}, "
        f"{format_bandwidth(cost.lost_bytes_per_s)} lost ({cost.basis})"
    )
    if scene.wire_bytes_per_step is None:
        return text
    most = cost.lost_seconds(scene.wire_bytes_per_step)
    if scene.compute_seconds_per_step is None:
        return f"{text}; up to {format_seconds(most)} a step if nothing hides the wire"
    least = cost.least_lost_seconds(scene.wire_bytes_per_step, scene.compute_seconds_per_step)
    return (
        f"{text}; {format_seconds(least)} a step if compute hides all it can, {format_seconds(most)} if nothing hides "
        "the wire"
    )


def _measured(scene: Scene) -> list[str]:
    lines = ["Measured"]
    for found in scene.measurements:
        result = found.problem or format_bandwidth(found.bytes_per_s)
        over = f" over {found.transport}" if found.transport else ""
        idle = "" if found.nvlink_bytes is None else f", NVLink moved {format_bytes(found.nvlink_bytes)}"
        lines += _wrap(f"{found.kind} {found.variant}, GPUs {','.join(map(str, found.gpus))}, "
                       f"{format_bytes(found.num_bytes)}{over}: {result}{idle}", "  ", "    ")  # fmt: skip
    return lines


def _gap(gap: Gap) -> list[str]:
    tail = f" To read it: {gap.command}" if gap.command else ""
    weight = "" if gap.essential else " (corroboration only)"
    return _wrap(f"{gap.what}: {gap.why}{weight}.{tail}", "  - ", "    ")


def _wrap(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False,
                         break_on_hyphens=False, replace_whitespace=True, drop_whitespace=True) or [first]  # fmt: skip


def to_json(diagnosis: Diagnosis) -> str:
    """The page for machines: one JSON object. Bytes a second and seconds; see `docs/doctor.md` for the fields."""
    return json.dumps(to_plain(diagnosis), indent=2) + "\n"


def to_plain(diagnosis: Diagnosis) -> dict[str, Any]:
    """The same as plain data."""
    scene = diagnosis.scene
    return {
        "schema": SCHEMA,
        "verdict": diagnosis.verdict.name.lower(),
        "exit_code": diagnosis.exit_code,
        "machine": {
            "hostname": scene.machine.hostname,
            "looked_at": not diagnosis.machine_skipped,
            "gpus": [{"index": card.index, "name": card.name, "address": card.address} for card in scene.cards],
            "nccl_version": None if isinstance(scene.nccl_version, Unreadable) else _version(scene),
        },
        "transports": [
            {"gpus": [found.pair.a, found.pair.b], "transport": found.transport, "reason": found.reason,
             "switch": found.switch or None, "nvlink": found.joined_by_nvlink}
            for found in scene.known_predictions
        ],
        "findings": [_plain_finding(finding, scene) for finding in diagnosis.findings],
        "notes": [_plain_finding(finding, scene) for finding in diagnosis.notes],
        "gaps": [
            {"check": gap.check, "what": gap.what, "why": gap.why, "command": gap.command or None,
             "essential": gap.essential}
            for gap in diagnosis.gaps
        ],
        "measurements": [
            {"kind": m.kind, "variant": m.variant, "gpus": list(m.gpus), "bytes": m.num_bytes,
             "bytes_per_s": m.bytes_per_s, "transport": m.transport or None, "seconds_p50": m.seconds_p50,
             "seconds_p95": m.seconds_p95, "data_is_right": m.data_is_right, "problem": m.problem or None,
             "nvlink_bytes": m.nvlink_bytes}
            for m in scene.measurements
        ],
        "checks": list(diagnosis.looked),
    }  # fmt: skip


def _plain_finding(finding: Finding, scene: Scene) -> dict[str, Any]:
    cost, wire_bytes, compute = finding.cost, scene.wire_bytes_per_step, scene.compute_seconds_per_step
    return {
        "check": finding.check,
        "subject": finding.subject,
        "severity": finding.severity.name.lower(),
        "certainty": finding.certainty.name.lower(),
        "headline": finding.headline,
        "evidence": [{"what": e.what, "value": e.value, "source": e.source} for e in finding.evidence],
        "cost": None if cost is None else {
            "actual_bytes_per_s": cost.actual_bytes_per_s,
            "expected_bytes_per_s": cost.expected_bytes_per_s,
            "lost_bytes_per_s": cost.lost_bytes_per_s,
            "basis": cost.basis,
            "lost_seconds_per_step": None if wire_bytes is None else cost.lost_seconds(wire_bytes),
            "least_lost_seconds_per_step": None
            if wire_bytes is None or compute is None
            else cost.least_lost_seconds(wire_bytes, compute),
        },
        "fix": finding.fix,
        "proof": {"a": finding.proof.a, "b": finding.proof.b, "expect": finding.proof.expect},
        "reference": finding.reference or None,
    }  # fmt: skip
