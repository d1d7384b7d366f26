"""Every machine of the catalog gives exactly its findings, its notes and its gaps."""

from __future__ import annotations

from pathlib import Path

import pytest
from machines.builder import build
from machines.catalog import CASES, Case

from shardwise.doctor.checks import ALL_CHECKS
from shardwise.doctor.diagnose import Diagnosis, DoctorOptions, Verdict, diagnose, gather
from shardwise.doctor.diagnose import examine as run_checks
from shardwise.doctor.report import render_text, to_plain
from shardwise.facts.machine import read_machine


def examine(case: Case, tmp_path: Path) -> Diagnosis:
    root = build(tmp_path / "machine", case.spec)
    options: dict[str, object] = {}
    if case.log:
        (tmp_path / "nccl.log").write_text(case.log)
        options["log"] = tmp_path / "nccl.log"
    if case.env_file:
        (tmp_path / "job.env").write_text(case.env_file)
        options["env_files"] = (tmp_path / "job.env",)
    told = DoctorOptions(root=root, pids=tuple(case.pids), wire_bytes_per_step=10**10, **options)  # type: ignore[arg-type] # two known fields
    if case.measurements:
        machine = read_machine(root, pids=told.pids)
        scene = gather(machine, case.spec.environment, None, told, tuple(case.measurements))
        return run_checks(scene, ALL_CHECKS)
    return diagnose(told, environment=case.spec.environment)


@pytest.mark.parametrize("name", CASES)
def test_machine_gives_exactly_its_findings(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    found = examine(case, tmp_path)
    page = render_text(found)
    assert not found.crashed
    assert {finding.check for finding in found.findings} == set(case.findings), page
    assert {note.check for note in found.notes} == set(case.notes), page
    assert {gap.check for gap in found.gaps if gap.essential} == set(case.gaps), page
    told = " ".join(f"{f.headline} {f.fix}" for f in (found.findings or found.notes))
    for words in case.words:
        assert words in told, page


@pytest.mark.parametrize("name", CASES)
def test_verdict_follows_from_what_was_found(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    found = examine(case, tmp_path)
    wanted = Verdict.FINDINGS if case.findings else Verdict.COULD_NOT_LOOK if case.gaps else Verdict.HEALTHY
    assert found.verdict is wanted
    assert found.exit_code == to_plain(found)["exit_code"] == int(wanted)
    assert ("Healthy" in render_text(found)) == (wanted is Verdict.HEALTHY and not found.gaps)


def test_every_finding_has_evidence_a_fix_and_a_proof(tmp_path: Path) -> None:
    for name, case in CASES.items():
        found = examine(case, tmp_path / name)
        for finding in (*found.findings, *found.notes):
            assert finding.evidence, finding
            assert finding.fix.endswith((".", ")", "=0000")) or "setpci" in finding.fix, finding.fix
            assert finding.proof.a != finding.proof.b, finding
            assert finding.proof.expect, finding
            assert finding.subject, finding


def test_every_check_has_a_machine_on_which_it_speaks() -> None:
    spoken = {check for case in CASES.values() for check in (*case.findings, *case.notes, *case.gaps)}
    assert spoken == {check.id for check in ALL_CHECKS}


def test_there_are_enough_machines_and_healthy_ones_among_them() -> None:
    assert len(CASES) >= 20
    assert sum(not case.findings and not case.gaps for case in CASES.values()) >= 8
