"""The network interface that NCCL takes by itself: first `ib*`, then nearly anything, also bridges and VPNs."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.checks.common import network_severity
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity, gap
from shardwise.doctor.scene import Scene
from shardwise.facts.machine.record import NetInterface, Unreadable

_VIRTUAL = ("docker", "br-", "veth", "cni", "flannel", "cali", "virbr", "vmnet", "lxc", "lxd", "podman", "lo")
_TUNNELS = ("tailscale", "wg", "tun", "tap", "zt", "nebula", "ppp", "utun", "vxlan", "geneve")
_MUCH_FASTER = 5.0


def look(scene: Scene) -> Iterator[Answer]:
    """Repeats NCCL's choice and judges its first interface."""
    if isinstance(scene.machine.interfaces, Unreadable):
        if scene.several_nodes:
            yield gap(CHECK.id, "the network interfaces", scene.machine.interfaces)
        return
    wanted = scene.switches.value("NCCL_SOCKET_IFNAME")
    usable = [found for found in scene.interfaces if found.addresses and found.operstate != "down"]
    chosen = choose(usable, wanted)
    if wanted and not chosen:
        yield _finding(
            scene,
            wanted,
            f"NCCL_SOCKET_IFNAME={wanted} matches no interface with an address; NCCL stops",
            usable,
            "Name an interface that exists on every host, or unset it.",
            Severity.FAULT,
        )
        return
    if not chosen or _logged_otherwise(scene, chosen[0]):
        yield from _logged(scene, usable)
        return
    first = chosen[0]
    kind = _kind(first.name)
    physical = [found for found in usable if found.has_device or found.is_bond]
    if kind and first.name != "lo":
        name = physical[0].name if physical else "<interface>"
        yield _finding(
            scene,
            first.name,
            f"NCCL takes {first.name}, {kind}",
            usable,
            f"Set NCCL_SOCKET_IFNAME={name} on every host (in its environment or in /etc/nccl.conf).",
        )
    elif not wanted and (faster := _faster(first, physical)) is not None:
        yield _finding(
            scene,
            first.name,
            f"NCCL takes {first.name}, while {faster.name} is much faster",
            usable,
            f"Set NCCL_SOCKET_IFNAME={faster.name} on every host.",
        )


def _logged_otherwise(scene: Scene, first: NetInterface) -> bool:
    """Whether the log shows another first interface on this machine than the one that would be taken now."""
    return any(name != first.name for name in _logged_first(scene))


def _logged_first(scene: Scene) -> list[str]:
    if scene.log is None:
        return []
    return [
        found.devices[0].name
        for found in scene.log.devices
        if found.network == "Socket" and found.devices and found.host in scene.local_hosts
    ]


def _logged(scene: Scene, usable: list[NetInterface]) -> Iterator[Finding]:
    for name in dict.fromkeys(_logged_first(scene)):
        if (kind := _kind(name)) and name != "lo":
            yield _finding(
                scene,
                name,
                f"NCCL took {name}, {kind}",
                usable,
                "Set NCCL_SOCKET_IFNAME to the real interface on every host.",
            )


def choose(usable: list[NetInterface], wanted: str) -> list[NetInterface]:
    """The interfaces that NCCL takes, in its order: by its variable, else ib*, else the rest, docker and lo last.

    A leading `=` in the variable asks for whole names, a leading `^` excludes.
    """
    if wanted:
        exclude, exact = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
        names = wanted.lstrip("^=").split(",")

        def matches(name: str) -> bool:
            return any(name == word if exact else name.startswith(word) for word in names if word)

        return [found for found in usable if matches(found.name) != exclude]
    tiers = (
        [found for found in usable if found.name.startswith("ib")],
        [found for found in usable if not found.name.startswith(("docker", "lo", "virbr"))],
        [found for found in usable if found.name.startswith("docker")],
        [found for found in usable if found.name.startswith("lo")],
        [found for found in usable if found.name.startswith("virbr")],
    )
    return next((tier for tier in tiers if tier), [])


def _kind(name: str) -> str:
    if name.startswith(_TUNNELS):
        return "a VPN or tunnel"
    return "a virtual bridge that other hosts cannot reach" if name.startswith(_VIRTUAL) else ""


def _faster(first: NetInterface, physical: list[NetInterface]) -> NetInterface | None:
    speed = first.speed_bits_per_s
    if isinstance(speed, Unreadable) or speed is None:
        return None
    rates = {found.name: found.speed_bits_per_s for found in physical}
    for found in physical:
        other = rates[found.name]
        if isinstance(other, float) and other >= _MUCH_FASTER * speed:
            return found
    return None


def _finding(
    scene: Scene, name: str, headline: str, usable: list[NetInterface], fix: str, severity: Severity | None = None
) -> Finding:
    listed = ", ".join(f"{found.name} {_speed(found)}" for found in usable) or "none"
    return Finding(
        check=CHECK.id,
        subject=name,
        severity=network_severity(scene) if severity is None else severity,
        certainty=Certainty.INFERRED,
        headline=headline,
        evidence=(Evidence(what="interfaces with an address", value=listed, source="/sys/class/net"),),
        fix=fix,
        proof=AbTest(
            a="NCCL_DEBUG=INFO torchrun ... (two machines)",
            b="the same with NCCL_SOCKET_IFNAME",
            expect="`NET/Socket : Using [0]` and `Bootstrap: Using` name the real interface",
        ),
        reference="horovod/horovod#310, horovod/horovod#636",
    )


def _speed(found: NetInterface) -> str:
    speed = found.speed_bits_per_s
    return "" if isinstance(speed, Unreadable) or speed is None else f"({speed / 1e9:g} Gb/s)"


CHECK = Check(
    id="interface",
    title="The network interface that NCCL takes",
    reads=("/sys/class/net", "addresses", "NCCL_SOCKET_IFNAME", "log"),
    look=look,
)
