"""NCCL's switches in force: which cost bandwidth here, and which are red herrings.

Launchers set some of them: `accelerate launch` sets NCCL_P2P_DISABLE and NCCL_IB_DISABLE on RTX 40 cards with drivers
before 550.40.07. So the environment that counts is the rank's own, with NCCL's conf files.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity, gap
from shardwise.doctor.measurements import Measurement
from shardwise.doctor.nccl_log.records import version_numbers
from shardwise.doctor.relevance import why_no_effect
from shardwise.doctor.scene import Scene, edges_inside_hosts
from shardwise.doctor.switches import Setting, Variable, variables
from shardwise.doctor.transport import Prediction
from shardwise.vocabulary.units import format_bandwidth, format_bytes

_LAUNCHER_FIXED = (550, 40, 7)


def look(scene: Scene) -> Iterator[Answer]:
    """One finding for every switch in force whose value can take bandwidth away."""
    for source, problem in scene.switches.unreadable:
        yield gap(CHECK.id, f"the environment of {source}", problem)
    for name, setting in scene.switches.in_force.items():
        variable = variables().get(name)
        if variable is not None and variable.takes_bandwidth(setting.value) and not _told_with_p2p(scene, name):
            yield _judge(scene, variable, setting)


def _told_with_p2p(scene: Scene, name: str) -> bool:
    """Whether NCCL_SHM_DISABLE only decides what NCCL_P2P_DISABLE falls back to; that finding names both."""
    blocked = any(found.switch == "NCCL_P2P_DISABLE" and found.p2p_possible for found in scene.known_predictions)
    return name == "NCCL_SHM_DISABLE" and blocked


def _judge(scene: Scene, variable: Variable, setting: Setting) -> Finding:
    if (why := why_no_effect(scene, variable, setting)) is not None:
        return _finding(
            scene,
            variable,
            setting,
            Severity.NOTE,
            f"{variable.name}={setting.value} is set, but has no effect here: {why}",
        )
    blocked = [found for found in scene.known_predictions if found.switch == variable.name]
    blocked = [found for found in blocked if found.p2p_possible or variable.name == "NCCL_SHM_DISABLE"]
    if blocked:
        return _blocking(scene, variable, setting, blocked)
    if variable.scope in ("p2p", "intra"):
        return (
            _without_machine(scene, variable, setting)
            if not scene.known_predictions
            else _finding(
                scene,
                variable,
                setting,
                Severity.NOTE,
                f"{variable.name}={setting.value} is set and changes no transport here",
            )
        )
    severity = Severity.RISK if variable.scope in ("network", "verbs") and not scene.several_nodes else Severity.LOSS
    if variable.scope == "any" or variable.scope == "nvls":
        severity = Severity.RISK
    suffix = " (as soon as a second machine joins)" if severity is Severity.RISK and variable.scope != "any" else ""
    suffix = "" if variable.scope == "nvls" else suffix
    return _finding(scene, variable, setting, severity, f"{variable.name}={setting.value}: {variable.effect}{suffix}")


def _without_machine(scene: Scene, variable: Variable, setting: Setting) -> Finding:
    """A switch whose effect only the log can show: the machine is elsewhere, or its cards cannot be read."""
    slow = ("SHM", "NET") if variable.scope == "p2p" else ("NET",)
    inside = () if scene.log is None else edges_inside_hosts(scene.log)
    edge = next((edge for edge in inside if edge.transport in slow), None)
    headline = f"{variable.name}={setting.value}: {variable.effect}"
    if edge is None:
        return _finding(scene, variable, setting, Severity.RISK, headline)
    seen = Evidence(what=f"edge {edge.source_rank} -> {edge.target_rank}", value=edge.via, source=f"log of {edge.host}")
    return _finding(scene, variable, setting, Severity.LOSS, headline, (seen,))


def _blocking(scene: Scene, variable: Variable, setting: Setting, blocked: list[Prediction]) -> Finding:
    """A switch that keeps cards from their best transport."""
    first = next((found for found in blocked if found.joined_by_nvlink), blocked[0])
    best = "P2P" if first.p2p_possible else "SHM"
    now = "NET/Socket" if first.transport == "NET" else first.transport
    over = {"SHM": "host memory", "NET/Socket": "the network"}.get(now, now)
    instead = "NVLink" if first.joined_by_nvlink else "P2P over PCIe" if best == "P2P" else "host memory"
    idle = "NVLink lies idle: " if first.joined_by_nvlink else ""
    headline = (
        f"{idle}{variable.name}={setting.value} sends {len(blocked)} of {len(scene.machine.pairs)} pairs over {over} "
        f"instead of {instead}"
    )
    extra = [
        Evidence(what=f"{scene.pair_name(found.pair)} could use", value=instead, source="driver and topology")
        for found in blocked[:1]
    ]
    extra += _idle_nvlink(scene.measurements)
    both = [name for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if scene.switches.is_on(name)]
    if variable.name == "NCCL_P2P_DISABLE" and len(both) == 2:
        extra.append(Evidence(what="also set", value="NCCL_SHM_DISABLE=1", source="switches in force"))
    return _finding(scene, variable, setting, Severity.LOSS, headline, tuple(extra), (first, now, best))


def _idle_nvlink(measurements: tuple[Measurement, ...]) -> list[Evidence]:
    """NVLink traffic during the collective as set, next to what the collective moved."""
    for found in measurements:
        if found.kind == "all_reduce" and found.variant == "as_set" and found.nvlink_bytes is not None:
            return [
                Evidence(
                    what=f"NVLink traffic during an all_reduce of {format_bytes(found.num_bytes)}",
                    value=f"{format_bytes(found.nvlink_bytes)} at {format_bandwidth(found.bytes_per_s)} bus bandwidth",
                    source="NVML counters",
                )
            ]
    return []


def _finding(
    scene: Scene,
    variable: Variable,
    setting: Setting,
    severity: Severity,
    headline: str,
    extra: tuple[Evidence, ...] = (),
    loss: tuple[Prediction, str, str] | None = None,
) -> Finding:
    evidence = [Evidence(what=variable.name, value=setting.value, source=setting.source), *extra]
    if (hint := _launcher_hint(scene, variable)) is not None:
        evidence.append(hint)
    cost = None if loss is None else scene.cost(loss[0].pair, loss[1], loss[2])
    measured = cost is not None and cost.basis == "measured"
    names = [variable.name]
    if loss is not None and loss[1] == "NET/Socket" and scene.switches.is_on("NCCL_SHM_DISABLE"):
        names = list(dict.fromkeys([*names, "NCCL_SHM_DISABLE"]))
    return Finding(
        check=CHECK.id,
        subject=variable.name,
        severity=severity,
        certainty=Certainty.MEASURED if measured else Certainty.READ,
        headline=headline,
        evidence=tuple(evidence),
        fix=f"Unset {' and '.join(names)} {_where(setting)}."
        if severity > Severity.NOTE
        else f"Nothing to gain from {variable.name}; remove it so that it misleads nobody.",
        proof=AbTest(
            a="shardwise doctor --run",
            b=f"env {' '.join(f'-u {name}' for name in names)} shardwise doctor --run",
            expect="a higher all_reduce bus bandwidth in b" if severity > Severity.NOTE else "the same figures",
        ),
        cost=cost,
        reference="NVIDIA/nccl-tests#166, huggingface/accelerate#2328" if variable.scope == "p2p" else "",
    )


def _where(setting: Setting) -> str:
    if setting.source.startswith(("log", "process")):
        return f"where that job is started ({setting.source})"
    return f"in {setting.source}"


def _launcher_hint(scene: Scene, variable: Variable) -> Evidence | None:
    """Whether `accelerate launch` may have set it."""
    if variable.name not in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE") or len(scene.cards) < 2:
        return None
    version = scene.machine.driver.version
    old = isinstance(version, str) and (version_numbers(version) or _LAUNCHER_FIXED) < _LAUNCHER_FIXED
    if old and any("RTX 40" in card.name for card in scene.cards):
        return Evidence(
            what="who may have set it",
            value="accelerate launch does, on RTX 40 cards with a driver before 550.40.07",
            source=f"driver {version}",
        )
    return None


CHECK = Check(
    id="nccl-switches",
    title="NCCL switches in force",
    reads=("environment", "/proc/PID/environ", "$NCCL_CONF_FILE or ~/.nccl.conf", "/etc/nccl.conf", "log"),
    look=look,
    of_log=True,
)
