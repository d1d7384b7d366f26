"""Pairs whose driver, chipset or card refuses direct access to each other's memory."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.findings import AbTest, Answer, Certainty, Evidence, Finding, Severity
from shardwise.doctor.scene import Scene
from shardwise.facts.machine.record import GpuPair, P2pStatus, PathType, Unreadable

_GEFORCE = ("RTX 40", "RTX 50")


def look(scene: Scene) -> Iterator[Answer]:
    """A finding per pair that is refused for a reason that can be removed; a note where the card cannot do it."""
    for pair in scene.machine.pairs:
        if isinstance(pair.read, Unreadable) or isinstance(pair.write, Unreadable):
            continue  # the inventory says so
        worst = max(pair.read, pair.write)
        if pair.one_way:
            yield _finding(
                scene,
                pair,
                Severity.FAULT,
                "the driver allows P2P in one direction only",
                "Reset the GPUs or reboot; then look for a driver update.",
            )
        elif worst != P2pStatus.OK:
            yield _refused(scene, pair, worst)
    if scene.log is not None:
        for notice in scene.log.notices_of("p2p_refused_nvlink"):
            yield Finding(
                check=CHECK.id,
                subject=f"GPU {notice.value('a')} - GPU {notice.value('b')}",
                severity=Severity.FAULT,
                certainty=Certainty.READ,
                headline="P2P is refused between cards joined by NVLink; NCCL stops",
                evidence=(Evidence(what="NCCL", value=notice.text, source=f"log of {notice.host}"),),
                fix="Reset the GPUs or reboot; if it stays, check the bridge or the baseboard.",
                proof=AbTest(a="nvidia-smi topo -p2p r", b="the same after a reboot", expect="OK between the two"),
            )


def _refused(scene: Scene, pair: GpuPair, status: P2pStatus) -> Finding:
    if pair.path == PathType.NVLINK:
        return _finding(
            scene,
            pair,
            Severity.FAULT,
            "P2P is refused although NVLink joins the cards; NCCL stops here",
            "Reset the GPUs or reboot; if it stays, check the bridge or the baseboard.",
        )
    names = {scene.cards[index].name for index in (pair.a, pair.b)}
    if len(names) > 1:
        return _finding(
            scene,
            pair,
            Severity.NOTE,
            "no P2P between different models of card",
            "Nothing to repair. Keep each tensor or shard group on equal cards.",
        )
    if status == P2pStatus.REGKEY:
        return _finding(
            scene,
            pair,
            Severity.LOSS,
            "P2P is switched off by an option of the driver module",
            "Look for NVreg_RegistryDwords in /etc/modprobe.d and remove what forces P2P off; reload the driver.",
        )
    virtual = isinstance(scene.machine.virtual_machine, str) and scene.machine.virtual_machine
    if status == P2pStatus.CHIPSET and virtual:
        return _finding(
            scene,
            pair,
            Severity.LOSS,
            "the driver refuses P2P because it does not know the VM's chipset",
            "On the host, give both cards one clique: x-nv-gpudirect-clique on the vfio-pci devices. Then "
            "test a real all_reduce before use.",
        )
    if any(word in name for name in names for word in _GEFORCE):
        return _finding(
            scene,
            pair,
            Severity.NOTE,
            "GeForce cards of the 40 and 50 series have no P2P in NVIDIA's driver; data goes through host memory",
            "Nothing to repair. A patched open driver can enable it; test data and hangs first.",
        )
    if status in (P2pStatus.CHIPSET, P2pStatus.TOPOLOGY):
        return _finding(
            scene,
            pair,
            Severity.LOSS,
            "the driver refuses P2P across this chipset or topology",
            "Move the cards below one root complex, or update BIOS and driver.",
        )
    return _finding(
        scene,
        pair,
        Severity.NOTE,
        "this card does not support P2P; data goes through host memory",
        "Nothing to repair.",
    )


def _finding(scene: Scene, pair: GpuPair, severity: Severity, headline: str, fix: str) -> Finding:
    return Finding(
        check=CHECK.id,
        subject=scene.pair_name(pair),
        severity=severity,
        certainty=Certainty.READ,
        headline=headline,
        evidence=(
            Evidence(what="read", value=_name(pair.read), source="NVML P2P status"),
            Evidence(what="write", value=_name(pair.write), source="NVML P2P status"),
        ),
        fix=fix,
        proof=AbTest(a="nvidia-smi topo -p2p r", b="the same after the fix", expect="OK between the two cards"),
        cost=scene.cost(pair, "SHM", "P2P") if severity is Severity.LOSS else None,
        reference="NVIDIA/nccl-tests#117, aikitoria/open-gpu-kernel-modules#6",
    )


def _name(status: P2pStatus | Unreadable) -> str:
    return status.why if isinstance(status, Unreadable) else status.name


CHECK = Check(
    id="p2p-refused",
    title="P2P refused by the driver",
    reads=("NVML P2P status (read, write)", "log"),
    look=look,
    of_log=True,
)
