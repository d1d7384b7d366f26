"""NVLink SHARP (NVLS): multicast that fails, and fabrics that were not ready for it."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity
from shardwise.doctor.scene import Scene

_SLOTS = 128


def look(scene: Scene) -> Iterator[Answer]:
    """Reads the log, and experiments that hang with NVLS only."""
    log = scene.log
    if log is not None:
        for notice in log.notices_of("nvls_failure"):
            yield _finding(
                "NVLS multicast failed",
                Evidence(what="NCCL", value=notice.text, source=f"log of {notice.host}"),
                "Set NCCL_NVLS_ENABLE=0; then restart the Fabric Manager and reset the GPUs.",
                "NVIDIA/nccl#976, NVIDIA/nccl#1488, NVIDIA/nccl-tests#216",
            )
        for notice in log.notices_of("fabric_not_ready"):
            yield _finding(
                "the NVSwitch fabric was not ready",
                Evidence(what="NCCL", value=notice.text, source=f"log of {notice.host}"),
                "Start the Fabric Manager of the driver's own version, then reset the GPUs.",
                "NVIDIA/nccl-tests#264",
            )
        if log.nvls_groups > _SLOTS:
            yield _finding(
                f"{log.nvls_groups} multicast groups were asked for, the switches have {_SLOTS}",
                Evidence(what="groups created", value=str(log.nvls_groups), source="log"),
                "Set NCCL_NVLS_ENABLE=0 for jobs with many groups.",
                "NVIDIA/nccl#2077",
            )
    stuck = [m for m in scene.measurements if m.variant in ("as_set", "no_switches") and m.problem]
    free = [m for m in scene.measurements if m.variant == "nvls_off" and m.is_good]
    if stuck and free:
        yield _finding(
            "collectives finish only with NVLS off",
            Evidence(what=stuck[0].variant, value=stuck[0].problem, source="experiment"),
            "Set NCCL_NVLS_ENABLE=0; then look at the Fabric Manager.",
            "NVIDIA/nccl#1197",
        )


def _finding(headline: str, evidence: Evidence, fix: str, reference: str) -> Finding:
    return Finding(
        check=CHECK.id,
        subject="NVLS",
        severity=Severity.FAULT,
        certainty=Certainty.MEASURED if evidence.source == "experiment" else Certainty.READ,
        headline=headline,
        evidence=(evidence,),
        fix=fix,
        proof=AbTest(
            a="shardwise doctor --run",
            b="NCCL_NVLS_ENABLE=0 shardwise doctor --run",
            expect="b finishes; all_reduce on 8 cards is up to a quarter slower",
        ),
        reference=reference,
    )


CHECK = Check(id="nvls", title="NVLink SHARP multicast", reads=("log", "experiments (--run)"), look=look, of_log=True)
