"""Hosts that cannot reach each other, or that look like one and the same to NCCL."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity
from shardwise.doctor.nccl_log.records import NoticeKind
from shardwise.doctor.scene import Scene

_MEANINGS: dict[NoticeKind, tuple[str, str]] = {
    "no_route": (
        "a host cannot be reached: no route (a firewall answers so too)",
        "Open the ports between the hosts, or narrow net.ipv4.ip_local_port_range to those that are open.",
    ),
    "connection_refused": (
        "a connection was refused: another rank died first, or a firewall answered",
        "Look for the first error in the other ranks' logs; then open the ports between the hosts.",
    ),
    "connection_timeout": (
        "a connection timed out",
        "Check that the chosen interface is one that all hosts share, and that its ports are open.",
    ),
    "no_socket_interface": (
        "NCCL found no network interface",
        "Set NCCL_SOCKET_IFNAME to an interface with an address on every host.",
    ),
}


def look(scene: Scene) -> Iterator[Answer]:
    """Reads the log for refusals; the connection test itself needs the other host (see the proof)."""
    if scene.log is not None:
        for notice in scene.log.notices_of(*_MEANINGS):
            headline, fix = _MEANINGS[notice.kind]
            yield _finding(
                notice.host or "a host",
                Severity.FAULT,
                headline,
                fix,
                Evidence(what="NCCL", value=notice.text, source=f"log of {notice.host}"),
            )
    if scene.several_nodes and scene.machine.hostname in ("localhost", "localhost.localdomain"):
        yield _finding(
            scene.machine.hostname,
            Severity.RISK,
            "this machine is called localhost; NCCL may take two such machines for one",
            "Give every machine a name of its own (hostnamectl set-hostname), or set NCCL_HOSTID.",
            Evidence(what="host name", value=scene.machine.hostname, source="gethostname"),
        )


def _finding(subject: str, severity: Severity, headline: str, fix: str, evidence: Evidence) -> Finding:
    return Finding(
        check=CHECK.id,
        subject=subject,
        severity=severity,
        certainty=Certainty.READ,
        headline=headline,
        evidence=(evidence,),
        fix=fix,
        proof=AbTest(
            a="nc -l 42517 (on one host), nc -zv <host> 42517 (on the other); then the other way round",
            b="the same after the fix",
            expect="succeeded, both ways",
        ),
        reference="NVIDIA/nccl#1105, sgl-project/sglang#3820",
    )


CHECK = Check(id="reachability", title="Hosts reach each other", reads=("log", "host name"), look=look, of_log=True)
