"""What several checks need."""

from __future__ import annotations

from shardwise.doctor.findings import Severity
from shardwise.doctor.scene import Scene


def network_severity(scene: Scene) -> Severity:
    """How bad a fault of the network is: a loss for a job on several machines, a note for one that never leaves one."""
    if scene.several_nodes is None:
        return Severity.RISK
    return Severity.LOSS if scene.several_nodes else Severity.NOTE
