"""The machines: each with the findings that it must give, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.doctor.measurements import Measurement
from shardwise.vocabulary.units import GB, GIB, MIB

from .builder import (
    Card,
    Net,
    Port,
    Rank,
    Spec,
    below_switch,
    bridged_links,
    chipset_slot,
    one_root,
    own_root,
    switched_links,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A machine, what is handed to the doctor, and what it must say."""

    spec: Spec
    findings: Sequence[str] = ()
    """Checks whose findings must be there; no other may."""
    notes: Sequence[str] = ()
    words: Sequence[str] = ()
    """Each must stand in a headline or a fix of the findings (or of the notes, if there are no findings)."""
    gaps: Sequence[str] = ()
    """Checks with essential gaps."""
    log: str = ""
    measurements: Sequence[Measurement] = ()
    """Of `--run`."""
    pids: Sequence[int] = ()
    env_file: str = ""


def a6000(index: int, *, numa: int = 0) -> Card:
    return Card(name="NVIDIA RTX A6000", place=own_root(index, numa=numa), numa=numa)


def rtx3090(index: int, *, links: bool = False) -> Card:
    place, peer = one_root(index), one_root(1 - index)[-1] if index < 2 else ""
    return Card(name="NVIDIA GeForce RTX 3090", place=place, links=bridged_links(4, peer) if links else ())


def rtx4090(index: int, **changes: object) -> Card:
    return Card(name="NVIDIA GeForce RTX 4090", place=one_root(index), capability=(8, 9), **changes)  # type: ignore[arg-type] # passed through to the card


def h100(
    index: int, *, down: Sequence[int] = (), fabric: tuple[int, int] = (3, 0), name: str = "NVIDIA H100 80GB HBM3"
) -> Card:
    return Card(
        name=name,
        place=below_switch(0, switch=index % 3) if index < 3 else below_switch(index, switch=index % 3),
        capability=(9, 0),
        gen=5,
        gen_max=5,
        gen_card=5,
        links=switched_links(18, down=down),
        fabric=fabric,
    )


def hca(device: str = "mlx5_0", *, index: int = 9, switch: int = 0, **changes: object) -> Port:
    return Port(device=device, place=below_switch(index, switch=switch), **changes)  # type: ignore[arg-type] # passed through to the port


def h200_vm(count: int, **changes: object) -> Spec:
    """Cards of an HGX board lent to a virtual machine: every link is there, at a made-up place of the PCI tree."""
    cards = [
        Card(
            name="NVIDIA H200",
            place=("pci0000:00", f"0000:00:{6 + index:02x}.0"),
            capability=(9, 0),
            gen=5,
            gen_max=5,
            gen_card=5,
            links=switched_links(18),
        )
        for index in range(count)
    ]
    return Spec(cards=cards, hypervisor="Firecracker", topology_file=True, **changes)  # type: ignore[arg-type] # passed through to the spec


def eight_h100(**changes: object) -> Spec:
    return Spec(cards=[h100(index) for index in range(8)], num_cpus=64, **changes)  # type: ignore[arg-type] # passed through to the spec


A100_VM = Spec(
    cards=[
        Card(
            name="NVIDIA A100-SXM4-80GB",
            place=(f"pci000{i}:00", f"000{i}:00:00.0"),
            capability=(8, 0),
            links=switched_links(12, version=4),
            fabric=(0, 0),
        )
        for i in range(8)
    ],
    num_cpus=96,
    hypervisor="Microsoft Corporation",
    ports=[Port(device="mlx5_0", place=("pci0101:00", "0101:00:00.0"))],
    environment={"SLURM_NNODES": "1"},
)

SHM_LOG = "".join(
    f"node-a:100:20{i} [{i}] NCCL INFO Channel 00 : {i}[{i}] -> {(i + 1) % 4}[{(i + 1) % 4}] via SHM/direct/direct\n"
    for i in range(4)
)
P2P_LOG = SHM_LOG.replace("Channel 00 :", "Channel 00/0 :").replace("SHM/direct/direct", "P2P/CUMEM")
ONE_SIDED_LOG = (
    "node-a:1:2 [0] NCCL INFO comm 0x1 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0\n"
    "node-a:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/1/GDRDMA\n"
    "node-b:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [receive] via NET/IB/0\n"
)

HERE = "node-a:1:2 [0] NCCL INFO "
P2P_HERE = f"{HERE}comm 0x1 rank 0 nRanks 2 nNodes 1 localRanks 2 localRank 0 MNNVL 0\n" + (
    f"{HERE}Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
)


def all_reduce(variant: str, transport: str, gb_per_s: float, gpus: tuple[int, ...] = (0, 1), **changes: object) -> (
    Measurement
):  # fmt: skip
    found = Measurement(kind="all_reduce", variant=variant, gpus=gpus, num_bytes=GIB, bytes_per_s=gb_per_s * GB,
                        seconds_p50=0.010, seconds_p95=0.011, transport=transport)  # fmt: skip
    return replace(found, **changes)  # type: ignore[arg-type] # passed through to the measurement


def host_copies(*gb_per_s: float, variant: str = "alone") -> tuple[Measurement, ...]:
    return tuple(
        Measurement(kind="host_to_device", variant=variant, gpus=(gpu,), num_bytes=256 * MIB, bytes_per_s=rate * GB)
        for gpu, rate in enumerate(gb_per_s)
    )


def peer_copy(gb_per_s: float, **changes: object) -> Measurement:
    found = Measurement(kind="peer_copy", variant="alone", gpus=(0, 1), num_bytes=256 * MIB, bytes_per_s=gb_per_s * GB)
    return replace(found, **changes)  # type: ignore[arg-type] # passed through to the measurement


TWO_A6000 = Spec(cards=[a6000(i) for i in range(2)])

CASES: dict[str, Case] = {
    # healthy machines: silent
    "2x3090-bridge": Case(spec=Spec(cards=[rtx3090(0, links=True), rtx3090(1, links=True)])),
    "1x4090": Case(spec=Spec(cards=[rtx4090(0)])),
    "8xh100": Case(spec=eight_h100()),
    "8xh100-several-nodes": Case(
        spec=eight_h100(ports=[hca()], environment={"SLURM_NNODES": "4"}, nets=[Net(name="ib0", speed=200_000)]),
    ),
    "4xa6000-epyc-2.21": Case(spec=Spec(cards=[a6000(i) for i in range(4)], nccl="2.21.5"), log=P2P_LOG),
    "2xa6000-epyc-2.27": Case(spec=Spec(cards=[a6000(i) for i in range(2)])),
    "2x4090-x16": Case(spec=Spec(cards=[rtx4090(0), rtx4090(1)], p2p_all=2), notes=["p2p-refused"]),
    "4xa6000-intel": Case(
        spec=Spec(cards=[a6000(i) for i in range(4)], cpu="intel", nccl="2.21.5"), notes=["p2p-level"]
    ),
    "iommu-off-nvlink-translating": Case(
        # NVLink traffic does not cross the IOMMU.
        spec=Spec(cards=[rtx3090(0, links=True), rtx3090(1, links=True)], iommu="DMA-FQ", acs_readable=False),
    ),
    "red-herring-ib-disable-on-desktop": Case(
        spec=Spec(cards=[rtx3090(0, links=True), rtx3090(1, links=True)], environment={"NCCL_IB_DISABLE": "1"}),
        notes=["nccl-switches"],
        words=["no effect here", "no InfiniBand"],
    ),
    "red-herring-p2p-disable-on-4090": Case(
        spec=Spec(cards=[rtx4090(0), rtx4090(1)], p2p_all=2, environment={"NCCL_P2P_DISABLE": "1"}, driver="545.23.08"),
        notes=["nccl-switches", "p2p-refused"],
        words=["no effect here"],
    ),
    "2xh200-without-nvls": Case(
        spec=h200_vm(2, environment={"NCCL_NVLS_ENABLE": "0"}),
        notes=["nccl-switches"],
        words=["no effect here", "takes a ring anyway"],
    ),
    "4xh200-ring-forced": Case(spec=h200_vm(4, environment={"NCCL_ALGO": "Ring"}), notes=["nccl-switches"]),
    "red-herring-socket-without-adapter": Case(
        spec=Spec(cards=[a6000(i) for i in range(2)], environment={"NCCL_NET": "Socket", "NCCL_PXN_DISABLE": "1"}),
        notes=["nccl-switches"],
        words=["TCP anyway"],
    ),
    "red-herring-no-ll128-on-pcie": Case(
        spec=Spec(cards=[a6000(i) for i in range(2)], environment={"NCCL_PROTO": "^LL128", "NCCL_BUFFSIZE": "4194304"}),
        notes=["nccl-switches"],
    ),
    "red-herring-algo-on-one-card": Case(
        spec=Spec(cards=[rtx4090(0)], environment={"NCCL_ALGO": "Tree"}), notes=["nccl-switches"]
    ),
    # sick machines
    "8xh100-without-nvls": Case(
        spec=eight_h100(environment={"NCCL_NVLS_ENABLE": "0"}),
        findings=["nccl-switches"],
        words=["no longer add up all_reduce"],
    ),
    "8xh100-tree-forced": Case(spec=eight_h100(environment={"NCCL_ALGO": "Tree"}), findings=["nccl-switches"]),
    "2xa6000-ll-forced": Case(
        spec=Spec(cards=[a6000(i) for i in range(2)], environment={"NCCL_PROTO": "LL"}), findings=["nccl-switches"]
    ),
    "2x4090-x8x8": Case(
        spec=Spec(
            cards=[rtx4090(0, width=8), rtx4090(1, width=8)],
            p2p_all=2,
            bridges={f"0000:00:01.{i}": {"width": 8, "width_max": 8} for i in range(2)},
        ),
        findings=["pcie-link"],
        notes=["p2p-refused"],
        words=["x8 of its x16", "slot gives no more"],
    ),
    "riser-x4": Case(
        spec=Spec(
            cards=[
                rtx3090(0, links=True),
                Card(
                    name="NVIDIA GeForce RTX 3090", place=one_root(1), width=4, links=bridged_links(4, one_root(0)[-1])
                ),
            ],
            bridges={"0000:00:01.1": {"width": 4, "width_max": 16}},
        ),
        findings=["pcie-link"],
        words=["x4 of x16", "riser"],
    ),
    "gen3-slot": Case(
        spec=Spec(
            cards=[Card(name="NVIDIA RTX A6000", place=own_root(i), gen=3, gen_max=3, gen_card=4) for i in range(2)]
        ),
        findings=["pcie-link"],
        words=["Gen4 card in a Gen3 slot"],
    ),
    "trained-down-to-gen2": Case(
        spec=Spec(cards=[a6000(0), Card(name="NVIDIA RTX A6000", place=own_root(1), gen=2, processes=(4242,))]),
        findings=["pcie-link"],
        notes=["shared-fabric"],
        words=["Gen2 where card and slot have Gen4"],
    ),
    "chipset-slot": Case(
        spec=Spec(
            cards=[rtx4090(0), Card(name="NVIDIA GeForce RTX 4090", place=chipset_slot(), width=4)],
            p2p_all=2,
            bridges={"0000:05:00.0": {"vendor": "0x1022", "width": 4, "width_max": 4}},
        ),
        findings=["pcie-link"],
        notes=["p2p-refused"],
        words=["chipset slot"],
    ),
    "4xa6000-epyc-2.26": Case(
        spec=Spec(cards=[a6000(i) for i in range(4)], nccl="2.26.2"),
        findings=["p2p-level"],
        words=["2.26.2", "NCCL_P2P_LEVEL=PHB"],
    ),
    "4xa6000-epyc-2.26-logged": Case(
        spec=Spec(cards=[a6000(i, numa=i // 2) for i in range(4)], nccl="2.26.2"),
        log=SHM_LOG,
        findings=["p2p-level"],
        words=["NCCL_P2P_LEVEL=SYS"],
    ),
    "8xh100-dead-link": Case(
        spec=Spec(cards=[h100(i, down=(7,) if i == 3 else ()) for i in range(8)], num_cpus=64),
        findings=["nvlink"],
        words=["1 of 18 NVLinks are down"],
    ),
    "8xh100-fabric-not-started": Case(
        spec=Spec(cards=[h100(i, fabric=(1, 0)) for i in range(8)], num_cpus=64),
        findings=["nvlink"],
        words=["fabric is not ready", "Fabric Manager"],
    ),
    "3090-bridge-half-seated": Case(
        spec=Spec(
            cards=[
                Card(
                    name="NVIDIA GeForce RTX 3090",
                    place=one_root(i),
                    links=bridged_links(4, one_root(1 - i)[-1], down=(1, 3)),
                )
                for i in range(2)
            ]
        ),
        findings=["nvlink"],
        words=["2 of 4 NVLinks are down", "bridge"],
    ),
    "a100-vm-without-topology-file": Case(spec=A100_VM, findings=["virtual-machine"], words=["NCCL_TOPO_FILE"]),
    "container-64mb-shm": Case(
        spec=Spec(cards=[rtx4090(i) for i in range(4)], p2p_all=2, container=True, shm_bytes=64_000_000),
        findings=["shm"],
        notes=["p2p-refused"],
        words=["too small", "--shm-size"],
    ),
    "container-64mb-shm-nvlink": Case(
        spec=eight_h100(container=True, shm_bytes=64_000_000),
        notes=["shm"],
    ),
    "split-shm-mounts": Case(
        spec=Spec(
            cards=[a6000(i) for i in range(2)],
            ranks=[Rank(pid=1000 + i, shm=f"0:{40 + i}", environment={"LOCAL_RANK": str(i)}) for i in range(2)],
        ),
        pids=[1000],
        findings=["shm-mounts"],
        words=["different /dev/shm"],
    ),
    "ranks-differ": Case(
        spec=Spec(
            cards=[rtx3090(0, links=True), rtx3090(1, links=True)],
            ranks=[
                Rank(pid=1000 + i, environment={"LOCAL_RANK": str(i), **({"NCCL_ALGO": "Ring"} if i else {})})
                for i in range(2)
            ],
        ),
        pids=[1000],
        findings=["rank-differences"],
        notes=["nccl-switches"],
        words=["NCCL_ALGO differs between ranks"],
    ),
    "p2p-disabled-on-nvlink": Case(
        spec=eight_h100(environment={"NCCL_P2P_DISABLE": "1"}),
        findings=["nccl-switches"],
        words=["NVLink lies idle", "host memory"],
    ),
    "p2p-and-shm-disabled-on-nvlink": Case(
        spec=eight_h100(environment={"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}),
        findings=["nccl-switches"],
        words=["NVLink lies idle", "the network", "NCCL_P2P_DISABLE and NCCL_SHM_DISABLE"],
    ),
    "conf-file-sets-level": Case(
        spec=Spec(cards=[a6000(i) for i in range(2)], conf="# tuned\nNCCL_P2P_LEVEL=NVL\n"),
        findings=["nccl-switches"],
        words=["NCCL_P2P_LEVEL=NVL", "/etc/nccl.conf"],
    ),
    "env-file-misspelt": Case(
        spec=Spec(cards=[a6000(i) for i in range(2)]),
        env_file="NCCL_SHM_DISABLED=1\nexport NCCL_DEBUG=INFO\n",
        findings=["switch-names"],
        words=["NCCL_SHM_DISABLE was probably meant"],
    ),
    "iommu-translating": Case(
        spec=Spec(cards=[a6000(i) for i in range(2)], iommu="DMA-FQ"),
        findings=["iommu"],
        words=["iommu=pt"],
    ),
    "acs-read-as-root": Case(
        spec=Spec(
            cards=[Card(name="NVIDIA A40", place=below_switch(i)) for i in range(2)],
            bridges={"0000:12:00.0": {"redirect": True}},
        ),
        findings=["acs"],
        words=["up to the processor", "setpci"],
    ),
    "acs-inferred": Case(
        spec=Spec(
            cards=[Card(name="NVIDIA A40", place=below_switch(i)) for i in range(2)],
            iommu="identity",
            acs_readable=False,
        ),
        findings=["acs"],
        words=["up to the processor"],
    ),
    "acs-unreadable": Case(
        spec=Spec(cards=[a6000(i) for i in range(2)], acs_readable=False),
        gaps=["acs"],
    ),
    "docker0-chosen": Case(
        spec=Spec(
            cards=[a6000(i) for i in range(2)],
            environment={"SLURM_NNODES": "2"},
            nets=[Net(name="eth0", state="down", address=""), Net(name="docker0", physical=False)],
        ),
        findings=["interface"],
        words=["NCCL takes docker0"],
    ),
    "tailscale-chosen": Case(
        spec=Spec(
            cards=[a6000(i) for i in range(2)],
            nets=[Net(name="tailscale0", address="192.0.2.9", physical=False), Net(name="eno1")],
        ),
        findings=["interface"],
        words=["tailscale0", "NCCL_SOCKET_IFNAME=eno1"],
    ),
    "slow-interface-first": Case(
        spec=Spec(
            cards=[a6000(i) for i in range(2)],
            environment={"SLURM_NNODES": "2"},
            nets=[Net(name="eno1", speed=1_000), Net(name="enp1s0", speed=100_000)],
        ),
        findings=["interface"],
        words=["enp1s0 is much faster"],
    ),
    "ib-without-libibverbs": Case(
        spec=eight_h100(ports=[hca()], verbs=False, environment={"SLURM_NNODES": "2"}),
        findings=["verbs"],
        words=["libibverbs1"],
    ),
    "ib-without-device-nodes": Case(
        spec=eight_h100(ports=[hca()], uverbs=False, container=True, environment={"SLURM_NNODES": "2"}),
        findings=["verbs"],
        words=["--device=/dev/infiniband"],
    ),
    "ib-port-down": Case(
        spec=eight_h100(
            ports=[hca(), hca("mlx5_1", switch=1, state="1: DOWN", physical="2: Polling")],
            environment={"SLURM_NNODES": "2"},
        ),
        findings=["ib-port"],
        words=["is DOWN while its siblings are active"],
    ),
    "ib-port-slow": Case(
        spec=eight_h100(
            ports=[hca(), hca("mlx5_1", switch=1, rate="100 Gb/sec (4X EDR)")], environment={"SLURM_NNODES": "2"}
        ),
        findings=["ib-port"],
        words=["100 Gb/s where a sibling has 200"],
    ),
    "roce-v1-gid": Case(
        spec=eight_h100(
            nccl="2.19.3",
            environment={"SLURM_NNODES": "2"},
            ports=[
                hca(
                    layer="Ethernet",
                    gids=(
                        ("fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1"),
                        ("0000:0000:0000:0000:0000:ffff:c000:0201", "RoCE v2"),
                    ),
                )
            ],
        ),
        findings=["ib-port"],
        words=["NCCL_IB_GID_INDEX=1"],
    ),
    "one-sided-gpudirect": Case(
        spec=eight_h100(ports=[hca()]),
        log=ONE_SIDED_LOG,
        findings=["gpudirect"],
        words=["on node-b", "nvidia-peermem"],
    ),
    "no-peermem": Case(
        spec=eight_h100(
            ports=[hca()],
            modules=("nvidia",),
            legacy_peermem=False,
            open_driver=False,
            environment={"SLURM_NNODES": "2"},
        ),
        findings=["gpudirect"],
        words=["neither nvidia_peermem nor DMA-BUF"],
    ),
    "peermem-too-new-for-nccl": Case(
        spec=eight_h100(ports=[hca()], nccl="2.21.5", legacy_peermem=False, environment={"SLURM_NNODES": "2"}),
        findings=["gpudirect"],
        words=["does not see nvidia_peermem"],
    ),
    "memlock": Case(
        spec=eight_h100(ports=[hca()], memlock=8_388_608, container=True, environment={"SLURM_NNODES": "2"}),
        findings=["limits"],
        words=["memlock=-1"],
    ),
    "two-cores-for-four-cards": Case(
        spec=Spec(cards=[rtx4090(i) for i in range(4)], p2p_all=2, affinity=2),
        findings=["cpu-affinity"],
        notes=["p2p-refused"],
        words=["2 processors for 4 ranks"],
    ),
    "one-way-p2p": Case(
        spec=Spec(cards=[a6000(i) for i in range(2)], p2p={(0, 1): ((0, 1), (0, 1))}),
        findings=["p2p-refused"],
        words=["one direction only"],
    ),
    "vm-without-clique": Case(
        spec=Spec(cards=[a6000(i) for i in range(2)], p2p_all=1, hypervisor="QEMU", topology_file=True),
        findings=["p2p-refused"],
        words=["x-nv-gpudirect-clique"],
    ),
    "nvlink-p2p-refused": Case(
        spec=Spec(cards=[rtx3090(0, links=True), rtx3090(1, links=True)], p2p_all=4),
        findings=["p2p-refused"],
        words=["although NVLink joins the cards"],
    ),
    "kernel-log-page-faults": Case(
        spec=Spec(
            cards=[a6000(i) for i in range(2)], kernel_log=["AMD-Vi: Event logged [IO_PAGE_FAULT device=41:00.0]"]
        ),
        findings=["kernel-log"],
        words=["IOMMU blocked"],
    ),
    "power-brake": Case(
        spec=Spec(cards=[a6000(0), Card(name="NVIDIA RTX A6000", place=own_root(1), slowdowns=0x80)]),
        findings=["throttling"],
        words=["power brake"],
    ),
    "patched-driver-on-4090": Case(
        spec=Spec(cards=[rtx4090(0), rtx4090(1)]), findings=["p2p-granted"], words=["compares the data on the far side"]
    ),
    "patched-driver-without-resizable-bar": Case(
        spec=Spec(cards=[rtx4090(0, bar1=256 * MIB), rtx4090(1)]), findings=["p2p-granted"], words=["Resizable BAR"]
    ),
    "pcie-replays": Case(
        spec=Spec(cards=[a6000(0), Card(name="NVIDIA RTX A6000", place=own_root(1), replays=48_211)]),
        findings=["pcie-link"],
        words=["48,211 packets again"],
    ),
    "corrected-errors": Case(
        spec=Spec(cards=[a6000(0), Card(name="NVIDIA RTX A6000", place=own_root(1), corrected_errors=5_000)]),
        findings=["pcie-link"],
        words=["corrected 5,000 errors"],
    ),
    "efa-without-plugin": Case(
        spec=eight_h100(
            ports=[hca("rdmap0s6", layer="Unspecified")], environment={"SLURM_NNODES": "2"}, nets=[Net(name="ens5")]
        ),
        findings=["verbs"],
        words=["aws-ofi-nccl"],
    ),
    "called-localhost": Case(
        spec=Spec(cards=[a6000(i) for i in range(2)], hostname="localhost", environment={"SLURM_NNODES": "2"}),
        findings=["reachability"],
        words=["hostnamectl"],
    ),
    "firewall": Case(
        spec=TWO_A6000,
        log=P2P_HERE + "node-a:1:9 [0] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to 192.0.2.7<41234> "
        "failed : No route to host\n",
        findings=["reachability"],
        words=["ip_local_port_range"],
    ),
    "one-nccl-version-told-twice": Case(
        spec=TWO_A6000,
        log=f"{HERE}NCCL version 2.27.5+cuda12.9\n{P2P_HERE}torch.distributed: NCCL error, NCCL version 2.27.5\n",
    ),
    "two-nccl-versions": Case(
        spec=TWO_A6000,
        log=f"{HERE}NCCL version 2.26.2+cuda12.2\n"
        + P2P_HERE
        + "node-b:1:2 [0] NCCL INFO NCCL version 2.27.5+cuda12.9\n",
        findings=["versions"],
        words=["2.26.2", "2.27.5"],
    ),
    "log-shows-shm-where-p2p-is-possible": Case(
        spec=TWO_A6000,
        log=P2P_HERE.replace("00/0 : 0[0] -> 1[1] via P2P/CUMEM", "00 : 0[0] -> 1[1] via SHM/direct/direct"),
        findings=["transport"],
        words=["the log shows SHM"],
    ),
    "nvls-multicast-failed": Case(
        spec=eight_h100(),
        log=P2P_HERE + "node-a:1:2 [1] transport/nvls.cc:254 NCCL WARN Cuda failure 401 'the operation cannot be "
        "performed in the present state'\n",
        findings=["nvls"],
        words=["NCCL_NVLS_ENABLE=0"],
    ),
    "infiniband-times-out": Case(
        spec=eight_h100(ports=[hca()]),
        log=P2P_HERE + "node-a:1:2 [1] transport/net_ib.cc:1238 NCCL WARN NET/IB : Got completion from peer "
        "192.0.2.7<37948> with status=12 opcode=1 len=0 vendor err 129\n",
        findings=["log-errors"],
        words=["timed out (status 12)"],
    ),
    "cumem-host-in-container": Case(
        spec=Spec(
            cards=[rtx4090(i) for i in range(2)], p2p_all=2, container=True, nccl="2.25.1", nodes_without_cpus=[2, 3]
        ),
        findings=["cumem-host"],
        notes=["p2p-refused"],
        words=["NCCL_CUMEM_HOST_ENABLE=0"],
    ),
    # sick machines that only a measurement shows
    "wrong-bytes-over-p2p": Case(
        spec=TWO_A6000,
        measurements=[*host_copies(25, 25), peer_copy(24, data_is_right=False)],
        findings=["p2p-works"],
        words=["NCCL_P2P_DISABLE=1 at once"],
    ),
    "p2p-slower-than-host-memory": Case(
        spec=TWO_A6000,
        measurements=[all_reduce("p2p_off", "SHM", 14), all_reduce("as_set", "P2P", 13.5)],
        findings=["bandwidth", "p2p-works"],
        words=["slower than through host memory"],
    ),
    "shared-uplink": Case(
        spec=TWO_A6000,
        measurements=[*host_copies(26, 26), *host_copies(12, 12, variant="at_once")],
        findings=["contention"],
        words=["share"],
    ),
    "slow-host-memory": Case(
        spec=TWO_A6000, measurements=host_copies(25, 12), findings=["host-memory"], words=["38% of the link"]
    ),
    "times-that-wander": Case(
        spec=TWO_A6000,
        measurements=[all_reduce("as_set", "P2P", 24, seconds_p95=0.03)],
        findings=["shared-fabric"],
        words=["3.0 times the median"],
    ),
    "8xh100-slow-nvlink": Case(
        spec=eight_h100(),
        measurements=[all_reduce("as_set", "P2P", 200, gpus=tuple(range(8)))],
        findings=["bandwidth"],
        words=["44% of the link"],
    ),
    "good-measurements": Case(
        spec=TWO_A6000,
        measurements=[
            *host_copies(26, 26),
            *host_copies(25, 25, variant="at_once"),
            peer_copy(26),
            all_reduce("p2p_off", "SHM", 11),
            all_reduce("as_set", "P2P", 24),
        ],
    ),
    "patched-driver-that-was-tested": Case(
        spec=Spec(cards=[rtx4090(0), rtx4090(1)]), measurements=[*host_copies(26, 26), peer_copy(26)]
    ),
    "powersave": Case(
        spec=Spec(cards=[a6000(i) for i in range(2)], governor="powersave"), notes=["cpu-affinity"], words=["cpupower"]
    ),
    # what could not be read
    "no-nvml": Case(
        spec=Spec(cards=[a6000(i) for i in range(2)], nvml=False),
        gaps=["inventory", "nvlink", "p2p-level", "pcie-link"],
    ),
    "no-gpu": Case(spec=Spec(nvml=False), gaps=["inventory"]),
    "no-nccl-version": Case(spec=Spec(cards=[a6000(i) for i in range(4)], nccl=""), gaps=["p2p-level"]),
}
