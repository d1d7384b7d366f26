"""Whether a switch can matter on this machine at all: a red herring is no finding, and no reason for an experiment."""

from __future__ import annotations

from shardwise.doctor.scene import Scene
from shardwise.doctor.switches import Setting, Variable
from shardwise.doctor.thresholds import value
from shardwise.facts.machine.record import Unreadable

_HOPPER = (9, 0)
_MOST_CHANNELS = 64
"""NCCL's MAXCHANNELS; a limit at or above it limits nothing."""
_DEFAULTS = {"NCCL_BUFFSIZE": "4194304", "NCCL_NTHREADS": "512"}
"""What NCCL takes on current cards by itself (user guide, environment variables)."""


def why_no_effect(scene: Scene, variable: Variable, setting: Setting) -> str | None:
    """Why a switch rules nothing on this hardware; None if it may."""
    if variable.scope in ("p2p", "intra"):
        return _inside(scene, variable)
    if variable.scope in ("network", "verbs"):
        return _between(scene, variable, setting)
    if variable.scope == "nvls":
        return _multicast(scene)
    return _everywhere(scene, variable, setting) if variable.scope == "any" else None


def _inside(scene: Scene, variable: Variable) -> str | None:
    if _few_cards(scene):
        return "there are not two cards"
    predictions = scene.known_predictions
    if variable.scope == "p2p" and predictions and not any(found.p2p_possible for found in predictions):
        return "the driver lets no two of these cards reach each other anyway"
    return None


def _between(scene: Scene, variable: Variable, setting: Setting) -> str | None:
    if scene.several_nodes is False:
        return "the job runs on one machine"
    without_adapter = not scene.ib_ports and not isinstance(scene.machine.ib_ports, Unreadable)
    if not without_adapter:
        return None
    if variable.scope == "verbs":
        return "this machine has no InfiniBand or RoCE adapter"
    if variable.name == "NCCL_NET" and setting.value.lower() == "socket":
        return "this machine has no InfiniBand or RoCE adapter, so NCCL takes TCP anyway"
    if variable.name == "NCCL_PXN_DISABLE":
        return "this machine has no InfiniBand or RoCE adapter to send through"
    return None


def _multicast(scene: Scene) -> str | None:
    """NVLS adds up all_reduce in the switches; below a number of cards NCCL takes a ring even where it could."""
    if isinstance(scene.machine.gpus, Unreadable):
        return None
    switched = any(
        not isinstance(card.compute_capability, Unreadable)
        and card.compute_capability >= _HOPPER
        and not isinstance(card.nvlinks, Unreadable)
        and any(link.remote_is_switch is True for link in card.nvlinks)
        for card in scene.cards
    )
    if not switched:
        return "these cards have no NVLink switch with multicast"
    return _too_few_for_nvls(scene)


def _too_few_for_nvls(scene: Scene) -> str | None:
    least = int(value("nvls_min_cards"))
    if len(scene.cards) < least:
        return f"with {len(scene.cards)} cards NCCL takes a ring anyway; NVLS wins from {least} or 6 cards up"
    return None


def _everywhere(scene: Scene, variable: Variable, setting: Setting) -> str | None:
    if _few_cards(scene) and not scene.several_nodes:
        return "there are not two cards, and nothing says that the job spans machines"
    if variable.name in ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS") and _number(setting.value) >= _MOST_CHANNELS:
        return f"NCCL never takes more than {_MOST_CHANNELS}"
    if _DEFAULTS.get(variable.name) == setting.value:
        return "this is what NCCL takes by itself"
    one_machine = scene.several_nodes is False or (scene.several_nodes is None and len(scene.cards) > 1)
    nvlink = any(found.joined_by_nvlink for found in scene.known_predictions)
    if variable.name == "NCCL_PROTO" and not nvlink and one_machine and _allows(setting.value, "ll", "simple"):
        return "LL128 runs over NVLink only, and the others are allowed"
    if variable.name == "NCCL_ALGO" and one_machine and _allows(setting.value, "ring") and _readable(scene):
        return _too_few_for_nvls(scene) if nvlink else "large messages inside a machine go by ring anyway"
    return None


def _readable(scene: Scene) -> bool:
    return not isinstance(scene.machine.gpus, Unreadable)


def _few_cards(scene: Scene) -> bool:
    return _readable(scene) and len(scene.cards) < 2


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _allows(text: str, *names: str) -> bool:
    """Whether a list of NCCL_ALGO or NCCL_PROTO (`Ring,Tree`, or `^LL128` for all but these) leaves all of `names`."""
    excluded = text.startswith("^")
    listed = {word.strip() for word in text.lower().lstrip("^").split(",")}
    if ":" in text:
        return False  # per collective; too fine to wave through
    return all((name in listed) != excluded for name in names)
