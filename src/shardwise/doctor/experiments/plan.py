"""Which collectives are run, with which switches, on which cards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.doctor.relevance import why_no_effect
from shardwise.doctor.scene import Scene
from shardwise.doctor.switches import variables
from shardwise.doctor.thresholds import value
from shardwise.doctor.transport import default_level
from shardwise.facts.machine.record import Unreadable
from shardwise.vocabulary.units import GIB, MIB

COLLECTIVE_BYTES = (64 * MIB, GIB)
OPS = ("all_reduce", "all_gather", "reduce_scatter")
_LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One start of the child processes."""

    variant: str
    environment: Mapping[str, str]
    ops: tuple[str, ...] = ("all_reduce",)
    sizes: tuple[int, ...] = COLLECTIVE_BYTES
    backend: str = "nccl"
    """nccl on cards, gloo on CPU tensors."""


def visible_cards(scene: Scene) -> tuple[int, ...]:
    """NVML indices of the cards that CUDA will show, in its order."""
    wanted = scene.environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return tuple(card.index for card in scene.cards)
    by_uuid = {card.uuid: card.index for card in scene.cards if isinstance(card.uuid, str)}
    known = {card.index for card in scene.cards}
    found: list[int] = []
    for word in filter(None, wanted.split(",")):
        index = int(word) if word.isdigit() else next((i for uuid, i in by_uuid.items() if uuid.startswith(word)), -1)
        if index not in known:
            break  # CUDA stops at the first entry that it cannot resolve
        found.append(index)
    return tuple(found)


def base_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The shell's environment without a launcher's variables; cards in the order of PCI addresses, as NVML has them."""
    base = {name: value for name, value in environment.items() if name not in _LAUNCHER_NAMES}
    base["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return base


def plan_trials(scene: Scene, base: Mapping[str, str], *, risky: bool) -> tuple[Trial, ...]:
    """The collectives to run, safest first. Each costs a start of all ranks, so none is run that shows nothing new."""
    clean = _without_switches(scene, base)
    trials: list[Trial] = []
    host_memory = scene.switches.is_on("NCCL_P2P_DISABLE") and not scene.switches.is_on("NCCL_SHM_DISABLE")
    if not host_memory:  # else that is what `as_set` measures
        trials.append(Trial(variant="p2p_off", environment={**clean, "NCCL_P2P_DISABLE": "1"}, sizes=(64 * MIB,)))
    trials.append(Trial(variant="as_set", environment=_as_set(scene, base), ops=OPS))
    if _suspects(scene):
        trials.append(Trial(variant="no_switches", environment=clean))
    nvlink = any(found.joined_by_nvlink for found in scene.known_predictions)
    if nvlink and len(scene.cards) >= int(value("nvls_min_cards")):  # with fewer cards NCCL takes a ring by itself
        trials.append(Trial(variant="ring", environment={**clean, "NCCL_ALGO": "Ring"}, sizes=COLLECTIVE_BYTES[-1:]))
    kept_apart = [found for found in scene.known_predictions if found.reason == "level_rule" and found.p2p_possible]
    if risky and kept_apart:
        trials.append(Trial(variant="forced_p2p", environment={**clean, "NCCL_P2P_LEVEL": "SYS"}))
    return tuple(trials)


def _suspects(scene: Scene) -> bool:
    """Whether a switch in force may take bandwidth away here."""
    known = variables()
    return any(
        name in known
        and known[name].takes_bandwidth(setting.value)
        and why_no_effect(scene, known[name], setting) is None
        for name, setting in scene.switches.in_force.items()
    )


def _as_set(scene: Scene, base: Mapping[str, str]) -> dict[str, str]:
    """With the switches in force, wherever they were found: a rank's environment and files count here too."""
    environment = dict(base)
    for name, setting in scene.switches.in_force.items():
        variable = variables().get(name)
        if variable is not None and variable.scope != "quiet" and "$" not in setting.value:
            environment[name] = setting.value
    return environment


def _without_switches(scene: Scene, base: Mapping[str, str]) -> dict[str, str]:
    """Without any of NCCL's variables. /etc/nccl.conf cannot be left out, so what it sets is set back."""
    environment = {name: value for name, value in base.items() if not name.startswith("NCCL_")}
    environment["NCCL_CONF_FILE"] = "/dev/null"
    conf = next((file for file in scene.machine.conf_files if file.path == "/etc/nccl.conf"), None)
    for name, _ in () if conf is None or isinstance(conf.settings, Unreadable) else conf.settings:
        if name.endswith("_DISABLE"):
            environment[name] = "0"
        elif name == "NCCL_P2P_LEVEL" and not isinstance(scene.nccl_version, Unreadable):
            vendor = scene.machine.cpu.vendor if isinstance(scene.machine.cpu.vendor, str) else ""
            environment[name] = default_level(scene.nccl_version, vendor, len(scene.cards))
    return environment
