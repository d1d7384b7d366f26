"""Names that NCCL ignores because they are misspelt, and values that it does not understand."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity
from shardwise.doctor.scene import Scene
from shardwise.doctor.switches import Setting, misspelt, variables
from shardwise.doctor.transport import parse_level

_NUMBERS = ("_DISABLE", "_ENABLE", "_NCHANNELS", "_NTHREADS", "_BUFFSIZE", "_CTAS", "_TIMEOUT", "_RETRY_CNT", "_NIC")
_LEVELS = ("NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL")


def look(scene: Scene) -> Iterator[Answer]:
    """Findings for misspelt names and values without meaning; a note for names that nobody knows."""
    for setting in scene.switches.in_force.values():
        meant = misspelt(setting.name)
        if meant:
            yield _finding(
                setting,
                Severity.RISK,
                f"{setting.name} is ignored by NCCL; {meant} was probably meant",
                f"Write {meant}={setting.value}, or remove it.",
                f"{meant}={setting.value} shardwise doctor --run",
            )
        elif setting.name not in variables():
            yield _finding(
                setting,
                Severity.NOTE,
                f"{setting.name} is no variable that NCCL 2.4 to 2.30 is known to read",
                "Check the spelling in NCCL's user guide.",
                f"env -u {setting.name} shardwise doctor --run",
            )
        elif (problem := _bad_value(setting)) is not None:
            yield _finding(
                setting,
                Severity.RISK,
                f"{setting.name}={setting.value}: {problem}",
                "Write a value that NCCL reads.",
                f"env -u {setting.name} shardwise doctor --run",
            )
    for notice in () if scene.log is None else scene.log.notices_of("invalid_switch_value"):
        yield _finding(
            Setting(name=notice.value("name"), value=notice.value("value"), source=f"log of {notice.host}"),
            Severity.RISK,
            f"NCCL could not read {notice.value('name')}={notice.value('value')} and took {notice.value('default')}",
            "Write a value that NCCL reads.",
            f"env -u {notice.value('name')} shardwise doctor --run",
        )


def _bad_value(setting: Setting) -> str | None:
    value = setting.value
    if "$" in value or "`" in value or value == "":
        return None
    if setting.name in _LEVELS and parse_level(value) is None:
        return "no level that NCCL knows (LOC NVL PIX PXB PHB SYS, or 0 to 4); it takes the default instead"
    if setting.name.endswith(_NUMBERS):
        try:
            int(value, 0)
        except ValueError:
            return "not a number; NCCL reads it as 0"
    return None


def _finding(setting: Setting, severity: Severity, headline: str, fix: str, other: str) -> Finding:
    return Finding(
        check=CHECK.id,
        subject=setting.name,
        severity=severity,
        certainty=Certainty.READ,
        headline=headline,
        evidence=(Evidence(what=setting.name, value=setting.value, source=setting.source),),
        fix=fix,
        proof=AbTest(
            a="NCCL_DEBUG=INFO shardwise doctor --run",
            b=f"NCCL_DEBUG=INFO {other}" if not other.startswith("env ") else other,
            expect="NCCL prints `set by environment` for a variable that it reads",
        ),
    )


CHECK = Check(
    id="switch-names",
    title="Misspelt switches and values without meaning",
    reads=("environment", "conf files", "log"),
    look=look,
    of_log=True,
)
